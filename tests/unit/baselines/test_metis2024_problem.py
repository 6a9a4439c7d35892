import numpy as np
import pytest

from amp_ray.baselines.metis2024 import MetisCost, metis_cost
from amp_ray.baselines.metis2024_bounds import outside_s
from amp_ray.baselines.metis2024_groups import GroupSpace, MetisLimits
from amp_ray.baselines.metis2024_menu import Menu, stage_menu
from amp_ray.baselines.metis2024_plan import MetisSetting
from amp_ray.baselines.metis2024_problem import PosedPlans, pose_plans
from amp_ray.baselines.metis2024_works import Works
from amp_ray.partition.tails import TailedSolution, solve_tailed
from support.metis import metis_setting
from support.metis_oracle import cheapest_plan, random_setting


def menu_of(setting: MetisSetting, number: int) -> Menu:
    """Return the groups that can run a micro-batch."""
    space = GroupSpace(setting=setting, limits=MetisLimits())
    return stage_menu(space, Works(space=space), number)


def posed(menu: Menu, *, exact: bool = False) -> PosedPlans:
    """Pose the problem of all groups."""
    crews = frozenset(range(len(menu.crew[0]))) if exact else frozenset[int]()
    plans = pose_plans(menu, np.arange(len(menu.variant)), crews)
    assert plans is not None
    return plans


def solved(plans: PosedPlans) -> TailedSolution:
    """Solve a problem, short of what starts where it may not."""
    solution = solve_tailed(plans.problem, upper_bound_s=1e9)
    assert isinstance(solution, TailedSolution)
    return solution


def total_s(plans: PosedPlans, solution: TailedSolution) -> float:
    """Return what the problem says of its solution."""
    return solution.value_s + plans.shift_s + outside_s(plans.menu)


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_a_solution_costs_what_its_plan_does(number: int, *, exact: bool) -> None:
    setting = metis_setting()
    plans = posed(menu_of(setting, number), exact=exact)
    solution = solved(plans)
    cost = metis_cost(setting, plans.plan(solution))
    assert isinstance(cost, MetisCost)
    assert total_s(plans, solution) == pytest.approx(cost.total_s, rel=1e-12)


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_groups_told_apart_by_their_first_layer_are_exact(seed: int, number: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    plans = posed(menu_of(setting, number), exact=True)
    best = cheapest_plan(setting, MetisLimits(), number)
    assert best is not None
    assert total_s(plans, solved(plans)) == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_leading_works_bound(seed: int, number: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    plans = posed(menu_of(setting, number))
    best = cheapest_plan(setting, MetisLimits(), number)
    assert best is not None
    assert total_s(plans, solved(plans)) < best[0]


def test_groups_that_lead_to_no_end_are_no_problem() -> None:
    menu = menu_of(metis_setting(), 4)
    first = menu.space.graph.from_state[menu.space.variants.edge[menu.variant]] == 0
    size = menu.space.devices[menu.variant].sum(axis=1)
    assert pose_plans(menu, np.flatnonzero(first & (size < 4)), frozenset()) is None


def test_crews_are_those_of_the_stages() -> None:
    menu = menu_of(metis_setting(), 4)
    plans = posed(menu)
    solution = solved(plans)
    crews = plans.crews(solution)
    assert len(crews) == plans.plan(solution).pp
    assert all(menu.is_led[crew] for crew in crews)
