"""What a trial's program measured, read from the files that it left."""

import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.trials.launch import RESULT_FILE, TIMELINE_FILE
from amp_ray.trials.outcome import Measured
from amp_ray.trials.steps import check_times, summarise_steps
from amp_ray.units import GIB, MIB

_OF_A_RANK: Final = re.compile(r"(?:metric-)?rank-(0|[1-9][0-9]{0,6})\.(?:log|json)")
_OF_THE_FIRST: Final = (RESULT_FILE, TIMELINE_FILE)  # of the first host or of none

RESULT_KEYS: Final = "trial_id (text), step_s (list of seconds)"
MAX_JSON_BYTES: Final = 4 * MIB  # of a result: the times of some 200,000 steps
MAX_MEMORY_BYTES: Final = 1024 * 1024 * GIB  # a pebibyte: more than a stage of any cluster has


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a program tells of its steps."""

    step_time_s: tuple[float, ...]  # all steps in order, each the maximum over ranks
    num_warmup_steps: int = 0  # known not to count; more may be found
    peak_memory_bytes: tuple[int, ...] = ()  # per stage, or of the whole trial, or empty
    remarks: tuple[str, ...] = ()  # on files that play no part in the times and cannot be used


class MissingRankError(ValueError):
    """A rank of which a measurement would need the figures, and they are missing or incomplete."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


Reader = Callable[[Mapping[str, bytes], str], Measurement]
"""Takes the files of a trial, as ``AllFiles`` has them, and its id; raises ValueError without
a result."""


class AllFiles(Mapping[str, bytes]):
    """The files of all hosts together, none read before it is asked for.

    A rank's log or metric may lie on any host; where several have a name, the first one's counts,
    and result and timeline are those of the first host or none.

    Example:
        >>> dict(AllFiles({"a": {"x": b"1"}, "b": {"x": b"2", "y": b"3"}}))
        {'x': b'1', 'y': b'3'}
    """

    def __init__(
        self,
        files: Mapping[str, Mapping[str, bytes]],
        broken: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """Look at the names, rank 0's host first; ``broken`` logs have a rank and a reason."""
        self._broken = dict(broken or {})
        self._places: dict[str, Mapping[str, bytes]] = {}
        for number, (host, contents) in enumerate(files.items()):
            for name in contents:
                match = _OF_A_RANK.fullmatch(name)
                if match and name in self._places:
                    self._broken[name] = int(match[1]), f"{host} sent it, and another host before"
                if number == 0 or name not in _OF_THE_FIRST:
                    self._places.setdefault(name, contents)

    def __getitem__(self, name: str) -> bytes:
        if name in self._broken:
            rank, problem = self._broken[name]
            raise MissingRankError(f"{name} cannot be used: {problem}", rank)
        return self._places[name][name]

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a file, without reading it."""
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_result(files: Mapping[str, bytes], trial_id: str) -> Measurement:
    """Read ``result.json``, of this trial and no other."""
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
    """Turn a measurement into the outcome: warm-up found, the steps after it summarised."""
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
    """Read a file of a host, which may hold anything, as a JSON object."""
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
        raise ValueError(message)  # noqa: TRY004 - bad input is a ValueError, whatever is bad
    return record


def check_trial(name: str, record: Mapping[str, Any], trial_id: str) -> None:
    """Refuse the result of another trial."""
    if record.get("trial_id") != trial_id:
        named = reprlib.repr(record.get("trial_id"))
        raise ValueError(f"{name} is of trial {named}, not of {trial_id!r}")


def read_times(name: str, record: Mapping[str, Any]) -> tuple[float, ...]:
    """Read ``step_s``, whatever numbers those are."""
    values = record.get("step_s")
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise ValueError(f"{name} needs {RESULT_KEYS}, found step_s {reprlib.repr(values)}")
    most = sys.float_info.max  # an integer may be larger
    return tuple(float(max(min(value, most), -most)) for value in values)


def read_count(name: str, key: str, value: object, *, most: int) -> int | None:
    """Read a count that may be unknown."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        shown = reprlib.repr(value)
        raise ValueError(f"{name} says {key} {shown}; expected null or an integer from 0 to {most}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _peak_memory_bytes(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Take the peaks of the stages, or the one of the trial."""
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
