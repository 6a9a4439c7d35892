"""The best plan by the formulas of Metis (2024), with a proof.

The published search covers only some plans, and lists some that cannot run. Here stages may have
any number of devices, any order of the device types and any layers; every layer is placed, every
device takes samples, and no device holds more than its own memory.

For one number of micro-batches, choosing a plan is a partition problem with a step end. Its options
are device groups; layers are counted from the last to the first, because stages take devices from
the last one on. The problem charges every stage the time of its leading rank. If another rank is
slower in the layers that a solution gives the stage, the problem is built again with one option of
the group per first layer, with exact times.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Reason
from amp_ray.partition.problem import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionProblem,
)
from amp_ray.partition.resources import NO_KIND, labelled
from amp_ray.partition.rows import distinct_rows
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    solve_with_step_end,
)
from amp_ray.partition.tables import OptionTable, StageTables
from amp_ray.planners.metis2024.groups import GroupSpace, GroupTable, MetisLimits, group_table
from amp_ray.planners.metis2024.plan import (
    OPTIMIZER_FACTOR,
    OUT_OF_MEMORY,
    MetisCost,
    MetisPlan,
    MetisSetting,
    counted_parameter_bytes,
    metis_cost,
    metis_defects,
)

FORBIDDEN_S: Final = 1e12
"""Seconds charged if an option starts at a layer other than its own first layer: 30,000 years."""

ANY_START: Final = -1
"""First layer of an option that may start anywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlansProblem:
    """A partition problem, and the data to convert its solutions into plans."""

    table: GroupTable
    group: IntArray  # shape ``(O,)``. Index of each option's group in the table.
    problem: StepEndProblem  # its options are those
    shift_s: float  # least time beyond the layers of any last stage

    def plan(self, solution: StepEndSolution) -> MetisPlan:
        """Return the plan of a solution."""
        space, num_layers = self.table.space, self.table.layer_s.shape[1]
        variants, rows = space.variants, self.table.variant[self._groups(solution)]
        order = [int(kind) for row in rows for kind in variants.kinds[row] if kind != NO_KIND]
        dp, tp = variants.dp[rows], variants.tp[rows]
        return MetisPlan(
            type_order=space.type_order
            or tuple(space.kinds[kind] for kind in dict.fromkeys(order)),
            degrees=tuple(zip(dp.tolist(), tp.tolist(), strict=True)),
            num_micro_batches=self.table.num_micro_batches,
            bounds=tuple(num_layers - bound for bound in reversed(solution.bounds)),
        )

    def hidden_sets(self, solution: StepEndSolution) -> frozenset[int]:
        """Return a solution's sets of ranks whose leading rank may not be slowest everywhere."""
        sets = self.table.rank_set[1][self._groups(solution)]
        return frozenset(sets[~self.table.is_led[sets]].tolist())

    @property
    def beside_s(self) -> float:
        """Seconds that every plan takes on top of the problem's value."""
        setting = self.table.space.setting
        return self.shift_s + setting.whole.batch_generator_s * self.table.num_micro_batches

    def _groups(self, solution: StepEndSolution) -> IntArray:
        groups: IntArray = self.group[np.array(solution.options[::-1])]
        return groups


def build_problem(
    table: GroupTable, chosen: IntArray, exact: frozenset[int]
) -> PlansProblem | None:
    """Build the problem of some groups.

    ``chosen``, shape ``(G,)``, are the groups of the table that may be used. Groups of the sets of
    ranks in ``exact`` get one option per first layer. The problem is None if no sequence of the
    chosen groups uses all devices.
    """
    space = table.space
    edge = space.variants.edge[table.variant[chosen]]
    graph = labelled(
        space.graph.from_state[edge],
        space.graph.to_state[edge],
        space.labels[table.variant[chosen]],
        space.graph.final_states,
    )
    if not graph.final_states:
        return None
    index, start = _by_first_layer(table, chosen[graph.edge], exact)
    group = chosen[graph.edge[index]]
    is_last = graph.from_state[index] == 0
    shift_s = float(table.rest_s[group].min(initial=0.0))
    times_s, time_row = _times(table, group, start)
    cuts_s, cut_row = _cuts(table, group, graph.label[index], start)
    starts, memory_row = _starts(table, group, start)
    problem = PartitionProblem(
        tables=StageTables(time_prefix_s=times_s, cut_time_s=cuts_s, earliest_start=starts),
        options=OptionTable(
            time_row=time_row,
            from_state=graph.from_state[index],
            to_state=graph.to_state[index],
            cut_row=cut_row,
            memory_row=memory_row,
            fixed_s=np.where(is_last, table.rest_s[group] - shift_s, 0.0),
        ),
        num_micro_batches=table.num_micro_batches,
        final_states=graph.final_states,
    )
    terms = _step_end_terms(table, table.variant[group])
    return PlansProblem(
        table=table,
        group=group,
        problem=StepEndProblem(problem=problem, terms=terms),
        shift_s=shift_s,
    )


