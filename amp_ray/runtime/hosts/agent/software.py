"""What a trial's Python has: versions by metadata, and on demand by importing.

This module is also sent as a program of its own to the interpreter that trains, which need not be
the one that runs the agent. So it imports nothing of the agent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

# Of ``torch/version.py``, which says more than the wheel's metadata do
VERSION_LINE = r"^{}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]"
PACKAGES = ("torch", "deepspeed")


def package_folder(name: str) -> Path | None:
    """Find where a package would be imported from, without importing it."""
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
    found = {}
    with contextlib.suppress(OSError):
        text = (folder / "version.py").read_text(encoding="utf-8")
        for name in ("__version__", "cuda"):
            match = re.search(VERSION_LINE.format(name), text, re.MULTILINE)
            if match is not None:
                found[name] = match[1]
    return found


def read_software() -> dict[str, Any]:
    """Find versions without importing anything."""
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


def import_all() -> dict[str, Any]:
    """Import the packages; say what prevents it, and what torch sees then."""
    facts: dict[str, Any] = {"import_problem": None, "num_cuda_devices": None}
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - an import may fail with anything
            reason = str(error).strip().splitlines() or [""]
            problem = f"import {name}: {type(error).__name__}: {reason[0]}"
            facts["import_problem"] = facts["import_problem"] or problem
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return facts
    facts["num_cuda_devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if facts["num_cuda_devices"] and torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return facts


def main() -> None:
    """Print one line of JSON: ``deep`` as an argument asks for imports too."""
    facts = read_software()
    if "deep" in sys.argv[1:]:
        facts.update(import_all())
    version = ".".join(str(part) for part in sys.version_info[:3])
    line = {"kind": "software", "executable": sys.executable, "version": version, **facts}
    sys.stdout.write("\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
