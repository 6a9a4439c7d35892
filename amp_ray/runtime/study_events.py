"""What a study writes down, event by event, and how its state is rebuilt from that."""

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.errors import InputError, Where
from amp_ray.runtime.pool import Task
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_json import strategy_from_json, strategy_to_json
from amp_ray.trials.outcome import Outcome, outcome_from_json, outcome_to_json
from amp_ray.tuner.state import Trial, TunerState, record, start

JOURNAL: Final = "journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """An attempt that was begun and has no end in the journal.

    Args:
        trial: What was launched.
        attempt: Which attempt at it.
        trial_id: The name of its folders.
        interrupted: Whether the driver ended it in order: then nothing of it is left on hosts.
    """

    trial: Trial
    attempt: int
    trial_id: str
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a journal tells.

    Args:
        state: With every trial that was told.
        open: Trials without an outcome, by number.
        seconds: Wall time that the drivers before have spent.
    """

    state: TunerState
    open: tuple[Open, ...]
    seconds: float


def started(trial: Trial, task: Task, group: int, cluster: Cluster) -> dict[str, Any]:
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


def interrupted(task: Task, seconds: float) -> dict[str, Any]:
    """Return the event of an attempt that the driver ended before it was over."""
    return {
        "event": "interrupted",
        "number": task.number,
        "attempt": task.attempt,
        "seconds": seconds,
        "at": now(),
    }


def now() -> str:
    """Return the time as people read it in a journal."""
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")


def rebuild(
    state: TunerState, cluster: Cluster, events: Iterable[Mapping[str, Any]], *, file: str
) -> Rebuilt:
    """Replay a journal.

    Args:
        state: At the beginning of the study.
        cluster: Whose hosts strategies name.
        events: Bodies of its records.
        file: The journal, for messages.

    Raises:
        InputError: If an event does not fit what came before it.
    """
    open_: dict[int, Open] = {}
    strategies: dict[str, Strategy] = {}
    seconds = spent = 0.0
    for number, event in enumerate(events, start=1):
        spent = float(event.get("seconds", spent))
        if event["event"] == "resumed":
            seconds, spent = seconds + spent, 0.0
        elif event["event"] == "started":
            key = json.dumps(event["strategy"], sort_keys=True)
            if key not in strategies:
                strategies[key] = strategy_from_json(event["strategy"], cluster, file=file)
            trial = _trial(event, strategies[key])
            if trial.number == len(state.trials):
                state = start(state, trial)
            open_[trial.number] = Open(
                trial=state.trials[trial.number].trial,
                attempt=event["attempt"],
                trial_id=event["trial_id"],
                interrupted=False,
            )
        elif event["event"] in {"ended", "interrupted"}:
            begun = open_.pop(event["number"], None)
            if begun is None:
                message = f"record {number} ends trial {event['number']}, which was not running"
                raise InputError(message, where=Where(file=file))
            if event["event"] == "ended":
                state = record(state, event["number"], outcome_from_json(event))
            else:
                open_[event["number"]] = Open(
                    trial=begun.trial,
                    attempt=begun.attempt,
                    trial_id=begun.trial_id,
                    interrupted=True,
                )
    return Rebuilt(state=state, open=tuple(open_.values()), seconds=seconds + spent)


def _trial(event: Mapping[str, Any], strategy: Strategy) -> Trial:
    """Read the trial of a ``started`` event."""
    return Trial(
        number=event["number"],
        strategy=strategy,
        predicted_s=event["predicted_s"],
        sigma=event["sigma"],
        repeats=event["repeats"],
        reason=event["chosen"],
    )