def _by_first_layer(
    table: GroupTable, group: IntArray, exact: frozenset[int]
) -> tuple[IntArray, IntArray]:
    """Return the group index of every option, and the only layer at which it may start."""
    apart = np.isin(table.rank_set[1][group], sorted(exact))
    num_layers = table.layer_s.shape[1]
    single, split = np.flatnonzero(~apart), np.flatnonzero(apart)
    starts = np.tile(np.arange(num_layers), len(split))
    index = np.concatenate([single, split.repeat(num_layers)])
    return index, np.concatenate([np.full(len(single), ANY_START), starts])


def _times(table: GroupTable, group: IntArray, start: IntArray) -> tuple[FloatArray, IntArray]:
    """Return prefix sums of layer times, and the row of each option."""
    rank_set = table.rank_set[1][group]
    rows = np.where(start == ANY_START, table.leading[rank_set], -1 - rank_set)
    first, row = distinct_rows([rows, start])
    prefix_s = np.zeros((len(first), table.layer_s.shape[1] + 1))
    leading = np.flatnonzero(start[first] == ANY_START)
    prefix_s[leading, 1:] = table.space.layer_s[rows[first[leading]]].cumsum(axis=1)
    for index in np.flatnonzero(start[first] != ANY_START):
        begin = start[first[index]]
        ranks_s = table.space.layer_s[table.rank_set[0][rank_set[first[index]]], begin:]
        prefix_s[index, begin + 1 :] = ranks_s.cumsum(axis=1).max(axis=0)
    return prefix_s, row


def _cuts(
    table: GroupTable, group: IntArray, next_label: IntArray, start: IntArray
) -> tuple[FloatArray, IntArray]:
    """Return transfer times by the layers behind a cut, and the row of each option."""
    space, setting = table.space, table.space.setting
    variant = table.variant[group]
    dp, tp = space.variants.dp[variant], space.variants.tp[variant]
    first, row = distinct_rows([dp, tp, next_label, space.labels[variant], start])
    if not space.is_plain:
        first, row = distinct_rows([variant, next_label, start])
    rate = space.transfer_rate(variant[first], next_label[first])
    tokens = setting.global_batch_size // dp[first] // table.num_micro_batches
    tokens = tokens * setting.sequence_length
    cuts_s = np.repeat((tokens * setting.hidden_size / rate)[:, None], _width(table), axis=1)
    cuts_s[:, 1] = tokens * setting.vocab_size / tp[first] / rate
    only = start[first, None]
    elsewhere = (only != ANY_START) & (np.arange(_width(table)) > only)
    return np.where(elsewhere, FORBIDDEN_S, cuts_s), row


def _starts(table: GroupTable, group: IntArray, start: IntArray) -> tuple[IntArray, IntArray]:
    """Return earliest starts, and the row of each option."""
    by_set, number = table.holders
    first, row = distinct_rows([number[group], start])
    starts = np.maximum(by_set[number[group[first]]], start[first, None])
    return np.minimum(starts, np.arange(_width(table))), row


def _step_end_terms(table: GroupTable, variant: IntArray) -> tuple[StepEndTerm, ...]:
    space, setting = table.space, table.space.setting
    dp, tp = space.variants.dp[variant], space.variants.tp[variant]
    nothing = np.zeros(len(variant))
    per_layer_s = OPTIMIZER_FACTOR * setting.whole.optimizer_s / setting.profile.num_layers
    held = counted_parameter_bytes(setting)[::-1]
    optimizer = StepEndTerm(
        weight_prefix=np.arange(_width(table), dtype=np.float64),
        s_per_weight=per_layer_s / tp,
        fixed_s=nothing,
    )
    sync = StepEndTerm(
        weight_prefix=np.pad(held.cumsum(), (1, 0)),
        s_per_weight=2 * (dp - 1) / dp / tp / space.gradient_rate[variant],
        fixed_s=nothing,
    )
    return optimizer, sync


