"""The best plan by the formulas of Metis (2024), with a proof.

Its own search looks at a part of the plans, and lists some that cannot run. Here stages have any
number of devices, any order of the device types and any layers; every layer is placed, every
device takes samples, and none holds more than its own memory.

Plans with one number of micro-batches are a partition problem with a step end. Options are device
groups; layers count backwards, because stages take devices from the last one on. The problem
charges every stage its leading rank. Where another rank is slower in the layers that a solution
gives the stage, the next problem has an option of the group for every first layer, with exact
times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, permutations
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Reason
from amp_ray.partition.problem import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionProblem,
    PrunedPartition,
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
from amp_ray.planners.metis2024.group_table import GroupTable, RankTimes, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
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
"""Seconds charged if an option starts at another than its first layer: 30,000 years."""

ANY_START: Final = -1
"""First layer of an option that may start anywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlansProblem:
    """A problem, and the data to convert its solutions into plans."""

    table: GroupTable
    group: IntArray  # shape ``(O,)``. Group of the table of each option.
    problem: StepEndProblem  # its options are those
    # What every plan takes on top of the problem's value, but for the batch generator
    shift_s: float

    def plan(self, solution: StepEndSolution) -> MetisPlan:
        """Return the plan of a solution."""
        space, num_layers = self.table.space, self.table.layer_s.shape[1]
        variants, rows = space.variants, self.table.variant[self._groups(solution)]
        order = [int(kind) for row in rows for kind in variants.kinds[row] if kind != NO_KIND]
        dp, tp = variants.dp[rows], variants.tp[rows]
        return MetisPlan(
            type_order=space.type_order
            or tuple(space.kinds[kind] for kind in dict.fromkeys(order)),
            group_sizes=tuple((dp * tp).tolist()),
            degrees=tuple(zip(dp.tolist(), tp.tolist(), strict=True)),
            num_micro_batches=self.table.num_micro_batches,
            bounds=tuple(num_layers - bound for bound in reversed(solution.bounds)),
        )

    def rank_sets(self, solution: StepEndSolution) -> tuple[int, ...]:
        """Return the set of ranks of each stage of a solution, in the order of the plan."""
        return tuple(self.table.rank_set[1][self._groups(solution)].tolist())

    def _groups(self, solution: StepEndSolution) -> IntArray:
        groups: IntArray = self.group[np.array(solution.options[::-1])]
        return groups


def build_problem(
    table: GroupTable, chosen: IntArray, exact: frozenset[int]
) -> PlansProblem | None:
    """Build the problem of some groups.

    Args:
        table: Every group.
        chosen: Shape ``(G,)``. Groups of the table that may be used.
        exact: Sets of ranks whose groups get an option per first layer.

    Returns:
        The problem; None where the groups lead to no end.
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
    """Return the group index of every option, and the only layer that it starts at."""
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
    prefix_s[leading, 1:] = table.rank_times.layer_s[rows[first[leading]]].cumsum(axis=1)
    for index in np.flatnonzero(start[first] != ANY_START):
        begin = start[first[index]]
        ranks_s = table.rank_times.layer_s[table.rank_set[0][rank_set[first[index]]], begin:]
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
    """Return the time of every plan outside of stages: making micro-batches."""
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
"""Relative difference between sums of the same times in another order."""

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
    """Result if every plan takes longer than the upper bound."""

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
        answer = _round(plans, upper_bound_s if best is None else best.cost.total_s)
        if best is not None and isinstance(answer, Reason):
            raise AssertionError(f"a problem with more options lost a plan: {answer}")
        if isinstance(answer, Reason) or (best is None and isinstance(answer, MetisPruned)):
            return answer
        if isinstance(answer, _Found) and (best is None or answer.cost.total_s < best.cost.total_s):
            best = answer
        assert best is not None
        hidden = frozenset[int]() if isinstance(answer, MetisPruned) else answer.hidden
        if hidden <= exact:
            return MetisSolution(
                plan=best.plan,
                cost=best.cost,
                lower_bound_s=min(answer.lower_bound_s, best.cost.total_s),
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
    exact = cost.total_s <= (solution.value_s + beside_s) * (1 + SAME)
    rank_sets = () if exact else plans.rank_sets(solution)
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
        result = self._least(self.numbers, math.inf)
        assert not isinstance(result, MetisPruned), "nothing is pruned without an upper bound"
        return result

    def _least(self, numbers: Sequence[int], upper_bound_s: float) -> MetisResult:
        """Find the best plan with one of some numbers of micro-batches."""
        best: MetisSolution | None = None
        limit_s, least_s = upper_bound_s, math.inf
        reasons = []
        keys = [(number, space) for number in numbers for space in range(len(self.spaces))]
        for bound_s, key in sorted((work_bound_s(self._table(key)), key) for key in keys):
            result: MetisResult = MetisPruned(lower_bound_s=bound_s)
            if bound_s <= limit_s:
                result = solve_table(self._table(key), limit_s)
            if isinstance(result, Reason):
                reasons.append(result)
                continue
            least_s = min(least_s, result.lower_bound_s)
            if isinstance(result, MetisSolution) and (
                best is None or result.cost.total_s < limit_s
            ):
                best, limit_s = result, result.cost.total_s
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
        """Times and memory of groups, by the number of micro-batches and the space."""
        return {}

    def _table(self, key: tuple[int, int]) -> GroupTable:
        if key not in self._tables:
            number, space = key
            self._tables[key] = group_table(self.spaces[space], self._rank_times[space], number)
        return self._tables[key]
