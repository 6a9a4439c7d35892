"""Reads and writes files: experiments, profiles, strategies, measurements, results."""

import errno
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from amp_ray import guests
from amp_ray.calibration.calibration import Calibration, apply_calibration, parse_calibration
from amp_ray.calibration.observation import Observation, noise_of
from amp_ray.clusters.device import Device
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.profile import SLICES_SUFFIX, Profile
from amp_ray.inputs.slice_table import MOST_CHARACTERS, SliceTable, parse_slice_table
from amp_ray.inputs.strategies import (
    Entry,
    parse_strategies,
    strategies_of,
    strategy_to_json,
)
from amp_ray.inputs.strict_text import parse_json
from amp_ray.inputs.yaml_text import Document, parse_yaml, with_changes
from amp_ray.models.model import Model
from amp_ray.runtime.own_inputs import is_input, remember_input
from amp_ray.runtime.whole_file import regular, write_whole
from amp_ray.search.planner import AMP_RAY, make_planner
from amp_ray.search.run import score_given
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.profile.tables import RECORDS_FILE

_LOGGER = logging.getLogger(__name__)
_SHIPPED: Final = "shipped:"  # prefix of a profile in the package's data
# Suffixes of a profile's files; its folder may have other files, too
_PROFILE_SUFFIXES: Final = (".csv", ".yaml", SLICES_SUFFIX)
_INPUT_SUFFIXES: Final = (".yaml", ".yml", ".csv")
_ENCODING: Final = "utf-8-sig"  # with or without the byte order mark of spreadsheet programs
_MOST_LINKS: Final = 40  # maximum length of a chain of links, as in the kernel
_MOST_CHARACTERS: Final = 2**25  # maximum size of an input file: a million strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFiles:
    """Reads the files that an experiment names, relative to the experiment file's folder."""

    base: Path

    def text(self, name: str) -> str:
        """Return the text of a file."""
        return read_text(self._locate(name))

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the texts of a profile folder's YAML, CSV and slice table files, by file name."""
        folder = self._locate(name)
        texts = read_texts(folder, _PROFILE_SUFFIXES)
        if not texts and (folder / RECORDS_FILE).exists():
            message = (
                "an unfinished profile: at no tp and micro-batch size all layers were measured; "
                f"run amp-ray profile EXPERIMENT.yaml -o {folder} again, it goes on"
            )
            raise InputError(message, where=Where(file=str(folder)))
        return texts

    def foreign_profile(
        self,
        source: str,
        name: str,
        model: Model,
        devices: Iterable[Device],
        profiled: str | None = None,
    ) -> Profile:
        """Read a profile in another planner's format; log its notes for the user."""
        read = guests.load(guests.PROFILES[source], f"profile.source {source!r}")
        profile: Profile = read(
            read_texts(self._locate(name), (guests.PROFILE_SUFFIXES[source],)),
            folder=name,
            profiled=profiled,
            model=model,
            devices=devices,
        )
        origin = profile.operators or profile.published
        for note in origin.notes if origin else ():
            _LOGGER.info("%s", note)
        return profile

    def _locate(self, name: str) -> Path:
        """Resolve a name: shipped data, absolute, or relative to the experiment file."""
        if name.startswith(_SHIPPED):
            return _shipped(name)
        try:
            return self.base / Path(name).expanduser()
        except RuntimeError as error:
            raise InputError(f"cannot be found: {error}", where=Where(file=name)) from None


def load_experiment(
    source: Path | Mapping[str, Any], hostfile: Path | None = None, changes: Iterable[str] = ()
) -> Experiment:
    """Read an experiment from its file or from plain values, with all files that it names.

    Paths in plain values are relative to the current folder; ``changes`` are as for `with_changes`.
    """
    if hostfile is not None:  # set it as a change, so that the copy in a study's folder has it
        changes = (*changes, f"cluster.hostfile={json.dumps(str(hostfile.absolute()))}")
    base = Path() if isinstance(source, Mapping) else source.parent
    experiment = build_experiment(document_of(source, changes), ExperimentFiles(base=base))
    for note in experiment.model.shape.not_read:
        _LOGGER.warning("%s", note)
    return experiment


def document_of(source: Path | Mapping[str, Any], changes: Iterable[str] = ()) -> Document:
    """Return the keys of an experiment file or of plain values, with ``changes`` applied."""
    if isinstance(source, Mapping):
        document = Document(file="experiment", values=plain_values(source))
    else:
        document = parse_yaml(read_text(source), file=str(source))
    return with_changes(document, changes)