def _width(table: GroupTable) -> int:
    """Return the number of boundaries, both ends included."""
    return int(table.layer_s.shape[1]) + 1


SAME: Final = 1e-9
"""Relative difference between sums of the same times in another order."""

NO_PLAN: Final = "no plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisSolution:
    """The best plan with one number of micro-batches."""

    plan: MetisPlan  # in the published planner's own terms
    cost: MetisCost
    lower_bound_s: float  # no plan takes less; equals the cost, up to the order of additions


def solve_table(table: GroupTable) -> MetisSolution | Reason:
    """Find the best plan of a table, or return why there is none.

    The problem charges each group the rank that is slowest over all layers, which is a lower bound.
    Where another rank is slower on the layers of the best plan, the groups with such ranks become
    one option per first layer, with exact times, and the problem is solved again.
    """
    best: MetisSolution | None = None
    hidden: frozenset[int] = frozenset()
    while True:
        plans = build_problem(table, np.arange(len(table.variant)), hidden)
        if plans is None:
            detail = f"{table.num_micro_batches} micro-batches: no groups of devices share them"
            return Reason(kind=NO_PLAN, detail=detail)
        limit_s = math.inf if best is None else best.cost.total_s
        answer = solve_with_step_end(plans.problem, upper_bound_s=limit_s - plans.beside_s)
        if isinstance(answer, InfeasiblePartition):
            assert best is None, f"a problem with more options lost a plan: {answer}"
            memory = answer.reason == InfeasibleReason.MEMORY
            return Reason(kind=OUT_OF_MEMORY if memory else NO_PLAN, detail=answer.detail)
        lower_bound_s = answer.lower_bound_s + plans.beside_s
        uncharged: frozenset[int] = frozenset()
        if isinstance(answer, StepEndSolution):
            plan, cost = _checked(plans, answer)
            if best is None or cost.total_s < best.cost.total_s:
                best = MetisSolution(plan=plan, cost=cost, lower_bound_s=0.0)
            if cost.total_s > (answer.value_s + plans.beside_s) * (1 + SAME):
                uncharged = plans.hidden_sets(answer)
        assert best is not None, "nothing is pruned without an upper bound"
        if uncharged <= hidden:
            return replace(best, lower_bound_s=min(lower_bound_s, best.cost.total_s))
        hidden |= uncharged


def _checked(plans: PlansProblem, answer: StepEndSolution) -> tuple[MetisPlan, MetisCost]:
    plan, setting = plans.plan(answer), plans.table.space.setting
    cost, defects = metis_cost(setting, plan), metis_defects(setting, plan)
    if not isinstance(cost, MetisCost) or defects:
        raise AssertionError(f"{plan} was found, which cannot run: {cost}, {defects}")
    return plan, cost


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisSearch:
    """Finds the best plans of a cluster."""

    setting: MetisSetting
    limits: MetisLimits = field(default_factory=MetisLimits)  # as in the published search

    def solve(self, num_micro_batches: int) -> MetisSolution | Reason:
        """Find the best plan with a number of micro-batches that divides the batch."""
        results = [solve_table(group_table(space, num_micro_batches)) for space in self.spaces]
        solutions = [result for result in results if isinstance(result, MetisSolution)]
        if solutions:
            best = min(solutions, key=lambda solution: solution.cost.total_s)
            bound_s = min(solution.lower_bound_s for solution in solutions)
            return replace(best, lower_bound_s=bound_s)
        reasons = [result for result in results if isinstance(result, Reason)]
        return next((reason for reason in reasons if reason.kind == OUT_OF_MEMORY), reasons[0])

    @cached_property
    def spaces(self) -> tuple[GroupSpace, ...]:
        """Spaces that together hold every group: one per order of types, if ranks depend on it."""
        setting, limits = self.setting, self.limits
        if not setting.first_node_counts:
            return (GroupSpace(setting=setting, limits=limits),)
        orders = permutations(sorted(set(setting.node_types)))
        by_types = {setting.ordered_types(order): order for order in orders}
        return tuple(
            GroupSpace(setting=setting, limits=limits, type_order=order)
            for order in by_types.values()
        )
