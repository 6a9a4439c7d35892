"""The search space of a study: all candidates of an experiment, or the strategies of a table."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment, launchable_only
from amp_ray.inputs.strategies import Entry
from amp_ray.runtime.files import load_measured
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import AUTO, Workers
from amp_ray.search.planner import AMP_RAY, choose_planner, make_planner
from amp_ray.search.ranking import rank, why_none
from amp_ray.search.run import score_given
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, candidate_of
from amp_ray.trials.command import trial_problem
from amp_ray.trials.outcome import Crashed, Measured, Outcome, OutOfMemory
from amp_ray.trials.steps import step_warnings
from amp_ray.tuner.state import Policy

PUBLISHED: Final = "amp-2022"  # name of the cost model, and of the policy that uses it
PoolKind = Literal["auto", "threads", "ray"]

Key = Candidate | Strategy
"""A table's line names a strategy or a candidate; for a candidate, the planner chooses the cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of ``amp-ray tune``."""

    backend: Literal["ssh", "local", "replay"]  # where trials run; ``replay`` answers from a table
    table: Path | None = None  # table of measurements for ``replay``
    budget: int  # number of trials, including those of earlier runs of the study
    time_budget_s: float | None = None  # wall time, including earlier runs; None for no limit
    policy: Policy = "best"
    seed: int = 0
    workers: Workers = AUTO
    pool: PoolKind = "auto"  # run trials in threads of this process, or in Ray actors
    concurrency: int | None = None  # number of host groups to use; None for all
    salvage: bool = False  # whether to keep the records before the damage of a journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The candidates of a study."""

    results: tuple[Result, ...]  # all candidates, planned or scored, in ranking order
    order: tuple[Strategy, ...] | None = None  # the published planner's order, for its policy
    replayed: tuple[tuple[Strategy, Entry], ...] = ()  # strategies and lines of a replayed table

    @property
    def num_feasible(self) -> int:
        """Number of strategies that fit in memory and can be launched."""
        return sum(
            isinstance(result, Estimate) and result.feasible and result.launchable
            for result in self.results
        )

    def why_none(self, experiment: Experiment) -> str:
        """Explain why the space has no strategy that is expected to run."""
        estimates = [result for result in self.results if isinstance(result, Estimate)]
        fitting = [estimate for estimate in estimates if estimate.feasible]
        if not fitting:
            why = (
                why_none(self.results)
                if self.replayed
                else make_planner(experiment, AMP_RAY).why_none(self.results)
            )
            return f"no strategy is expected to run: {why}"
        reasons = Counter(estimate.warnings[-1] for estimate in fitting if estimate.warnings)
        [(reason, number)] = reasons.most_common(1) or [("the runtime has no way to", len(fitting))]
        return (
            f"none of the strategies that fit ({len(fitting)}) can be launched; {number} of them: "
            f"{reason}"
        )


def study_space(
    experiment: Experiment, options: TuneOptions, progress: Callable[[int, int], None]
) -> Space:
    """Plan all candidates, or score the strategies of a table; ``progress`` gets (done, total)."""
    if options.backend != "replay":
        planned = plan_experiment(
            launchable_only(experiment),
            choose_planner(experiment, AMP_RAY),
            workers=options.workers,
            progress=progress,
        )
        results = tuple(_launched(experiment, result) for result in planned.ranking.results)
        return Space(results=results, order=_published_order(experiment, results, options.policy))
    assert options.table is not None
    lines = load_replay(options.table, experiment)
    scored = score_given(make_planner(experiment, AMP_RAY), lines)
    pairs = tuple(
        (result.strategy, entry)
        for result, entry in zip(scored, lines, strict=True)
        if isinstance(result, Estimate)
    )
    results = rank(scored, relative_error=experiment.constants.time_error).results
    order = _published_order(experiment, results, options.policy)
    return Space(results=results, order=order, replayed=pairs)


def _launched(experiment: Experiment, result: Result) -> Result:
    """Return a result with a warning if its strategy cannot be launched."""
    if not isinstance(result, Estimate) or not result.launchable:
        return result
    problem = trial_problem(experiment, result.strategy)
    if problem is None:
        return result
    return replace(result, launchable=False, warnings=(*result.warnings, problem))


def _published_order(
    experiment: Experiment, results: Sequence[Result], policy: Policy
) -> tuple[Strategy, ...] | None:
    """Return the strategies in the published planner's order; None for other policies."""
    if policy != PUBLISHED:
        return None
    planner = make_planner(experiment, PUBLISHED)
    ours: dict[Candidate, Strategy] = {}
    for result in results:
        if isinstance(result, Estimate):
            ours.setdefault(candidate_of(result.strategy), result.strategy)
    ordered = rank([planner.plan(candidate) for candidate in ours]).results
    theirs = (
        candidate_of(result.strategy) if isinstance(result, Estimate) else result.candidate
        for result in ordered
    )
    return tuple(ours[candidate] for candidate in theirs if isinstance(candidate, Candidate))


def load_replay(path: Path, experiment: Experiment) -> tuple[Entry, ...]:
    """Read a table of measurements; keep the median run per strategy, or its first failure."""
    runs: dict[Key, list[Entry]] = {}
    for entry in load_measured(path, experiment):
        key = entry.strategy or entry.candidate
        assert key is not None
        runs.setdefault(key, []).append(entry)
    return tuple(_typical(entries) for entries in runs.values())


def _typical(runs: Sequence[Entry]) -> Entry:
    """Return the run with the (lower) median time; the first failure if none was measured."""
    measured = [run for run in runs if run.measured_s is not None]
    measured.sort(key=lambda run: run.mean_s or 0.0)
    return measured[(len(measured) - 1) // 2] if measured else runs[0]


def recorded_outcome(line: Entry) -> Outcome:
    """Convert a line of a replayed table to the outcome of a trial."""
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
