"""What a study writes down, event by event, and how its state is rebuilt from that."""

import datetime as dt
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amp_ray.calibration.fingerprint import differences
from amp_ray.errors import InputError, Where
from amp_ray.runtime.study.pool import Task
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_json import strategy_from_json, strategy_to_json
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

_HEADER_LINES = 1
"""Of a journal, before its events."""

_JUDGED = (Measured, OutOfMemory, TimedOut)
"""Outcomes that tell what a strategy takes; a program that crashed may be mended."""

_MOST_SHOWN = 40
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A trial that was begun and has no outcome in the journal."""

    trial: Trial
    attempt: int
    trial_id: str
    # Whether the driver ended the attempt in order, so that nothing is left of it
    interrupted: bool = False
    lost: bool = False  # whether a host was unreachable during one of its attempts


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
        """Refuse to mix times of two programs; one that has told nothing yet may be mended.

        Returns what has changed; None if nothing has.
        """
        if program is None or self.program is None:
            return None
        changed = "; ".join(differences("program", self.program, program))
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


def started(
    trial: Trial, task: Task, group: int, cluster: Cluster, seconds: float
) -> dict[str, Any]:
    """Return the event of an attempt that is about to be launched."""
    return {
        "event": "started",
        "number": trial.number,
        "attempt": task.attempt,
        "trial_id": task.trial_id,
        "group": group,
        "strategy": strategy_to_json(trial.strategy, cluster),
        "predicted_s": trial.predicted_s,
        "sigma": trial.sigma,
        "repeats": trial.repeats,
        "chosen": trial.reason,
        "seconds": seconds,
        "at": now(),
    }


def ended(task: Task, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the event of a trial that has its outcome."""
    return {
        "event": "ended",
        "number": task.number,
        "attempt": task.attempt,
        "seconds": seconds,
        "at": now(),
        **outcome_to_json(outcome),
    }


def interrupted(
    task: Task, seconds: float, *, unreachable: str | None = None, fault: str | None = None
) -> dict[str, Any]:
    """Return the event of an attempt that is over while its trial is not."""
    return {
        "event": "interrupted",
        "number": task.number,
        "attempt": task.attempt,
        "unreachable": unreachable,
        "fault": fault,
        "seconds": seconds,
        "at": now(),
    }


def now() -> str:
    """Return the time as people read it in a journal."""
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")


def rebuild(
    state: TunerState,
    cluster: Cluster,
    events: Sequence[Mapping[str, Any]],
    *,
    file: str,
    program: Mapping[str, Any] | None = None,
) -> Rebuilt:
    """Replay a journal."""
    replay = _Replay(state=state, cluster=cluster, file=file, program=program)
    for index in range(len(events)):
        with _placed(Where(file=file, line=1 + _HEADER_LINES + index)):
            replay.take(events[index])
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
    # Names of attempts of which something may be left; an ordered set
    left: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0  # wall time of all drivers but the last
    spent: float = 0.0
    # Those that were read, by their JSON text
    strategies: dict[str, Strategy] = field(default_factory=dict)
    # The attempt that gave each trial its outcome
    over: dict[int, Open] = field(default_factory=dict)
    known_failures: set[str] = field(default_factory=set)
    program: Mapping[str, Any] | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply one event; kinds that are not known are of no consequence."""
        self.spent = _finite(event.get("seconds", self.spent), "seconds")
        kind = event["event"]
        if kind == "resumed":
            self.seconds, self.spent = self.seconds + self.spent, 0.0
            self.program = event.get("program", self.program)
        elif kind == "started":
            self._start(event)
        elif kind == "interrupted":
            self._interrupt(event)
        elif kind == "ended":
            self._end(event)
        elif kind == "stopped" and event.get("alike") is not None:
            self._reopen(event["alike"])

    def _reopen(self, alike: Mapping[str, Any]) -> None:
        """The study was stopped for trials that crashed alike: after a mend they run again."""
        self.known_failures.add(alike["sign"])
        for number in alike["numbers"]:
            self.open[number] = self.over.pop(number)
            self.state = reopen(self.state, number)

    def _start(self, event: Mapping[str, Any]) -> None:
        number, trial_id = event["number"], event["trial_id"]
        self.left[trial_id] = None
        if number == len(self.state.trials):
            self.state = start(self.state, self._trial(event))
        elif number not in self.open:
            raise ValueError(f"trial {number} begins again and is not open")
        before = self.open.get(number)
        self.open[number] = Open(
            trial=self.state.trials[number].trial,
            attempt=event["attempt"],
            trial_id=trial_id,
            lost=before is not None and before.lost,
        )

    def _interrupt(self, event: Mapping[str, Any]) -> None:
        begun = self._begun(event)
        lost = event.get("unreachable") is not None
        is_clean = not lost and event.get("fault") is None
        if is_clean:
            del self.left[begun.trial_id]
        self.open[event["number"]] = Open(
            trial=begun.trial,
            attempt=begun.attempt,
            trial_id=begun.trial_id,
            interrupted=is_clean,
            lost=lost or begun.lost,
        )

    def _end(self, event: Mapping[str, Any]) -> None:
        """A trial has its outcome; it has one only, and what is told later changes nothing."""
        number = event["number"]
        if number not in self.open and 0 <= number < len(self.state.trials):
            return
        begun = self._begun(event)
        outcome = outcome_from_json(event)
        self.state = record(self.state, number, outcome)
        if not isinstance(outcome, Unreachable):
            del self.left[begun.trial_id]
        self.over[number] = self.open.pop(number)

    def _begun(self, event: Mapping[str, Any]) -> Open:
        begun = self.open.get(event["number"])
        if begun is None or begun.attempt != event["attempt"] or begun.trial_id not in self.left:
            attempt = f"attempt {event['attempt']} at trial {event['number']}"
            raise ValueError(f"{attempt} is over ({event['event']}) and did not run")
        return begun

    def _trial(self, event: Mapping[str, Any]) -> Trial:
        key = json.dumps(event["strategy"], sort_keys=True)
        if key not in self.strategies:
            self.strategies[key] = strategy_from_json(
                event["strategy"], self.cluster, file=self.file
            )
        if self.strategies[key] not in self.state.index_of:
            raise ValueError(
                f"trial {event['number']} ran a strategy that is none of the "
                f"{len(self.state.candidates)} to choose from now: the search's limits, the "
                "calibration or the table are not those that the study began with. Go on with "
                "them, or name a new folder by --study"
            )
        if event["predicted_s"] == 0:
            raise ValueError("predicted_s is 0; no strategy takes no time")
        return Trial(
            number=event["number"],
            strategy=self.strategies[key],
            predicted_s=_finite(event["predicted_s"], "predicted_s"),
            sigma=_finite(event["sigma"], "sigma"),
            repeats=event["repeats"],
            reason=event["chosen"],
        )


def _finite(value: object, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {str(value)[:_MOST_SHOWN]}; expected a number of at least 0")
    return float(value)


@contextmanager
def _placed(where: Where) -> Iterator[None]:
    """Lead a mistake in an event to its line."""
    try:
        yield
    except KeyError as error:
        raise InputError(f"the event has no {error}", where=where) from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(str(error), where=where) from error