def plain_values(value: Any) -> Any:  # noqa: ANN401 - any value of an experiment
    """Convert mappings, sequences, paths and numpy's values to those that a file would have."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return str(value) if isinstance(value, os.PathLike) else value


def load_strategies(
    source: Path | Sequence[Strategy | Estimate | Mapping[str, Any]], experiment: Experiment
) -> tuple[Entry, ...]:
    """Read strategies from values or from a file, which may also be a plan of another planner."""
    if isinstance(source, Path):
        return _strategies_of_file(source, experiment)
    records = [_strategy_record(strategy, experiment) for strategy in source]
    return strategies_of(records, file="strategies", experiment=experiment)


def _strategy_record(
    source: Strategy | Estimate | Mapping[str, Any], experiment: Experiment
) -> object:
    strategy = source.strategy if isinstance(source, Estimate) else source
    if isinstance(strategy, Strategy):
        return strategy_to_json(strategy, experiment.cluster)
    return plain_values(strategy)


def _strategies_of_file(path: Path, experiment: Experiment) -> tuple[Entry, ...]:
    from amp_ray.exports.reading import is_program, read_program  # noqa: PLC0415 - few plans need it

    text = read_text(path)
    if text.lstrip()[:1] == "{" and not is_program(text):
        record = parse_json(text, file=str(path))
        for key, place in guests.STRATEGY_FILES.items():
            if key in record:
                read = guests.load(place, f"{path}, a file with {key},")
                strategy = read(record, file=str(path), experiment=experiment)
                return (Entry(where=Where(file=str(path)), candidate=None, strategy=strategy),)
    launched = read_program(text, file=str(path), experiment=experiment)
    if launched is not None:
        notes = launched.pop("not_read", ())
        entries = strategies_of([launched], file=str(path), experiment=experiment)
        return tuple(replace(entry, not_read=notes) for entry in entries)
    return parse_strategies(text, file=str(path), experiment=experiment)


def load_slice_table(path: Path) -> SliceTable:
    """Read a table of slice latencies."""
    return parse_slice_table(read_text(path, MOST_CHARACTERS), file=str(path))


def load_measured(path: Path, experiment: Experiment) -> tuple[Entry, ...]:
    """Read a table of measured strategies."""
    measured = tuple(entry for entry in load_strategies(path, experiment) if entry.has_ended)
    for entry in measured:
        if entry.measured_s is None and entry.failure is None:
            message = "nothing was measured; expected measured_s with seconds, oom or failed"
            raise InputError(message, where=entry.where)
    return measured


def load_observations(path: Path, experiment: Experiment) -> list[Observation]:
    """Read measured strategies; if a line has no cuts, use those that the planner chooses."""
    return [
        Observation(
            experiment=experiment,
            strategy=_strategy_of(entry, experiment),
            outcome=entry.failure or "measured",
            measured_s=entry.mean_s,
            spread_s=entry.spread_s,
            noise=noise_of(entry.measured_s, entry.spread_s),
            peak_memory_bytes=entry.peak_memory_bytes,
            where=entry.where,
        )
        for entry in load_measured(path, experiment)
    ]


def with_calibration(
    experiment: Experiment,
    calibration: Calibration | str | os.PathLike[str] | None,
    *,
    transfer: bool,
) -> Experiment:
    """Return an experiment with the constants of a calibration (or its file); None changes nothing.

    With ``transfer``, the calibration may be of another model, cluster or runtime.
    """
    if calibration is None:
        if transfer:
            raise InputError("--transfer-calibration needs --calibration FILE")
        return experiment
    file = "calibration"
    if not isinstance(calibration, Calibration):
        path = Path(calibration)
        file = str(path)
        calibration = parse_calibration(read_text(path), file=file)
    try:
        return apply_calibration(calibration, experiment, transfer=transfer)
    except ValueError as error:
        raise InputError(str(error), where=Where(file=file)) from error


def _strategy_of(entry: Entry, experiment: Experiment) -> Strategy:
    if entry.strategy is not None:
        return entry.strategy
    (result,) = score_given(make_planner(experiment, AMP_RAY), [entry])
    if isinstance(result, Estimate):
        return result.strategy
    raise InputError(str(result.reason), where=entry.where)


def read_text(path: Path, most_characters: int = _MOST_CHARACTERS) -> str:
    """Return a file's text; raise `InputError` if it cannot be read or is too long.

    A pipe is read only through a descriptor, such as ``/dev/stdin``: it has a writer.
    """
    try:
        opener = None if _is_descriptor(path) else regular
        with open(path, "rb", opener=opener) as file, _unpacked(file, path) as content:
            remember_input(file.fileno())
            text = content.read(most_characters + 1)
        if len(text) <= most_characters:
            return text
        message = f"longer than {most_characters:,} characters: is this the right file?"
    except FileNotFoundError:
        message = "no such file"
    except IsADirectoryError:
        message = "this is a folder; expected a file"
    except UnicodeDecodeError as error:
        message = f"not a text file (byte {error.start} is not UTF-8)"
    except (EOFError, zlib.error) as error:
        message = f"cannot be unpacked: {error}; is it cut short?"
    except (OSError, ValueError) as error:
        message = f"cannot be read: {_reason(error)}"
    raise InputError(message, where=Where(file=str(path)))


def _unpacked(file: BinaryIO, path: Path) -> io.TextIOWrapper:
    """Return the text of an open file, which is unpacked while it is read if it is an archive."""
    content = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    return io.TextIOWrapper(content, encoding=_ENCODING)


def not_linked(path: str, flags: int, mode: int = 0o666) -> int:
    """Open as `regular`, refusing symbolic links; an ``opener`` for the built-in ``open``."""
    return regular(path, flags | os.O_NOFOLLOW, mode)


def write_output(path: Path, text: str | Iterable[str], *, is_new: bool = False) -> None:
    """Write a user's output file atomically; refuse to overwrite an input of the command.

    With ``is_new``, refuse to overwrite any file that is not empty.
    """
    if path.is_file():
        status, where = path.stat(), Where(file=str(path))
        if is_input(status):
            message = "this is an input of the command, which would be lost; name another file"
            raise InputError(message, where=where)
        if is_new and status.st_size:
            raise InputError("is there already; name another file by -o", where=where)
    write_text(path, text)


def private(path: str, flags: int) -> int:
    """Open as `not_linked`; a new file is readable only by its owner."""
    return not_linked(path, flags, 0o600)


def write_text(path: Path, text: str | Iterable[str], *, mode: int = 0o666) -> None:
    """Write a file atomically, with `write_whole`; ``text`` may be an iterable of pieces.

    Symbolic links that belong to this user or root are followed; other links are refused. Devices
    and pipes are written directly.
    """
    pieces = (piece.encode() for piece in ([text] if isinstance(text, str) else text))
    try:
        target = _followed(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_stream(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(pieces)
        else:
            write_whole(target, pieces, mode=mode)
    except (OSError, ValueError) as error:
        message = f"cannot be written: {_reason(error)}"
        raise InputError(message, where=Where(file=str(path))) from error


def _followed(path: Path) -> Path:
    """Return the target of a chain of links; refuse links of users other than this one and root."""
    for _link in range(_MOST_LINKS):
        if _is_stream(path) or not path.is_symlink():
            return path
        owner = path.lstat().st_uid
        if owner not in (0, os.geteuid()):
            raise ValueError(f"{path} is a link of another user (uid {owner}); remove it")
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_stream(path: Path) -> bool:
    """Return whether a path is a device, a pipe or an open descriptor (``/dev/stdout``)."""
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or _is_descriptor(path)


def _is_descriptor(path: Path) -> bool:
    """Return whether a path names an open descriptor, as ``/dev/fd/3`` or a shell's ``<(...)``."""
    parents = [path.parent, *([path.readlink().parent] if path.is_symlink() else [])]
    return any(Path(os.path.realpath(parent)).is_relative_to("/proc") for parent in parents)


