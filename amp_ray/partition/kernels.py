"""The dynamic programme of the exact solver, compiled; it reads and writes arrays.

For one bound ``cap_s`` on the slowest stage, `cheapest_chain` finds the cheapest way to place all
layers. Its table is indexed by (state, layers placed). Each option adds a sliding-window minimum,
so one bound costs O(options x layers). Layer counts that cannot lead to an end are skipped.
`support.brute_force` holds the readable loop version.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cython
from cython.cimports.libc.math import nextafter

from amp_ray.arrays import BoolArray, FloatArray, IntArray

INF = cython.declare(cython.double, float("inf"))


class Programme(NamedTuple):
    """A partition problem laid out for the kernels: C classes, E options, R states, L layers.

    A class is the part of an option that a cap depends on: time row, bottleneck row and overhead.
    Options are in canonical order, ascending by target state. Every table ends with a row of
    zeros; columns are layer counts ``0..L``.
    """

    time_prefix_s: FloatArray  # shape ``(T, L + 1)``
    cut_time_s: FloatArray  # shape ``(K + 1, L + 1)``; column 0 holds 0
    bottleneck_start_s: FloatArray  # shape ``(B + 1, L + 1)``
    bottleneck_end_s: FloatArray  # shape ``(B + 1, L + 1)``
    earliest_start: IntArray  # shape ``(M + 1, L + 1)``
    latest_start: IntArray  # shape ``(L + 1,)``
    # Shape ``(M + 1, L + 1)``. Minimum of ``earliest_start`` over this and later columns.
    earliest_floor: IntArray
    class_time: IntArray  # shape ``(C,)``. Time row.
    class_bottleneck: IntArray  # shape ``(C,)``. Bottleneck row.
    class_overhead_s: FloatArray  # shape ``(C,)``
    # Shape ``(C, L + 1)``. Non-decreasing upper bound of the time that a start subtracts.
    class_start_s: FloatArray
    # Shape ``(C, L + 1)``. Non-decreasing lower bound of the time that an end adds.
    class_end_s: FloatArray
    # Shape ``(C,)``. Whether both bounds are exact: then a cap admits a window of starts.
    class_regular: BoolArray
    option_from: IntArray  # shape ``(E,)``
    option_to: IntArray  # shape ``(E,)``
    option_class: IntArray  # shape ``(E,)``
    option_cut: IntArray  # shape ``(E,)``
    option_memory: IntArray  # shape ``(E,)``
    option_fixed_s: FloatArray  # shape ``(E,)``
    is_final: BoolArray  # shape ``(R,)``
    # Shape ``(R,)``. Fewest stages from state 0; ``R`` or more if there is no path.
    fewest: IntArray
    # Shape ``(R,)``. Most layers that still leave one per later stage; below 0 if there is no path
    # to a final state, or more stages than layers.
    most: IntArray


class Scratch(NamedTuple):
    """Arrays that one evaluation writes; the next one reuses them."""

    # Shape ``(C, L + 1)``. First start that the cap admits, per class and end.
    admissible: IntArray
    first: IntArray  # shape ``(R,)``. Fewest layers from which the end can be reached.
    low: IntArray  # shape ``(R,)``. Fewest layers placed so far.
    high: IntArray  # shape ``(R,)``. Most layers placed so far.
    cost_s: FloatArray  # shape ``(R, L + 1)``. Cheapest sum.
    start: IntArray  # shape ``(R, L + 1)``. Start of the last stage of that sum.
    option: IntArray  # shape ``(R, L + 1)``. Option of that stage.
    queue_start: IntArray  # shape ``(L + 1,)``. Window minima: starts, ascending.
    queue_key_s: FloatArray  # shape ``(L + 1,)``. Their keys, not descending.
    path_start: IntArray  # shape ``(R,)``. Starts of the chain, last stage first.
    path_option: IntArray  # shape ``(R,)``. Options of the chain, last stage first.


@cython.cclass
@dataclass(eq=False, repr=False)
class ProgrammeViews:
    """The arrays of a `Programme`, by the same names, as compiled code reads them."""

    time_prefix_s: cython.const[cython.double][:, ::1]
    cut_time_s: cython.const[cython.double][:, ::1]
    bottleneck_start_s: cython.const[cython.double][:, ::1]
    bottleneck_end_s: cython.const[cython.double][:, ::1]
    earliest_start: cython.const[cython.longlong][:, ::1]
    latest_start: cython.const[cython.longlong][::1]
    earliest_floor: cython.const[cython.longlong][:, ::1]
    class_time: cython.const[cython.longlong][::1]
    class_bottleneck: cython.const[cython.longlong][::1]
    class_overhead_s: cython.const[cython.double][::1]
    class_start_s: cython.const[cython.double][:, ::1]
    class_end_s: cython.const[cython.double][:, ::1]
    class_regular: cython.const[cython.uchar][::1]
    option_from: cython.const[cython.longlong][::1]
    option_to: cython.const[cython.longlong][::1]
    option_class: cython.const[cython.longlong][::1]
    option_cut: cython.const[cython.longlong][::1]
    option_memory: cython.const[cython.longlong][::1]
    option_fixed_s: cython.const[cython.double][::1]
    is_final: cython.const[cython.uchar][::1]
    fewest: cython.const[cython.longlong][::1]
    most: cython.const[cython.longlong][::1]


@cython.cclass
@dataclass(eq=False, repr=False)
class ScratchViews:
    """The arrays of a `Scratch`, by the same names, as compiled code writes them."""

    admissible: cython.longlong[:, ::1]
    first: cython.longlong[::1]
    low: cython.longlong[::1]
    high: cython.longlong[::1]
    cost_s: cython.double[:, ::1]
    start: cython.longlong[:, ::1]
    option: cython.longlong[:, ::1]
    queue_start: cython.longlong[::1]
    queue_key_s: cython.double[::1]
    path_start: cython.longlong[::1]
    path_option: cython.longlong[::1]


@cython.ccall
def count_stages(
    option_from: cython.const[cython.longlong][::1],
    option_to: cython.const[cython.longlong][::1],
    fewest: cython.longlong[::1],
    most: cython.longlong[::1],
) -> None:
    """Count the stages that must come before and after each state, in place.

    Args:
        option_from: Shape ``(E,)``, options ascending by ``option_to``.
        option_to: Shape ``(E,)``.
        fewest: Shape ``(R,)``. 0 for state 0, ``R`` for the others; becomes `Programme.fewest`.
        most: Shape ``(R,)``. ``L`` for final states, ``-R`` for others; becomes `Programme.most`.
    """
    for option in range(option_to.shape[0]):
        state, to_state = option_from[option], option_to[option]
        fewest[to_state] = min(fewest[to_state], fewest[state] + 1)
    for option in range(option_to.shape[0] - 1, -1, -1):
        state, to_state = option_from[option], option_to[option]
        most[state] = max(most[state], most[to_state] - 1)


@cython.cfunc
def _fill_first(
    cap_s: cython.double, programme: ProgrammeViews, scratch: ScratchViews
) -> cython.double:
    """Fill the first start that the cap admits, per class and end, with two pointers.

    Then fill the fewest layers per state that can reach the end; return the next useful cap.
    """
    start: cython.longlong
    next_cap_s: cython.double = INF
    num_classes, num_layers = programme.class_start_s.shape[0], programme.class_start_s.shape[1] - 1
    admissible, first = scratch.admissible, scratch.first
    start_s, end_s = programme.class_start_s, programme.class_end_s
    for row in range(num_classes):
        overhead_s, start = programme.class_overhead_s[row], 0
        for end in range(1, num_layers + 1):
            while start < end and (end_s[row, end] - start_s[row, start]) + overhead_s > cap_s:
                start += 1
            admissible[row, end] = start
    for state in range(first.shape[0]):
        first[state] = num_layers if programme.is_final[state] else num_layers + 1
    for option in range(programme.option_to.shape[0] - 1, -1, -1):
        end, state = first[programme.option_to[option]], programme.option_from[option]
        if end > num_layers:
            continue
        row = programme.option_class[option]
        by_cap = admissible[row, end]
        by_memory = programme.earliest_floor[programme.option_memory[option], end]
        if by_cap > by_memory:
            refused_s = end_s[row, end] - start_s[row, by_cap - 1]
            next_cap_s = min(next_cap_s, refused_s + programme.class_overhead_s[row])
        start = max(by_cap, by_memory, programme.fewest[state])
        if start < num_layers:
            first[state] = min(first[state], start)
    return next_cap_s


@cython.cfunc
def _fill_cost(cap_s: cython.double, programme: ProgrammeViews, scratch: ScratchViews) -> None:  # noqa: C901, PLR0912, PLR0915 - as above
    """Fill the cheapest sums from state 0 forwards, where the end can be reached.

    Each option appends a stage. If the cap admits a window of starts per end, a queue holds starts
    with ascending keys. Its head moves without removing entries, and may move back, because memory
    limits need not be monotone. Otherwise the cap is checked at every start. Ties are broken by the
    earliest start, then the first option.
    """
    low, high, cost_s = scratch.low, scratch.high, scratch.cost_s
    queue_start, queue_key_s = scratch.queue_start, scratch.queue_key_s
    for state in range(low.shape[0]):
        low[state], high[state] = cost_s.shape[1], -1
        for end in range(scratch.first[state], programme.most[state] + 1):
            cost_s[state, end] = INF
    low[0] = high[0] = 0
    cost_s[0, 0] = 0.0
    for option in range(programme.option_to.shape[0]):
        state, to_state = programme.option_from[option], programme.option_to[option]
        begin: cython.longlong = max(scratch.first[to_state], low[state] + 1)
        stop = programme.most[to_state] + 1
        if high[state] < 0 or begin >= stop:
            continue
        row, memory = programme.option_class[option], programme.option_memory[option]
        prefix_s = programme.time_prefix_s[programme.class_time[row]]
        cut_s, from_s = programme.cut_time_s[programme.option_cut[option]], cost_s[state]
        bottleneck = programme.class_bottleneck[row]
        overhead_s, fixed_s = programme.class_overhead_s[row], programme.option_fixed_s[option]
        pushed: cython.longlong = max(low[state], scratch.admissible[row, begin])
        head: cython.longlong = 0
        size: cython.longlong = 0
        for end in range(begin, stop):
            latest: cython.longlong = min(programme.latest_start[end], high[state])
            first: cython.longlong = scratch.admissible[row, end]
            if first > high[state]:
                break
            first, sum_s, best = max(first, programme.earliest_start[memory, end]), INF, 0
            if programme.class_regular[row]:
                while pushed <= latest:
                    if from_s[pushed] < INF:
                        key_s = (from_s[pushed] - prefix_s[pushed]) + cut_s[pushed]
                        while size > 0 and queue_key_s[size - 1] > key_s:
                            size -= 1
                        queue_start[size], queue_key_s[size] = pushed, key_s
                        size += 1
                    pushed += 1
                head = min(head, size)
                while head > 0 and queue_start[head - 1] >= first:
                    head -= 1
                while head < size and queue_start[head] < first:
                    head += 1
                if head < size:
                    best = queue_start[head]
                    sum_s = ((queue_key_s[head] + prefix_s[end]) + overhead_s) + fixed_s
            else:
                end_s = prefix_s[end] + programme.bottleneck_end_s[bottleneck, end]
                for start in range(max(first, low[state]), latest + 1):
                    start_s = prefix_s[start] - programme.bottleneck_start_s[bottleneck, start]
                    if from_s[start] < INF and (end_s - start_s) + overhead_s <= cap_s:
                        key_s = (from_s[start] - prefix_s[start]) + cut_s[start]
                        whole_s = ((key_s + prefix_s[end]) + overhead_s) + fixed_s
                        if whole_s < sum_s:
                            sum_s, best = whole_s, start
            least_s = cost_s[to_state, end]
            if sum_s < least_s or (sum_s == least_s < INF and best < scratch.start[to_state, end]):
                cost_s[to_state, end] = sum_s
                scratch.start[to_state, end], scratch.option[to_state, end] = best, option
                low[to_state], high[to_state] = min(low[to_state], end), max(high[to_state], end)


@cython.cfunc
def _bottleneck_s(
    row: cython.longlong, start: cython.longlong, end: cython.longlong, programme: ProgrammeViews
) -> cython.double:
    """Return a stage's bottleneck time, with the same operations as `problem.bottleneck_s`."""
    prefix_s = programme.time_prefix_s[programme.class_time[row]]
    bottleneck = programme.class_bottleneck[row]
    end_s = prefix_s[end] + programme.bottleneck_end_s[bottleneck, end]
    start_s = prefix_s[start] - programme.bottleneck_start_s[bottleneck, start]
    return (end_s - start_s) + programme.class_overhead_s[row]


