"""The loop of a study: ask the tuner, start trials, record their outcomes, update the view."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.study import events as study_events
from amp_ray.runtime.study.events import Alike, JournalTrial, SetAside, Stopped
from amp_ray.runtime.study.pool import Fault, Finished, Pool, Task
from amp_ray.runtime.study.result import MOST_TIES, Ending, StudyResult, recommendation_json
from amp_ray.trials.outcome import Crashed, Unreachable, blames_host
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.certificate import certify
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import Trial, TrialRecord, TunerState, record, start
from amp_ray.tuner.unexpected import CommonFailure, Surprise, common_failure, surprise_of


class EventLog(Protocol):
    """A durable log of events; `Journal` is one."""

    def append(self, record: dict[str, Any], /) -> None:
        """Write an event; when this returns, it survives a crash."""


class View(Protocol):
    """Callbacks that display the progress of a study."""

    def started(self, trial: Trial, group: int) -> None:
        """Show that an attempt begins."""

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Show the outcome of a trial."""

    def halted(self, trial: Trial) -> None:
        """Show that an attempt ended without an outcome: the trial has to run again."""

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Show the tuner's knowledge after an outcome has updated it."""

    def note(self, text: str) -> None:
        """Show a message."""


# Makes context managers that delay signals; see `tuning.Interruption.steady`
Steady = Callable[[], AbstractContextManager[None]]
_WAIT_S: Final = 0.5  # interval at which the time budget is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """Settings of `Driver`."""

    trials_folder: Path
    study_id: str  # short, unique per study; prefix of trial ids
    time_left_s: float | None = None  # trials are ended after this; None for no limit
    steady: Steady = contextlib.nullcontext
    known_failures: frozenset[str] = frozenset()  # signs of failures that do not stop the study


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """An attempt that is running, or is queued to run again."""

    trial: Trial
    attempt: int = 0
    lost: bool = False  # whether a host failed before; a second failure is final
    group: int | None = None  # group of the current or last attempt; the next prefers another


