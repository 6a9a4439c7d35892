"""A study driven without hosts: a pool with scripted outcomes, and a journal in memory."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_ray.errors import AmpRayError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.runtime.study.driver import Driver, DriverSettings
from amp_ray.runtime.study.events import Rebuilt, rebuild
from amp_ray.runtime.study.pool import Fault, Finished, Task
from amp_ray.runtime.study.result import StudyResult
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import candidates_of
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import Trial, TrialRecord, TunerSettings, TunerState, begin
from amp_ray.tuner.unexpected import Surprise
from support.experiments import SLOW_HOST, small_experiment

Answer = Callable[[Task, int], Outcome | Fault | None]
"""Returns the outcome of an attempt on a group."""


# A strategy of one rank, for tests in which no host runs it
PLAIN_STRATEGY = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    (0, 2),
)


def task_of(
    trial_id: str, folder: Path, number: int = 0, strategy: Strategy = PLAIN_STRATEGY
) -> Task:
    """Return the first attempt at a trial, whose folder has the trial's name."""
    return Task(
        number=number,
        attempt=0,
        trial_id=trial_id,
        strategy=strategy,
        folder=folder / trial_id,
    )


@functools.cache
def small_ranking() -> tuple[Experiment, Ranking]:
    """Return the small experiment on slow hosts and the planner's ranking of it."""
    experiment = small_experiment(SLOW_HOST)
    planner = AmpRayPlanner(experiment=experiment)
    return experiment, search_candidates(planner, candidates_of(experiment), workers=ALONE)


def small_study(budget: int = 3, **settings: Any) -> TunerState:  # noqa: ANN401 - TunerSettings'
    """Return a new study of sixteen strategies; the default policy is the predicted order."""
    experiment, ranking = small_ranking()
    chosen = {"policy": "predicted-order", **settings}
    return begin(experiment, ranking.results, TunerSettings(budget=budget, **chosen))


@dataclass(kw_only=True)
class MemoryLog:
    """A journal in memory.

    Args:
        happened: Log of all parts, which gets a line per event, to check their order.
        room: Number of events until the disk is full; None for no limit.
        events: The written events, as a reader would return them.
    """

    happened: list[str] = field(default_factory=list)
    room: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def append(self, record: dict[str, Any], /) -> None:
        """Store an event.

        Raises:
            AmpRayError: If the disk is full.
        """
        if self.room is not None and len(self.events) >= self.room:
            message = "journal.jsonl: cannot be written: No space left on device"
            raise AmpRayError(message)
        self.events.append(json.loads(json.dumps(record, allow_nan=False)))
        self.happened.append(f"journal: {_describe(record)}")


@dataclass(kw_only=True)
class ScriptedPool:
    """A pool in which every call of ``wait`` ends the attempt that began first.

    Args:
        answer: Returns the outcome of an attempt.
        num_groups: Number of groups.
        happened: Log of all parts, which gets a line for every call of a method.
        at_close: Returns the outcome of an attempt that is running when the pool is closed.
        running: Running attempts by group.
        aside: Groups that were set aside.
        swept: Names of attempts that were swept.
        is_closed: Whether ``close`` was called.
        most_running: Maximum number of attempts that ran at the same time.
        timeouts_s: Timeout of every call of ``wait``.
    """

    answer: Answer
    num_groups: int = 1
    happened: list[str] = field(default_factory=list)
    at_close: Answer = lambda _task, _group: None
    running: dict[int, Task] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    swept: list[str] = field(default_factory=list)
    is_closed: bool = False
    most_running: int = 0
    timeouts_s: list[float] = field(default_factory=list)

    def free(self) -> tuple[int, ...]:
        """Return the groups that run no attempt and are not set aside."""
        busy = self.aside | self.running.keys()
        return tuple(group for group in range(self.num_groups) if group not in busy)

    def start(self, task: Task, group: int) -> None:
        """Start an attempt."""
        assert group in self.free(), f"group {group} is not free"
        assert not self.is_closed, "the pool is closed"
        self.running[group] = task
        self.most_running = max(self.most_running, len(self.running))
        self.happened.append(f"start: trial {task.number}-{task.attempt} on group {group}")

    def wait(self, timeout_s: float) -> list[Finished]:
        """End the attempt that began first; after ``close``, end all of them."""
        self.timeouts_s.append(timeout_s)
        groups = list(self.running) if self.is_closed else list(self.running)[:1]
        answer = self.at_close if self.is_closed else self.answer
        outcomes = {group: answer(self.running[group], group) for group in groups}
        return [
            Finished(task=self.running.pop(group), outcome=outcome, group=group)
            for group, outcome in outcomes.items()
        ]

    def set_aside(self, group: int) -> None:
        """Start no more attempts on a group."""
        self.aside.add(group)
        self.happened.append(f"aside: group {group}")

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Record the names of the swept attempts."""
        self.swept += trial_ids
        self.happened.append(f"sweep: {' '.join(trial_ids)}")
        return [f"{trial_id} has left a process" for trial_id in trial_ids]

    def close(self) -> None:
        """Let ``wait`` end everything."""
        self.is_closed = True
        self.happened.append("close")


@dataclass(kw_only=True)
class NotingView:
    """A view that stores one line per call.

    Args:
        lines: The stored lines.
    """

    lines: list[str] = field(default_factory=list)

    def started(self, trial: Trial, group: int) -> None:
        """Store that an attempt begins."""
        self.lines.append(f"started {trial.number} on {group}")

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Store the outcome of a trial."""
        outcome = type(trial_record.outcome).__name__
        self.lines.append(f"ended {trial_record.trial.number}: {outcome}")
        if surprise is not None:
            self.lines.append(f"surprise {surprise.trial.number}")

    def halted(self, trial: Trial) -> None:
        """Store that a trial has to run again."""
        self.lines.append(f"halted {trial.number}")

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Store nothing."""

    def note(self, text: str) -> None:
        """Store a message."""
        self.lines.append(text)


def make_driver(
    state: TunerState,
    pool: ScriptedPool,
    log: MemoryLog | None = None,
    view: NotingView | None = None,
    **settings: Any,  # noqa: ANN401 - those of DriverSettings
) -> Driver:
    """Return a driver with these parts; its trials have no folders."""
    chosen = DriverSettings(trials_folder=Path("unused"), study_id="study", **settings)
    return Driver(state, pool, log or MemoryLog(), view or NotingView(), chosen)


def resume(
    before: Rebuilt,
    pool: ScriptedPool,
    log: MemoryLog | None = None,
    view: NotingView | None = None,
    **settings: Any,  # noqa: ANN401 - those of DriverSettings
) -> StudyResult:
    """Resume a study and drive it to its end."""
    driver = make_driver(before.state, pool, log, view, **settings)
    return driver.run(before.open, before.leftovers)


def drive(state: TunerState, answer: Answer, log: MemoryLog | None = None) -> StudyResult:
    """Drive a study of one group to its end."""
    return make_driver(state, ScriptedPool(answer=answer), log).run()


def rebuilt(state: TunerState, log: MemoryLog) -> Rebuilt:
    """Rebuild a study from the events in a log."""
    return rebuild(state, log.events, file="journal.jsonl")


def _describe(event: dict[str, Any]) -> str:
    """Describe an event in one line."""
    words = [str(event["event"])]
    if "number" in event:
        words.append(f"trial {event['number']}-{event['attempt']}")
    return " ".join(words)
