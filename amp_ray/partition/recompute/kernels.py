"""Which operators to recompute, compiled: arrays in, arrays out.

Operators of one layer form a run ``[i, j]`` if all of them are recomputed and their neighbours are
not. A run takes the forward time of its ``j - i + 1`` operators again and saves what the first
``j - i`` of them hold: an operator's result need not be kept only if its successor, which reads
it, runs again too. While a run is computed backward, it holds what it saved once: its peak.
`support.recompute` holds the readable version that tries every set of operators.
"""

from typing import Any

import numpy as np
from numba import njit

from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray

FREE_PARTS = 12  # of a kind in a stage, more are fixed at what is best in fractions

INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True}


@njit(**INNER)
def _is_better(more_s: float, more: float, s_per_byte: float) -> bool:
    """Say whether so many more seconds are worth so many more saved bytes."""
    if s_per_byte == np.inf:
        return more > 0.0 or (more == 0.0 and more_s < 0.0)
    return more_s < s_per_byte * more


@njit(**INNER)
def _cheapest_patterns(
    cost_s: FloatArray, held: FloatArray, s_per_byte: float, most: float, best: FloatArray
) -> None:
    """Fill, per first operator, the pattern of the rest of a layer with the least Lagrangian.

    Args:
        cost_s: Shape ``(m,)``. Forward time of each operator.
        held: Shape ``(m,)``. Bytes.
        s_per_byte: What a saved byte is worth.
        most: Largest peak of a run.
        best: Shape ``(m + 2, 2)``. Becomes (seconds, saved bytes) of the operators from ``i`` on.
    """
    size = cost_s.size
    best[size:] = 0.0
    for first in range(size - 1, -1, -1):
        best[first] = best[first + 1]
        run_s, saved = cost_s[first], 0.0
        for last in range(first + 1, size):
            run_s, saved = run_s + cost_s[last], saved + held[last - 1]
            if saved > most:
                break
            seconds, total = run_s + best[last + 2, 0], saved + best[last + 2, 1]
            if _is_better(seconds - best[first, 0], total - best[first, 1], s_per_byte):
                best[first, 0], best[first, 1] = seconds, total


@njit(**INNER)
def _cheapest_heads(
    cost_s: FloatArray, held: FloatArray, s_per_byte: float, most: float, best: FloatArray
) -> None:
    """Fill the mirror image: ``best[k]`` for the first ``k`` operators, shape ``(m + 1, 2)``."""
    size = cost_s.size
    best[0] = 0.0
    for end in range(1, size + 1):
        best[end] = best[end - 1]
        _offer_last_runs(cost_s[:end], held[:end], s_per_byte, most, best)


@njit(**INNER)
def _offer_last_runs(
    cost_s: FloatArray, held: FloatArray, s_per_byte: float, most: float, best: FloatArray
) -> None:
    """Improve ``best[k]``, ``k`` operators being given, by runs that end with the last of them."""
    end = cost_s.size
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
        low_s, low, high_s, high = stack[depth]
        if high <= low:
            continue
        slope = (high_s - low_s) / (high - low)
        _cheapest_patterns(cost_s, held, slope, most, best)
        middle_s, middle = best[0]
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


@njit(cache=True, nogil=True)
def fill_levels(
    cost_s: FloatArray, held: FloatArray, begin: IntArray, most: FloatArray, levels: FloatArray
) -> None:
    """Choose for each largest peak what a saved byte may be worth: slopes of the layers' hulls.

    Args:
        cost_s: Shape ``(O,)``. Forward times of the operators of all kinds of layers, in a row.
        held: Shape ``(O,)``.
        begin: Shape ``(K + 1,)``. Where each kind of layer begins.
        most: Shape ``(P,)``. Largest peaks.
        levels: Shape ``(P, N)``. Filled ascending; the last is infinite.
    """
    num_levels = levels.shape[1]
    slopes = np.empty(64 * begin.size)
    for peak in range(most.size):
        size = 0
        for kind in range(begin.size - 1):
            first, end = begin[kind], begin[kind + 1]
            size = _add_slopes(cost_s[first:end], held[first:end], most[peak], slopes, size)
        chosen = np.unique(slopes[:size])
        levels[peak] = np.inf
        levels[peak, 0] = 0.0
        kept = min(chosen.size, num_levels - 2)
        for level in range(kept):
            # All of them if they fit, evenly spread ones if not.
            index = level if chosen.size == kept else (level * (chosen.size - 1)) // (kept - 1)
            levels[peak, level + 1] = chosen[index]


