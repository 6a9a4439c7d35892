"""Runs Python programs in processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any


def python(*arguments: str | Path, code: int = 0, **how: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401 - of `subprocess.run`
    """Run Python with these arguments until it ends with a code; return what it wrote."""
    argv = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600, **how)
    assert ended.returncode == code, ended.stderr
    return ended
