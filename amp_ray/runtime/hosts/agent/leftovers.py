"""What agents and controllers that are gone may have left on this host."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

from .job import FOLDER_VARIABLE, base_folder
from .processes import describe, end_all, marked, tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TRIAL_FOLDER = "amp-ray-{}-[0-9a-f]+"
"""How the folders of a trial's attempts are called."""


def sweep(message: Mapping[str, Any], meanwhile: Callable[[], None]) -> dict[str, list[str]]:
    """End what an agent's tag or a trial's folder marks, and remove the folders.

    Returns processes that were ``found``, and those that are ``left``.

    Args:
        message: ``tag`` of an agent or null, ``base`` of all folders, ``names`` of folders, and
            ``trials``, of which the folders of all attempts count.
        meanwhile: Called while waiting.
    """
    base, tag = base_folder(message["base"]), message["tag"]
    folders = [base / name for name in message.get("names", ())]
    folders += find_folders(base, message.get("trials", ()))

    def listed() -> list[int]:
        pids = [] if tag is None else tagged(tag)
        for folder in folders:
            pids += marked(f"{FOLDER_VARIABLE}={folder}")
        return pids

    found = [describe(pid) for pid in listed()]
    left = end_all(listed, 0.0, meanwhile)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return {"found": found, "left": [describe(pid) for pid in left]}


def find_folders(base: Path, trials: Sequence[str]) -> list[Path]:
    """Find the folders of all attempts at some trials; one trial's id may begin another's."""
    shapes = [re.compile(TRIAL_FOLDER.format(re.escape(trial))) for trial in trials]
    return [
        path
        for path in (base.iterdir() if shapes and base.is_dir() else ())
        if any(shape.fullmatch(path.name) for shape in shapes)
    ]
