"""Compiled kernels that choose the operators to recompute.

Operators of one layer form a run ``[i, j]`` if all of them are recomputed and their neighbours are
not. A run repeats the forward pass of its ``j - i + 1`` operators and saves the held bytes of the
first ``j - i``: an operator's result may be dropped only if its successor, which reads it, is
recomputed too. During its backward pass, a run holds once all that it saved: its peak.
`support.operator_oracle` has the readable version, which tries every set of operators.
"""

from dataclasses import dataclass

import cython
import numpy as np

from amp_ray.arrays import FloatArray, IntArray

INF = cython.declare(cython.double, float("inf"))
FREE_PARTS = cython.declare(
    cython.longlong, 12
)  # of each kind in a stage; other parts are fixed at the best relaxed pattern


@cython.cfunc
def _is_better(
    more_s: cython.double, more: cython.double, s_per_byte: cython.double
) -> cython.bint:
    """Return whether the extra seconds are worth the extra saved bytes."""
    if s_per_byte == INF:
        return more > 0.0 or (more == 0.0 and more_s < 0.0)
    return more_s < s_per_byte * more


@cython.cfunc
def _stable_order(values: cython.const[cython.double][:]) -> cython.longlong[::1]:
    """Return the indices that sort values in ascending order; equal values keep their order."""
    middle: cython.longlong
    high: cython.longlong
    low: cython.longlong = 0
    size = values.shape[0]
    order: cython.longlong[::1] = np.arange(size)
    merged: cython.longlong[::1] = np.empty(size, np.int64)
    width = 1
    while width < size:
        low = 0
        while low < size:
            middle, high = min(low + width, size), min(low + 2 * width, size)
            _merge(values, order, merged, low, middle, high)
            low += 2 * width
        order, merged = merged, order
        width *= 2
    return order


@cython.cfunc
def _merge(
    values: cython.const[cython.double][:],
    order: cython.const[cython.longlong][::1],
    merged: cython.longlong[::1],
    low: cython.longlong,
    middle: cython.longlong,
    high: cython.longlong,
) -> None:
    """Merge two sorted parts of an order: ``[low, middle)`` and ``[middle, high)``."""
    low_index, high_index = low, middle
    for place in range(low, high):
        if high_index == high or (
            low_index < middle and values[order[low_index]] <= values[order[high_index]]
        ):
            merged[place] = order[low_index]
            low_index += 1
        else:
            merged[place] = order[high_index]
            high_index += 1


@cython.cfunc
def _cheapest_patterns(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    s_per_byte: cython.double,
    most: cython.double,
    best: cython.double[:, ::1],
) -> None:
    """Fill, per first operator, the least Lagrangian of the patterns for the rest of a layer.

    Args:
        cost_s: Shape ``(m,)``. Forward time of each operator.
        held: Shape ``(m,)``. Bytes.
        s_per_byte: Price of a byte: seconds that one saved byte is worth.
        most: Largest peak of a run.
        best: Shape ``(m + 2, 2)``. Overwritten: seconds and saved bytes of the operators from ``i``
            on.
    """
    size = cost_s.shape[0]
    for place in range(size, best.shape[0]):
        best[place, 0] = best[place, 1] = 0.0
    for first in range(size - 1, -1, -1):
        best[first, 0], best[first, 1] = best[first + 1, 0], best[first + 1, 1]
        run_s, saved = cost_s[first], 0.0
        for last in range(first + 1, size):
            run_s += cost_s[last]
            saved += held[last - 1]
            if saved > most:
                break
            seconds, total = run_s + best[last + 2, 0], saved + best[last + 2, 1]
            if _is_better(seconds - best[first, 0], total - best[first, 1], s_per_byte):
                best[first, 0], best[first, 1] = seconds, total


@cython.cfunc
def _cheapest_heads(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    s_per_byte: cython.double,
    most: cython.double,
    best: cython.double[:, ::1],
) -> None:
    """Fill the mirror image: ``best[k]`` for the first ``k`` operators, shape ``(m + 1, 2)``."""
    size = cost_s.shape[0]
    best[0, 0] = best[0, 1] = 0.0
    for end in range(1, size + 1):
        best[end, 0], best[end, 1] = best[end - 1, 0], best[end - 1, 1]
        _offer_last_runs(cost_s, held, end, s_per_byte, most, best)


@cython.cfunc
def _offer_last_runs(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    end: cython.Py_ssize_t,
    s_per_byte: cython.double,
    most: cython.double,
    best: cython.double[:, ::1],
) -> None:
    """Improve ``best[end]`` by runs that end with operator ``end - 1``."""
    run_s, saved = cost_s[end - 1], 0.0
    for first in range(end - 2, -1, -1):
        run_s += cost_s[first]
        saved += held[first]
        if saved > most:
            return
        seconds, total = run_s, saved
        if first >= 1:
            seconds += best[first - 1, 0]
            total += best[first - 1, 1]
        if _is_better(seconds - best[end, 0], total - best[end, 1], s_per_byte):
            best[end, 0], best[end, 1] = seconds, total


