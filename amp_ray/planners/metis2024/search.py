"""The best plan by the formulas of Metis (2024), with a proof.

Its own search looks at a part of the plans, and lists some that cannot run. Here stages have any
number of devices, any order of the device types and any layers; every layer is placed, every
device takes samples, and none holds more than its own memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, permutations
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Reason
from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason, PrunedPartition
from amp_ray.partition.step_end import solve_with_step_end
from amp_ray.planners.metis2024.cost import MetisCost, metis_cost
from amp_ray.planners.metis2024.group_table import GroupTable, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.plan import MetisPlan, MetisSetting
from amp_ray.planners.metis2024.problem import PlansProblem, build_problem
from amp_ray.planners.metis2024.rank_times import RankTimes
from amp_ray.planners.metis2024.validity import OUT_OF_MEMORY, metis_defects


def work_bound_s(table: GroupTable) -> float:
    """Return a lower bound of the time of every plan of a table.

    Devices have weights that add up to one. A stage of weight ``U`` that takes ``t`` brings
    ``sum(t) + (B - 1) max(t)`` at least ``t + (B - 1) U t``, because the weights of all stages add
    up to one, too. So a layer costs at least what it does in the group where that is least.

    Args:
        table: The groups that can run a micro-batch.

    Returns:
        Seconds; infinite where no group can be the last.
    """
    is_last = table.is_last
    if not is_last.any():
        return math.inf
    least = np.full(len(table.layer_s), np.inf)
    np.minimum.at(least, table.rank_set[1], table.space.weight(table.variant, _weights(table)))
    charged_s = (1 + (table.num_micro_batches - 1) * least)[:, None] * table.layer_s
    return float(charged_s.min(axis=0).sum() + table.rest_s[is_last].min()) + outside_s(table)


def outside_s(table: GroupTable) -> float:
    """Return what every plan takes outside of stages: making micro-batches."""
    return table.space.setting.whole.batch_generator_s * table.num_micro_batches


def _weights(table: GroupTable) -> FloatArray:
    """Return the share of one device of each type in the speed of all, at its best.

    Any weights bound; these are good ones.
    """
    variants, alone = table.space.variants, ~table.space.variants.mixed[table.variant]
    of = table.variant[alone]
    total_s = table.layer_s.sum(axis=1)[table.rank_set[1][alone]]
    device_s = variants.dp[of] * variants.tp[of] * total_s
    speed = np.zeros(len(table.space.kinds))
    rate = 1 / np.maximum(device_s, np.finfo(np.float64).tiny)
    np.maximum.at(speed, variants.kinds[of, 0], rate)
    speed = np.where(speed > 0, speed, max(speed.max(), 1.0))
    weights: FloatArray = speed / (speed @ table.space.counts)
    return weights


SAME: Final = 1e-9
"""Relative; times that differ by less were added up in another order."""

NO_PLAN: Final = "no plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisSolution:
    """The best plan of a search."""

    plan: MetisPlan  # in the published planner's own terms
    cost: MetisCost
    lower_bound_s: float  # no plan takes less; the cost itself, but for the order of additions
    num_rounds: int  # problems that were solved


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisPruned:
    """Every plan takes longer than what is of interest."""

    lower_bound_s: float  # no plan takes less


MetisResult = MetisSolution | MetisPruned | Reason


def solve_table(table: GroupTable, upper_bound_s: float) -> MetisResult:
    """Find the best plan of a table.

    The problem charges each group the rank that is slowest over all layers, which is a lower bound.
    Where another rank is slower on the layers of the best plan, the groups with such ranks become
    one option per first layer, with exact times, and the problem is solved again.

    Args:
        table: The groups that can run a micro-batch.
        upper_bound_s: Only plans that take no longer are of interest.

    Returns:
        The plan; that all take longer; or why there is none.
    """
    best: _Found | None = None
    exact: frozenset[int] = frozenset()
    for num_rounds in count(1):
        plans = build_problem(table, np.arange(len(table.variant)), exact)
        if plans is None:
            detail = f"{table.num_micro_batches} micro-batches: no groups of devices share them"
            return Reason(kind=NO_PLAN, detail=detail)
        found = _round(plans, upper_bound_s if best is None else best.cost.total_s)
        if best is not None and isinstance(found, Reason):
            raise AssertionError(f"a problem with more options lost a plan: {found}")
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
    """The best plan of one problem."""

    plan: MetisPlan
    cost: MetisCost  # of the plan, by the published formulas
    lower_bound_s: float  # no plan takes less
    # Sets of ranks of its stages that take longer than the problem charges them
    hidden: frozenset[int]


def _round(plans: PlansProblem, upper_bound_s: float) -> _Found | MetisPruned | Reason:
    """Solve one problem, and check its plan by the published formulas."""
    beside_s = plans.shift_s + outside_s(plans.table)
    solution = solve_with_step_end(plans.problem, upper_bound_s=upper_bound_s - beside_s)
    if isinstance(solution, InfeasiblePartition):
        memory = solution.reason == InfeasibleReason.MEMORY
        return Reason(kind=OUT_OF_MEMORY if memory else NO_PLAN, detail=solution.detail)
    if isinstance(solution, PrunedPartition):
        return MetisPruned(lower_bound_s=solution.lower_bound_s + beside_s)
    plan, setting = plans.plan(solution), plans.table.space.setting
    cost, defects = metis_cost(setting, plan), metis_defects(setting, plan)
    if not isinstance(cost, MetisCost) or defects:
        raise AssertionError(f"{plan} was found, which cannot run: {cost}, {defects}")
    known = cost.total_s <= (solution.value_s + beside_s) * (1 + SAME)
    rank_sets = () if known else plans.rank_sets(solution)
    return _Found(
        plan=plan,
        cost=cost,
        lower_bound_s=solution.lower_bound_s + beside_s,
        hidden=frozenset(rank_set for rank_set in rank_sets if not plans.table.is_led[rank_set]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisSearch:
    """Finds the best plans of a cluster."""

    setting: MetisSetting
    limits: MetisLimits = field(default_factory=MetisLimits)  # the published planner's

    def solve(self, num_micro_batches: int, *, upper_bound_s: float = math.inf) -> MetisResult:
        """Find the best plan with one number of micro-batches.

        Args:
            num_micro_batches: A divisor of the global batch size.
            upper_bound_s: Only plans that take no longer are of interest.

        Returns:
            The plan; that all take longer; or why there is none.

        Raises:
            ValueError: If the number does not divide the batch.
        """
        if num_micro_batches not in self.numbers:
            raise ValueError(
                f"{num_micro_batches} micro-batches do not divide the batch of "
                f"{self.setting.global_batch_size}"
            )
        return self._least((num_micro_batches,), upper_bound_s)

    def best(self) -> MetisSolution | Reason:
        """Find the best plan with any number of micro-batches.

        Returns:
            The plan, with a bound for all of them; or why there is none.
        """
        found = self._least(self.numbers, math.inf)
        assert not isinstance(found, MetisPruned), "nothing is pruned without an upper bound"
        return found

    def _least(self, numbers: Sequence[int], upper_bound_s: float) -> MetisResult:
        """Find the best plan with one of some numbers of micro-batches."""
        best: MetisSolution | None = None
        limit_s, least_s = upper_bound_s, math.inf
        reasons = []
        keys = [(number, space) for number in numbers for space in range(len(self.spaces))]
        for bound_s, key in sorted((work_bound_s(self._table(key)), key) for key in keys):
            found: MetisResult = MetisPruned(lower_bound_s=bound_s)
            if bound_s <= limit_s:
                found = solve_table(self._table(key), limit_s)
            if isinstance(found, Reason):
                reasons.append(found)
                continue
            least_s = min(least_s, found.lower_bound_s)
            if isinstance(found, MetisSolution) and (best is None or found.cost.total_s < limit_s):
                best, limit_s = found, found.cost.total_s
        if best is not None:
            return replace(best, lower_bound_s=min(least_s, limit_s))
        if least_s < math.inf:
            return MetisPruned(lower_bound_s=least_s)
        return next((reason for reason in reasons if reason.kind == OUT_OF_MEMORY), reasons[0])

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Micro-batches that divide the batch, ascending."""
        batch = self.setting.global_batch_size
        return tuple(number for number in range(1, batch + 1) if batch % number == 0)

    @cached_property
    def spaces(self) -> tuple[GroupSpace, ...]:
        """Every group of devices; order by order where ranks have other types in each."""
        setting, limits = self.setting, self.limits
        if not setting.first_node_counts:
            return (GroupSpace(setting=setting, limits=limits),)
        orders = permutations(sorted(set(setting.node_types)))
        by_types = {setting.ordered_types(order): order for order in orders}
        return tuple(
            GroupSpace(setting=setting, limits=limits, type_order=order)
            for order in by_types.values()
        )

    @cached_property
    def _rank_times(self) -> tuple[RankTimes, ...]:
        """The profile as tables, for each space."""
        return tuple(RankTimes(space=space) for space in self.spaces)

    @cached_property
    def _tables(self) -> dict[tuple[int, int], GroupTable]:
        """What groups take and hold, by the number of micro-batches and the space."""
        return {}

    def _table(self, key: tuple[int, int]) -> GroupTable:
        """Return what groups take and hold."""
        if key not in self._tables:
            number, space = key
            self._tables[key] = group_table(self.spaces[space], self._rank_times[space], number)
        return self._tables[key]
