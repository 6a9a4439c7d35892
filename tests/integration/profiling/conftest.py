"""Runs scripts of ``experiments/`` as users do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.commands import amp_ray

__all__ = ["amp_ray", "run_script"]

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 1800.0
"""Limit against hangs; a script takes less than a minute on an idle machine."""


def run_python(folder: Path, *words: str) -> str:
    """Run Python in a folder, with this repository to import from, and return its output."""
    ended = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_script(name: str, folder: Path, experiment: str, *arguments: str) -> dict[str, Any]:
    """Write an experiment as ``e.yaml``, run a script on it, and return the script's result."""
    (folder / "e.yaml").write_text(experiment, encoding="utf-8")
    script = REPOSITORY / "experiments" / name
    run_python(folder, str(script), *arguments, "--result", "result.json")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found
