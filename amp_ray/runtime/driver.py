"""The loop of a study: ask the tuner, start trials, write down what comes of them, learn."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from amp_ray.runtime import study_events
from amp_ray.runtime.pool import Finished, Pool, Task
from amp_ray.runtime.study_events import Open
from amp_ray.trials.outcome import Unreachable
from amp_ray.tuner.certificate import Certificate, certify
from amp_ray.tuner.kept_predictor import KeptPredictor
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.state import Told, Trial, TunerState, record, start
from amp_ray.tuner.surprise import Surprise, surprises

_WAIT_S: Final = 0.5
"""Between looks at the clock while trials run."""

Ending = Literal["budget", "time-budget", "certificate", "exhausted", "hosts"]

ENDINGS: Final[dict[Ending, str]] = {
    "budget": "the budget of trials is spent",
    "time-budget": "the time budget is spent",
    "certificate": "no untested strategy is likely to be better",
    "exhausted": "every strategy that can run has run",
    "hosts": "no group of hosts is left that can be reached",
}


class EventLog(Protocol):
    """Where events are written down for good."""

    def append(self, record: dict[str, Any], /) -> None:
        """Write an event; when this returns, it survives a crash."""
        ...


class View(Protocol):
    """Who watches a study."""

    def started(self, trial: Trial, group: int) -> None:
        """See that an attempt begins."""
        ...

    def ended(self, told: Told, surprise: Surprise | None) -> None:
        """See what came of a trial."""
        ...

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """See what is known now."""
        ...

    def note(self, text: str) -> None:
        """See anything else that matters."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """How a study is driven.

    Args:
        trials_folder: Where the folders of attempts are made.
        study_id: Short and different for every study: part of the names of trials.
        deadline_s: On the monotonic clock; nothing runs beyond it. None for no limit.
        seconds_before: Wall time that earlier drivers of the study have spent.
    """

    trials_folder: Path
    study_id: str
    deadline_s: float | None = None
    seconds_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a study, or of one run of its driver.

    Args:
        state: All trials.
        knowledge: What they taught.
        certificate: What is known of the strategies that have not run; None without any trial.
        ending: Why it stopped.
    """

    state: TunerState
    knowledge: Knowledge
    certificate: Certificate | None
    ending: Ending

    @property
    def best_number(self) -> int | None:
        """Number of the best trial; see `best_trial`."""
        return best_trial(self.knowledge)