class Driver:
    """Runs one study to its end; writes every change of state to the journal first."""

    def __init__(
        self,
        state: TunerState,
        pool: Pool,
        log: EventLog,
        view: View,
        settings: DriverSettings,
    ) -> None:
        self.state = state
        self._pool, self._log, self._view, self._settings = pool, log, view, settings
        self._predictor = BoundedPredictor()
        self._begun_s = time.monotonic()
        self._waiting: list[_Turn] = []
        self._running: dict[int, _Turn] = {}
        self._fault: AmpRayError | None = None
        self._alike: CommonFailure | None = None

    def run(
        self, unfinished: Iterable[JournalTrial[Trial]] = (), leftovers: Iterable[str] = ()
    ) -> StudyResult:
        """Drive until the budget is spent, no candidate is worth a trial, or no host is left.

        Trials that earlier drivers left ``unfinished`` run again. ``leftovers`` are ids of attempts
        that may still have processes or files on hosts; these are removed first. Raises
        `KeyboardInterrupt` after all running trials were ended in order.
        """
        ending: Ending = "failed"
        try:
            self._take_up(unfinished, tuple(leftovers))
            ending = self._drive()
        except KeyboardInterrupt:
            ending = "interrupted"
            self._view.note("interrupted: what runs is being ended")
            raise
        finally:
            self._close(ending)
        return self.result(ending)

    def result(self, ending: Ending) -> StudyResult:
        """Return the result so far."""
        knowledge = learn(self.state, self._predictor)
        certificate = certify(self.state, knowledge)
        return StudyResult(
            state=self.state,
            knowledge=knowledge,
            certificate=certificate,
            ending=ending,
            common_failure=self._alike,
        )

    # ------------------------------------------------------------------ the loop

    def _drive(self) -> Ending:
        """Start trials, wait and learn until no trial runs and none can be started."""
        knowledge = self._learn()
        while True:
            left_s = self._left_s
            if left_s <= 0.0:
                return "time-budget"
            with self._settings.steady():
                self._start_some(knowledge)
            if not self._running:
                return self._why(knowledge)
            finished = self._pool.wait(min(_WAIT_S, left_s))
            with self._settings.steady():
                for entry in finished:
                    self._end(entry)
            if self._fault is not None:
                raise self._fault
            if self._alike is not None:
                return "crashes"
            if finished:
                knowledge = self._learn()

    def _start_some(self, knowledge: Knowledge) -> None:
        """Fill the free groups: first with queued attempts, then with the tuner's proposals."""
        free = list(self._pool.free())
        for again in tuple(self._waiting):
            if free:
                group = next((group for group in free if group != again.group), free[0])
                self._waiting.remove(again)
                free.remove(group)
                self._start(again, group)
        if free:
            proposed = next_trials(self.state, len(free), self._predictor, knowledge)
            for trial, group in zip(proposed, free, strict=False):
                self._start(_Turn(trial=trial), group)

    def _why(self, knowledge: Knowledge) -> Ending:
        if not self._pool.free():
            return "hosts"
        certificate = certify(self.state, knowledge)
        follows_it = self.state.settings.policy == "best"
        if follows_it and certificate is not None and certificate.settled:
            return "certificate" if certificate.holds else "settled"
        return "exhausted" if self.state.budget_left else "budget"

    def _start(self, turn: _Turn, group: int) -> None:
        trial, attempt = turn.trial, turn.attempt
        while (self._settings.trials_folder / f"{trial.number:04d}-{attempt}").exists():
            attempt += 1  # folder of an attempt that a salvaged journal has lost
        name = f"{trial.number:04d}-{attempt}"
        task = Task(
            number=trial.number,
            attempt=attempt,
            trial_id=f"{self._settings.study_id}-{name}",
            strategy=trial.strategy,
            folder=self._settings.trials_folder / name,
        )
        cluster = self.state.experiment.cluster
        self._log.append(study_events.started(trial, task, group, cluster, self._seconds))
        if trial.number == len(self.state.trials):
            self.state = start(self.state, trial)
        self._running[trial.number] = replace(turn, group=group)
        self._view.started(trial, group)
        self._pool.start(task, group)

    def _end(self, finished: Finished) -> None:
        """Record the outcome of an attempt; queue a second one if a host failed once."""
        task, outcome = finished.task, finished.outcome
        running = self._running.pop(task.number)
        if outcome is None or isinstance(outcome, Fault):
            self._halt(running, task, outcome)
            return
        if blames_host(outcome):
            self._on_host_failure(finished.group, outcome, running)
            if not running.lost:
                self._try_again(running, task, outcome)
                return
        self._log.append(study_events.ended(task, outcome, self._seconds))
        self.state = record(self.state, task.number, outcome)
        trial_record = self.state.trials[task.number]
        self._view.ended(trial_record, surprise_of(self.state, trial_record))
        alike = common_failure(self.state, task.number)
        if alike is not None and alike.sign not in self._settings.known_failures:
            self._alike = alike

    def _halt(self, running: _Turn, task: Task, fault: Fault | None) -> None:
        """Record an attempt without an outcome; a fault of this machine ends the study."""
        text = None if fault is None else str(fault.error)
        self._log.append(study_events.interrupted(task, self._seconds, fault=text))
        self._view.halted(running.trial)
        if fault is not None and self._fault is None:
            message = (
                f"trial {task.number} could not be run from this machine: {text}. The strategy is "
                f"not to blame: its trial (in {task.folder}) is still open; mend that, and "
                "--resume runs it again"
            )
            kind = InputError if isinstance(fault.error, InputError) else AmpRayError
            self._fault = kind(message)

    def _on_host_failure(self, group: int, outcome: Unreachable | Crashed, running: _Turn) -> None:
        """Set a group aside if there is another one, or if the trial's host failed before.

        An outcome without a host means that only the process that ran the group's trials died. The
        pool starts a new process, and sets the group aside itself if that fails.
        """
        groups = {*self._pool.free(), *(entry.group for entry in self._running.values())}
        if running.lost or (outcome.host and groups - {group}):
            event = SetAside(group=group, reason=outcome.reason, seconds=self._seconds)
            self._log.append(event.record())
            self._pool.set_aside(group)
            self._view.note(f"group {group} is set aside: {outcome.reason}")

    def _try_again(self, running: _Turn, task: Task, outcome: Unreachable | Crashed) -> None:
        """Queue a second attempt for a trial whose host failed."""
        event = study_events.interrupted(task, self._seconds, unreachable=outcome.reason)
        self._log.append(event)
        trial = running.trial
        self._waiting.append(replace(running, attempt=task.attempt + 1, lost=True))
        self._view.halted(trial)
        self._view.note(f"trial {trial.number}: {outcome.reason}; it runs once more")

    # ------------------------------------------------------------------ beginning and end

    def _take_up(
        self, unfinished: Iterable[JournalTrial[Trial]], leftovers: tuple[str, ...]
    ) -> None:
        """Remove the leftovers of dead drivers from hosts, and queue unfinished trials."""
        self._waiting = [
            _Turn(trial=entry.trial, attempt=entry.attempt + 1, lost=entry.lost)
            for entry in unfinished
        ]
        if leftovers:
            for line in self._pool.sweep(leftovers):
                self._view.note(line)

    def _close(self, ending: Ending) -> None:
        """End the running trials and record their outcomes.

        After an interruption or a failure, a journal that cannot be written is ignored, so that it
        does not hide the first error.
        """
        self._pool.close()
        is_orderly = ending not in {"interrupted", "failed"}
        with contextlib.nullcontext() if is_orderly else contextlib.suppress(AmpRayError):
            with self._settings.steady():
                for finished in self._pool.wait(0.0):
                    self._end(finished)
            alike = None
            if ending == "crashes" and self._alike is not None:
                alike = Alike(numbers=self._alike.numbers, sign=self._alike.sign)
            event = Stopped(
                ending=ending,
                seconds=self._seconds,
                alike=alike,
                recommendation=self._recommendation(),
            )
            self._log.append(event.record())
        for number in self._running:
            self._view.note(f"trial {number} did not end in order; --resume cleans up after it")

    def _learn(self) -> Knowledge:
        knowledge = learn(self.state, self._predictor)
        self._view.learned(self.state, knowledge)
        return knowledge

    def _recommendation(self) -> dict[str, Any] | None:
        recommended = recommend(self.state, learn(self.state, self._predictor))
        if recommended is None:
            return None
        first = replace(recommended, ties=recommended.ties[:MOST_TIES])
        return recommendation_json(first, self.state.experiment.cluster)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def _left_s(self) -> float:
        limit_s = self._settings.time_left_s
        return math.inf if limit_s is None else limit_s - self._seconds
