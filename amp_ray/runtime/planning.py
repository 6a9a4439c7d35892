"""Search an experiment's strategies, with Ray if it pays, and add intervals to times."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amp_ray.calibration.intervals import rank_with_intervals
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import AUTO, Workers, search_candidates
from amp_ray.search.planner import Candidates, Planner, PlannerChoice, choose_planner
from amp_ray.search.ranking import Ranking
from amp_ray.search.rows import SCHEMA, ranking_rows
from amp_ray.search.run import NUM_INTERVALS, run_search
from amp_ray.search.space import searched_dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The ranking of a search, with its experiment, planner and duration."""

    experiment: Experiment
    cost_model: str
    planner: Planner
    ranking: Ranking
    search_s: float

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``; ``num_rows`` None lists every candidate."""
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
        """Explain why no strategy is feasible, and which one is closest."""
        return self.planner.why_none(self.ranking.results)


def plan_experiment(
    experiment: Experiment,
    choice: PlannerChoice | None = None,
    *,
    num_rows: int | None = None,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None],
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Planned:
    """Search the candidates of an experiment, by default with the planner that it names.

    In a large uniform space, candidates are skipped if they are proven not to be among the first
    ``num_rows`` rows; None skips none.

    The ranking does not depend on ``workers``. ``progress`` gets (candidates done, total);
    ``leading`` gets each strategy that is faster than all before it.
    """
    start_s = time.perf_counter()
    workers.check()
    choice = choice or choose_planner(experiment)

    def search(planner: Planner, candidates: Candidates) -> Ranking:
        return search_candidates(
            planner,
            candidates.required,
            optional=candidates.optional,
            workers=workers,
            progress=progress,
            leading=leading,
        )

    planner, ranking = run_search(experiment, choice, search, num_rows=num_rows)
    if planner.traits.has_constants:
        ranking = rank_with_intervals(experiment, ranking, NUM_INTERVALS)
    return Planned(
        experiment=experiment,
        cost_model=choice.name,
        planner=planner,
        ranking=ranking,
        search_s=time.perf_counter() - start_s,
    )
