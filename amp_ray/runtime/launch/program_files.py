"""The files that a program needs on the hosts: sources of this package, files of the user."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Any, Final

from amp_ray.errors import InputError, Where
from amp_ray.spec.experiment import Experiment
from amp_ray.trials.launch import without_secrets
from amp_ray.trials.own_program.metric_files import HELPER_FILE

TRAINING_PARTS: Final = (
    *("__init__.py", "training"),
    *("cost/__init__.py", "cost/instructions.py"),
)
"""Of this package, sent to the hosts: what they run is what is installed here."""

_DIGEST_LETTERS: Final = 12
"""Enough to tell versions of a file apart that a person has."""

METRIC_MODULE: Final = "runtime/launch/metric_helper.py"
"""Of this package: by which a user's program tells its iteration times."""


def source_files(parts: Iterable[str] = TRAINING_PARTS) -> dict[str, bytes]:
    """Return source files of this package.

    Returns content by path, from ``amp_ray/`` on.
    """
    package = resources.files("amp_ray")
    found: dict[str, bytes] = {}

    def take(entry: Traversable, path: str) -> None:
        if entry.is_dir():
            for inner in sorted(entry.iterdir(), key=lambda item: item.name):
                take(inner, f"{path}/{inner.name}")
        elif entry.name.endswith(".py"):
            found[path] = entry.read_bytes()

    for part in parts:
        take(package / part, f"amp_ray/{part}")
    return found


def user_files(names: Sequence[str], base: Path, *, where: Where | None = None) -> dict[str, bytes]:
    """Read the files that a user's own program needs.

    Returns content by path in the trial's folder: as the user wrote it, or the file's name alone
    where that would lead out of the folder.
    """
    found: dict[str, bytes] = {}
    for name in names:
        target = _target(name)
        if target in found:
            message = f"two files would be {target!r} in the trial's folder; rename one"
            raise InputError(message, where=where)
        try:
            found[target] = (base / Path(name).expanduser()).read_bytes()
        except (OSError, RuntimeError, ValueError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise InputError(f"{name} cannot be read: {text}", where=where) from error
    return found


def program_files(experiment: Experiment, base: Path) -> dict[str, bytes]:
    """Return what every trial of an experiment sends to the hosts."""
    program = experiment.trials.program
    if program is None:
        return source_files()
    where = experiment.where("trials", "program", "files")
    found = user_files(program.files, base, where=where)
    if program.metric == "helper":
        found[HELPER_FILE] = (resources.files("amp_ray") / METRIC_MODULE).read_bytes()
    return found


def program_record(experiment: Experiment, base: Path) -> dict[str, Any]:
    """Return what decides how long a trial's program takes, as plain JSON values.

    Files are known by their digests: those that are sent to the hosts, and those of this machine
    that arguments name, where trials run here. Values of secret variables are left out.
    """
    trials, program = experiment.trials, experiment.trials.program
    record: dict[str, Any] = {
        "python": trials.python,
        "launcher": trials.launcher,
        "environment": without_secrets(trials.environment),
    }
    if program is None:
        return record
    where = experiment.where("trials", "program", "files")
    files = user_files(program.files, base, where=where)
    if trials.backend == "local" and program.cwd is not None:
        for word in program.argv:
            path = Path(program.cwd, word)
            if not Path(word).is_absolute() and path.is_file():
                files[word] = path.read_bytes()
    return record | {
        "argv": list(program.argv),
        "per": program.per,
        "cwd": program.cwd,
        "metric": str(program.metric),
        "files": {name: sha256(data).hexdigest()[:_DIGEST_LETTERS] for name, data in files.items()},
    }


def _target(name: str) -> str:
    path = PurePath(name)
    inside = not path.is_absolute() and ".." not in path.parts and not name.startswith("~")
    return str(path) if inside else path.name