@cython.ccall
def cheapest_chain(
    cap_s: cython.double, programme: ProgrammeViews, scratch: ScratchViews
) -> tuple[cython.double, cython.double, cython.longlong, cython.double]:
    """Place all layers at the smallest sum with no stage slower than ``cap_s``.

    The chain is then in ``path_start`` and ``path_option`` of ``scratch``.

    Returns:
        ``(sum_s, slowest_s, num_stages, next_cap_s)``. Without a chain the sum is infinite and
        ``next_cap_s > cap_s`` is a cap below which none exists.
    """
    next_cap_s = _fill_first(cap_s, programme, scratch)
    if scratch.first[0] > 0:
        return INF, INF, 0, next_cap_s
    _fill_cost(cap_s, programme, scratch)
    end: cython.longlong
    slowest_s: cython.double
    state: cython.longlong
    num_layers = programme.time_prefix_s.shape[1] - 1
    sum_s, slowest_s, num_stages, state, end = INF, 0.0, 0, -1, num_layers
    for final in range(programme.is_final.shape[0]):  # the lowest of equals
        if scratch.high[final] < num_layers or not programme.is_final[final]:
            continue
        if scratch.cost_s[final, num_layers] < sum_s:
            sum_s, state = scratch.cost_s[final, num_layers], final
    if state < 0:
        return INF, INF, 0, nextafter(cap_s, INF)
    while end > 0:
        start, option = scratch.start[state, end], scratch.option[state, end]
        bottleneck_s = _bottleneck_s(programme.option_class[option], start, end, programme)
        slowest_s = max(slowest_s, bottleneck_s)
        scratch.path_start[num_stages], scratch.path_option[num_stages] = start, option
        num_stages += 1
        state, end = programme.option_from[option], start
    return sum_s, slowest_s, num_stages, next_cap_s