def write_result(record: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON; see `write_result_text`."""
    write_result_text(json.dumps(record, indent=1, allow_nan=False) + "\n", path)


def write_result_text(text: str | Iterable[str], path: Path) -> None:
    """Write the text of a result atomically; refuse the suffixes of input files."""
    if path.suffix in _INPUT_SUFFIXES:
        message = "results are not written over an input file; name the result .json"
        raise InputError(message, where=Where(file=str(path)))
    write_output(path, text)


def read_texts(folder: Path, suffixes: Collection[str]) -> dict[str, str]:
    """Return the texts of a folder's files with one of the suffixes, by file name."""
    endings = tuple(suffixes)
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(endings))
    except FileNotFoundError:
        message = "no such folder"
    except NotADirectoryError:
        message = "this is a file; expected a folder"
    except (OSError, ValueError) as error:
        message = f"cannot be read: {_reason(error)}"
    else:
        return {path.name: read_text(path) for path in paths}
    raise InputError(message, where=Where(file=str(folder)))


def _shipped(name: str) -> Path:
    folder = Path(str(resources.files("amp_ray"))) / "data" / "profiles"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    chosen = name.removeprefix(_SHIPPED)
    if chosen not in names:
        message = f"no such profile is shipped; there are {', '.join(map(_SHIPPED.__add__, names))}"
        raise InputError(message, where=Where(file=name))
    return folder / chosen


def _reason(error: OSError | ValueError) -> str:
    """Return an error's text without its number; a `ValueError` means a null byte in the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
