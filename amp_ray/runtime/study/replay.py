"""Trials that were run before: a table of strategies answers instead of hosts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategy_file import Given
from amp_ray.runtime.calibrating import load_measured
from amp_ray.runtime.study.pool import Finished, Task
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, Outcome, OutOfMemory
from amp_ray.trials.steps import step_warnings

Key = Candidate | Strategy
"""A table's line names a strategy, or a candidate that ran with the planner's cuts."""


def load_replay(path: Path, experiment: Experiment) -> tuple[Given, ...]:
    """Read a table of measured strategies; of several runs the middle one, or the first failure."""
    runs: dict[Key, list[Given]] = {}
    for entry in load_measured(path, experiment):
        key = entry.strategy or entry.candidate
        assert key is not None
        runs.setdefault(key, []).append(entry)
    return tuple(_typical(entries) for entries in runs.values())


def _typical(runs: Sequence[Given]) -> Given:
    """Return the middle one of a strategy's runs, the faster one of two in the middle."""
    measured = [run for run in runs if run.measured_s is not None]
    measured.sort(key=lambda run: run.mean_s or 0.0)
    return measured[(len(measured) - 1) // 2] if measured else runs[0]


def recorded_outcome(line: Given) -> Outcome:
    """Return what a line of a table says as the outcome of a trial."""
    if line.measured_s is not None:
        mean_s, spread_s = line.mean_s or line.measured_s, line.spread_s or 0.0
        return Measured(
            measured_s=line.measured_s,
            mean_s=mean_s,
            spread_s=spread_s,
            warnings=step_warnings([mean_s], spread_s, has_trend=False),
            step_time_s=(line.measured_s,),
            num_warmup_steps=0,
            peak_memory_bytes=tuple(round(peak) for peak in line.peak_memory_bytes),
            wall_s=0.0,
        )
    if line.failure == "oom":
        reason = f"recorded as out of memory ({line.where})"
        return OutOfMemory(reason=reason, rank=None, host="", lines=(), wall_s=0.0)
    reason = f"recorded as failed, the cause is not known ({line.where})"
    return Crashed(reason=reason, kind="no-result", rank=None, host="", lines=(), wall_s=0.0)


class ReplayPool:
    """A `Pool` that answers at once from recorded outcomes and starts nothing."""

    def __init__(self, answers: Mapping[Strategy, Outcome], num_groups: int = 1) -> None:
        self._answers, self._num_groups = answers, num_groups
        self._asked: dict[int, Task] = {}
        self._aside: set[int] = set()

    def free(self) -> tuple[int, ...]:
        """Return the groups that are idle."""
        busy = self._aside | self._asked.keys()
        return tuple(group for group in range(self._num_groups) if group not in busy)

    def start(self, task: Task, group: int) -> None:
        """Ask for a strategy."""
        assert group in self.free()
        self._asked[group] = task

    def wait(self, timeout_s: float) -> list[Finished]:  # noqa: ARG002 - answers are there at once
        """Return all answers."""
        finished = [
            Finished(task=task, outcome=self._answers[task.strategy], group=group)
            for group, task in self._asked.items()
        ]
        self._asked.clear()
        return finished

    def set_aside(self, group: int) -> None:
        """Use a group no more."""
        self._aside.add(group)

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:  # noqa: ARG002 - nothing was started
        """Nothing was started, so nothing is left."""
        return []

    def close(self) -> None:
        """Nothing runs."""
