import math

import pytest

from amp_ray.partition import PartitionSolution, solve
from amp_ray.search.cuts import without_limits
from amp_ray.search.placement.build_problem import build_problem
from amp_ray.search.placement.problem import PlacementProblem
from amp_ray.search.placement.step_end import FEWEST_EVALUATIONS, MOST_WORK, StepEndSearch
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def placement_problem(*, dp: int = 2, tied: bool = False, gib: float = 16) -> PlacementProblem:
    cost_model = mixed_cost_model(("QUICK", "SLOW"), slow_gib=gib) if gib < 16 else None
    found = build_problem(cost_model or mixed_cost_model(tied=tied), mixed_candidate(dp=dp))
    assert found is not None
    return found.problem


def searched(
    problem: PlacementProblem, *, upper_bound_s: float = math.inf, most_work: float = MOST_WORK
) -> StepEndSearch:
    search = StepEndSearch(problem=problem, upper_bound_s=upper_bound_s, most_work=most_work)
    search.run()
    return search


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_no_cap_on_the_step_end_gives_a_better_sum(dp: int, *, tied: bool) -> None:
    problem = placement_problem(dp=dp, tied=tied)
    search = searched(problem)
    assert search.lower_bound_s == pytest.approx(search.value_s, rel=1e-12)
    for tied_s in problem.tied_times_s.tolist():
        cap_s = math.inf
        while isinstance(solution := solve(problem.capped(cap_s, tied_s)), PartitionSolution):
            cap_s = problem.step_end_s(solution.bounds, solution.options, tied_s)
            assert search.value_s <= solution.value_s + cap_s
            cap_s = math.nextafter(cap_s, 0.0)


def test_what_was_found_costs_what_it_says() -> None:
    problem = placement_problem()
    for placed in searched(problem).found:
        assert placed.step_end_s == problem.step_end_s(placed.bounds, placed.options, 0.0)
        assert placed.value_s > placed.step_end_s > 0


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
    early = searched(problem, most_work=problem.work * FEWEST_EVALUATIONS)
    assert early.lower_bound_s <= whole.value_s <= early.value_s
    assert early.lower_bound_s > 0


def test_nothing_is_found_where_nothing_fits() -> None:
    search = searched(placement_problem(gib=1))
    assert not search.found
    assert search.lower_bound_s == math.inf


def test_without_limits_something_is_placed_all_the_same() -> None:
    problem = placement_problem(gib=1)
    placed = without_limits(problem.problem)
    assert placed is not None
    assert len(placed.bounds) == 4
    assert placed.value_s > 0
