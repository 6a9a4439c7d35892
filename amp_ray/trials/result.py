"""Measurement of a trial's program, read from its files."""

import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.trials.launch import RESULT_FILE, TIMELINE_FILE
from amp_ray.trials.outcome import Measured
from amp_ray.trials.steps import check_times, summarise_steps
from amp_ray.units import GIB, MIB

_OF_A_RANK: Final = re.compile(r"(?:metric-)?rank-(0|[1-9][0-9]{0,6})\.(?:log|json)")
_FIRST_HOST_FILES: Final = (RESULT_FILE, TIMELINE_FILE)  # files read only from the first host

RESULT_KEYS: Final = "trial_id (text), step_s (list of seconds)"
MAX_JSON_BYTES: Final = 4 * MIB  # limit of a result: about 200,000 step times
MAX_MEMORY_BYTES: Final = 1024 * 1024 * GIB  # a pebibyte: more than a stage of any cluster has


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Step times and memory as reported by a program."""

    step_time_s: tuple[float, ...]  # all steps in order, each the maximum over ranks
    num_warmup_steps: int = 0  # lower bound; `measured` may count more steps as warm-up
    peak_memory_bytes: tuple[int, ...] = ()  # per stage, or of the whole trial, or empty
    remarks: tuple[str, ...] = ()  # about unusable files, which do not affect the times


class MissingRankError(ValueError):
    """A measurement needs the values of a rank, and they are missing, incomplete or wrong."""

    def __init__(self, text: str, rank: int, file: str | None = None) -> None:
        """Take the rank, and the name of the file that is wrong, if there is one."""
        super().__init__(text)
        self.rank, self.file = rank, file

    def __reduce__(self) -> tuple[type, tuple[str, int, str | None]]:
        """Let it pass from one process to another with all of its values."""
        return type(self), (str(self), self.rank, self.file)


@contextmanager
def of_rank(file: str, rank: int) -> Iterator[None]:
    """Add the rank to an error in its file."""
    try:
        yield
    except MissingRankError:
        raise
    except ValueError as error:
        raise MissingRankError(str(error), rank, file) from None


Reader = Callable[[Mapping[str, bytes], str], Measurement]
"""Function that reads a measurement from a trial's files (see ``AllFiles``) and its id; it raises
ValueError if there is no result."""


class AllFiles(Mapping[str, bytes]):
    """The files of all hosts together; a file is read when it is accessed.

    If several hosts have a file of the same name, the first host's is used. Result and timeline are
    taken only from the first host.

    Example:
        >>> dict(AllFiles({"a": {"x": b"1"}, "b": {"x": b"2", "y": b"3"}}))
        {'x': b'1', 'y': b'3'}
    """

    def __init__(
        self,
        files: Mapping[str, Mapping[str, bytes]],
        broken: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """Index the names, rank 0 first; ``broken`` maps unusable logs to rank and reason."""
        self._broken = dict(broken or {})
        self._places: dict[str, Mapping[str, bytes]] = {}
        for number, (host, contents) in enumerate(files.items()):
            for name in contents:
                match = _OF_A_RANK.fullmatch(name)
                if match and name in self._places:
                    self._broken[name] = int(match[1]), f"{host} sent it, and another host before"
                if number == 0 or name not in _FIRST_HOST_FILES:
                    self._places.setdefault(name, contents)

    def __getitem__(self, name: str) -> bytes:
        if name in self._broken:
            rank, problem = self._broken[name]
            raise MissingRankError(f"{name} cannot be used: {problem}", rank, name)
        return self._places[name][name]

    def __contains__(self, name: object) -> bool:
        """Return whether a file exists, without reading it."""
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_result(files: Mapping[str, bytes], trial_id: str) -> Measurement:
    """Read ``result.json``; refuse the result of another trial."""
    if RESULT_FILE not in files:
        raise ValueError(f"the program ended without writing {RESULT_FILE}")
    record = parse_object(RESULT_FILE, files[RESULT_FILE], RESULT_KEYS)
    check_trial(RESULT_FILE, record, trial_id)
    step_time_s = read_times(RESULT_FILE, record)
    check_times(step_time_s, source=RESULT_FILE)
    num_warmup_steps = record.get("warmup_steps", 0)
    if type(num_warmup_steps) is not int or not 0 <= num_warmup_steps < len(step_time_s):
        raise ValueError(
            f"{RESULT_FILE} has {len(step_time_s)} steps, of which warmup_steps "
            f"{reprlib.repr(num_warmup_steps)} leave none to measure"
        )
    return Measurement(
        step_time_s=step_time_s,
        num_warmup_steps=num_warmup_steps,
        peak_memory_bytes=_peak_memory_bytes(record),
    )


def measured(measurement: Measurement, *, wall_s: float) -> Measured:
    """Turn a measurement into an outcome: detect the warm-up, summarise the steps after it."""
    summary = summarise_steps(measurement.step_time_s[measurement.num_warmup_steps :])
    return Measured(
        measured_s=summary.measured_s,
        mean_s=summary.mean_s,
        spread_s=summary.spread_s,
        warnings=summary.warnings,
        step_time_s=measurement.step_time_s,
        num_warmup_steps=measurement.num_warmup_steps + summary.num_warmup_steps,
        peak_memory_bytes=measurement.peak_memory_bytes,
        remarks=measurement.remarks,
        wall_s=wall_s,
    )


def parse_object(
    name: str, data: bytes, expected: str, *, max_bytes: int = MAX_JSON_BYTES
) -> Mapping[str, Any]:
    """Parse an untrusted file of a host as a JSON object."""
    if len(data) > max_bytes:
        raise ValueError(f"{name} has {len(data)} bytes; expected at most {max_bytes}")
    try:
        record = json.loads(data)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(record, dict):
        message = f"{name} must be a JSON object with {expected}"
        raise ValueError(message)  # noqa: TRY004 - bad input is always a ValueError
    return record


def check_trial(name: str, record: Mapping[str, Any], trial_id: str) -> None:
    """Refuse the result of another trial."""
    if record.get("trial_id") != trial_id:
        named = reprlib.repr(record.get("trial_id"))
        raise ValueError(f"{name} is of trial {named}, not of {trial_id!r}")


def read_times(name: str, record: Mapping[str, Any]) -> tuple[float, ...]:
    """Read ``step_s`` as floats, without checking their range."""
    values = record.get("step_s")
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise ValueError(f"{name} needs {RESULT_KEYS}, found step_s {reprlib.repr(values)}")
    most = sys.float_info.max  # an integer may be larger
    return tuple(float(max(min(value, most), -most)) for value in values)


def read_count(name: str, key: str, value: object, *, most: int) -> int | None:
    """Return a count of at most ``most``, or None if it is unknown."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        shown = reprlib.repr(value)
        raise ValueError(f"{name} says {key} {shown}; expected null or an integer from 0 to {most}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _peak_memory_bytes(record: Mapping[str, Any]) -> tuple[int, ...]:
    stages = record.get("stages")
    if isinstance(stages, list):
        peaks = [_peak(stage) for stage in stages if isinstance(stage, dict)]
        numbers = tuple(peak for peak in peaks if peak is not None)
        if numbers and len(numbers) == len(stages):
            return numbers
    peak = _peak(record)
    return () if peak is None else (peak,)


def _peak(record: Mapping[str, Any]) -> int | None:
    key = "peak_memory_bytes"
    return read_count(RESULT_FILE, key, record.get(key), most=MAX_MEMORY_BYTES)
