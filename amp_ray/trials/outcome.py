"""What came of a trial: exactly one of five outcomes, none of them an exception."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

CauseKind = Literal[
    "crash", "killed", "port", "communication", "disk", "network", "start", "no-result"
]

JSON_NAMES: Final = ("measured", "oom", "timeout", "crashed", "unreachable")
"""The contract's words, in the order of ``Outcome``'s classes."""


MOST_SECONDS: Final = 1e9
"""Thirty years: no step and no trial takes longer."""

MOST_BYTES: Final = 1e18
"""No device has more memory."""

_MOST_SHOWN: Final = 80
"""Characters of a wrong value that a message shows."""


def _is_between(value: object, most: float) -> bool:
    """Tell whether a value is a number from 0 on; nan and infinity are none."""
    return isinstance(value, int | float) and 0 <= value <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The trial ran; this is what it took."""

    iteration_time_s: float  # median over the steps after warm-up
    spread_s: float  # interquartile range of the same steps
    step_time_s: tuple[float, ...]  # all steps, each the maximum over ranks
    num_warmup_steps: int  # how many of them, from the first, count as warm-up
    # Per stage, where the program tells; else of the trial, or empty
    peak_memory_bytes: tuple[int, ...]
    wall_s: float

    def __post_init__(self) -> None:
        times = (self.iteration_time_s, self.spread_s, *self.step_time_s, self.wall_s)
        is_time = all(_is_between(seconds, MOST_SECONDS) for seconds in times)
        if not is_time or self.iteration_time_s <= 0:
            message = f"a time is not between 0 and {MOST_SECONDS:g} s: {str(times)[:_MOST_SHOWN]}"
            raise ValueError(message)
        if type(self.num_warmup_steps) is not int or self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps is {str(self.num_warmup_steps)[:_MOST_SHOWN]}")
        if not all(_is_between(peak, MOST_BYTES) for peak in self.peak_memory_bytes):
            peaks = str(self.peak_memory_bytes)[:_MOST_SHOWN]
            raise ValueError(f"a peak of memory is not between 0 and {MOST_BYTES:g} bytes: {peaks}")

    @property
    def reason(self) -> None:
        """Nothing went wrong."""

    @property
    def has_spread(self) -> bool:
        """Whether the spread is known: of a single step, or a time alone in a table, it is not."""
        return self.spread_s > 0 or len(self.step_time_s) - self.num_warmup_steps > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank asked for more memory than there was: an observation, not a fault."""

    reason: str
    rank: int | None  # the first that failed; None if unknown
    host: str
    lines: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The trial was still running at its deadline and was ended."""

    reason: str
    timeout_s: float
    # Last lines of a rank that was still running, where one was stopped of that one
    lines: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The program, or what it needs on the host, failed."""

    reason: str
    kind: CauseKind
    rank: int | None  # where it happened; None if to no single rank
    host: str
    lines: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A host could not be reached or fell silent; the strategy is not to blame."""

    reason: str
    host: str
    wall_s: float


Outcome = Measured | OutOfMemory | TimedOut | Crashed | Unreachable

_CLASSES: Final = dict(
    zip(JSON_NAMES, (Measured, OutOfMemory, TimedOut, Crashed, Unreachable), strict=True)
)
_NAMES: Final = {kind: name for name, kind in _CLASSES.items()}


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Write an outcome as part of a trial record.

    Returns the contract's keys ``outcome``, ``measured_s``, ``spread_s``, ``peak_memory_bytes``,
    ``wall_s`` and ``reason``, null where they do not apply, and the outcome's own keys.
    """
    record = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
    record["measured_s"] = record.pop("iteration_time_s", None)
    contract = {
        "outcome": _NAMES[type(outcome)],
        "measured_s": None,
        "spread_s": None,
        "peak_memory_bytes": None,
        "wall_s": None,
        "reason": None,
    }
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in {**contract, **record}.items()
    }


def outcome_from_json(record: Mapping[str, Any]) -> Outcome:
    """Read what ``outcome_to_json`` wrote; further keys of a trial record are ignored."""
    name = record.get("outcome")
    if name not in _CLASSES:
        raise ValueError(f"outcome must be one of {', '.join(JSON_NAMES)}, found {name!r}")
    kind: type[Outcome] = _CLASSES[name]
    renamed = {**record, "iteration_time_s": record.get("measured_s")}
    keys = [field.name for field in fields(kind)]
    missing = sorted(key for key in keys if key not in renamed)
    if missing:
        message = f"an outcome {name!r} needs the keys {', '.join(missing)}, found {sorted(record)}"
        raise ValueError(message)
    values: dict[str, Any] = {
        key: tuple(renamed[key]) if isinstance(renamed[key], list) else renamed[key] for key in keys
    }
    return kind(**values)
