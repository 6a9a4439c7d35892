"""Compiled kernels that choose the operators to recompute.

Operators of one layer form a run ``[i, j]`` if all of them are recomputed and their neighbours are
not. A run repeats the forward pass of its ``j - i + 1`` operators and saves the held bytes of the
first ``j - i``: an operator's result may be dropped only if its successor, which reads it, is
recomputed too. During its backward pass, a run holds once all that it saved: its peak.
`support.operator_oracle` has the readable version, which tries every set of operators.

Rows are copied and sorted by loops, because numba takes three times as long to compile numpy's own
functions: half a minute on the first run.
"""

from typing import Any

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.jit import kept, njit

FREE_PARTS = 12  # of each kind in a stage; other parts are fixed at the best relaxed pattern

INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True}
# Code without allocations need not count references to arrays, which would take most of its time.
PER_STAGE: dict[str, Any] = {**INNER, "_nrt": False}
INLINED: dict[str, Any] = {**PER_STAGE, "forceinline": True}


@njit(**PER_STAGE)
def _is_better(more_s: float, more: float, s_per_byte: float) -> bool:
    """Return whether the extra seconds are worth the extra saved bytes."""
    if s_per_byte == np.inf:
        return more > 0.0 or (more == 0.0 and more_s < 0.0)
    return more_s < s_per_byte * more


@njit(**INNER)
def _stable_order(values: FloatArray) -> IntArray:
    """Return the indices that sort values in ascending order; equal values keep their order."""
    order, merged = np.arange(values.size), np.empty(values.size, np.int64)
    width = 1
    while width < order.size:
        for low in range(0, order.size, 2 * width):
            middle, high = min(low + width, order.size), min(low + 2 * width, order.size)
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
        order, merged = merged, order
        width *= 2
    return order


