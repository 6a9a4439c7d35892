"""Versions of packages of the trial's Python, read from metadata without imports.

The trial's interpreter, which may differ from the agent's, runs this module as a program. So it
imports nothing of the agent.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

# Lines of ``torch/version.py``, which has more than the wheel's metadata
VERSION_LINE = r"^{}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]"
PACKAGES = ("torch", "deepspeed")


def package_folder(name: str) -> Path | None:
    """Return the folder that a package would be imported from, without importing it."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def metadata_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def version_lines(folder: Path) -> dict[str, str]:
    """Read ``__version__`` and ``cuda`` of torch's version file."""
    lines = {}
    with contextlib.suppress(OSError):
        text = (folder / "version.py").read_text(encoding="utf-8")
        for name in ("__version__", "cuda"):
            match = re.search(VERSION_LINE.format(name), text, re.MULTILINE)
            if match is not None:
                lines[name] = match[1]
    return lines


def read_software() -> dict[str, Any]:
    """Return the versions of the packages that trials use."""
    facts: dict[str, Any] = dict.fromkeys((*PACKAGES, "cuda", "nccl"))
    for name in PACKAGES:
        folder = package_folder(name)
        if folder is not None:
            facts[name] = metadata_version(name) or "unknown"
            if name == "torch":
                lines = version_lines(folder)
                facts["torch"] = lines.get("__version__", facts["torch"])
                facts["cuda"] = lines.get("cuda")
    if facts["cuda"]:
        facts["nccl"] = metadata_version(f"nvidia-nccl-cu{facts['cuda'].split('.')[0]}")
    return facts


def main() -> None:
    """Print ``read_software`` as a line of JSON."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    line = {"kind": "software", "executable": sys.executable, "version": version, **read_software()}
    sys.stdout.write("\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