@cython.cfunc
def _add_slopes(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    most: cython.double,
    slopes: cython.double[::1],
    size: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Append the slopes of the lower hull of (saved, seconds) of one layer's patterns."""
    best: cython.double[:, ::1] = np.zeros((cost_s.shape[0] + 2, 2))
    _cheapest_patterns(cost_s, held, INF, most, best)
    stack: cython.double[:, ::1] = np.empty((2 * cost_s.shape[0] + 64, 4))
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0.0, 0.0, best[0, 0], best[0, 1]
    depth = 1
    while depth > 0 and size < slopes.shape[0]:
        depth -= 1
        low_s, low = stack[depth, 0], stack[depth, 1]
        high_s, high = stack[depth, 2], stack[depth, 3]
        if high <= low:
            continue
        slope = (high_s - low_s) / (high - low)
        _cheapest_patterns(cost_s, held, slope, most, best)
        middle_s, middle = best[0, 0], best[0, 1]
        below = (middle_s - slope * middle) < (low_s - slope * low) * (1 - 1e-12) - 1e-18
        if below and low < middle < high and depth + 2 <= stack.shape[0]:
            stack[depth, 0], stack[depth, 1] = low_s, low
            stack[depth, 2], stack[depth, 3] = middle_s, middle
            stack[depth + 1, 0], stack[depth + 1, 1] = middle_s, middle
            stack[depth + 1, 2], stack[depth + 1, 3] = high_s, high
            depth += 2
        else:
            slopes[size] = slope
            size += 1
    return size


@cython.ccall
def fill_levels(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    begin: cython.const[cython.longlong][::1],
    most: cython.const[cython.double][::1],
    levels: cython.double[:, ::1],
) -> None:
    """Choose, per largest peak, the prices of a saved byte to try: slopes of the layers' hulls.

    Args:
        cost_s: Shape ``(O,)``. Forward times of the operators of all kinds of layers, kind after
            kind.
        held: Shape ``(O,)``.
        begin: Shape ``(K + 1,)``. Where each kind of layer begins.
        most: Shape ``(P,)``. Largest peaks.
        levels: Shape ``(P, N)``. Overwritten, in ascending order; the last one is infinite.
    """
    size: cython.Py_ssize_t
    kept: cython.Py_ssize_t
    num_levels = levels.shape[1]
    slopes: cython.double[::1] = np.empty(64 * begin.shape[0])
    chosen: cython.double[::1] = np.empty(64 * begin.shape[0])
    for peak in range(most.shape[0]):
        size, count = 0, 0
        for kind in range(begin.shape[0] - 1):
            first, end = begin[kind], begin[kind + 1]
            size = _add_slopes(cost_s[first:end], held[first:end], most[peak], slopes, size)
        order = _stable_order(slopes[:size])
        for place in range(size):
            if count == 0 or slopes[order[place]] > chosen[count - 1]:
                chosen[count] = slopes[order[place]]
                count += 1
        for level in range(num_levels):
            levels[peak, level] = INF if level else 0.0
        kept = min(count, num_levels - 2)
        for level in range(kept):
            # All slopes if they fit, otherwise evenly spread ones.
            index = level if count == kept else (level * (count - 1)) // (kept - 1)
            levels[peak, level + 1] = chosen[index]


@cython.ccall
def fill_relaxation(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    begin: cython.const[cython.longlong][::1],
    free_end: cython.const[cython.uchar][::1],
    most: cython.const[cython.double][::1],
    levels: cython.const[cython.double][:, ::1],
    rest: cython.double[:, :, :, ::1],
    head: cython.double[:, :, :, ::1],
) -> None:
    """Fill the least Lagrangian of every part of every kind of layer.

    Args:
        cost_s: Shape ``(O,)``.
        held: Shape ``(O,)``.
        begin: Shape ``(K + 1,)``.
        free_end: Shape ``(O,)``. Whether a run that ends a stage after this operator has no peak.
        most: Shape ``(P,)``.
        levels: Shape ``(P, N)``.
        rest: Shape ``(P, N, O, 2)``. Overwritten: (seconds, saved bytes) from an operator to the
            end of its layer.
        head: Shape ``(P, N, O, 2)``. Overwritten: (seconds, saved bytes) from the begin of a layer
            to an operator that ends the stage.
    """
    largest: cython.longlong = 0
    for kind in range(begin.shape[0] - 1):
        largest = max(largest, begin[kind + 1] - begin[kind])
    behind: cython.double[:, ::1] = np.zeros((largest + 2, 2))
    before: cython.double[:, ::1] = np.zeros((largest + 2, 2))
    last: cython.double[:, ::1] = np.zeros((largest + 2, 2))
    for peak in range(most.shape[0]):
        for level in range(levels.shape[1]):
            worth = levels[peak, level]
            for kind in range(begin.shape[0] - 1):
                first, end = begin[kind], begin[kind + 1]
                layer_s, layer = cost_s[first:end], held[first:end]
                _cheapest_patterns(layer_s, layer, worth, most[peak], behind)
                _cheapest_heads(layer_s, layer, worth, most[peak], before)
                for place in range(first, end):
                    size = place - first + 1
                    for entry in range(0 if free_end[place] else size, size + 1):
                        last[entry, 0], last[entry, 1] = before[entry, 0], before[entry, 1]
                    if free_end[place]:
                        _offer_last_runs(layer_s, layer, size, worth, INF, last)
                    for part in range(2):
                        rest[peak, level, place, part] = behind[place - first, part]
                        head[peak, level, place, part] = last[size, part]


@cython.cclass
@dataclass(eq=False, repr=False)
class Relaxation:
    """Tables of `relaxed_s`: R rows, P peaks, N levels, O operators of all kinds, Y layers."""

    # Shape ``(P + 1,)``. Level to begin with for each peak, then the peak to begin with;
    # overwritten with the best ones.
    hints: cython.longlong[::1]
    # Shape ``(R, P)``. Smallest peak of the patterns that each row of ``levels`` allows.
    charged: cython.const[cython.double][:, ::1]
    levels: cython.const[cython.double][:, :, ::1]  # shape ``(R, P, N)``
    rest: cython.const[cython.double][:, :, :, :, ::1]  # shape ``(R, P, N, O, 2)``
    # Shape ``(R, P, N, Y + 1, 2)``. Prefix sums over whole layers.
    layers: cython.const[cython.double][:, :, :, :, ::1]
    head: cython.const[cython.double][:, :, :, :, ::1]  # shape ``(R, P, N, O, 2)``


@cython.cfunc
def relaxed_s(
    excess: cython.double,
    in_flight: cython.double,
    known_s: cython.double,
    tables: Relaxation,
    row: cython.Py_ssize_t,
    where: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
) -> cython.double:
    """Return a lower bound on the seconds of recompute that fit a stage into its memory.

    The peak that was best in the last call is tried first; its bound rules out most other peaks.
    Larger peaks are skipped from the first one for which the bound of the last row, with that peak
    charged, is no better. Smaller peaks are skipped from the first one whose bound, with the
    smallest peak charged, is no better.

    Args:
        excess: Bytes above the limit without recompute, leaving out peaks.
        in_flight: Micro-batches that the stage holds at once.
        known_s: Search only for a bound below it.
        tables: Peaks and prices to try, and what they cost.
        row: Row of the tables.
        where: Index of the first operator, or -1; first whole layer and end of the whole layers;
            index of the last operator, or -1. A -1 means that there is no partial layer at that
            end.

    Returns:
        Seconds; infinite if no pattern fits in less than ``known_s``.
    """
    likely: cython.longlong
    num_peaks = tables.charged.shape[1]
    last = num_peaks - 1
    least = (excess + tables.charged[row, 0]) / in_flight
    if least <= 0.0:
        return 0.0
    while tables.charged[row, last] == INF:
        last -= 1
    likely = min(tables.hints[num_peaks], last)
    need = (excess + tables.charged[row, likely]) / in_flight
    least_s = _least_of_peak(likely, need, known_s * (1 + 1e-12), tables, row, where)
    for peak in range(likely + 1, last + 1):
        need = (excess + tables.charged[row, peak]) / in_flight
        if _lagrangian_s(last, tables.hints[last], need, tables, row, where) >= least_s:
            break
        seconds = _least_of_peak(peak, need, least_s, tables, row, where)
        if seconds < least_s:
            least_s = seconds
            tables.hints[num_peaks] = peak
    for peak in range(likely - 1, -1, -1):
        if _lagrangian_s(peak, tables.hints[peak], least, tables, row, where) >= least_s:
            break
        need = (excess + tables.charged[row, peak]) / in_flight
        seconds = _least_of_peak(peak, need, least_s, tables, row, where)
        if seconds < least_s:
            least_s = seconds
            tables.hints[num_peaks] = peak
    return least_s if least_s < known_s else INF


@cython.cfunc
def _least_of_peak(
    peak: cython.Py_ssize_t,
    need: cython.double,
    known_s: cython.double,
    tables: Relaxation,
    row: cython.Py_ssize_t,
    where: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
) -> cython.double:
    """Return the bound of one group of peaks, or ``known_s`` if the bound is not below it."""
    bound_s: cython.double
    level, num_levels = tables.hints[peak], tables.levels.shape[2]
    if _lagrangian_s(peak, level, need, tables, row, where) >= known_s:
        return known_s
    # Every level gives a bound; the best is at the last level that saves too little or the one
    # after.
    while level > 0 and _pattern(peak, level - 1, tables, row, where)[1] >= need:
        level -= 1
    while level < num_levels and _pattern(peak, level, tables, row, where)[1] < need:
        level += 1
    tables.hints[peak] = level - 1 if 0 < level < num_levels else min(level, num_levels - 1)
    if level == num_levels:
        return known_s
    bound_s = _lagrangian_s(peak, level, need, tables, row, where)
    if level > 0:
        bound_s = max(bound_s, _lagrangian_s(peak, level - 1, need, tables, row, where))
    return min(known_s, bound_s)


@cython.cfunc
@cython.inline
def _lagrangian_s(
    peak: cython.Py_ssize_t,
    level: cython.Py_ssize_t,
    need: cython.double,
    tables: Relaxation,
    row: cython.Py_ssize_t,
    where: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
) -> cython.double:
    """Return the bound of one level; infinite if no pattern saves enough."""
    seconds, saved = _pattern(peak, level, tables, row, where)
    if tables.levels[row, peak, level] < INF:
        return seconds + tables.levels[row, peak, level] * (need - saved)
    return INF if saved < need else 0.0


@cython.cfunc
@cython.inline
def _pattern(
    peak: cython.Py_ssize_t,
    level: cython.Py_ssize_t,
    tables: Relaxation,
    row: cython.Py_ssize_t,
    where: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
) -> tuple[cython.double, cython.double]:
    """Return seconds and saved bytes of a stage's patterns with the least Lagrangian."""
    seconds: cython.double
    saved: cython.double
    first, low, high, last = where
    seconds = tables.layers[row, peak, level, high, 0] - tables.layers[row, peak, level, low, 0]
    saved = tables.layers[row, peak, level, high, 1] - tables.layers[row, peak, level, low, 1]
    if first >= 0:
        seconds += tables.rest[row, peak, level, first, 0]
        saved += tables.rest[row, peak, level, first, 1]
    if last >= 0:
        seconds += tables.head[row, peak, level, last, 0]
        saved += tables.head[row, peak, level, last, 1]
    return seconds, saved


def pattern_front(
    cost_s: FloatArray, held: FloatArray, end_extra: cython.double, most_kept: cython.longlong
) -> tuple[FloatArray, IntArray, bool]:
    """List the undominated patterns of a part of a layer, by seconds, bytes and peak.

    Args:
        cost_s: Shape ``(m,)``, ``m`` at most 62.
        held: Shape ``(m,)``.
        end_extra: Added to the peak of a run that ends the part; negative infinity for no peak.
        most_kept: Limit on the number of patterns; above it, evenly spread ones are kept.

    Returns:
        Shape ``(F, 3)``: seconds, saved bytes and peak, in ascending order of seconds; shape
        ``(F,)``: the recomputed operators, one bit each; and whether the list is complete.
    """
    size = len(cost_s)
    # Patterns of the operators from each one on, and their number
    fronts, masks = np.zeros((size + 2, most_kept, 3)), np.zeros((size + 2, most_kept), np.int64)
    lengths = np.ones(size + 2, np.int64)
    complete = _fill_front(cost_s, held, end_extra, fronts, masks, lengths)
    return fronts[0, : lengths[0]].copy(), masks[0, : lengths[0]].copy(), complete


@cython.cfunc
def _fill_front(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    end_extra: cython.double,
    fronts: cython.double[:, :, ::1],
    masks: cython.longlong[:, ::1],
    lengths: cython.longlong[::1],
) -> cython.bint:
    """Write the patterns of `pattern_front`; return whether the lists are complete."""
    length: cython.longlong
    most: cython.longlong
    size, most_kept = cost_s.shape[0], masks.shape[1]
    complete = True
    for first in range(size - 1, -1, -1):
        most = lengths[first + 1]
        for last in range(first + 1, size):
            most += lengths[last + 2]
        points: cython.double[:, ::1] = np.empty((most, 3))
        bits: cython.longlong[::1] = np.empty(most, np.int64)
        _fill_points(cost_s, held, end_extra, first, fronts, masks, lengths, points, bits)
        kept = _undominated(points)
        length = min(kept.shape[0], most_kept)
        complete = complete and length == kept.shape[0]
        for index in range(length):
            # All patterns if they fit, otherwise evenly spread ones.
            spread = index
            if length < kept.shape[0]:
                spread = index * (kept.shape[0] - 1) // (most_kept - 1)
            masks[first, index] = bits[kept[spread]]
            for figure in range(3):
                fronts[first, index, figure] = points[kept[spread], figure]
        lengths[first] = length
    return complete


@cython.cfunc
def _fill_points(
    cost_s: cython.const[cython.double][::1],
    held: cython.const[cython.double][::1],
    end_extra: cython.double,
    first: cython.Py_ssize_t,
    fronts: cython.const[cython.double][:, :, ::1],
    masks: cython.const[cython.longlong][:, ::1],
    lengths: cython.const[cython.longlong][::1],
    points: cython.double[:, ::1],
    bits: cython.longlong[::1],
) -> None:
    """Write the patterns of the operators from ``first`` on: each run with all that may follow."""
    one: cython.longlong = 1
    mask: cython.longlong = 0
    run_s: cython.double = 0.0
    saved: cython.double = 0.0
    peak: cython.double = 0.0
    count, size = 0, cost_s.shape[0]
    for last in range(first, size):
        behind = last + 2 if last > first else first + 1  # a single operator is no run
        if last == first + 1:
            run_s, mask = cost_s[first], one << first
        if last > first:
            run_s += cost_s[last]
            saved += held[last - 1]
            mask |= one << last
            peak = max(saved + end_extra, 0.0) if last == size - 1 else saved
        for index in range(lengths[behind]):
            points[count, 0] = run_s + fronts[behind, index, 0]
            points[count, 1] = saved + fronts[behind, index, 1]
            points[count, 2] = max(peak, fronts[behind, index, 2])
            bits[count] = mask | masks[behind, index]
            count += 1


@cython.cfunc
def _undominated(points: cython.const[cython.double][:, ::1]) -> cython.longlong[::1]:
    """Return indices of undominated points, ascending in seconds, then in the other two."""
    kept: cython.longlong[::1] = np.empty(points.shape[0], np.int64)
    size: cython.Py_ssize_t = 0
    order = _stable_order(points[:, 0])
    for step in range(points.shape[0]):
        index, place = order[step], size
        if _is_dominated(points, kept, size, index):
            continue
        # Among equal seconds, a later point may dominate an earlier one.
        while place > 0 and points[kept[place - 1], 0] == points[index, 0]:
            place -= 1
        size = _without_beaten(points, kept, place, size, index)
        kept[size] = index
        size += 1
    return kept[:size]


@cython.cfunc
def _is_dominated(
    points: cython.const[cython.double][:, ::1],
    kept: cython.const[cython.longlong][::1],
    size: cython.Py_ssize_t,
    index: cython.Py_ssize_t,
) -> cython.bint:
    """Return whether any of the first kept points saves as much with as small a peak."""
    for entry in range(size):
        other = kept[entry]
        if points[other, 1] >= points[index, 1] and points[other, 2] <= points[index, 2]:
            return True
    return False


@cython.cfunc
def _without_beaten(
    points: cython.const[cython.double][:, ::1],
    kept: cython.longlong[::1],
    place: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
    index: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Drop the points from ``place`` on that are as slow as ``index`` and dominated by it."""
    num_kept = place
    for entry in range(place, size):
        other = kept[entry]
        if points[index, 1] >= points[other, 1] and points[index, 2] <= points[other, 2]:
            continue
        kept[num_kept] = other
        num_kept += 1
    return num_kept


@cython.cclass
@dataclass(eq=False, repr=False)
class _Parts:
    """The parts of a stage, K of them, with U lists of F patterns in all, and arrays to write."""

    part: cython.const[cython.longlong][
        ::1
    ]  # shape ``(K,)``. Index of each part's list of patterns.
    begin: cython.const[cython.longlong][
        ::1
    ]  # shape ``(U + 1,)``. Index at which each list begins.
    points: cython.const[cython.double][:, ::1]  # shape ``(F, 3)``. Seconds, saved bytes, peak.
    allowed: cython.uchar[::1]  # shape ``(F,)``. Whether a pattern's peak is within the limit.
    reduced: cython.double[::1]  # shape ``(F,)``. See `_reduce`.
    least: cython.double[:, ::1]  # shape ``(U, 2)``. See `_least`.
    # Shape ``(U, 2)``. Patterns with the least Lagrangian that save the fewest and the most bytes.
    ends: cython.longlong[:, ::1]
    fixed: cython.longlong[::1]  # shape ``(K,)``. See `_fix`.
    members: cython.longlong[::1]  # shape ``(U,)``. Parts with each list.
    picks: cython.longlong[::1]  # shape ``(K,)``. The pattern of each part in its list.


def cheapest_recompute(
    part: IntArray,
    begin: IntArray,
    points: FloatArray,
    peaks: FloatArray,
    excess: cython.double,
    in_flight: cython.double,
    most_states: cython.longlong,
    gap_s: cython.double,
) -> tuple[float, float, IntArray]:
    """Choose a pattern for each part of a stage, so that it fits into memory in the least time.

    Args:
        part: Shape ``(K,)``. Index of each part's list of patterns.
        begin: Shape ``(U + 1,)``. Index at which each list begins.
        points: Shape ``(F, 3)``. Seconds, saved bytes, peak.
        peaks: Distinct peaks of the patterns, ascending.
        excess: Bytes above the limit without recompute, leaving out peaks.
        in_flight: Micro-batches that the stage holds at once.
        most_states: Number of combinations that are kept after each part, best first.
        gap_s: The search ends where no choice saves more seconds than this.

    Returns:
        Seconds, infinite if no choice fits; a lower bound on the seconds of choices that were left
        out, infinite if there are none; and shape ``(K,)``, the pattern of each part.
    """
    num_parts, num_lists, num_points = len(part), len(begin) - 1, len(points)
    chosen = np.zeros(num_parts, np.int64)
    parts = _Parts(
        part=part,
        begin=begin,
        points=points,
        allowed=np.zeros(num_points, np.bool_),
        reduced=np.empty(num_points),
        least=np.empty((num_lists, 2)),
        ends=np.empty((num_lists, 2), np.int64),
        fixed=np.empty(num_parts, np.int64),
        members=np.empty(num_lists, np.int64),
        picks=np.empty(num_parts, np.int64),
    )
    bounds = np.empty((len(peaks), 2))
    best_s, cut_s = _search(parts, peaks, excess, in_flight, most_states, gap_s, bounds, chosen)
    return best_s, cut_s, chosen


@cython.cfunc
def _search(
    parts: _Parts,
    peaks: cython.const[cython.double][::1],
    excess: cython.double,
    in_flight: cython.double,
    most_states: cython.longlong,
    gap_s: cython.double,
    bounds: cython.double[:, ::1],
    chosen: cython.longlong[::1],
) -> tuple[cython.double, cython.double]:
    """Write the patterns of `cheapest_recompute`; return its seconds and its bound.

    ``bounds``, shape ``(num_peaks, 2)``, gets the seconds that a byte is worth and the least
    seconds with each peak.
    """
    best_s: cython.double = INF
    cut_s: cython.double = INF
    lost_s: cython.double
    all_free: cython.bint
    for peak in range(peaks.shape[0]):
        need = (excess + peaks[peak]) / in_flight
        _allow(parts, peaks[peak])
        bounds[peak, 0], bounds[peak, 1] = _best_worth(parts, need)
    order = _stable_order(bounds[:, 1])
    for step in range(peaks.shape[0]):
        peak = order[step]
        worth, bound_s = bounds[peak, 0], bounds[peak, 1]
        if bound_s >= best_s - gap_s:
            cut_s = min(cut_s, bound_s)
            break
        need = (excess + peaks[peak]) / in_flight
        _allow(parts, peaks[peak])
        _find_ends(parts, worth)
        seconds = _rounded_s(parts, need)
        if seconds < best_s:
            best_s = seconds
            chosen[:] = parts.picks
        all_free = _fix(parts, need)
        _reduce(parts, worth)
        lost_s = INF
        for trial in range(3):
            states = 32 if trial == 0 else (256 if trial == 1 else most_states)
            slack_s = (best_s - gap_s - bound_s) * (1 + 1e-9) + 1e-15
            seconds, dropped_s = _combined_s(parts, need, slack_s, states)
            lost_s = bound_s + dropped_s
            if seconds < best_s:
                best_s = seconds
                chosen[:] = parts.picks
            if lost_s >= best_s - gap_s:
                break
        cut_s = min(cut_s, lost_s, best_s - gap_s, INF if all_free else bound_s)
    return best_s, cut_s


@cython.cfunc
def _allow(parts: _Parts, peak: cython.double) -> None:
    """Allow the patterns whose peak is within a limit."""
    for index in range(parts.points.shape[0]):
        parts.allowed[index] = parts.points[index, 2] <= peak


@cython.cfunc
def _least(parts: _Parts, worth: cython.double) -> tuple[cython.double, cython.double]:
    """Return seconds and saved bytes of the least Lagrangian; ties go to the larger saving."""
    seconds: cython.double = 0.0
    saved: cython.double = 0.0
    best: cython.longlong
    for which in range(parts.begin.shape[0] - 1):
        best = -1
        for index in range(parts.begin[which], parts.begin[which + 1]):
            if not parts.allowed[index]:
                continue
            if best < 0 or _is_better(
                parts.points[index, 0] - parts.points[best, 0],
                parts.points[index, 1] - parts.points[best, 1],
                worth,
            ):
                best = index
        parts.least[which, 0], parts.least[which, 1] = parts.points[best, 0], parts.points[best, 1]
    for step in range(parts.part.shape[0]):
        seconds += parts.least[parts.part[step], 0]
        saved += parts.least[parts.part[step], 1]
    return seconds, saved


@cython.cfunc
def _best_worth(parts: _Parts, need: cython.double) -> tuple[cython.double, cython.double]:
    """Return the multiplier (seconds per byte) of the highest Lagrangian bound, and the bound."""
    low_s: cython.double = 0.0
    low: cython.double = 0.0
    if need <= 0.0:
        return 0.0, 0.0
    high_s, high = _least(parts, INF)
    if high < need:
        return 0.0, INF
    while True:
        worth = (high_s - low_s) / (high - low)
        seconds, saved = _least(parts, worth)
        lower = (seconds - worth * saved) < (low_s - worth * low) - 1e-12 * low_s - 1e-18
        if not lower or not low < saved < high:
            return worth, max(0.0, (seconds + worth * (need - saved)) * (1 - 1e-12))
        if saved >= need:
            high_s, high = seconds, saved
        else:
            low_s, low = seconds, saved


@cython.cfunc
def _find_ends(parts: _Parts, worth: cython.double) -> None:
    """Fill the patterns with the least Lagrangian that save the fewest and the most bytes."""
    low: cython.longlong
    high: cython.longlong
    for which in range(parts.begin.shape[0] - 1):
        low, high, least_s = -1, -1, INF
        for index in range(parts.begin[which], parts.begin[which + 1]):
            if not parts.allowed[index]:
                continue
            seconds = parts.points[index, 0] - worth * parts.points[index, 1]
            slack_s = 1e-11 * parts.points[index, 0]
            if seconds < least_s - slack_s:
                low, high, least_s = index, index, seconds
            elif seconds <= least_s + slack_s:
                low = index if parts.points[index, 1] < parts.points[low, 1] else low
                high = index if parts.points[index, 1] > parts.points[high, 1] else high
        parts.ends[which, 0], parts.ends[which, 1] = low, high


@cython.cfunc
def _saved_by_fewest(parts: _Parts) -> cython.double:
    """Return the bytes that all parts save by the patterns that save the fewest."""
    saved: cython.double = 0.0
    for step in range(parts.part.shape[0]):
        saved += parts.points[parts.ends[parts.part[step], 0], 1]
    return saved


@cython.cfunc
def _rounded_s(parts: _Parts, need: cython.double) -> cython.double:
    """Choose among patterns with the least Lagrangian: those that save most, until it is enough.

    Returns:
        Seconds, infinite if all of them save too little.
    """
    seconds: cython.double = 0.0
    saved: cython.double = _saved_by_fewest(parts)
    for step in range(parts.part.shape[0]):
        which = parts.part[step]
        low, high = parts.ends[which, 0], parts.ends[which, 1]
        pick = high if saved < need else low
        saved += parts.points[pick, 1] - parts.points[low, 1]
        seconds += parts.points[pick, 0]
        parts.picks[step] = pick - parts.begin[which]
    return seconds if saved >= need else INF


@cython.cfunc
def _fix(parts: _Parts, need: cython.double) -> cython.bint:
    """If many parts are alike, fix most of them at a pattern with the least Lagrangian.

    ``fixed`` gets a pattern, or -1 for up to `FREE_PARTS` parts of each kind.

    Returns:
        Whether no part is fixed.
    """
    all_free: cython.bint = True
    enough: cython.double
    num_high: cython.longlong
    saved: cython.double = _saved_by_fewest(parts)
    parts.members[:] = 0
    for step in range(parts.part.shape[0]):
        parts.fixed[step] = -1
        parts.members[parts.part[step]] += 1
    for which in range(parts.begin.shape[0] - 1):
        low, high = parts.ends[which, 0], parts.ends[which, 1]
        more = parts.points[high, 1] - parts.points[low, 1]
        num_high = 0
        if more > 0.0 and need > saved:
            enough = min(cython.cast(cython.double, parts.members[which]), (need - saved) / more)
            num_high = cython.cast(cython.longlong, enough)
            saved += num_high * more
        num_fixed = parts.members[which] - FREE_PARTS
        num_high = min(max(num_high - FREE_PARTS // 2, 0), num_fixed)
        seen = 0
        for step in range(parts.part.shape[0]):
            if parts.part[step] == which and seen < num_fixed:
                parts.fixed[step] = high if seen < num_high else low
                all_free = False
                seen += 1
    return all_free


@cython.cfunc
def _combined_s(
    parts: _Parts, need: cython.double, slack_s: cython.double, most_states: cython.longlong
) -> tuple[cython.double, cython.double]:
    """Combine patterns part by part; drop combinations too far above the bound to matter.

    Returns:
        Seconds of the best combination, whose patterns are then in ``picks``; infinite without one.
        And how far the best dropped one is above the bound.
    """
    lost_s: cython.double = INF
    dropped_s: cython.double
    num_free, num_parts = 0, parts.part.shape[0]
    # Seconds, saved bytes, reduced seconds
    states: cython.double[:, ::1] = np.zeros((most_states, 3))
    for step in range(num_parts):
        parts.picks[step] = parts.fixed[step] - parts.begin[parts.part[step]]
        if parts.fixed[step] >= 0:
            states[0, 0] += parts.points[parts.fixed[step], 0]
            states[0, 1] += parts.points[parts.fixed[step], 1]
        else:
            num_free += 1
    # Per new state: the previous state and the pattern added to it
    origins: cython.longlong[:, :, ::1] = np.empty((num_free, most_states, 2), np.int64)
    grown, num_states = 0, cython.cast(cython.Py_ssize_t, 1)
    for step in range(num_parts):
        if parts.fixed[step] < 0:
            which = parts.part[step]
            num_states, dropped_s = _extend(
                parts, which, slack_s, states, num_states, origins[grown]
            )
            grown += 1
            lost_s = min(lost_s, dropped_s)
    final: cython.longlong = -1
    least_s = INF
    for index in range(num_states):
        if states[index, 1] >= need and states[index, 0] < least_s:
            final, least_s = index, states[index, 0]
    for step in range(num_parts - 1, -1, -1):
        if final >= 0 and parts.fixed[step] < 0:
            grown -= 1
            parts.picks[step] = origins[grown, final, 1]
            final = origins[grown, final, 0]
    return least_s, lost_s


@cython.cfunc
def _reduce(parts: _Parts, worth: cython.double) -> None:
    """Fill the excess of each pattern's Lagrangian over the least one of its part."""
    least_s: cython.double
    for which in range(parts.begin.shape[0] - 1):
        least_s = INF
        for index in range(parts.begin[which], parts.begin[which + 1]):
            parts.reduced[index] = INF
            if parts.allowed[index]:
                parts.reduced[index] = parts.points[index, 0] - worth * parts.points[index, 1]
                least_s = min(least_s, parts.reduced[index])
        for index in range(parts.begin[which], parts.begin[which + 1]):
            parts.reduced[index] -= least_s


@cython.cfunc
def _extend(
    parts: _Parts,
    which: cython.Py_ssize_t,
    slack_s: cython.double,
    states: cython.double[:, ::1],
    num_states: cython.Py_ssize_t,
    origins: cython.longlong[:, ::1],
) -> tuple[cython.Py_ssize_t, cython.double]:
    """Add one part to every combination; keep undominated ones and, if too many, the best.

    Args:
        parts: The parts.
        which: The part's list of patterns.
        slack_s: Combinations further above the bound are dropped.
        states: Shape ``(most_states, 3)``. Seconds, saved bytes, and seconds above the bound.
            Overwritten with the new combinations.
        num_states: Number of combinations.
        origins: Shape ``(most_states, 2)``. Overwritten: the previous state and the pattern of each
            new state.

    Returns:
        Number of new states, and how far the best dropped one is above the bound.
    """
    begin, end = parts.begin[which], parts.begin[which + 1]
    num_useful = 0
    for index in range(begin, end):
        if parts.reduced[index] <= slack_s and parts.reduced[index] < INF:
            num_useful += 1
    grown: cython.double[:, ::1] = np.empty((num_states * num_useful, 3))
    made: cython.longlong[:, ::1] = np.empty((num_states * num_useful, 2), np.int64)
    size = 0
    for state in range(num_states):
        for index in range(begin, end):
            total_s = states[state, 2] + parts.reduced[index]
            if total_s <= slack_s and total_s < INF:
                grown[size, 0] = states[state, 0] + parts.points[index, 0]
                grown[size, 1] = states[state, 1] + parts.points[index, 1]
                grown[size, 2] = total_s
                made[size, 0], made[size, 1] = state, index - begin
                size += 1
    kept = _most_saving(grown, size)
    dropped_s = _drop_worst(grown, kept, origins.shape[0])
    num_kept = min(kept.shape[0], origins.shape[0])
    for index in range(num_kept):
        origins[index, 0], origins[index, 1] = made[kept[index], 0], made[kept[index], 1]
        for figure in range(3):
            states[index, figure] = grown[kept[index], figure]
    return num_kept, dropped_s


@cython.cfunc
def _most_saving(
    grown: cython.const[cython.double][:, ::1], size: cython.Py_ssize_t
) -> cython.longlong[::1]:
    """Return the first states that no faster one beats in saved bytes, ascending in seconds."""
    kept: cython.longlong[::1] = np.empty(size, np.int64)
    count, most_saved = 0, -1.0
    order = _stable_order(grown[:size, 0])
    for step in range(size):
        index = order[step]
        if grown[index, 1] > most_saved:
            most_saved = grown[index, 1]
            kept[count] = index
            count += 1
    return kept[:count]


@cython.cfunc
def _drop_worst(
    grown: cython.const[cython.double][:, ::1], kept: cython.longlong[::1], most: cython.Py_ssize_t
) -> cython.double:
    """Move the ``most`` states least above the bound to the front; return the next one's excess."""
    size = kept.shape[0]
    if size <= most:
        return INF
    above_s: cython.double[::1] = np.empty(size)
    every: cython.longlong[::1] = np.empty(size, np.int64)
    for index in range(size):
        above_s[index], every[index] = grown[kept[index], 2], kept[index]
    order = _stable_order(above_s)
    for index in range(most):
        kept[index] = every[order[index]]
    return above_s[order[most]]
