"""How far a search is."""

from dataclasses import replace

from rich.progress import Progress

from amp_ray.cli.options import SearchProgress
from amp_ray.cost.estimate import Estimate
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from support.experiments import small_experiment


def test_while_a_search_goes_on_the_fastest_strategy_is_told() -> None:
    bar = Progress(disable=True)
    progress = SearchProgress(bar)
    planner = AmpRayPlanner(experiment=small_experiment())
    best = planner.plan(uniform_candidates(planner.experiment)[0])
    assert isinstance(best, Estimate)
    progress(3, 16)
    progress.leading(replace(best, iteration_time_s=0.25, lower_bound_s=0.125))
    assert (bar.tasks[0].completed, bar.tasks[0].total) == (3, 16)
    assert bar.tasks[0].description == "searching, best 0.25 s (at least 0.125 s)"
    progress.leading(replace(best, iteration_time_s=0.2, lower_bound_s=None))
    assert bar.tasks[0].description == "searching, best 0.2 s"
