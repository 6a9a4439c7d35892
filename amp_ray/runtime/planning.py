"""Run a search in this process and time it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amp_ray.baselines.amp2022 import Amp2022Planner
from amp_ray.search.planner import AmpRayPlanner, Planner, search
from amp_ray.search.ranking import Ranking
from amp_ray.search.rows import SCHEMA, ranking_rows
from amp_ray.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The result of a search."""

    experiment: Experiment
    cost_model: str
    ranking: Ranking
    search_s: float

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``; None lists every candidate."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment.name,
            "cost_model": self.cost_model,
            "num_candidates": len(self.ranking.results),
            "num_feasible": self.ranking.num_feasible,
            "search_s": self.search_s,
            "lower_bound_s": self.ranking.lower_bound_s,
            "ranking": ranking_rows(self.ranking, self.experiment.cluster, num_rows=num_rows),
        }


def make_planner(experiment: Experiment, cost_model: str) -> Planner:
    """Return the planner behind a ``--cost-model`` name."""
    if cost_model == "amp-2022":
        return Amp2022Planner(experiment=experiment)
    return AmpRayPlanner(experiment=experiment)


def plan_experiment(
    experiment: Experiment, cost_model: str, *, progress: Callable[[int, int], None]
) -> Planned:
    """Search all candidates of an experiment.

    Args:
        experiment: What to plan.
        cost_model: Whose predictions.
        progress: Called with (candidates done, candidates in all).
    """
    start_s = time.perf_counter()
    ranking = search(experiment, make_planner(experiment, cost_model), progress=progress)
    return Planned(
        experiment=experiment,
        cost_model=cost_model,
        ranking=ranking,
        search_s=time.perf_counter() - start_s,
    )