class Driver:
    """Runs one study to its end; every change of state goes to the journal first."""

    def __init__(
        self,
        state: TunerState,
        pool: Pool,
        log: EventLog,
        view: View,
        settings: DriverSettings,
    ) -> None:
        """Take the parts.

        Args:
            state: Of a new study, or as `study_events.rebuild` returns it.
            pool: Groups of hosts.
            log: The journal.
            view: Who watches.
            settings: How.
        """
        self.state = state
        self._pool, self._log, self._view, self._settings = pool, log, view, settings
        self._predictor = KeptPredictor()
        self._begun_s = time.monotonic()
        self._waiting: list[tuple[Trial, int, int | None]] = []
        self._running: dict[int, Trial] = {}
        self._aside: set[int] = set()

    def run(self, unfinished: Iterable[Open] = ()) -> Result:
        """Drive until the budget is spent, nothing is worth a trial, or no host is left.

        Args:
            unfinished: Attempts of a driver that died; hosts are swept, then they run again.

        Raises:
            AmpRayError: If the journal cannot be written.
            KeyboardInterrupt: After everything that ran has been ended in order.
        """
        try:
            self._take_up(tuple(unfinished))
            return self._drive()
        finally:
            self._pool.close()
            for finished in self._pool.wait(0.0):
                self._end(finished)
            for trial in tuple(self._running.values()):
                self._view.note(f"trial {trial.number} did not end in order")

    # ------------------------------------------------------------------ the loop

    def _drive(self) -> Result:
        """Start what is worth it, wait, learn; until there is no more to start or wait for."""
        knowledge = self._learn()
        while True:
            ending = self._ending()
            if ending is None:
                self._start_some(knowledge)
            may_go_on = ending is None and self._waiting
            if ending == "time-budget" or not (self._running or may_go_on):
                return self._result(knowledge, ending)
            finished = self._pool.wait(_WAIT_S)
            for entry in finished:
                self._end(entry)
            if finished:
                knowledge = self._learn()

    def _ending(self) -> Ending | None:
        """Tell why nothing may be started, whatever the tuner would like."""
        deadline_s = self._settings.deadline_s
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return "time-budget"
        return "hosts" if len(self._aside) == self._pool.num_groups else None

    def _start_some(self, knowledge: Knowledge) -> None:
        """Fill the free groups: first what has to run again, then what the tuner proposes."""
        free = list(self._pool.free())
        for entry in tuple(self._waiting):
            trial, attempt, avoided = entry
            others = [group for group in free if group != avoided] or free
            if others:
                self._waiting.remove(entry)
                free.remove(others[0])
                self._start(trial, attempt, others[0])
        if not free:
            return
        proposed = next_trials(self.state, len(free), self._predictor, knowledge)
        for trial, group in zip(proposed, free, strict=False):
            self.state = start(self.state, trial)
            self._start(trial, 0, group)

    def _result(self, knowledge: Knowledge, ending: Ending | None) -> Result:
        """Say why it ends, also in the journal."""
        certificate = certify(self.state, knowledge)
        if ending is None:
            if certificate is not None and certificate.holds:
                ending = "certificate"
            else:
                ending = "exhausted" if self.state.budget_left else "budget"
        self._write({"event": "stopped", "ending": ending, "seconds": self._seconds})
        return Result(state=self.state, knowledge=knowledge, certificate=certificate, ending=ending)

    def _start(self, trial: Trial, attempt: int, group: int) -> None:
        """Write down and start one attempt."""
        name = f"{trial.number:04d}-{attempt}"
        task = Task(
            number=trial.number,
            attempt=attempt,
            trial_id=f"{self._settings.study_id}-{name}",
            strategy=trial.strategy,
            folder=self._settings.trials_folder / name,
        )
        cluster = self.state.experiment.cluster
        self._write(study_events.started(trial, task, group, cluster))
        self._running[trial.number] = trial
        self._view.started(trial, group)
        self._pool.start(task, group)

    def _end(self, finished: Finished) -> None:
        """Write down what came of an attempt; after an unreachable host there is a second one."""
        task, outcome = finished.task, finished.outcome
        trial = self._running.pop(task.number)
        if outcome is None:
            self._write(study_events.interrupted(task, self._seconds))
            return
        if isinstance(outcome, Unreachable) and self._try_again(trial, task, outcome, finished):
            return
        self._write(study_events.ended(task, outcome, self._seconds))
        self.state = record(self.state, task.number, outcome)
        told = self.state.trials[task.number]
        found = {entry.trial.number: entry for entry in surprises(self.state)}
        self._view.ended(told, found.get(task.number))

    def _try_again(
        self, trial: Trial, task: Task, outcome: Unreachable, finished: Finished
    ) -> bool:
        """Set the group of a lost host aside where there is another; tell whether to retry."""
        others = self._pool.num_groups - len(self._aside | {finished.group})
        if others or task.attempt:
            self._set_aside(finished.group, outcome)
        if task.attempt:
            return False
        self._write(study_events.interrupted(task, self._seconds))
        self._view.note(f"trial {task.number}: {outcome.reason}; it runs once more")
        self._waiting.append((trial, task.attempt + 1, finished.group))
        return True

    def _set_aside(self, group: int, outcome: Unreachable) -> None:
        """Use a group no more."""
        self._aside.add(group)
        self._pool.set_aside(group)
        self._write({"event": "set-aside", "group": group, "reason": outcome.reason})
        self._view.note(f"group {group} is set aside: {outcome.reason}")

    # ------------------------------------------------------------------ the rest

    def _take_up(self, unfinished: tuple[Open, ...]) -> None:
        """Sweep hosts after a driver that died, and queue what it had begun."""
        lost = [entry.trial_id for entry in unfinished if not entry.interrupted]
        if lost:
            for line in self._pool.sweep(lost):
                self._view.note(line)
        self._waiting = [(entry.trial, entry.attempt + 1, None) for entry in unfinished]

    def _learn(self) -> Knowledge:
        """Calibrate with all outcomes and show what is known."""
        knowledge = learn(self.state, self._predictor)
        self._view.learned(self.state, knowledge)
        return knowledge

    def _write(self, event: dict[str, Any]) -> None:
        """Write an event down."""
        self._log.append(event)

    @property
    def _seconds(self) -> float:
        """Wall time of this driver so far."""
        return time.monotonic() - self._begun_s


def best_trial(knowledge: Knowledge) -> int | None:
    """Return the number of the trial that stands for the best measured strategy; None without any.

    Of several runs of it, that is the one in the middle, whose time counts.
    """
    best = knowledge.standing.best
    if best is None:
        return None
    figure = knowledge.standing.figures[best]
    return figure.numbers[figure.runs.index(figure.typical)]
