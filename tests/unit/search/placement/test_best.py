import pytest

from amp_ray.search.effort import EFFORT
from amp_ray.search.placement.best_placements import solve_placement
from amp_ray.search.placement.simple_placements import key_of, objective_s
from support.mixed_cluster import mixed_candidate, mixed_cost_model
from support.placement_oracle import best_placement


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3)])
def test_the_value_is_that_of_the_best_placement(tp: int, dp: int) -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(tp=tp, dp=dp)
    solution = solve_placement(cost_model, candidate)
    best_s, _ = best_placement(cost_model, candidate)
    assert solution.value_s == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-9)


def test_leaders_come_best_first_and_once() -> None:
    cost_model = mixed_cost_model()
    leaders = solve_placement(cost_model, mixed_candidate(dp=2)).leaders
    values_s = [objective_s(cost_model, leader) for leader in leaders]
    assert values_s == sorted(values_s)
    assert len({key_of(leader) for leader in leaders}) == len(leaders)


def test_simple_orders_are_among_the_leaders() -> None:
    leaders = solve_placement(mixed_cost_model(), mixed_candidate(dp=2)).leaders
    assert {(0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 0, 1)} <= {leader.placement for leader in leaders}
    assert len(leaders) <= EFFORT.max_leaders + 2


def test_where_nothing_fits_there_is_no_value_but_something_to_show() -> None:
    solution = solve_placement(mixed_cost_model(slow_gib=1), mixed_candidate(dp=2))
    assert solution.value_s is None
    assert solution.lower_bound_s is None
    assert solution.leaders


def test_groups_that_no_node_holds_are_not_bounded() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(tp=3)
    solution = solve_placement(cost_model, candidate)
    assert solution.lower_bound_s is None
    assert solution.value_s == objective_s(cost_model, solution.leaders[0])