@cython.ccall
def least_chain_s(
    prefix: cython.const[cython.double][:, ::1],
    rooms: cython.const[cython.longlong][::1],
    num_again: cython.longlong,
    extras_s: tuple[cython.double, cython.double],
    num_micro_batches: cython.longlong,
) -> cython.double:
    """Bound what the slowest stage of 1F1B adds to one micro-batch's way through all stages.

    After its first backward pass, stage ``s`` of ``S`` still runs ``m - 1`` backward passes and
    ``m - (S - s)`` forward passes. Bisect the time that this may take; for each, every stage takes
    as many layers as it can, from the first stage on. That is best, since fewer layers never take
    longer: a block takes at least as long as the recompute of any other one.

    Args:
        prefix: Shape ``(4, num_layers + 1)``. Prefix sums of layers: forward seconds, backward
            seconds, number of equal blocks that ``rooms`` limits, number of other blocks.
        rooms: Shape ``(num_stages,)``. Most equal blocks of each stage.
        num_again: Recomputed blocks per stage. Other blocks count first, since they may take less.
        extras_s: Least seconds to recompute an equal block, and another one, which is not more.
        num_micro_batches: ``m``.

    Returns:
        Seconds, within one part in a million; infinite if the stages have no room for all layers.
    """
    late: cython.longlong
    first: cython.double
    high_s: cython.double
    num_layers, num_stages = prefix.shape[1] - 1, rooms.shape[0]
    later = num_micro_batches - 1
    whole_s = later * (
        prefix[0, num_layers]
        + prefix[1, num_layers]
        + prefix[2, num_layers] * extras_s[0]
        + prefix[3, num_layers] * extras_s[1]
    )
    low_s, high_s, limit_s = 0.0, 2 * whole_s, INF
    while True:
        end = 0
        for stage in range(num_stages):
            start, late = end, max(num_micro_batches - num_stages + stage, 0)
            while end < num_layers:
                equal = prefix[2, end + 1] - prefix[2, start]
                first = min(prefix[3, end + 1] - prefix[3, start], num_again)
                again_s = first * extras_s[1] + min(equal, num_again - first) * extras_s[0]
                backward_s = prefix[1, end + 1] - prefix[1, start] + again_s
                forward_s = prefix[0, end + 1] - prefix[0, start]
                if equal > rooms[stage] or later * backward_s + late * forward_s > limit_s:
                    break
                end += 1
        if end == num_layers:
            high_s = min(high_s, limit_s)
        elif limit_s == INF:
            return INF
        else:
            low_s = limit_s
        if high_s - low_s <= 1e-6 * high_s:
            return low_s
        limit_s = (low_s + high_s) / 2


