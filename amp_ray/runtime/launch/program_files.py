"""Files that a trial's program needs on hosts: sources of this package and the user's files."""

from collections.abc import Iterable
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.redaction import redact_values
from amp_ray.runtime.whole_file import read_regular
from amp_ray.trials.own_program.metrics import HELPER_FILE
from amp_ray.trials.own_program.program import file_names

TRAINING_PARTS: Final = (
    *("__init__.py", "compiled", "errors.py", "memo.py", "redaction.py", "training"),
    *("cost/__init__.py", "cost/instructions.py"),
    *("models/__init__.py", "models/model.py", "models/operator.py"),
    *("runtime/__init__.py", "runtime/whole_file.py"),
    *("strategies/__init__.py", "strategies/candidate.py", "strategies/recompute.py"),
    "strategies/zero.py",
    *("trials/__init__.py", "trials/steps.py"),
    *("trials/profile/__init__.py", "trials/profile/points.py"),
)
"""Parts of this package whose sources are sent, so that hosts run the version installed here."""

_MOST_BYTES: Final = 2**30  # of one file of the user
_DIGEST_LETTERS: Final = 12  # leading digits of a file's SHA-256
# Source file that is sent for ``import amp_ray_metric``
METRIC_MODULE: Final = "runtime/launch/metric_helper.py"


def source_files(parts: Iterable[str] = TRAINING_PARTS) -> dict[str, bytes]:
    """Return source files of this package by path, which begins with ``amp_ray/``."""
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
    """Read the files that a user's program needs, by path in the trial's folder."""
    files = {}
    for target, name in file_names(experiment).items():
        try:
            files[target] = read_regular(base / Path(name).expanduser(), _MOST_BYTES)
        except (OSError, RuntimeError, ValueError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            where = experiment.where("trials", "program", "files")
            raise InputError(f"{name} cannot be read: {text}", where=where) from error
    return files


def program_files(experiment: Experiment, base: Path) -> dict[str, bytes]:
    """Return the files that every trial of an experiment sends to hosts."""
    program = experiment.trials.program
    if program is None:
        return source_files()
    files = user_files(experiment, base)
    if program.metric == "helper":
        files[HELPER_FILE] = (resources.files("amp_ray") / METRIC_MODULE).read_bytes()
    return files


def program_record(experiment: Experiment, base: Path) -> dict[str, Any]:
    """Return everything that affects a program's step times, as plain JSON values.

    The record has digests of the files that are sent to hosts and, if trials run on this machine,
    of the files that arguments name. Secrets are left out.
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
                files[word] = read_regular(path, _MOST_BYTES)
    record |= {
        "argv": list(program.argv),
        "per": program.per,
        "cwd": program.cwd,
        "metric": program.metric if isinstance(program.metric, str) else repr(program.metric),
        "files": {name: sha256(data).hexdigest()[:_DIGEST_LETTERS] for name, data in files.items()},
    }
    return dict(redact_values(record))
