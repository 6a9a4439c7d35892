"""Plans of Metis (2024) with one number of micro-batches as a partition problem with a step end.

Options are device groups; layers count backwards, because stages take devices from the last one
on. The problem charges every stage its leading rank. Where another rank is slower in the
layers that a solution gives the stage, the next problem has an option of the group for every first
layer, with exact times.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.resources import NO_KIND, labelled
from amp_ray.partition.rows import distinct_rows
from amp_ray.partition.step_end import StepEndProblem, StepEndSolution, StepEndTerm
from amp_ray.partition.tables import OptionTable, StageTables
from amp_ray.planners.metis2024.cost import OPTIMIZER_FACTOR, counted_parameter_bytes
from amp_ray.planners.metis2024.group_table import GroupTable
from amp_ray.planners.metis2024.plan import MetisPlan

FORBIDDEN_S: Final = 1e12
"""Charged where an option for one first layer would start at another: 30,000 years."""

ANY_START: Final = -1
"""First layer of an option that may start anywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlansProblem:
    """A problem, and the way back from its solutions."""

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
        """Return the group of each stage, in the order of the plan."""
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
    """Return the optimizer step and the gradient all-reduce."""
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