@cython.cclass
@dataclass(eq=False, repr=False)
class StepEndViews:
    """Step-end terms: B terms, E options in the programme's order, L layers."""

    weight_prefix: cython.const[cython.double][:, ::1]  # shape ``(B, L + 1)``
    s_per_weight: cython.const[cython.double][:, ::1]  # shape ``(B, E)``
    fixed_s: cython.const[cython.double][:, ::1]  # shape ``(B, E)``
    # Shape ``(B,)``. Lower bound of the term in any chain.
    least_s: cython.const[cython.double][::1]


@cython.ccall
def fill_least_values(
    limits_s: cython.const[cython.double][::1],
    num_later: cython.longlong,
    programme: ProgrammeViews,
    scratch: ScratchViews,
    terms: StepEndViews,
    behind_s: cython.double[:, ::1],
    least_s: cython.double[::1],
) -> None:
    """Compute, per option, a lower bound on the value, step end included, of chains that use it.

    The cheapest sums from state 0 come from `cheapest_chain`; those to the end are added here. Only
    states and layer counts of chains within the limits are visited.

    Args:
        limits_s: Shape ``(3,)``. Least and largest bottleneck of a chain, and largest sum of its
            stages and cuts.
        num_later: Micro-batches after the first.
        programme: The problem.
        scratch: Overwritten.
        terms: Step-end terms of the options.
        behind_s: Shape ``(R, L + 1)``, infinite. Overwritten: the cheapest sums to the end.
        least_s: Shape ``(E,)``, infinite. Overwritten, in the order of the programme's options;
            infinite if no chain is within the limits.
    """
    earliest: cython.longlong
    start: cython.longlong
    sum_s: cython.double
    if cheapest_chain(limits_s[1], programme, scratch)[2] == 0:
        return
    num_layers = programme.time_prefix_s.shape[1] - 1
    for final in range(programme.is_final.shape[0]):
        if programme.is_final[final]:
            behind_s[final, num_layers] = 0.0
    for option in range(programme.option_to.shape[0] - 1, -1, -1):
        state, to_state = programme.option_from[option], programme.option_to[option]
        low, high = scratch.low[state], scratch.high[state]
        for end in range(max(scratch.low[to_state], low + 1), scratch.high[to_state] + 1):
            rest_s = behind_s[to_state, end]
            if rest_s + scratch.cost_s[to_state, end] > limits_s[2]:
                continue
            earliest = max(low, _earliest(option, end, programme, scratch))
            for start in range(min(high, programme.latest_start[end]), earliest - 1, -1):
                sum_s, bottleneck_s = _stage_s(option, start, end, programme)
                sum_s += rest_s
                own_s = scratch.cost_s[state, start]
                if bottleneck_s > limits_s[1] or own_s + sum_s > limits_s[2]:
                    continue
                behind_s[state, start] = min(behind_s[state, start], sum_s)
                sum_s += own_s + num_later * max(bottleneck_s, limits_s[0])
                if sum_s < least_s[option]:
                    sum_s += _terms_s(option, start, end, terms)
                    least_s[option] = min(least_s[option], sum_s)


