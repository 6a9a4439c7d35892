"""What a study writes down, event by event, and how its state is rebuilt from that."""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from pydantic import Field, SkipValidation

from amp_ray.calibration.fingerprint import differences
from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Where, placed
from amp_ray.inputs.section import Index, Positive, Section, Text, validate
from amp_ray.inputs.strategy_json import strategy_from_json, strategy_to_json
from amp_ray.inputs.yaml_text import Document
from amp_ray.redaction import redact_values
from amp_ray.runtime.study.pool import Task
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import (
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
    Unreachable,
    outcome_from_json,
    outcome_to_json,
)
from amp_ray.tuner.state import Trial, TunerState, record, reopen, start

_JUDGED = (Measured, OutOfMemory, TimedOut)  # tell what a strategy takes; a crash may be mended

Elapsed = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A trial that was begun and has no outcome in the journal."""

    trial: Trial
    attempt: int
    trial_id: str
    interrupted: bool = False  # whether the driver ended it in order: nothing is left of it
    lost: bool = False  # whether a host failed one of its attempts: lost, or without room on a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a journal tells."""

    state: TunerState
    open: tuple[Open, ...]  # trials without an outcome, by number
    # Names of attempts of which something may be left on hosts: their driver died, or a host could
    # not be reached
    left: tuple[str, ...]
    seconds: float  # wall time that the drivers before have spent
    # What the study ran last, as its header or a later start tells; None of a replay, and of a
    # study of an older version
    program: Mapping[str, Any] | None = None
    # Signs of failures that trials had in common and that the study was stopped for already: going
    # on after that is the user's decision
    known_failures: frozenset[str] = frozenset()

    def check_program(self, program: Mapping[str, Any] | None, *, file: str) -> str | None:
        """Refuse to mix times of two programs; say what has changed where none was measured."""
        if program is None or self.program is None:
            return None
        before = redact_values(self.program)  # older versions kept what looks secret to this one
        changed = "; ".join(differences("program", before, program))
        text = changed.replace("in the calibration", "in the study")
        if text and any(
            isinstance(trial_record.outcome, _JUDGED) for trial_record in self.state.trials
        ):
            message = (
                f"the program has changed since the study's trials were measured ({text}): their "
                "times cannot be compared with new ones. Go on with the program as it was, or "
                "begin a new study by --study"
            )
            raise InputError(message, where=Where(file=file))
        return text or None


class Event(Section, extra="ignore"):
    """What every record of a journal may tell; a later version may tell more.

    Each kind of event is declared once, here, for those who write it and for those who read it.
    """

    seconds: Elapsed | None = None  # wall time that this driver has spent
    at: str | None = None  # for people

    def record(self) -> dict[str, Any]:
        """Return the event as it is written."""
        names = {kind: name for name, kind in KINDS.items()}
        fields = self.model_dump(exclude_defaults=True, exclude={"outcome"})
        return {"event": names[type(self)], **fields}


class Header(Event):
    """What the study is of; what else stands there is compared, key by key, when it goes on."""

    study: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]  # its name on hosts
    experiment: str | None = None
    backend: str | None = None
    program: Mapping[str, Any] | None = None  # what trials run


class Started(Event):
    """An attempt is about to be launched."""

    number: Index
    attempt: Index
    trial_id: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,127}$")]  # on hosts
    group: Index | None = None
    strategy: dict[str, Any]
    predicted_s: Positive
    sigma: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
    repeats: Index | None
    chosen: str


class Ended(Event, arbitrary_types_allowed=True):
    """A trial has its outcome, whose keys stand among those of the event."""

    number: Index
    attempt: Index
    outcome: SkipValidation[Outcome]

    def record(self) -> dict[str, Any]:
        """Return the event as it is written."""
        return {**Event.record(self), **outcome_to_json(self.outcome)}


class Interrupted(Event):
    """An attempt is over while its trial is not."""

    number: Index
    attempt: Index
    unreachable: str | None = None  # why its host could not be reached
    fault: str | None = None  # why this machine could not run it


