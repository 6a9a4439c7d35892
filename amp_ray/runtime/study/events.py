"""The events of a study's journal, and their replay into the state of the study."""

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import Field, SkipValidation

from amp_ray.calibration.fingerprint import differences
from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Where, placed
from amp_ray.inputs.section import Index, Positive, Section, Text, validate
from amp_ray.inputs.strategies import strategy_from_json, strategy_to_json
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
from amp_ray.tuner.state import Trial, TrialRecord, TunerState

_JUDGED = (Measured, OutOfMemory, TimedOut)  # depend on the program; a crash may be a fixed bug

Elapsed = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


Begun = TypeVar("Begun")


@dataclass(slots=True, kw_only=True)
class JournalTrial(Generic[Begun]):
    """A trial in the journal, with its last attempt."""

    trial: Begun  # result of ``begun`` for its last ``started`` event
    attempt: int
    trial_id: str
    outcome: Outcome | None = None
    running: bool = True
    lost: bool = False  # whether an attempt failed because of its host: unreachable, or disk full


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The state of a study after the replay of its journal."""

    state: TunerState
    open: tuple[JournalTrial[Trial], ...]  # trials without an outcome, by number
    # Ids of attempts that may have left processes or files on hosts, because their driver died or
    # a host could not be reached
    leftovers: tuple[str, ...]
    seconds: float  # wall time of all earlier drivers
    # The last program, from the header or a ``resumed`` event; None for replays and for studies of
    # older versions
    program: Mapping[str, Any] | None = None
    # Signs of common failures that have stopped the study before. They do not stop it again, since
    # the user has resumed it
    known_failures: frozenset[str] = frozenset()

    def check_program(self, program: Mapping[str, Any] | None, *, file: str) -> str | None:
        """Describe how the program has changed since the study began; None if it has not.

        Raises `InputError` if it has changed after a trial was measured.
        """
        if program is None or self.program is None:
            return None
        before = redact_values(self.program)  # older versions redacted less
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
    """Base class of all events; unknown keys, of later versions, are ignored.

    The classes serve both for writing and for reading.
    """

    seconds: Elapsed | None = None  # wall time since this driver started
    at: str | None = None  # ISO 8601 time, for people

    def record(self) -> dict[str, Any]:
        """Return the event as it is written."""
        names = {kind: name for name, kind in KINDS.items()}
        fields = self.model_dump(exclude_defaults=True, exclude={"outcome"})
        return {"event": names[type(self)], **fields}


class Header(Event):
    """The first event; `folder.open_study` compares all its keys when a study is resumed."""

    study: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]  # id; prefix of the trials' ids
    experiment: str | None = None
    backend: str | None = None
    program: Mapping[str, Any] | None = None  # see `program_record`


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
    """A trial has its outcome; the outcome's keys are merged into those of the event."""

    number: Index
    attempt: Index
    outcome: SkipValidation[Outcome]

    def record(self) -> dict[str, Any]:
        """Return the event as it is written."""
        return {**Event.record(self), **outcome_to_json(self.outcome)}


class Interrupted(Event):
    """An attempt ended without an outcome; the trial is still open."""

    number: Index
    attempt: Index
    unreachable: str | None = None  # why the attempt's host could not be reached
    fault: str | None = None  # why this machine could not run the attempt


class SetAside(Event):
    """A host group gets no more trials."""

    group: Index
    reason: str


class Alike(Section, extra="ignore"):
    """Trials that crashed in the same way."""

    numbers: tuple[Index, ...]
    sign: str


class Stopped(Event):
    """A driver ended in order; a driver that is killed writes no such event."""

    ending: Text
    alike: Alike | None = None
    recommendation: Mapping[str, Any] | None = None  # as in ``tune --json``


class Resumed(Event):
    """A driver continues the study."""

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
    """Read the record at ``index``; None if its kind is unknown, as in a later version's journal.

    Raises:
        InputError: With the line number, if a key is missing or has an invalid value.
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
    """Return the record of an attempt that is about to be launched."""
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
    """Return the record of a trial's outcome."""
    return Ended(
        number=task.number, attempt=task.attempt, outcome=outcome, seconds=seconds, at=now()
    ).record()


def interrupted(
    task: Task, seconds: float, *, unreachable: str | None = None, fault: str | None = None
) -> dict[str, Any]:
    """Return the record of an attempt that ended without an outcome."""
    return Interrupted(
        number=task.number,
        attempt=task.attempt,
        unreachable=unreachable,
        fault=fault,
        seconds=seconds,
        at=now(),
    ).record()


def now() -> str:
    """Return the UTC time in ISO 8601, to the second."""
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")