@njit(**PER_STAGE)
def _cheapest_patterns(
    cost_s: FloatArray, held: FloatArray, s_per_byte: float, most: float, best: FloatArray
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
    size = cost_s.size
    for place in range(size, best.shape[0]):
        best[place, 0] = best[place, 1] = 0.0
    for first in range(size - 1, -1, -1):
        best[first, 0], best[first, 1] = best[first + 1, 0], best[first + 1, 1]
        run_s, saved = cost_s[first], 0.0
        for last in range(first + 1, size):
            run_s, saved = run_s + cost_s[last], saved + held[last - 1]
            if saved > most:
                break
            seconds, total = run_s + best[last + 2, 0], saved + best[last + 2, 1]
            if _is_better(seconds - best[first, 0], total - best[first, 1], s_per_byte):
                best[first, 0], best[first, 1] = seconds, total


@njit(**PER_STAGE)
def _cheapest_heads(
    cost_s: FloatArray, held: FloatArray, s_per_byte: float, most: float, best: FloatArray
) -> None:
    """Fill the mirror image: ``best[k]`` for the first ``k`` operators, shape ``(m + 1, 2)``."""
    size = cost_s.size
    best[0, 0] = best[0, 1] = 0.0
    for end in range(1, size + 1):
        best[end, 0], best[end, 1] = best[end - 1, 0], best[end - 1, 1]
        _offer_last_runs(cost_s, held, end, s_per_byte, most, best)


@njit(**PER_STAGE)
def _offer_last_runs(
    cost_s: FloatArray, held: FloatArray, end: int, s_per_byte: float, most: float, best: FloatArray
) -> None:
    """Improve ``best[end]`` by runs that end with operator ``end - 1``."""
    run_s, saved = cost_s[end - 1], 0.0
    for first in range(end - 2, -1, -1):
        run_s, saved = run_s + cost_s[first], saved + held[first]
        if saved > most:
            return
        seconds, total = run_s, saved
        if first >= 1:
            seconds, total = seconds + best[first - 1, 0], total + best[first - 1, 1]
        if _is_better(seconds - best[end, 0], total - best[end, 1], s_per_byte):
            best[end, 0], best[end, 1] = seconds, total


@njit(**INNER)
def _add_slopes(
    cost_s: FloatArray, held: FloatArray, most: float, slopes: FloatArray, size: int
) -> int:
    """Append the slopes of the lower hull of (saved, seconds) of one layer's patterns."""
    best = np.zeros((cost_s.size + 2, 2))
    _cheapest_patterns(cost_s, held, np.inf, most, best)
    stack = np.empty((2 * cost_s.size + 64, 4))
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0.0, 0.0, best[0, 0], best[0, 1]
    depth = 1
    while depth > 0 and size < slopes.size:
        depth -= 1
        low_s, low = stack[depth, 0], stack[depth, 1]
        high_s, high = stack[depth, 2], stack[depth, 3]
        if high <= low:
            continue
        slope = (high_s - low_s) / (high - low)
        _cheapest_patterns(cost_s, held, slope, most, best)
        middle_s, middle = best[0, 0], best[0, 1]
        below = (middle_s - slope * middle) < (low_s - slope * low) * (1 - 1e-12) - 1e-18
        if below and low < middle < high and depth + 2 <= len(stack):
            stack[depth, 0], stack[depth, 1] = low_s, low
            stack[depth, 2], stack[depth, 3] = middle_s, middle
            stack[depth + 1, 0], stack[depth + 1, 1] = middle_s, middle
            stack[depth + 1, 2], stack[depth + 1, 3] = high_s, high
            depth += 2
        else:
            slopes[size] = slope
            size += 1
    return size


@kept(nogil=True)
def fill_levels(
    cost_s: FloatArray, held: FloatArray, begin: IntArray, most: FloatArray, levels: FloatArray
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
    num_levels = levels.shape[1]
    slopes = np.empty(64 * begin.size)
    for peak in range(most.size):
        size = 0
        for kind in range(begin.size - 1):
            first, end = begin[kind], begin[kind + 1]
            size = _add_slopes(cost_s[first:end], held[first:end], most[peak], slopes, size)
        chosen, count = np.empty(size), 0
        for index in _stable_order(slopes[:size]):
            if count == 0 or slopes[index] > chosen[count - 1]:
                chosen[count] = slopes[index]
                count += 1
        for level in range(num_levels):
            levels[peak, level] = np.inf if level else 0.0
        kept = min(count, num_levels - 2)
        for level in range(kept):
            # All slopes if they fit, otherwise evenly spread ones.
            index = level if count == kept else (level * (count - 1)) // (kept - 1)
            levels[peak, level + 1] = chosen[index]


@kept(nogil=True)
def fill_relaxation(
    cost_s: FloatArray,
    held: FloatArray,
    begin: IntArray,
    free_end: BoolArray,
    most: FloatArray,
    levels: FloatArray,
    rest: FloatArray,
    head: FloatArray,
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
    largest = 0
    for kind in range(begin.size - 1):
        largest = max(largest, begin[kind + 1] - begin[kind])
    behind = np.zeros((largest + 2, 2))
    before, last = np.zeros_like(behind), np.zeros_like(behind)
    for peak in range(most.size):
        for level in range(levels.shape[1]):
            worth = levels[peak, level]
            for kind in range(begin.size - 1):
                first, end = begin[kind], begin[kind + 1]
                layer_s, layer = cost_s[first:end], held[first:end]
                _cheapest_patterns(layer_s, layer, worth, most[peak], behind)
                _cheapest_heads(layer_s, layer, worth, most[peak], before)
                for place in range(first, end):
                    size = place - first + 1
                    if free_end[place]:
                        for entry in range(size + 1):
                            last[entry, 0], last[entry, 1] = before[entry, 0], before[entry, 1]
                        _offer_last_runs(layer_s, layer, size, worth, np.inf, last)
                    ends = last if free_end[place] else before
                    for part in range(2):
                        rest[peak, level, place, part] = behind[place - first, part]
                        head[peak, level, place, part] = ends[size, part]


@njit(**PER_STAGE)
def relaxed_s(
    excess: float,
    in_flight: float,
    known_s: float,
    hints: IntArray,
    charged: FloatArray,
    levels: FloatArray,
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
    where: tuple[int, int, int, int],
) -> float:
    """Return a lower bound on the seconds of recompute that fit a stage into its memory.

    The peak that was best in the last call is tried first; its bound rules out most other peaks.
    Larger peaks are skipped from the first one for which the bound of the last row, with that peak
    charged, is no better. Smaller peaks are skipped from the first one whose bound, with the
    smallest peak charged, is no better.

    Args:
        excess: Bytes above the limit without recompute, leaving out peaks.
        in_flight: Micro-batches that the stage holds at once.
        known_s: Search only for a bound below it.
        hints: Shape ``(P + 1,)``. Level to begin with for each peak, then the peak to begin with;
            overwritten with the best ones.
        charged: Shape ``(P,)``. Smallest peak of the patterns that each row of ``levels`` allows.
        levels: Shape ``(P, N)``.
        rest: Shape ``(P, N, O, 2)``.
        layers: Shape ``(P, N, Y + 1, 2)``. Prefix sums over whole layers.
        head: Shape ``(P, N, O, 2)``.
        where: Index of the first operator, or -1; first whole layer and end of the whole layers;
            index of the last operator, or -1. A -1 means that there is no partial layer at that
            end.

    Returns:
        Seconds; infinite if no pattern fits in less than ``known_s``.
    """
    last = charged.size - 1
    least = (excess + charged[0]) / in_flight
    if least <= 0.0:
        return 0.0
    while charged[last] == np.inf:
        last -= 1
    likely = min(hints[charged.size], last)
    need = (excess + charged[likely]) / in_flight
    least_s = known_s * (1 + 1e-12)
    least_s = _least_of_peak(likely, need, least_s, hints, levels, rest, layers, head, where)
    for peak in range(likely + 1, last + 1):
        need = (excess + charged[peak]) / in_flight
        if _lagrangian_s(last, hints[last], need, levels, rest, layers, head, where) >= least_s:
            break
        seconds = _least_of_peak(peak, need, least_s, hints, levels, rest, layers, head, where)
        if seconds < least_s:
            least_s, hints[charged.size] = seconds, peak
    for peak in range(likely - 1, -1, -1):
        if _lagrangian_s(peak, hints[peak], least, levels, rest, layers, head, where) >= least_s:
            break
        need = (excess + charged[peak]) / in_flight
        seconds = _least_of_peak(peak, need, least_s, hints, levels, rest, layers, head, where)
        if seconds < least_s:
            least_s, hints[charged.size] = seconds, peak
    return least_s if least_s < known_s else np.inf


@njit(**PER_STAGE)
def _least_of_peak(
    peak: int,
    need: float,
    known_s: float,
    hints: IntArray,
    levels: FloatArray,
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
    where: tuple[int, int, int, int],
) -> float:
    """Return the bound of one group of peaks, or ``known_s`` if the bound is not below it."""
    level, num_levels = hints[peak], levels.shape[1]
    if _lagrangian_s(peak, level, need, levels, rest, layers, head, where) >= known_s:
        return known_s
    # Every level gives a bound; the best is at the last level that saves too little or the one
    # after.
    while level > 0 and _pattern(peak, level - 1, rest, layers, head, where)[1] >= need:
        level -= 1
    while level < num_levels and _pattern(peak, level, rest, layers, head, where)[1] < need:
        level += 1
    hints[peak] = level - 1 if 0 < level < num_levels else min(level, num_levels - 1)
    if level == num_levels:
        return known_s
    bound_s = _lagrangian_s(peak, level, need, levels, rest, layers, head, where)
    if level > 0:
        below_s = _lagrangian_s(peak, level - 1, need, levels, rest, layers, head, where)
        bound_s = max(bound_s, below_s)
    return float(min(known_s, bound_s))


@njit(**INLINED)
def _lagrangian_s(
    peak: int,
    level: int,
    need: float,
    levels: FloatArray,
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
    where: tuple[int, int, int, int],
) -> float:
    """Return the bound of one level; infinite if no pattern saves enough."""
    seconds, saved = _pattern(peak, level, rest, layers, head, where)
    if levels[peak, level] < np.inf:
        return float(seconds + levels[peak, level] * (need - saved))
    return np.inf if saved < need else 0.0


@njit(**INLINED)
def _pattern(
    peak: int,
    level: int,
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
    where: tuple[int, int, int, int],
) -> tuple[float, float]:
    """Return seconds and saved bytes of a stage's patterns with the least Lagrangian."""
    first, low, high, last = where
    seconds = layers[peak, level, high, 0] - layers[peak, level, low, 0]
    saved = layers[peak, level, high, 1] - layers[peak, level, low, 1]
    if first >= 0:
        seconds += rest[peak, level, first, 0]
        saved += rest[peak, level, first, 1]
    if last >= 0:
        seconds += head[peak, level, last, 0]
        saved += head[peak, level, last, 1]
    return seconds, saved


@kept(nogil=True)
def pattern_front(
    cost_s: FloatArray, held: FloatArray, end_extra: float, most_kept: int
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
    size = cost_s.size
    # Patterns of the operators from each one on, and their number
    fronts, masks = np.zeros((size + 2, most_kept, 3)), np.zeros((size + 2, most_kept), np.int64)
    lengths = np.ones(size + 2, np.int64)
    complete = True
    for first in range(size - 1, -1, -1):
        most = lengths[first + 1]
        for last in range(first + 1, size):
            most += lengths[last + 2]
        points, bits, count = np.empty((most, 3)), np.empty(most, np.int64), 0
        run_s, saved, peak, mask = 0.0, 0.0, 0.0, np.int64(0)
        for last in range(first, size):
            behind = last + 2 if last > first else first + 1  # a single operator is no run
            if last == first + 1:
                run_s, mask = cost_s[first], np.int64(1) << first
            if last > first:
                run_s, saved = run_s + cost_s[last], saved + held[last - 1]
                mask |= np.int64(1) << last
                peak = max(saved + end_extra, 0.0) if last == size - 1 else saved
            for index in range(lengths[behind]):
                points[count, 0] = run_s + fronts[behind, index, 0]
                points[count, 1] = saved + fronts[behind, index, 1]
                points[count, 2] = max(peak, fronts[behind, index, 2])
                bits[count] = mask | masks[behind, index]
                count += 1
        kept = _undominated(points)
        length = min(kept.size, most_kept)
        complete = complete and length == kept.size
        for index in range(length):
            # All patterns if they fit, otherwise evenly spread ones.
            spread = index if length == kept.size else index * (kept.size - 1) // (most_kept - 1)
            masks[first, index] = bits[kept[spread]]
            for figure in range(3):
                fronts[first, index, figure] = points[kept[spread], figure]
        lengths[first] = length
    return fronts[0, : lengths[0]].copy(), masks[0, : lengths[0]].copy(), complete


@njit(**INNER)
def _undominated(points: FloatArray) -> IntArray:
    """Return indices of undominated points, ascending in seconds, then in the other two."""
    kept = np.empty(len(points), np.int64)
    size = 0
    for index in _stable_order(points[:, 0]):
        place = size
        dominated = False
        for entry in range(size):
            other = kept[entry]
            if points[other, 1] >= points[index, 1] and points[other, 2] <= points[index, 2]:
                dominated = True
                break
        if dominated:
            continue
        # Among equal seconds, a later point may dominate an earlier one.
        while place > 0 and points[kept[place - 1], 0] == points[index, 0]:
            place -= 1
        size = _without_beaten(points, kept, place, size, index)
        kept[size] = index
        size += 1
    return kept[:size]


@njit(**INNER)
def _without_beaten(points: FloatArray, kept: IntArray, place: int, size: int, index: int) -> int:
    """Drop the points from ``place`` on that are as slow as ``index`` and dominated by it."""
    num_kept = place
    for entry in range(place, size):
        other = kept[entry]
        if points[index, 1] >= points[other, 1] and points[index, 2] <= points[other, 2]:
            continue
        kept[num_kept] = other
        num_kept += 1
    return num_kept


@kept(nogil=True)
def cheapest_recompute(
    part: IntArray,
    begin: IntArray,
    points: FloatArray,
    peaks: FloatArray,
    excess: float,
    in_flight: float,
    most_states: int,
    gap_s: float,
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
    chosen = np.zeros(part.size, np.int64)
    bounds = np.empty((peaks.size, 2))  # per peak: seconds that a byte is worth, least seconds
    for index in range(peaks.size):
        need = (excess + peaks[index]) / in_flight
        allowed = points[:, 2] <= peaks[index]
        bounds[index, 0], bounds[index, 1] = _best_worth(part, begin, points, allowed, need)
    best_s, cut_s = np.inf, np.inf
    for index in _stable_order(bounds[:, 1]):
        worth, bound_s = bounds[index]
        if bound_s >= best_s - gap_s:
            cut_s = min(cut_s, bound_s)
            break
        need = (excess + peaks[index]) / in_flight
        allowed = points[:, 2] <= peaks[index]
        ends = _least_ends(begin, points, allowed, worth)
        seconds, picks = _rounded(part, begin, points, need, ends)
        if seconds < best_s:
            best_s, chosen = seconds, picks
        fixed, all_free = _fixed(part, begin, points, need, ends)
        lost_s = np.inf
        for states in (32, 256, most_states):
            seconds, lost_s, picks = _combined(
                part, fixed, begin, points, allowed, need, worth, bound_s, best_s - gap_s, states
            )
            if seconds < best_s:
                best_s = seconds
                chosen = picks
            if lost_s >= best_s - gap_s:
                break
        cut_s = min(cut_s, lost_s, best_s - gap_s, np.inf if all_free else bound_s)
    return best_s, cut_s, chosen


@njit(**INNER)
def _least(
    part: IntArray, begin: IntArray, points: FloatArray, allowed: BoolArray, worth: float
) -> tuple[float, float]:
    """Return seconds and saved bytes of the least Lagrangian; ties go to the larger saving."""
    chosen = np.zeros((begin.size - 1, 2))
    for which in range(begin.size - 1):
        best = -1
        for index in range(begin[which], begin[which + 1]):
            if not allowed[index]:
                continue
            if best < 0 or _is_better(
                points[index, 0] - points[best, 0], points[index, 1] - points[best, 1], worth
            ):
                best = index
        chosen[which, 0], chosen[which, 1] = points[best, 0], points[best, 1]
    seconds, saved = 0.0, 0.0
    for which in part:
        seconds, saved = seconds + chosen[which, 0], saved + chosen[which, 1]
    return seconds, saved


@njit(**INNER)
def _best_worth(
    part: IntArray, begin: IntArray, points: FloatArray, allowed: BoolArray, need: float
) -> tuple[float, float]:
    """Return the multiplier (seconds per byte) of the highest Lagrangian bound, and the bound."""
    if need <= 0.0:
        return 0.0, 0.0
    high_s, high = _least(part, begin, points, allowed, np.inf)
    if high < need:
        return 0.0, np.inf
    low_s, low = 0.0, 0.0
    while True:
        worth = (high_s - low_s) / (high - low)
        seconds, saved = _least(part, begin, points, allowed, worth)
        lower = (seconds - worth * saved) < (low_s - worth * low) - 1e-12 * low_s - 1e-18
        if not lower or not low < saved < high:
            return worth, max(0.0, (seconds + worth * (need - saved)) * (1 - 1e-12))
        if saved >= need:
            high_s, high = seconds, saved
        else:
            low_s, low = seconds, saved


@njit(**INNER)
def _least_ends(begin: IntArray, points: FloatArray, allowed: BoolArray, worth: float) -> IntArray:
    """Return the patterns with the least Lagrangian that save the fewest and the most bytes.

    Returns:
        Shape ``(U, 2)``, by list of patterns.
    """
    ends = np.full((begin.size - 1, 2), -1)
    for which in range(begin.size - 1):
        low, high, least_s = -1, -1, np.inf
        for index in range(begin[which], begin[which + 1]):
            if not allowed[index]:
                continue
            seconds = points[index, 0] - worth * points[index, 1]
            slack_s = 1e-11 * points[index, 0]
            if seconds < least_s - slack_s:
                low, high, least_s = index, index, seconds
            elif seconds <= least_s + slack_s:
                low = index if points[index, 1] < points[low, 1] else low
                high = index if points[index, 1] > points[high, 1] else high
        ends[which, 0], ends[which, 1] = low, high
    return ends


@njit(**INNER)
def _rounded(
    part: IntArray, begin: IntArray, points: FloatArray, need: float, ends: IntArray
) -> tuple[float, IntArray]:
    """Choose among patterns with the least Lagrangian: those that save most, until it is enough.

    Returns:
        Seconds, infinite if all of them save too little; and shape ``(K,)``, the patterns.
    """
    saved, seconds = 0.0, 0.0
    chosen = np.empty(part.size, np.int64)
    for which in part:
        saved += points[ends[which, 0], 1]
    for step in range(part.size):
        low, high = ends[part[step], 0], ends[part[step], 1]
        pick = high if saved < need else low
        saved += points[pick, 1] - points[low, 1]
        seconds += points[pick, 0]
        chosen[step] = pick - begin[part[step]]
    return (seconds if saved >= need else np.inf), chosen


@njit(**INNER)
def _fixed(
    part: IntArray, begin: IntArray, points: FloatArray, need: float, ends: IntArray
) -> tuple[IntArray, bool]:
    """If many parts are alike, fix most of them at a pattern with the least Lagrangian.

    Returns:
        Shape ``(K,)``: a pattern, or -1 for up to `FREE_PARTS` parts of each kind; and whether no
        part is fixed.
    """
    fixed = np.full(part.size, -1)
    saved, all_free = 0.0, True
    members = np.zeros(begin.size - 1, np.int64)
    for which in part:
        saved += points[ends[which, 0], 1]
        members[which] += 1
    for which in range(begin.size - 1):
        low, high = ends[which, 0], ends[which, 1]
        more = points[high, 1] - points[low, 1]
        num_high = 0
        if more > 0.0 and need > saved:
            num_high = min(members[which], int((need - saved) / more))
            saved += num_high * more
        num_fixed = members[which] - FREE_PARTS
        num_high = min(max(num_high - FREE_PARTS // 2, 0), num_fixed)
        seen = 0
        for index in range(part.size):
            if part[index] == which and seen < num_fixed:
                fixed[index] = high if seen < num_high else low
                all_free = False
                seen += 1
    return fixed, all_free


@njit(**INNER)
def _combined(
    part: IntArray,
    fixed: IntArray,
    begin: IntArray,
    points: FloatArray,
    allowed: BoolArray,
    need: float,
    worth: float,
    bound_s: float,
    best_s: float,
    most_states: int,
) -> tuple[float, float, IntArray]:
    """Combine patterns part by part; drop combinations too far above the bound to matter."""
    slack_s = (best_s - bound_s) * (1 + 1e-9) + 1e-15
    reduced = _reduced(begin, points, allowed, worth)
    states, lost_s = np.zeros((1, 3)), np.inf  # seconds, saved bytes, reduced seconds
    num_free, chosen = 0, np.empty(part.size, np.int64)
    for step in range(part.size):
        chosen[step] = fixed[step] - begin[part[step]]
        if fixed[step] >= 0:
            states[0, 0] += points[fixed[step], 0]
            states[0, 1] += points[fixed[step], 1]
        else:
            num_free += 1
    # Per new state: the previous state and the pattern added to it
    origins, grown = np.empty((num_free, most_states, 2), np.int64), 0
    for step in range(part.size):
        if fixed[step] < 0:
            low, high = begin[part[step]], begin[part[step] + 1]
            states, dropped_s = _extended(
                states, points[low:high], reduced[low:high], slack_s, origins[grown]
            )
            grown += 1
            if dropped_s < np.inf:
                lost_s = min(lost_s, bound_s + dropped_s)
    final, least_s = -1, np.inf
    for index in range(len(states)):
        if states[index, 1] >= need and states[index, 0] < least_s:
            final, least_s = index, states[index, 0]
    for step in range(part.size - 1, -1, -1):
        if final >= 0 and fixed[step] < 0:
            grown -= 1
            chosen[step] = origins[grown, final, 1]
            final = origins[grown, final, 0]
    return least_s, lost_s, chosen


@njit(**INNER)
def _reduced(begin: IntArray, points: FloatArray, allowed: BoolArray, worth: float) -> FloatArray:
    """Return the excess of each pattern's Lagrangian over the least one of its part."""
    reduced = np.full(len(points), np.inf)
    for which in range(begin.size - 1):
        least_s = np.inf
        for index in range(begin[which], begin[which + 1]):
            if allowed[index]:
                reduced[index] = points[index, 0] - worth * points[index, 1]
                least_s = min(least_s, reduced[index])
        for index in range(begin[which], begin[which + 1]):
            reduced[index] -= least_s
    return reduced


@njit(**INNER)
def _extended(
    states: FloatArray,
    points: FloatArray,
    reduced: FloatArray,
    slack_s: float,
    origins: IntArray,
) -> tuple[FloatArray, float]:
    """Add one part to every combination; keep undominated ones and, if too many, the best.

    Args:
        states: Shape ``(S, 3)``. Seconds, saved bytes, and seconds above the bound.
        points: Shape ``(P, 3)``. The part's patterns.
        reduced: Shape ``(P,)``. Excess of each pattern over the bound.
        slack_s: Combinations further above the bound are dropped.
        origins: Shape ``(most_states, 2)``. Overwritten: the previous state and the pattern of each
            new state.

    Returns:
        The new states, and how far the best dropped one is above the bound.
    """
    num_useful = 0
    for index in range(len(points)):
        num_useful += reduced[index] <= slack_s and reduced[index] < np.inf
    grown = np.empty((len(states) * num_useful, 3))
    made = np.empty((len(grown), 2), np.int64)
    size = 0
    for state in range(len(states)):
        for index in range(len(points)):
            total_s = states[state, 2] + reduced[index]
            if total_s <= slack_s and total_s < np.inf:
                grown[size, 0] = states[state, 0] + points[index, 0]
                grown[size, 1] = states[state, 1] + points[index, 1]
                grown[size, 2] = total_s
                made[size, 0], made[size, 1] = state, index
                size += 1
    kept, count, most_saved = np.empty(size, np.int64), 0, -1.0
    for index in _stable_order(grown[:size, 0]):
        if grown[index, 1] > most_saved:
            most_saved = grown[index, 1]
            kept[count] = index
            count += 1
    kept, dropped_s = _least_above(grown, kept[:count], len(origins))
    remaining = np.empty((kept.size, 3))
    for index in range(kept.size):
        origins[index, 0], origins[index, 1] = made[kept[index], 0], made[kept[index], 1]
        for figure in range(3):
            remaining[index, figure] = grown[kept[index], figure]
    return remaining, dropped_s


@njit(**INNER)
def _least_above(states: FloatArray, kept: IntArray, most: int) -> tuple[IntArray, float]:
    """Keep the ``most`` states least above the bound; return also the excess of the next one."""
    if kept.size <= most:
        return kept, np.inf
    above_s = np.empty(kept.size)
    for index in range(kept.size):
        above_s[index] = states[kept[index], 2]
    order = _stable_order(above_s)
    best = np.empty(most, np.int64)
    for index in range(most):
        best[index] = kept[order[index]]
    return best, above_s[order[most]]