class SetAside(Event):
    """A group of hosts is used no more."""

    group: Index
    reason: str


class Alike(Section, extra="ignore"):
    """Trials that crashed in the same way."""

    numbers: tuple[Index, ...]
    sign: str


class Stopped(Event):
    """A driver has ended in order."""

    ending: Text
    alike: Alike | None = None
    recommendation: Mapping[str, Any] | None = None  # as in ``tune --json``


class Resumed(Event):
    """A driver goes on."""

    budget: Index | None = None
    program: Mapping[str, Any] | None = None


KINDS: Final[Mapping[str, type[Event]]] = {
    "study": Header,
    "started": Started,
    "ended": Ended,
    "interrupted": Interrupted,
    "set-aside": SetAside,
    "stopped": Stopped,
    "resumed": Resumed,
}


def read_event(bodies: Sequence[Mapping[str, Any]], index: int, *, file: str) -> Event | None:
    """Read a record of a journal, in which the header is the first; None if of a later version.

    Raises:
        InputError: With the line, if a key is missing or has a value that nobody writes.
    """
    where = Where(file=file, line=1 + index)
    with placed(where, ValueError):
        body = bodies[index]
        name = body.get("event")
        if not isinstance(name, str):
            raise InputError("the event has no name under 'event'")
        if name not in KINDS:
            return None
        kind = KINDS[name]
        if kind is Ended:
            body = {**body, "outcome": outcome_from_json(body)}
    keys = {*kind.model_fields, *body}
    lines: Mapping[tuple[str | int, ...], int] = {(key,): 1 + index for key in keys}
    return validate(kind, Document(file=file, values=body, lines=lines))


def read_header(bodies: Sequence[Mapping[str, Any]], *, file: str) -> Header:
    """Read the first record of a journal."""
    header = read_event(bodies, 0, file=file)
    if isinstance(header, Header):
        return header
    message = f"this is no header of a study: {bodies[0]['event']!r}"
    raise InputError(message, where=Where(file=file, line=1))


def started(
    trial: Trial, task: Task, group: int, cluster: Cluster, seconds: float
) -> dict[str, Any]:
    """Return the event of an attempt that is about to be launched."""
    return Started(
        number=trial.number,
        attempt=task.attempt,
        trial_id=task.trial_id,
        group=group,
        strategy=strategy_to_json(trial.strategy, cluster),
        predicted_s=trial.predicted_s,
        sigma=trial.sigma,
        repeats=trial.repeats,
        chosen=trial.reason,
        seconds=seconds,
        at=now(),
    ).record()