@cython.cfunc
def _earliest(
    option: cython.longlong, end: cython.longlong, programme: ProgrammeViews, scratch: ScratchViews
) -> cython.longlong:
    """Return the earliest start of a stage that memory and cap allow."""
    by_memory = programme.earliest_start[programme.option_memory[option], end]
    return max(by_memory, scratch.admissible[programme.option_class[option], end])


@cython.cfunc
def _stage_s(
    option: cython.longlong, start: cython.longlong, end: cython.longlong, programme: ProgrammeViews
) -> tuple[cython.double, cython.double]:
    """Return a stage's share of the sum, and its bottleneck time."""
    row = programme.option_class[option]
    prefix_s = programme.time_prefix_s[programme.class_time[row]]
    took_s = prefix_s[end] - prefix_s[start] + programme.class_overhead_s[row]
    cut_s = programme.cut_time_s[programme.option_cut[option], start]
    sum_s = took_s + cut_s + programme.option_fixed_s[option]
    return sum_s, _bottleneck_s(row, start, end, programme)


@cython.cfunc
def _terms_s(
    option: cython.longlong, start: cython.longlong, end: cython.longlong, terms: StepEndViews
) -> cython.double:
    """Return a lower bound on the step end of a chain with this stage."""
    sum_s: cython.double = 0.0
    for term in range(terms.least_s.shape[0]):
        weight = terms.weight_prefix[term, end] - terms.weight_prefix[term, start]
        own_s = terms.fixed_s[term, option] + terms.s_per_weight[term, option] * weight
        sum_s += max(own_s, terms.least_s[term])
    return sum_s
