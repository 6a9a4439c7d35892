import math

from amp_ray.search.effort import EFFORT
from amp_ray.search.placement.best_placements import StepEndSearch
from amp_ray.search.placement.placement_problem import PlacementProblem, build_problem
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def placement_problem(*, dp: int = 2, tied: bool = False) -> PlacementProblem:
    found = build_problem(mixed_cost_model(tied=tied), mixed_candidate(dp=dp))
    assert found is not None
    return found.problem


def searched(
    problem: PlacementProblem,
    *,
    upper_bound_s: float = math.inf,
    most_work: float = EFFORT.max_placement_work,
) -> StepEndSearch:
    search = StepEndSearch(problem=problem, upper_bound_s=upper_bound_s, most_work=most_work)
    search.run()
    return search


def test_an_upper_bound_below_the_best_is_told() -> None:
    problem = placement_problem()
    best_s = searched(problem).value_s
    search = searched(problem, upper_bound_s=best_s * 0.9)
    assert search.lower_bound_s >= best_s * 0.9
    assert search.value_s >= best_s


def test_the_upper_bound_itself_may_be_reached() -> None:
    problem = placement_problem()
    best_s = searched(problem).value_s
    assert searched(problem, upper_bound_s=best_s * (1 + 1e-9)).value_s == best_s


def test_an_early_stop_is_honest() -> None:
    problem = placement_problem(dp=1, tied=True)
    whole = searched(problem)
    early = searched(problem, most_work=problem.work * EFFORT.min_placement_caps)
    assert early.lower_bound_s <= whole.value_s <= early.value_s
    assert early.lower_bound_s > 0
