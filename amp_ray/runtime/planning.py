"""Search by a stopwatch and by Ray where it pays, and tell how far times may be off."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from amp_ray.calibration.intervals import log_shifts, tie_errors, with_intervals
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import AUTO, Workers, search_candidates
from amp_ray.search.planner import Planner
from amp_ray.search.ranking import Ranking, leader_order, with_more_ties
from amp_ray.search.rows import SCHEMA, ranking_rows
from amp_ray.search.run import NUM_INTERVALS, run_search
from amp_ray.search.space import searched_dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The result of a search."""

    experiment: Experiment
    cost_model: str
    planner: Planner
    ranking: Ranking
    search_s: float

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``; None lists every candidate."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment.name,
            "cost_model": self.cost_model,
            "objective": self.ranking.objective,
            "searched": list(searched_dimensions(self.experiment)),
            "num_candidates": len(self.ranking.results) + self.ranking.num_left_out,
            "num_feasible": self.ranking.num_feasible,
            "num_left_out": self.ranking.num_left_out,
            "search_s": self.search_s,
            "lower_bound_s": self.ranking.lower_bound_s,
            "ranking": ranking_rows(self.ranking, self.experiment, self.planner, num_rows=num_rows),
        }

    def why_none(self) -> str:
        """Say why no strategy is feasible, and what comes closest to it."""
        return self.planner.why_none(self.ranking.results)


def plan_experiment(
    experiment: Experiment,
    cost_model: str | None,
    *,
    num_rows: int | None = None,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None],
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Planned:
    """Search the candidates of an experiment.

    The cost model is the experiment's where none is named.

    Of a large uniform space those are left out that are proven not to be among so many first rows.
    By default none is.

    The ranking does not depend on ``workers``; ``progress`` gets (candidates done, all
    candidates), ``leading`` each strategy that is faster than all before it.
    """
    start_s = time.perf_counter()
    workers.check()
    cost_model = cost_model or experiment.planner
    search = partial(search_candidates, workers=workers, progress=progress, leading=leading)
    planner, ranking = run_search(
        experiment,
        cost_model,
        lambda planner, candidates: search(
            planner, candidates.required, optional=candidates.optional
        ),
        num_rows=num_rows,
    )
    if planner.traits.has_constants:
        ranking = _with_intervals(experiment, ranking)
    return Planned(
        experiment=experiment,
        cost_model=cost_model,
        planner=planner,
        ranking=ranking,
        search_s=time.perf_counter() - start_s,
    )


def _with_intervals(experiment: Experiment, ranking: Ranking) -> Ranking:
    """Let the first rows tell how far their time may be off, and count those as ties it may swap.

    Others would take longer than the search: each needs an estimate per uncertain constant.
    """
    feasible = [
        result for result in ranking.results[: ranking.num_feasible] if isinstance(result, Estimate)
    ]
    if not feasible:
        return ranking
    fastest = min(feasible, key=leader_order)
    rest = [estimate for estimate in feasible if estimate is not fastest]
    first = sorted([fastest, *rest[: NUM_INTERVALS - 1]], key=leader_order)
    shifts = log_shifts(experiment, first)
    bounded = with_intervals(experiment, first, shifts)
    ranking = replace(ranking, results=_exchanged(ranking.results, first, bounded))
    if experiment.objective != "time" or experiment.limits.batch_tolerance:
        return ranking
    errors = tie_errors(experiment, shifts).tolist()
    return with_more_ties(ranking, list(zip(bounded, errors, strict=True)))


def _exchanged(
    results: Sequence[Result], old: Sequence[Estimate], new: Sequence[Estimate]
) -> tuple[Result, ...]:
    """Return results with some of them exchanged, each in its place."""
    by_id = dict(zip(map(id, old), new, strict=True))
    return tuple(by_id.get(id(result), result) for result in results)


def score_intervals(
    experiment: Experiment, planner: Planner, results: Sequence[Result]
) -> tuple[Result, ...]:
    """Return scores of which the first that can run tell how far their time may be off."""
    if not planner.traits.has_constants:
        return tuple(results)
    feasible = [result for result in results if isinstance(result, Estimate) and result.feasible]
    first = feasible[:NUM_INTERVALS]
    return _exchanged(results, first, with_intervals(experiment, first))
