import numpy as np
import pytest

from amp_ray.partition.step_end import StepEndSolution, solve_with_step_end
from amp_ray.planners.metis2024.group_table import GroupTable, RankTimes, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.plan import MetisCost, MetisSetting, metis_cost
from amp_ray.planners.metis2024.search import PlansProblem, build_problem, outside_s
from support.metis_cases import metis_setting
from support.metis_oracle import cheapest_plan, random_setting


def table_of(setting: MetisSetting, number: int) -> GroupTable:
    """Return the groups that can run a micro-batch."""
    space = GroupSpace(setting=setting, limits=MetisLimits())
    return group_table(space, RankTimes(space=space), number)


def built(table: GroupTable, *, exact: bool = False) -> PlansProblem:
    """Build the problem of all groups."""
    rank_sets = frozenset(range(len(table.rank_set[0]))) if exact else frozenset[int]()
    plans = build_problem(table, np.arange(len(table.variant)), rank_sets)
    assert plans is not None
    return plans


def solved(plans: PlansProblem) -> StepEndSolution:
    """Solve a problem, short of what starts where it may not."""
    solution = solve_with_step_end(plans.problem, upper_bound_s=1e9)
    assert isinstance(solution, StepEndSolution)
    return solution


def total_s(plans: PlansProblem, solution: StepEndSolution) -> float:
    """Return what the problem says of its solution."""
    return solution.value_s + plans.shift_s + outside_s(plans.table)


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_a_solution_costs_what_its_plan_does(number: int, *, exact: bool) -> None:
    setting = metis_setting()
    plans = built(table_of(setting, number), exact=exact)
    solution = solved(plans)
    cost = metis_cost(setting, plans.plan(solution))
    assert isinstance(cost, MetisCost)
    assert total_s(plans, solution) == pytest.approx(cost.total_s, rel=1e-12)


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_groups_told_apart_by_their_first_layer_are_exact(seed: int, number: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    plans = built(table_of(setting, number), exact=True)
    best = cheapest_plan(setting, MetisLimits(), number)
    assert best is not None
    assert total_s(plans, solved(plans)) == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_leading_times_bound(seed: int, number: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    plans = built(table_of(setting, number))
    best = cheapest_plan(setting, MetisLimits(), number)
    assert best is not None
    assert total_s(plans, solved(plans)) < best[0]


def test_groups_that_lead_to_no_end_are_no_problem() -> None:
    table = table_of(metis_setting(), 4)
    first = table.space.graph.from_state[table.space.variants.edge[table.variant]] == 0
    size = table.space.graph.size[table.space.variants.edge[table.variant]]
    assert build_problem(table, np.flatnonzero(first & (size < 4)), frozenset()) is None


def test_rank_sets_are_those_of_the_stages() -> None:
    table = table_of(metis_setting(), 4)
    plans = built(table)
    solution = solved(plans)
    rank_sets = plans.rank_sets(solution)
    assert len(rank_sets) == plans.plan(solution).pp
    assert all(table.is_led[rank_set] for rank_set in rank_sets)