@njit(cache=True, nogil=True)
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
        rest: Shape ``(P, N, O, 2)``. Becomes (seconds, saved) from an operator to its layer's end.
        head: Shape ``(P, N, O, 2)``. Becomes those of a layer up to and with an operator, which
            ends a stage.
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
                    rest[peak, level, place] = behind[place - first]
                    head[peak, level, place] = before[place - first + 1]
                    if free_end[place]:
                        size = place - first + 1
                        last[: size + 1] = before[: size + 1]
                        _offer_last_runs(layer_s[:size], layer[:size], worth, np.inf, last)
                        head[peak, level, place] = last[size]


@njit(**INNER)
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
    """Bound the seconds of recompute that bring a stage into its memory.

    Args:
        excess: Bytes above the limit without any recompute, peaks left out.
        in_flight: Micro-batches that the stage holds at once.
        known_s: Only a bound below it is of interest.
        hints: Shape ``(P,)``. Levels to begin with; overwritten by those found.
        charged: Shape ``(P,)``. Smallest peak of a pattern that the row below allows.
        levels: Shape ``(P, N)``.
        rest: Shape ``(P, N, O, 2)``.
        layers: Shape ``(P, N, Y + 1, 2)``. Prefix sums over whole layers.
        head: Shape ``(P, N, O, 2)``.
        where: Place of the first operator, or -1; whole layers from and to; place of the last
            operator, or -1. The parts of layers at either end may be left out.

    Returns:
        Seconds; infinite if nothing brings it into memory in less than ``known_s``.
    """
    least_s = known_s * (1 + 1e-12)
    for peak in range(charged.size):
        need = (excess + charged[peak]) / in_flight
        if need <= 0.0:
            return 0.0
        # Any level gives a bound; the best one is the first that saves enough, or the one before.
        worth = levels[peak, hints[peak]]
        seconds, saved = _pattern(peak, hints[peak], where, rest, layers, head)
        if worth < np.inf and seconds + worth * (need - saved) >= least_s:
            continue
        level = _first_level(peak, hints[peak], need, where, rest, layers, head)
        hints[peak] = min(level, levels.shape[1] - 1)
        if level == levels.shape[1]:
            continue
        bound_s = 0.0
        for near in range(max(level - 1, 0), level + 1):
            if levels[peak, near] < np.inf:
                seconds, saved = _pattern(peak, near, where, rest, layers, head)
                bound_s = max(bound_s, seconds + levels[peak, near] * (need - saved))
        least_s = min(least_s, bound_s)
    return least_s if least_s < known_s else np.inf


@njit(**INNER)
def _first_level(
    peak: int,
    level: int,
    need: float,
    where: tuple[int, int, int, int],
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
) -> int:
    """Return the first level that saves enough, looking from a level on; or their number."""
    num_levels = layers.shape[1]
    while level > 0 and _pattern(peak, level - 1, where, rest, layers, head)[1] >= need:
        level -= 1
    while level < num_levels and _pattern(peak, level, where, rest, layers, head)[1] < need:
        level += 1
    return level


