"""What a trial's program measured, read from the files that it left."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.trials.launch import RESULT_FILE
from amp_ray.trials.outcome import Measured
from amp_ray.trials.steps import count_warmup_steps, summarise_steps

_OF_A_RANK: Final = re.compile(r"(?:metric-)?rank-(\d+)\.(?:log|json)")

RESULT_KEYS: Final = "trial_id (text), step_s (list of seconds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a program tells of its steps.

    Args:
        step_time_s: All steps in order, each the maximum over ranks.
        num_warmup_steps: Known not to count; more may be found.
        peak_memory_bytes: Per stage, or of the whole trial, or empty.
    """

    step_time_s: tuple[float, ...]
    num_warmup_steps: int = 0
    peak_memory_bytes: tuple[int, ...] = ()


class MissingRankError(ValueError):
    """A rank of which a measurement would need the figures, and they are missing or incomplete."""

    def __init__(self, text: str, rank: int) -> None:
        """Take what is wrong, and the rank."""
        super().__init__(text)
        self.rank = rank


Reader = Callable[[Mapping[str, bytes], str], Measurement]
"""Takes the files of a trial, as ``AllFiles`` has them, and its id; raises ValueError without
a result."""


class AllFiles(Mapping[str, bytes]):
    """The files of all hosts together, none read before it is asked for.

    A rank's log or metric may lie on any host; where several have a name, the first one's counts,
    and a result is that of the first host or none.

    Example:
        >>> dict(AllFiles({"a": {"x": b"1"}, "b": {"x": b"2", "y": b"3"}}))
        {'x': b'1', 'y': b'3'}
    """

    def __init__(
        self,
        files: Mapping[str, Mapping[str, bytes]],
        broken: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """Look at the names.

        Args:
            files: By host and name, the host of rank 0 first.
            broken: Logs that are incomplete, by name: whose, and why.
        """
        self._broken = dict(broken or {})
        self._places: dict[str, Mapping[str, bytes]] = {}
        for number, (host, contents) in enumerate(files.items()):
            for name in contents:
                match = _OF_A_RANK.fullmatch(name)
                if match and name in self._places:
                    self._broken[name] = int(match[1]), f"{host} sent it, and another host before"
                if number == 0 or name != RESULT_FILE:
                    self._places.setdefault(name, contents)

    def __getitem__(self, name: str) -> bytes:
        """Read a file.

        Raises:
            KeyError: If there is none.
            MissingRankError: If it is the log of a rank and incomplete: what it does not say might
                change the measurement.
        """
        if name in self._broken:
            rank, problem = self._broken[name]
            message = f"{name} cannot be used: {problem}"
            raise MissingRankError(message, rank)
        return self._places[name][name]

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a file, without reading it."""
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Count the files."""
        return len(self._places)


def read_result(files: Mapping[str, bytes], trial_id: str) -> Measurement:
    """Read ``result.json``.

    Args:
        files: By name; the result is that of rank 0's host.
        trial_id: That the result has to carry: an older one proves nothing.

    Raises:
        ValueError: If it is missing, of another trial or of another form.
    """
    if RESULT_FILE not in files:
        message = f"the program ended without writing {RESULT_FILE}"
        raise ValueError(message)
    record = _parse(files[RESULT_FILE])
    if record.get("trial_id") != trial_id:
        message = f"{RESULT_FILE} is of trial {record.get('trial_id')!r}, not of {trial_id!r}"
        raise ValueError(message)
    step_time_s = record.get("step_s")
    if not isinstance(step_time_s, list) or not all(_is_time(value) for value in step_time_s):
        message = f"{RESULT_FILE} needs {RESULT_KEYS}, found step_s {step_time_s!r}"
        raise ValueError(message)
    num_warmup_steps = record.get("warmup_steps", 0)
    if not isinstance(num_warmup_steps, int) or not 0 <= num_warmup_steps < len(step_time_s):
        message = (
            f"{RESULT_FILE} has {len(step_time_s)} steps, of which warmup_steps "
            f"{num_warmup_steps!r} leave none to measure"
        )
        raise ValueError(message)
    return Measurement(
        step_time_s=tuple(float(value) for value in step_time_s),
        num_warmup_steps=num_warmup_steps,
        peak_memory_bytes=_peak_memory_bytes(record),
    )


def measured(measurement: Measurement, *, wall_s: float) -> Measured:
    """Turn a measurement into the outcome: warm-up found, median and spread taken."""
    steps = measurement.step_time_s[measurement.num_warmup_steps :]
    summary = summarise_steps(steps)
    return Measured(
        iteration_time_s=summary.iteration_time_s,
        spread_s=summary.spread_s,
        step_time_s=measurement.step_time_s,
        num_warmup_steps=measurement.num_warmup_steps + count_warmup_steps(steps),
        peak_memory_bytes=measurement.peak_memory_bytes,
        wall_s=wall_s,
    )


def _parse(data: bytes) -> Mapping[str, Any]:
    """Read the JSON object."""
    try:
        record = json.loads(data)
    except ValueError as error:
        message = f"{RESULT_FILE} is not JSON: {error}"
        raise ValueError(message) from None
    if not isinstance(record, dict):
        message = f"{RESULT_FILE} must be a JSON object with {RESULT_KEYS}"
        raise ValueError(message)  # noqa: TRY004 - bad input is a ValueError, whatever is bad
    return record


def _is_time(value: object) -> bool:
    """Tell whether a JSON value is a duration."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _peak_memory_bytes(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Take the peaks of the stages, or the one of the trial."""
    stages = record.get("stages")
    if isinstance(stages, list):
        peaks = [stage.get("peak_memory_bytes") for stage in stages if isinstance(stage, dict)]
        known = tuple(peak for peak in peaks if isinstance(peak, int))
        if known and len(known) == len(stages):
            return known
    peak = record.get("peak_memory_bytes")
    return (peak,) if isinstance(peak, int) else ()
