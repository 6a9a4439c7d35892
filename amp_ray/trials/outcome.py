"""Outcomes of trials: five classes, which are no exceptions; a trial has exactly one outcome."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import fmean
from typing import Any, Final, Literal, TypeGuard, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from amp_ray.errors import printable
from amp_ray.redaction import redact, redact_values
from amp_ray.trials.steps import StepWarning, standard_error, step_warnings, tells_time

CauseKind = Literal[
    "crash", "killed", "port", "communication", "disk", "network", "start", "no-result"
]


MOST_SECONDS: Final = 1e9  # thirty years: no step and no trial takes longer
MOST_BYTES: Final = 1e18  # no device has more memory
_MOST_SHOWN: Final = 80  # characters of a wrong value that a message shows


def _is_between(value: object, most: float) -> bool:
    """Return whether a value is a finite number from 0 to ``most``."""
    return isinstance(value, int | float) and 0 <= value <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The trial ran: the times of its steps, and its peak memory."""

    measured_s: float  # median over the steps after warm-up
    mean_s: float  # mean over the same steps: predicts a long run's time per step
    spread_s: float  # interquartile range of the same steps
    step_time_s: tuple[float, ...]  # all steps, each the maximum over ranks
    num_warmup_steps: int  # first steps that count as warm-up
    peak_memory_bytes: tuple[int, ...]  # per stage if reported; else one maximum, or empty
    wall_s: float
    warnings: tuple[StepWarning, ...] = ()  # see `step_warnings`
    remarks: tuple[str, ...] = ()  # about unusable files, which do not affect the times

    def __post_init__(self) -> None:
        averages = (self.measured_s, self.mean_s)
        times = (*averages, self.spread_s, *self.step_time_s, self.wall_s)
        is_time = all(_is_between(seconds, MOST_SECONDS) for seconds in times)
        if not is_time or min(averages) <= 0:
            message = f"a time is not between 0 and {MOST_SECONDS:g} s: {str(times)[:_MOST_SHOWN]}"
            raise ValueError(message)
        if type(self.num_warmup_steps) is not int or self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps is {str(self.num_warmup_steps)[:_MOST_SHOWN]}")
        if not all(_is_between(peak, MOST_BYTES) for peak in self.peak_memory_bytes):
            peaks = str(self.peak_memory_bytes)[:_MOST_SHOWN]
            raise ValueError(f"a peak of memory is not between 0 and {MOST_BYTES:g} bytes: {peaks}")
        if not all(isinstance(remark, str) for remark in self.remarks):
            raise ValueError(f"a remark is no text: {str(self.remarks)[:_MOST_SHOWN]}")

    @property
    def reason(self) -> None:
        """None: a measured trial has no reason for a failure."""

    @property
    def has_spread(self) -> bool:
        """Whether the spread is known: it needs two steps or more, and a table has only a time."""
        return self.spread_s > 0 or len(self.step_time_s) - self.num_warmup_steps > 1

    @property
    def tells_time(self) -> bool:
        """Whether the spread of the steps is small enough to compare the time with others."""
        return tells_time(self.mean_s, self.spread_s)

    @property
    def error_fraction(self) -> float:
        """Standard error of the mean, as a fraction of the mean."""
        steps = self.step_time_s[self.num_warmup_steps :]
        return standard_error(steps, self.mean_s, self.spread_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank ran out of memory: an observation about the strategy, not a fault."""

    reason: str
    rank: int | None  # first rank that failed; None if unknown
    host: str
    lines: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The trial was still running at its deadline and was ended."""

    reason: str
    timeout_s: float
    lines: tuple[str, ...]  # last output of a rank that was still running, preferably a stopped one
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The program failed, or a resource on the host that the program needs failed."""

    reason: str
    kind: CauseKind
    rank: int | None  # rank that failed; None if no single rank did
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


def blames_host(outcome: Outcome | None) -> TypeGuard[Unreachable | Crashed]:
    """Return whether a host, not the strategy, is to blame: it was lost, or its disk was full."""
    return isinstance(outcome, Unreachable) or (
        isinstance(outcome, Crashed) and outcome.kind == "disk"
    )


_CLASSES: Final = {
    "measured": Measured,
    "oom": OutOfMemory,
    "timeout": TimedOut,
    "crashed": Crashed,
    "unreachable": Unreachable,
}
_NAMES: Final = {kind: name for name, kind in _CLASSES.items()}

NO_OUTCOME: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("outcome", "measured_s", "mean_s", "spread_s", "peak_memory_bytes", "wall_s")),
    "warnings": [],
    "reason": None,
}
"""Keys of an outcome in a trial record, with the values of a trial that has not ended."""


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as part of a trial record.

    The part has all keys of `NO_OUTCOME`, null if they do not apply, and the fields of the
    outcome's class.
    """
    record = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
    record = {**NO_OUTCOME, "outcome": _NAMES[type(outcome)], **record}
    return dict(redact_values(record))


def without_secrets_in(outcome: Outcome, secrets: Collection[str]) -> Outcome:
    """Return an outcome with secrets removed from its texts, which come from hosts."""
    texts: dict[str, Any] = {}
    if isinstance(outcome.reason, str):
        texts["reason"] = redact(outcome.reason, secrets)
    if isinstance(outcome, OutOfMemory | TimedOut | Crashed):
        texts["lines"] = tuple(redact(line, secrets) for line in outcome.lines)
    return replace(outcome, **texts)


def outcome_from_json(record: Mapping[str, Any]) -> Outcome:
    """Read the result of ``outcome_to_json``; other keys of a trial record are ignored.

    A measurement of an older version lacks mean and warnings; they are computed from its steps.
    """
    name = record.get("outcome")
    if not isinstance(name, str) or name not in _CLASSES:
        raise ValueError(f"outcome must be one of {', '.join(_CLASSES)}, found {name!r}")
    kind: type[Outcome] = _CLASSES[name]
    types = _types(name)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in record.items()
        if key in types
    }
    _check_types(types, values)
    # Older versions knew neither means and warnings nor remarks.
    if kind is Measured:
        values = {"remarks": (), **with_mean(values)}
        values["warnings"] = tuple(values.get("warnings", ()))
    missing = sorted(key for key in types if key not in values)
    if missing:
        message = f"an outcome {name!r} needs the keys {', '.join(missing)}, found {sorted(record)}"
        raise ValueError(message)
    return kind(**values)


