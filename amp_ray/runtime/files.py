"""Reading and writing files: experiments, hostfiles, profiles, strategies, results."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from amp_ray.errors import InputError, Where
from amp_ray.spec.build import build_experiment
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy_file import Context, Given, parse_strategies
from amp_ray.spec.yaml_text import parse_yaml

_SHIPPED = "shipped:"
"""Prefix of a profile path that means a folder of the package's own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFiles:
    """Files that an experiment names, relative to the folder of the experiment file."""

    base: Path

    def text(self, name: str) -> str:
        """Return the text of one file."""
        return read_text(self._locate(name))

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the text of every regular file of a folder, by file name."""
        folder = self._locate(name)
        if not folder.is_dir():
            message = f"{folder} is not a folder"
            raise InputError(message)
        return {path.name: read_text(path) for path in sorted(folder.iterdir()) if path.is_file()}

    def _locate(self, name: str) -> Path:
        """Resolve a name: shipped data, absolute, or relative to the experiment file."""
        if name.startswith(_SHIPPED):
            return (
                Path(str(resources.files("amp_ray")))
                / "data/profiles"
                / name.removeprefix(_SHIPPED)
            )
        return self.base / Path(name).expanduser()


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file and every file that it names.

    Raises:
        InputError: If a file cannot be read or what it says does not fit.
    """
    document = parse_yaml(read_text(path), file=str(path))
    return build_experiment(document, ExperimentFiles(base=path.parent))


def load_strategies(path: Path, experiment: Experiment) -> tuple[Given, ...]:
    """Read the strategies that a user names for an experiment.

    Raises:
        InputError: If the file cannot be read, or names what the experiment cannot have.
    """
    context = Context(
        cluster=experiment.cluster,
        num_layers=experiment.model.num_layers,
        global_batch_size=experiment.global_batch_size,
        recompute=experiment.recompute,
    )
    return parse_strategies(read_text(path), file=str(path), context=context)


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        InputError: If it does not exist, cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        message = "no such file"
    except IsADirectoryError:
        message = "this is a folder; expected a file"
    except UnicodeDecodeError as error:
        message = f"not a text file (byte {error.start} is not UTF-8)"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    raise InputError(message, where=Where(file=str(path)))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a neighbour first, then renamed.

    Raises:
        InputError: If the folder does not exist or cannot be written.
    """
    neighbour = path.with_name(f".{path.name}.partial")
    try:
        neighbour.write_text(text, encoding="utf-8")
        neighbour.replace(path)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        message = f"cannot be written: {error.strerror}"
        raise InputError(message, where=Where(file=str(path))) from error
