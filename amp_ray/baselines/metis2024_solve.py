"""The best plan by the formulas of Metis (2024) with one number of micro-batches, proven."""

from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from amp_ray.baselines.metis2024 import MetisCost, metis_cost
from amp_ray.baselines.metis2024_bounds import outside_s
from amp_ray.baselines.metis2024_menu import Menu
from amp_ray.baselines.metis2024_plan import MetisPlan
from amp_ray.baselines.metis2024_problem import PosedPlans, pose_plans
from amp_ray.baselines.metis2024_validity import OUT_OF_MEMORY, metis_defects
from amp_ray.cost.estimate import Reason
from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason, PrunedPartition
from amp_ray.partition.tails import solve_tailed

SAME: Final = 1e-9
"""Relative; times that differ by less were added up in another order."""

NO_PLAN: Final = "no plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisSolution:
    """The best plan of a search.

    Attributes:
        plan: In the published planner's own terms.
        cost: By its formulas.
        lower_bound_s: No plan takes less; the cost itself, but for the order of additions.
        num_rounds: Problems that were solved.
    """

    plan: MetisPlan
    cost: MetisCost
    lower_bound_s: float
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisPruned:
    """Every plan takes longer than what is of interest.

    Attributes:
        lower_bound_s: No plan takes less.
    """

    lower_bound_s: float


MetisResult = MetisSolution | MetisPruned | Reason


def solve_menu(menu: Menu, upper_bound_s: float) -> MetisResult:
    """Find the best plan of a menu.

    A problem charges the leading work of each group, so it bounds. Where that hides something in
    its best plan, the groups concerned are told apart by their first layer, and it is solved again.

    Args:
        menu: The groups that can run a micro-batch.
        upper_bound_s: Only plans that take no longer are of interest.

    Returns:
        The plan; that all take longer; or why there is none.
    """
    best: _Found | None = None
    exact: frozenset[int] = frozenset()
    for num_rounds in count(1):
        posed = pose_plans(menu, np.arange(len(menu.variant)), exact)
        if posed is None:
            detail = f"{menu.num_micro_batches} micro-batches: no groups of devices share them"
            return Reason(kind=NO_PLAN, detail=detail)
        found = _round(posed, upper_bound_s if best is None else best.cost.total_s)
        if best is not None and isinstance(found, Reason):
            message = f"telling groups apart takes no plan away: {found}"
            raise AssertionError(message)
        if isinstance(found, Reason) or (best is None and isinstance(found, MetisPruned)):
            return found
        if isinstance(found, _Found) and (best is None or found.cost.total_s < best.cost.total_s):
            best = found
        assert best is not None
        hidden = frozenset[int]() if isinstance(found, MetisPruned) else found.hidden
        if hidden <= exact:
            return MetisSolution(
                plan=best.plan,
                cost=best.cost,
                lower_bound_s=min(found.lower_bound_s, best.cost.total_s),
                num_rounds=num_rounds,
            )
        exact |= hidden
    raise AssertionError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one problem says.

    Attributes:
        plan: Its best plan.
        cost: Of the plan, by the published formulas.
        lower_bound_s: No plan takes less.
        hidden: Sets of works of its stages, where they take longer than the problem knows.
    """

    plan: MetisPlan
    cost: MetisCost
    lower_bound_s: float
    hidden: frozenset[int]


def _round(posed: PosedPlans, upper_bound_s: float) -> _Found | MetisPruned | Reason:
    """Solve one problem, and check its plan by the published formulas."""
    beside_s = posed.shift_s + outside_s(posed.menu)
    solution = solve_tailed(posed.problem, upper_bound_s=upper_bound_s - beside_s)
    if isinstance(solution, InfeasiblePartition):
        memory = solution.reason == InfeasibleReason.MEMORY
        return Reason(kind=OUT_OF_MEMORY if memory else NO_PLAN, detail=solution.detail)
    if isinstance(solution, PrunedPartition):
        return MetisPruned(lower_bound_s=solution.lower_bound_s + beside_s)
    plan, setting = posed.plan(solution), posed.menu.space.setting
    cost, defects = metis_cost(setting, plan), metis_defects(setting, plan)
    if not isinstance(cost, MetisCost) or defects:
        message = f"{plan} was found, which cannot run: {cost}, {defects}"
        raise AssertionError(message)
    known = cost.total_s <= (solution.value_s + beside_s) * (1 + SAME)
    crews = () if known else posed.crews(solution)
    return _Found(
        plan=plan,
        cost=cost,
        lower_bound_s=solution.lower_bound_s + beside_s,
        hidden=frozenset(crew for crew in crews if not posed.menu.is_led[crew]),
    )