def _check_types(types: Mapping[str, TypeAdapter[Any]], values: Mapping[str, Any]) -> None:
    """Refuse a value of a type that its field does not have."""
    for name, value in values.items():
        try:
            types[name].validate_python(value)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should be ")
            message = f"{name} is {str(value)[:_MOST_SHOWN]}; expected {expected}"
            raise ValueError(message) from None


@cache
def _types(name: str) -> Mapping[str, TypeAdapter[Any]]:
    config = ConfigDict(strict=True, allow_inf_nan=False)
    types = {entry.name: cast("Any", entry.type) for entry in fields(_CLASSES[name])}
    return {name: TypeAdapter(of_type, config=config) for name, of_type in types.items()}


_FAILURES: Final = {"oom": "ran out of memory", "timeout": "timed out"}  # others: by their names
_MOST_CAUSE: Final = 160  # characters of a reason in `no_success_text`


def failure_reason(record: Mapping[str, Any]) -> str:
    """Return the reason of a failed trial's record, with its host."""
    host, reason = printable(record.get("host") or ""), printable(str(record.get("reason")))
    return reason if host in reason else f"{host}: {reason}"


def no_success_text(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Say that no trial succeeded, and why; None if one was measured or none has ended.

    The records are those of trials. Of each kind of failure, the most common reason is named.

    Example:
        >>> oom = {"outcome": "oom", "reason": "rank 0 needs 3 GiB", "host": "n1"}
        >>> no_success_text([oom, oom])
        'No trial succeeded: 2 ran out of memory (n1: rank 0 needs 3 GiB)'
    """
    ended = [record for record in records if record.get("outcome") is not None]
    if not ended or any(record["outcome"] == "measured" for record in ended):
        return None
    kinds = Counter(record["outcome"] for record in ended)
    parts = []
    for kind, number in kinds.most_common():
        reasons = Counter(failure_reason(entry) for entry in ended if entry["outcome"] == kind)
        reason = reasons.most_common(1)[0][0]
        cause = reason if len(reason) <= _MOST_CAUSE else f"{reason[:_MOST_CAUSE]} ..."
        example = "" if len(reasons) == 1 else "for example "
        parts.append(f"{number} {_FAILURES.get(kind, printable(kind))} ({example}{cause})")
    return f"No trial succeeded: {', '.join(parts)}"


def trial_tells_time(record: Mapping[str, Any]) -> bool:
    """Return whether the spread of a trial record with a mean is small enough to compare times."""
    mean_s = record.get("mean_s")
    return mean_s is not None and tells_time(mean_s, record.get("spread_s") or 0.0)


def with_mean(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a trial record with the fields that older versions did not write.

    The mean is computed from the steps, or is the median if the record has no steps; the warnings
    are computed from the same steps.
    """
    if "mean_s" in record:
        return record
    if record.get("measured_s") is None:
        return {**record, "mean_s": None, "warnings": []}
    steps = list(record.get("step_time_s", ()))[record.get("num_warmup_steps", 0) :]
    steps = steps or [record["measured_s"]]
    warnings = step_warnings(steps, record.get("spread_s") or 0.0, has_trend=False)
    return {**record, "mean_s": fmean(steps), "warnings": list(warnings)}