def rebuild(state: TunerState, records: Sequence[Mapping[str, Any]], *, file: str) -> Rebuilt:
    """Replay a journal, beginning with a state without trials."""
    cluster = state.experiment.cluster
    strategies: dict[str, Strategy] = {}  # cache by JSON text

    def begun(event: Started) -> Trial:
        key = json.dumps(event.strategy, sort_keys=True)
        if key not in strategies:
            strategies[key] = strategy_from_json(event.strategy, cluster, file=file)
        return _trial(event, strategies[key], state)

    replay = replay_journal(records, begun, file=file)
    trials = tuple(
        TrialRecord(
            trial=entry.trial,
            candidate=state.index_of[entry.trial.strategy],
            outcome=entry.outcome,
        )
        for entry in replay.trials.values()
    )
    return Rebuilt(
        state=dataclasses.replace(state, trials=trials),
        open=tuple(entry for entry in replay.trials.values() if entry.outcome is None),
        leftovers=tuple(replay.leftovers),
        seconds=replay.seconds + replay.spent,
        program=replay.program,
        known_failures=frozenset(replay.known_failures),
    )


def _trial(event: Started, strategy: Strategy, state: TunerState) -> Trial:
    if strategy not in state.index_of:
        raise ValueError(
            f"trial {event.number} ran a strategy that is none of the "
            f"{len(state.candidates)} to choose from now: the search's limits, the "
            "calibration or the table are not those that the study began with. Go on with "
            "them, or name a new folder by --study"
        )
    if event.repeats is not None and event.repeats >= event.number:
        raise ValueError(f"trial {event.number} repeats trial {event.repeats}, a later one")
    return Trial(
        number=event.number,
        strategy=strategy,
        predicted_s=event.predicted_s,
        sigma=event.sigma,
        repeats=event.repeats,
        reason=event.chosen,
    )


def replay_journal(
    records: Sequence[Mapping[str, Any]], begun: Callable[[Started], Begun], *, file: str
) -> "Replay[Begun]":
    """Replay all events of a journal; ``begun`` converts ``started`` events for `JournalTrial`."""
    replay = Replay(begun=begun)
    for index in range(len(records)):
        event = read_event(records, index, file=file)
        with placed(Where(file=file, line=1 + index), ValueError):
            replay.take(event)
    return replay


@dataclass(slots=True, kw_only=True)
class Replay(Generic[Begun]):
    """The state after the events so far."""

    begun: Callable[[Started], Begun]
    trials: dict[int, JournalTrial[Begun]] = field(default_factory=dict)
    leftovers: dict[str, None] = field(default_factory=dict)  # ids of attempts, in order
    seconds: float = 0.0  # wall time of all drivers but the last
    spent: float = 0.0
    known_failures: set[str] = field(default_factory=set)
    program: Mapping[str, Any] | None = None
    last: Event | None = None

    def take(self, event: Event | None) -> None:
        """Apply one event; None is an unknown event of a later version, and is skipped."""
        if event is None:
            return
        self.last = event
        if event.seconds is not None:
            self.spent = event.seconds
        match event:
            case Header():
                self.program = event.program
            case Resumed():
                self.seconds, self.spent = self.seconds + self.spent, 0.0
                self.program = event.program or self.program
                self._stop()
            case Started():
                self._start(event)
            case Interrupted():
                self._interrupt(event)
            case Ended():
                self._end(event)
            case Stopped():
                self._stop()
                if event.alike is not None:
                    self._reopen(event.alike)

    def _stop(self) -> None:
        for entry in self.trials.values():
            entry.running = False

    def _reopen(self, alike: Alike) -> None:
        """Remove the outcomes of trials that crashed in the same way, so that they run again."""
        self.known_failures.add(alike.sign)
        for number in alike.numbers:
            entry = self.trials.get(number)
            if entry is None or entry.outcome is None:
                raise ValueError(f"trial {number} is to run again and has not ended")
            entry.outcome = None

    def _start(self, event: Started) -> None:
        before = self.trials.get(event.number)
        is_open = before is not None and before.outcome is None
        if event.number != len(self.trials) and not is_open:
            raise ValueError(f"trial {event.number} begins again and is not open")
        self.trials[event.number] = JournalTrial(
            trial=self.begun(event),
            attempt=event.attempt,
            trial_id=event.trial_id,
            lost=before is not None and before.lost,
        )
        self.leftovers[event.trial_id] = None

    def _interrupt(self, event: Interrupted) -> None:
        entry = self._at_work(event, "interrupted")
        entry.running = False
        if event.unreachable is not None:
            entry.lost = True
        elif event.fault is None:
            del self.leftovers[entry.trial_id]

    def _end(self, event: Ended) -> None:
        """Record the outcome of a trial; ignore a second one."""
        before = self.trials.get(event.number)
        if before is not None and before.outcome is not None:
            return
        entry = self._at_work(event, "ended")
        entry.outcome, entry.running = event.outcome, False
        if not isinstance(event.outcome, Unreachable):
            del self.leftovers[entry.trial_id]

    def _at_work(self, event: Ended | Interrupted, how: str) -> JournalTrial[Begun]:
        entry = self.trials.get(event.number)
        is_begun = entry is not None and entry.outcome is None and entry.attempt == event.attempt
        if entry is None or not is_begun or entry.trial_id not in self.leftovers:
            attempt = f"attempt {event.attempt} at trial {event.number}"
            raise ValueError(f"{attempt} is over ({how}) and did not run")
        return entry
