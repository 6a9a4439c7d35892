import math

from amp_ray.search.effort import EFFORT
from amp_ray.search.placement.best_placements import StepEndSearch, plan_placements, solve_placement
from amp_ray.search.placement.local_search import key_of, objective_s
from amp_ray.search.placement.placement_problem import PlacementProblem, build_problem
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def test_devices_of_a_node_stand_side_by_side_in_the_pipeline() -> None:
    placement = plan_placements(mixed_cost_model(), mixed_candidate())[0].strategy.placement
    assert [device // 2 for device in placement[::2]] == [device // 2 for device in placement[1::2]]


def test_equal_devices_stay_in_the_order_of_the_file() -> None:
    cost_model = mixed_cost_model(("SLOW", "QUICK"))
    placed = plan_placements(cost_model, mixed_candidate(tp=2))[0]
    assert placed.strategy.placement == tuple(range(6))


def test_what_fits_nowhere_is_estimated_all_the_same() -> None:
    cost_model = mixed_cost_model(("QUICK", "SLOW"), slow_gib=0.5)
    placed = plan_placements(cost_model, mixed_candidate())[0]
    assert not placed.feasible
    assert placed.iteration_time_s > 0
    assert max(placed.peak_memory_bytes) > placed.memory_limit_bytes[0]


def test_groups_that_no_node_holds_are_planned_in_simple_orders() -> None:
    cost_model = mixed_cost_model()
    placed = plan_placements(cost_model, mixed_candidate(tp=3, dp=1))[0]
    assert placed.strategy.placement in {tuple(range(6)), (2, 3, 4, 5, 0, 1)}


def test_cuts_that_a_runtime_fixes_stay() -> None:
    cost_model = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    placed = plan_placements(cost_model, mixed_candidate(tp=1, dp=3))[0]
    blocks = cost_model.experiment.model.indices("block")
    assert placed.strategy.bounds[1] == blocks[0] + len(blocks) // 2


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