@njit(**INNER)
def _pattern(
    peak: int,
    level: int,
    where: tuple[int, int, int, int],
    rest: FloatArray,
    layers: FloatArray,
    head: FloatArray,
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


@njit(cache=True, nogil=True)
def pattern_front(
    cost_s: FloatArray, held: FloatArray, end_extra: float, most_kept: int
) -> tuple[FloatArray, IntArray, bool]:
    """List the patterns of a part of a layer that no other beats in seconds, bytes and peak.

    Args:
        cost_s: Shape ``(m,)``, at most 62.
        held: Shape ``(m,)``.
        end_extra: Added to the peak of a run that ends the part; negative infinity for no peak.
        most_kept: Beyond so many patterns evenly spread ones are kept.

    Returns:
        Shape ``(F, 3)``: seconds, saved bytes and peak, ascending in seconds; shape ``(F,)``: the
        recomputed operators, a bit each; and whether the list is complete.
    """
    size = cost_s.size
    fronts = [np.zeros((1, 3)) for _ in range(size + 2)]
    masks = [np.zeros(1, np.int64) for _ in range(size + 2)]
    complete = True
    for first in range(size - 1, -1, -1):
        count = len(masks[first + 1])
        for last in range(first + 1, size):
            count += len(masks[last + 2])
        points, bits = np.empty((count, 3)), np.empty(count, np.int64)
        count = len(masks[first + 1])
        points[:count], bits[:count] = fronts[first + 1], masks[first + 1]
        run_s, saved, mask = cost_s[first], 0.0, np.int64(1) << first
        for last in range(first + 1, size):
            run_s, saved = run_s + cost_s[last], saved + held[last - 1]
            mask |= np.int64(1) << last
            peak = max(saved + end_extra, 0.0) if last == size - 1 else saved
            for index in range(len(masks[last + 2])):
                points[count, 0] = run_s + fronts[last + 2][index, 0]
                points[count, 1] = saved + fronts[last + 2][index, 1]
                points[count, 2] = max(peak, fronts[last + 2][index, 2])
                bits[count] = mask | masks[last + 2][index]
                count += 1
        kept = _undominated(points)
        if kept.size > most_kept:
            complete = False
            kept = kept[np.arange(most_kept) * (kept.size - 1) // (most_kept - 1)]
        fronts[first], masks[first] = points[kept], bits[kept]
    return fronts[0], masks[0], complete


@njit(**INNER)
def _undominated(points: FloatArray) -> IntArray:
    """Keep points that no other beats, ascending in the first figure; ties by the other two."""
    order = np.argsort(points[:, 0], kind="mergesort")
    kept = np.empty(order.size, np.int64)
    size = 0
    for index in order:
        place = size
        dominated = False
        for known in range(size):
            other = kept[known]
            if points[other, 1] >= points[index, 1] and points[other, 2] <= points[index, 2]:
                dominated = True
                break
        if dominated:
            continue
        # Of equal seconds, a later point may beat an earlier one.
        while place > 0 and points[kept[place - 1], 0] == points[index, 0]:
            place -= 1
        size = _without_beaten(points, kept, place, size, index)
        kept[size] = index
        size += 1
    return kept[:size]


@njit(**INNER)
def _without_beaten(points: FloatArray, kept: IntArray, place: int, size: int, index: int) -> int:
    """Drop the points from ``place`` on, as slow as ``index``, that it beats."""
    left = place
    for known in range(place, size):
        other = kept[known]
        if points[index, 1] >= points[other, 1] and points[index, 2] <= points[other, 2]:
            continue
        kept[left] = other
        left += 1
    return left


@njit(cache=True, nogil=True)
def cheapest_recompute(
    part: IntArray,
    begin: IntArray,
    points: FloatArray,
    excess: float,
    in_flight: float,
    most_states: int,
    known_s: float,
) -> tuple[float, float, IntArray]:
    """Choose a pattern for each part of a stage that brings it into memory in the least time.

    Args:
        part: Shape ``(K,)``. Which list of patterns each part has.
        begin: Shape ``(U + 1,)``. Where each list begins.
        points: Shape ``(F, 3)``. Seconds, saved bytes, peak.
        excess: Bytes above the limit without any recompute, peaks left out.
        in_flight: Micro-batches that the stage holds at once.
        most_states: Combinations of the parts so far that are kept, best first.
        known_s: Only less is of interest.

    Returns:
        Seconds, infinite if there is nothing of interest; the largest bound of what was cut off
        by ``most_states``, which the seconds are proven to be the least above; and shape
        ``(K,)``, the pattern of each part.
    """
    chosen = np.zeros(part.size, np.int64)
    best_s, cut_s = known_s, np.inf
    peaks = np.unique(points[:, 2])
    for peak in peaks:
        need = (excess + peak) / in_flight
        allowed = points[:, 2] <= peak
        worth, bound_s = _best_worth(part, begin, points, allowed, need)
        if bound_s >= best_s:
            continue
        fixed = _fixed(part, begin, points, allowed, need, worth)
        lost_s = np.inf
        for states in (32, most_states):
            seconds, lost_s, picks = _combined(
                part, fixed, begin, points, allowed, need, worth, bound_s, best_s, states
            )
            if seconds < best_s:
                best_s = seconds
                chosen[:] = picks
            if lost_s == np.inf:
                break
        cut_s = min(cut_s, lost_s, bound_s if (fixed >= 0).any() else np.inf)
    return (best_s if best_s < known_s else np.inf), cut_s, chosen


@njit(**INNER)
def _least(
    part: IntArray, begin: IntArray, points: FloatArray, allowed: BoolArray, worth: float
) -> tuple[float, float]:
    """Return seconds and saved bytes of the patterns with the least Lagrangian, saving more."""
    each = np.zeros((begin.size - 1, 2))
    for which in range(begin.size - 1):
        known = -1
        for index in range(begin[which], begin[which + 1]):
            if not allowed[index]:
                continue
            if known < 0 or _is_better(
                points[index, 0] - points[known, 0], points[index, 1] - points[known, 1], worth
            ):
                known = index
        each[which] = points[known, :2]
    seconds, saved = 0.0, 0.0
    for which in part:
        seconds, saved = seconds + each[which, 0], saved + each[which, 1]
    return seconds, saved


@njit(**INNER)
def _best_worth(
    part: IntArray, begin: IntArray, points: FloatArray, allowed: BoolArray, need: float
) -> tuple[float, float]:
    """Find what a saved byte is worth where the Lagrangian bound is highest, and that bound."""
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
def _fixed(
    part: IntArray,
    begin: IntArray,
    points: FloatArray,
    allowed: BoolArray,
    need: float,
    worth: float,
) -> IntArray:
    """Fix the patterns of most of many like parts at those with the least Lagrangian.

    Returns:
        Shape ``(K,)``. A pattern, or -1 for `FREE_PARTS` of each kind.
    """
    fixed = np.full(part.size, -1)
    saved = 0.0
    low, high = np.full(begin.size - 1, -1), np.full(begin.size - 1, -1)
    for which in range(begin.size - 1):
        low[which], high[which] = _least_ends(
            begin[which], begin[which + 1], points, allowed, worth
        )
    for which in part:
        saved += points[low[which], 1]
    for which in range(begin.size - 1):
        members = np.flatnonzero(part == which)
        more = points[high[which], 1] - points[low[which], 1]
        num_high = 0
        if more > 0.0 and need > saved:
            num_high = min(members.size, int((need - saved) / more))
            saved += num_high * more
        num_fixed = members.size - FREE_PARTS
        if num_fixed <= 0:
            continue
        num_high = min(max(num_high - FREE_PARTS // 2, 0), num_fixed)
        fixed[members[:num_high]] = high[which]
        fixed[members[num_high:num_fixed]] = low[which]
    return fixed


@njit(**INNER)
def _least_ends(
    first: int, end: int, points: FloatArray, allowed: BoolArray, worth: float
) -> tuple[int, int]:
    """Return the patterns with the least Lagrangian that save the least and the most."""
    low, high, least_s = -1, -1, np.inf
    for index in range(first, end):
        if not allowed[index]:
            continue
        seconds = points[index, 0] - worth * points[index, 1]
        slack_s = 1e-11 * points[index, 0]
        if seconds < least_s - slack_s:
            low, high, least_s = index, index, seconds
        elif seconds <= least_s + slack_s:
            low = index if points[index, 1] < points[low, 1] else low
            high = index if points[index, 1] > points[high, 1] else high
    return low, high


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
    """Combine patterns part by part; drop what exceeds the bound by more than is of interest."""
    slack_s = (best_s - bound_s) * (1 + 1e-9) + 1e-15
    reduced = _reduced(begin, points, allowed, worth)
    states, lost_s = np.zeros((1, 3)), np.inf  # seconds, saved bytes, reduced seconds
    for index in fixed[fixed >= 0]:
        states[0, 0] += points[index, 0]
        states[0, 1] += points[index, 1]
    parents = [np.zeros(0, np.int64) for _ in range(part.size)]
    picks = [np.zeros(0, np.int64) for _ in range(part.size)]
    free = np.flatnonzero(fixed < 0)
    for step in free:
        low, high = begin[part[step]], begin[part[step] + 1]
        states, parents[step], picks[step], dropped_s = _extended(
            states, points[low:high], reduced[low:high], slack_s, most_states
        )
        if dropped_s < np.inf:
            lost_s = min(lost_s, bound_s + dropped_s)
    chosen = fixed - begin[part]
    final, least_s = -1, np.inf
    for index in range(len(states)):
        if states[index, 1] >= need and states[index, 0] < least_s:
            final, least_s = index, states[index, 0]
    if final >= 0:
        for step in free[::-1]:
            chosen[step] = picks[step][final]
            final = parents[step][final]
    return least_s, lost_s, chosen


@njit(**INNER)
def _reduced(begin: IntArray, points: FloatArray, allowed: BoolArray, worth: float) -> FloatArray:
    """Return by how much the Lagrangian of each pattern exceeds the least of its part."""
    reduced = np.full(len(points), np.inf)
    for which in range(begin.size - 1):
        least_s = np.inf
        for index in range(begin[which], begin[which + 1]):
            if allowed[index]:
                reduced[index] = points[index, 0] - worth * points[index, 1]
                least_s = min(least_s, reduced[index])
        reduced[begin[which] : begin[which + 1]] -= least_s
    return reduced


@njit(**INNER)
def _extended(
    states: FloatArray,
    points: FloatArray,
    reduced: FloatArray,
    slack_s: float,
    most_states: int,
) -> tuple[FloatArray, IntArray, IntArray, float]:
    """Add one part to every combination; keep what none beats and, if too many, the best."""
    useful = np.flatnonzero((reduced <= slack_s) & (reduced < np.inf))
    grown = np.empty((len(states) * useful.size, 3))
    origin = np.empty((len(grown), 2), np.int64)
    size = 0
    for state in range(len(states)):
        for index in useful:
            total_s = states[state, 2] + reduced[index]
            if total_s <= slack_s:
                grown[size, 0] = states[state, 0] + points[index, 0]
                grown[size, 1] = states[state, 1] + points[index, 1]
                grown[size, 2] = total_s
                origin[size, 0], origin[size, 1] = state, index
                size += 1
    order = np.argsort(grown[:size, 0], kind="mergesort")
    kept = np.empty(size, np.int64)
    count, most_saved = 0, -1.0
    for index in order:
        if grown[index, 1] > most_saved:
            most_saved = grown[index, 1]
            kept[count] = index
            count += 1
    kept = kept[:count]
    dropped_s = np.inf
    if count > most_states:
        by_reduced = np.argsort(grown[kept, 2], kind="mergesort")
        dropped_s = grown[kept[by_reduced[most_states]], 2]
        kept = kept[by_reduced[:most_states]]
    return grown[kept], origin[kept, 0], origin[kept, 1], dropped_s