def ended(task: Task, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the event of a trial that has its outcome."""
    return Ended(
        number=task.number, attempt=task.attempt, outcome=outcome, seconds=seconds, at=now()
    ).record()


def interrupted(
    task: Task, seconds: float, *, unreachable: str | None = None, fault: str | None = None
) -> dict[str, Any]:
    """Return the event of an attempt that is over while its trial is not."""
    return Interrupted(
        number=task.number,
        attempt=task.attempt,
        unreachable=unreachable,
        fault=fault,
        seconds=seconds,
        at=now(),
    ).record()


def now() -> str:
    """Return the time as people read it in a journal."""
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")


def rebuild(
    state: TunerState,
    cluster: Cluster,
    records: Sequence[Mapping[str, Any]],
    *,
    file: str,
) -> Rebuilt:
    """Replay a journal."""
    replay = _Replay(state=state, cluster=cluster, file=file)
    for index in range(len(records)):
        event = read_event(records, index, file=file)
        with placed(Where(file=file, line=1 + index), ValueError):
            replay.take(event)
    return Rebuilt(
        state=replay.state,
        open=tuple(replay.open.values()),
        left=tuple(replay.left),
        seconds=replay.seconds + replay.spent,
        program=replay.program,
        known_failures=frozenset(replay.known_failures),
    )


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Where a replay stands."""

    state: TunerState
    cluster: Cluster
    file: str
    open: dict[int, Open] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)  # attempts that may have left something
    seconds: float = 0.0  # wall time of all drivers but the last
    spent: float = 0.0
    strategies: dict[str, Strategy] = field(default_factory=dict)  # that were read, by JSON text
    over: dict[int, Open] = field(default_factory=dict)  # the attempt that gave each its outcome
    known_failures: set[str] = field(default_factory=set)
    program: Mapping[str, Any] | None = None

    def take(self, event: Event | None) -> None:
        """Apply one event; None, of a later version, is of no consequence."""
        if event is not None and event.seconds is not None:
            self.spent = event.seconds
        match event:
            case Header():
                self.program = event.program
            case Resumed():
                self.seconds, self.spent = self.seconds + self.spent, 0.0
                self.program = event.program or self.program
            case Started():
                self._start(event)
            case Interrupted():
                self._interrupt(event)
            case Ended():
                self._end(event)
            case Stopped(alike=Alike() as alike):
                self._reopen(alike)

    def _reopen(self, alike: Alike) -> None:
        """The study was stopped for trials that crashed alike: after a mend they run again."""
        self.known_failures.add(alike.sign)
        for number in alike.numbers:
            if number not in self.over:
                raise ValueError(f"trial {number} is to run again and has not ended")
            self.open[number] = self.over.pop(number)
            self.state = reopen(self.state, number)

    def _start(self, event: Started) -> None:
        number = event.number
        self.left[event.trial_id] = None
        if number == len(self.state.trials):
            self.state = start(self.state, self._trial(event))
        elif number not in self.open:
            raise ValueError(f"trial {number} begins again and is not open")
        before = self.open.get(number)
        self.open[number] = Open(
            trial=self.state.trials[number].trial,
            attempt=event.attempt,
            trial_id=event.trial_id,
            lost=before is not None and before.lost,
        )

    def _interrupt(self, event: Interrupted) -> None:
        begun = self._begun(event, "interrupted")
        lost = event.unreachable is not None
        is_clean = not lost and event.fault is None
        if is_clean:
            del self.left[begun.trial_id]
        is_lost = lost or begun.lost
        self.open[event.number] = replace(begun, interrupted=is_clean, lost=is_lost)

    def _end(self, event: Ended) -> None:
        """A trial has its outcome; it has one only, and what is told later changes nothing."""
        number = event.number
        if number not in self.open and number < len(self.state.trials):
            return
        begun = self._begun(event, "ended")
        self.state = record(self.state, number, event.outcome)
        if not isinstance(event.outcome, Unreachable):
            del self.left[begun.trial_id]
        self.over[number] = self.open.pop(number)

    def _begun(self, event: Ended | Interrupted, how: str) -> Open:
        begun = self.open.get(event.number)
        if begun is None or begun.attempt != event.attempt or begun.trial_id not in self.left:
            attempt = f"attempt {event.attempt} at trial {event.number}"
            raise ValueError(f"{attempt} is over ({how}) and did not run")
        return begun

    def _trial(self, event: Started) -> Trial:
        key = json.dumps(event.strategy, sort_keys=True)
        if key not in self.strategies:
            self.strategies[key] = strategy_from_json(event.strategy, self.cluster, file=self.file)
        if self.strategies[key] not in self.state.index_of:
            raise ValueError(
                f"trial {event.number} ran a strategy that is none of the "
                f"{len(self.state.candidates)} to choose from now: the search's limits, the "
                "calibration or the table are not those that the study began with. Go on with "
                "them, or name a new folder by --study"
            )
        if event.repeats is not None and event.repeats >= event.number:
            raise ValueError(f"trial {event.number} repeats trial {event.repeats}, a later one")
        return Trial(
            number=event.number,
            strategy=self.strategies[key],
            predicted_s=event.predicted_s,
            sigma=event.sigma,
            repeats=event.repeats,
            reason=event.chosen,
        )
