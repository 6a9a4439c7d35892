"""The files that a program needs on the hosts: sources of this package, files of the user."""

from collections.abc import Iterable
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.redaction import redact_values
from amp_ray.trials.own_program.metric_files import HELPER_FILE
from amp_ray.trials.own_program.program import file_names

TRAINING_PARTS: Final = (
    *("__init__.py", "training"),
    *("cost/__init__.py", "cost/instructions.py"),
    *("runtime/__init__.py", "runtime/whole_file.py"),
    *("strategies/__init__.py", "strategies/zero.py"),
    *("trials/__init__.py", "trials/steps.py"),
    *("trials/profile/__init__.py", "trials/profile/points.py"),
)
"""Of this package, sent to the hosts: what they run is what is installed here."""

_DIGEST_LETTERS: Final = 12  # enough to tell versions of a file apart that a person has
# Of this package: by which a user's program tells its iteration times
METRIC_MODULE: Final = "runtime/launch/metric_helper.py"


def source_files(parts: Iterable[str] = TRAINING_PARTS) -> dict[str, bytes]:
    """Return source files of this package by their paths, from ``amp_ray/`` on."""
    package = resources.files("amp_ray")
    files: dict[str, bytes] = {}

    def take(entry: Traversable, path: str) -> None:
        if entry.is_dir():
            for inner in sorted(entry.iterdir(), key=lambda item: item.name):
                take(inner, f"{path}/{inner.name}")
        elif entry.name.endswith(".py"):
            files[path] = entry.read_bytes()

    for part in parts:
        take(package / part, f"amp_ray/{part}")
    return files


def user_files(experiment: Experiment, base: Path) -> dict[str, bytes]:
    """Read the files that a user's own program needs, by their paths in the trial's folder."""
    files = {}
    for target, name in file_names(experiment).items():
        try:
            files[target] = (base / Path(name).expanduser()).read_bytes()
        except (OSError, RuntimeError, ValueError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            where = experiment.where("trials", "program", "files")
            raise InputError(f"{name} cannot be read: {text}", where=where) from error
    return files


def program_files(experiment: Experiment, base: Path) -> dict[str, bytes]:
    """Return what every trial of an experiment sends to the hosts."""
    program = experiment.trials.program
    if program is None:
        return source_files()
    files = user_files(experiment, base)
    if program.metric == "helper":
        files[HELPER_FILE] = (resources.files("amp_ray") / METRIC_MODULE).read_bytes()
    return files


def program_record(experiment: Experiment, base: Path) -> dict[str, Any]:
    """Return what decides how long a trial's program takes, as plain JSON values.

    Files are known by their digests: those that are sent to the hosts, and those of this machine
    that arguments name, where trials run here. Secrets are left out.
    """
    trials, program = experiment.trials, experiment.trials.program
    record: dict[str, Any] = {
        "python": trials.python,
        "launcher": trials.launcher,
        "environment": trials.environment,
    }
    if program is None:
        return dict(redact_values(record))
    files = user_files(experiment, base)
    if trials.backend == "local" and program.cwd is not None:
        for word in program.argv:
            path = Path(program.cwd, word)
            if not Path(word).is_absolute() and path.is_file():
                files[word] = path.read_bytes()
    record |= {
        "argv": list(program.argv),
        "per": program.per,
        "cwd": program.cwd,
        "metric": program.metric if isinstance(program.metric, str) else repr(program.metric),
        "files": {name: sha256(data).hexdigest()[:_DIGEST_LETTERS] for name, data in files.items()},
    }
    return dict(redact_values(record))
