"""Kernels for the cheapest slices under two caps, compiled.

For bounds on the forward and the backward time of every slice, `cheapest_slices` finds the cheapest
cut of each number of sequences, then of the batch. It takes at most O(B n^2 / 2); where times grow
with the size of a slice, it visits only the sizes that the caps admit.
"""

from typing import Any, NamedTuple

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.jit import kept, njit

# Minima use vector instructions. This requires that no time is NaN and that the sign of 0 does not
# matter. Sums keep their order.
FAST: dict[str, Any] = {"nogil": True, "fastmath": {"nnan", "nsz"}}
INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **FAST}


class SliceArrays(NamedTuple):
    """The tables of `SliceTables`, and the arrays that an evaluation writes."""

    forward_s: FloatArray
    backward_s: FloatArray
    total_s: FloatArray
    regular: BoolArray
    # Shape ``(B, 2)``. Lower bounds of the slowest passes, by number of sequences.
    least_s: FloatArray
    # Shape ``(B, n + 1)``. Column ``n - end``: the cheapest cut of the first ``end`` granules,
    # reversed to match the order of the tables.
    cost_s: FloatArray
    batch_s: FloatArray  # shape ``(B + 1,)``. Cheapest cut, by number of sequences.
    batch_slice: IntArray  # shape ``(B + 1,)``. Sequences of its last batch slice.
    # Shape ``(B, n)``. Granules of the slices by number of sequences, last slice first; then 0.
    path: IntArray


@kept(**FAST)
def cheapest_slices(
    cap_forward_s: float, cap_backward_s: float, arrays: SliceArrays
) -> tuple[float, float, float, float, float]:
    """Find the cheapest slices with no pass above its cap.

    Returns:
        ``(sum_s, slowest_forward_s, slowest_backward_s, next_forward_s, next_backward_s)``. The sum
        is infinite without any. The last two are the least times above one cap of slices that obey
        the other cap.
    """
    num_sequences = len(arrays.cost_s)
    next_forward_s = next_backward_s = np.inf
    for row in range(num_sequences):
        if arrays.least_s[row, 0] > cap_forward_s:
            arrays.cost_s[row, 0] = np.inf
            next_forward_s = min(next_forward_s, arrays.least_s[row, 0])
            continue
        if arrays.least_s[row, 1] > cap_backward_s:
            arrays.cost_s[row, 0] = np.inf
            next_backward_s = min(next_backward_s, arrays.least_s[row, 1])
            continue
        first, second = _fill(row, cap_forward_s, cap_backward_s, arrays)
        next_forward_s = min(next_forward_s, first)
        next_backward_s = min(next_backward_s, second)
    arrays.batch_s[0] = 0.0
    for total in range(1, num_sequences + 1):
        best_s, best = np.inf, 0
        for size in range(total, 0, -1):
            sum_s = arrays.batch_s[total - size] + arrays.cost_s[size - 1, 0]
            if sum_s < best_s:
                best_s, best = sum_s, size
        arrays.batch_s[total], arrays.batch_slice[total] = best_s, best
    forward_s = backward_s = 0.0
    remaining = num_sequences if arrays.batch_s[num_sequences] < np.inf else 0
    while remaining > 0:
        size = int(arrays.batch_slice[remaining])
        slowest = _walk_back(size - 1, cap_forward_s, cap_backward_s, arrays)
        forward_s, backward_s = max(forward_s, slowest[0]), max(backward_s, slowest[1])
        remaining -= size
    sum_s = float(arrays.batch_s[num_sequences])
    return sum_s, forward_s, backward_s, next_forward_s, next_backward_s


@njit(**INNER)
def _fill(
    row: int, cap_forward_s: float, cap_backward_s: float, arrays: SliceArrays
) -> tuple[float, float]:
    """Fill the cheapest cuts of one number of sequences; return the least times above a cap."""
    cost_s, num_granules = arrays.cost_s[row], arrays.cost_s.shape[1] - 1
    forward_s, backward_s = arrays.forward_s[row], arrays.backward_s[row]
    total_s, regular = arrays.total_s[row], arrays.regular[row]
    next_forward_s = next_backward_s = np.inf
    cost_s[num_granules] = 0.0
    first = limit = 0
    for end in range(1, num_granules + 1):
        before, best_s = num_granules - end + 1, np.inf
        stop = end
        if regular[end - 1]:
            while limit > 0 and (
                forward_s[first + limit - 1] > cap_forward_s
                or backward_s[first + limit - 1] > cap_backward_s
            ):
                limit -= 1
            while (
                limit < end
                and forward_s[first + limit] <= cap_forward_s
                and backward_s[first + limit] <= cap_backward_s
            ):
                limit += 1
            for size in range(limit):
                best_s = min(best_s, cost_s[before + size] + total_s[first + size])
            stop = min(end, limit + 1)  # the first size above a cap
        for size in range(limit if regular[end - 1] else 0, stop):
            if backward_s[first + size] > cap_backward_s:
                if forward_s[first + size] <= cap_forward_s:
                    next_backward_s = min(next_backward_s, backward_s[first + size])
            elif forward_s[first + size] > cap_forward_s:
                next_forward_s = min(next_forward_s, forward_s[first + size])
            else:
                best_s = min(best_s, cost_s[before + size] + total_s[first + size])
        cost_s[num_granules - end] = best_s
        first += end
    return next_forward_s, next_backward_s


@njit(**INNER)
def _walk_back(
    row: int, cap_forward_s: float, cap_backward_s: float, arrays: SliceArrays
) -> tuple[float, float]:
    """Write the cheapest cut of one number of sequences; ties go to the shortest last slice."""
    cost_s, num_granules = arrays.cost_s[row], arrays.cost_s.shape[1] - 1
    slowest_forward_s = slowest_backward_s = 0.0
    end, number = num_granules, 0
    while end > 0:
        first, size = end * (end - 1) // 2, 1
        while (
            arrays.forward_s[row, first + size - 1] > cap_forward_s
            or arrays.backward_s[row, first + size - 1] > cap_backward_s
            or cost_s[num_granules - end + size] + arrays.total_s[row, first + size - 1]
            > cost_s[num_granules - end]
        ):
            size += 1
        slowest_forward_s = max(slowest_forward_s, arrays.forward_s[row, first + size - 1])
        slowest_backward_s = max(slowest_backward_s, arrays.backward_s[row, first + size - 1])
        arrays.path[row, number] = size
        end, number = end - size, number + 1
    if number < num_granules:
        arrays.path[row, number] = 0
    return slowest_forward_s, slowest_backward_s


@kept(**FAST)
def tightened(
    lows_s: tuple[float, float], highs_s: tuple[float, float], arrays: SliceArrays
) -> tuple[float, float]:
    """Raise the lower ends of a box of slowest passes to times of actual slices.

    The slice with the slowest forward pass has a backward pass below the top, and vice versa. The
    lower ends are infinite if no slice is in the box.
    """
    low_forward_s = low_backward_s = np.inf
    beside_forward_s = beside_backward_s = np.inf
    for row in range(len(arrays.least_s)):
        if arrays.least_s[row, 0] <= highs_s[0] and arrays.least_s[row, 1] <= highs_s[1]:
            least_s = _least_of(row, lows_s, highs_s, arrays)
            low_forward_s = min(low_forward_s, least_s[0])
            low_backward_s = min(low_backward_s, least_s[1])
            beside_forward_s = min(beside_forward_s, least_s[2])
            beside_backward_s = min(beside_backward_s, least_s[3])
    return max(low_forward_s, beside_forward_s), max(low_backward_s, beside_backward_s)


@njit(**INNER)
def _least_of(
    row: int, lows_s: tuple[float, float], highs_s: tuple[float, float], arrays: SliceArrays
) -> tuple[float, float, float, float]:
    """Return the least times of slices below the top, by the pass that reaches the bottom.

    Let A be slices with a forward pass in the box, B those with a backward pass in it. The result
    is forward of A, backward of B, forward of B, backward of A.
    """
    least_forward_s = least_backward_s = beside_forward_s = beside_backward_s = np.inf
    forward_s, backward_s = arrays.forward_s[row], arrays.backward_s[row]
    first = start = second = 0
    for end in range(1, arrays.regular.shape[1] + 1):
        is_regular = arrays.regular[row, end - 1]
        begin = last = 0
        if is_regular:
            start = _num_below(start, forward_s, first, end, lows_s[0])
            second = _num_below(second, backward_s, first, end, lows_s[1])
            begin, last = min(start, second), max(start, second)
        for size in range(begin, min(end, last + 1) if is_regular else end):
            forward, backward = forward_s[first + size], backward_s[first + size]
            if forward > highs_s[0] or backward > highs_s[1]:
                continue
            if forward >= lows_s[0]:
                least_forward_s = min(least_forward_s, forward)
                beside_backward_s = min(beside_backward_s, backward)
            if backward >= lows_s[1]:
                least_backward_s = min(least_backward_s, backward)
                beside_forward_s = min(beside_forward_s, forward)
        first += end
    return least_forward_s, least_backward_s, beside_forward_s, beside_backward_s


@njit(**INNER)
def _num_below(guess: int, times_s: FloatArray, first: int, end: int, low_s: float) -> int:
    """Count the entries of an ascending row below ``low_s``; ``guess`` is close to it."""
    number = guess
    while number > 0 and times_s[first + number - 1] >= low_s:
        number -= 1
    while number < end and times_s[first + number] < low_s:
        number += 1
    return number


class PathArrays(NamedTuple):
    """Arrays of the search through all slices of unequal stages."""

    forward_s: FloatArray  # shape ``(B, n (n + 1) / 2)``, as in `SliceTables`
    backward_s: FloatArray  # the same
    factors: FloatArray  # shape ``(K,)``. Factor on the times, per stage.
    # Shape ``(P, 2)``. Weights of sum and slowest pass: each pair bounds the time.
    bounds: FloatArray
    # Shape ``(B + 1, B + 1, n + 1)``. Least sum of the remaining slices, by sequences after the
    # current batch slice, sequences in it, and granules done.
    rest_sum_s: FloatArray
    # Shape ``(2, B + 1, B + 1, n + 1)``. Least slowest forward and backward pass of them.
    rest_slowest_s: FloatArray
    last_s: float  # least sum of a slice that ends a sequence
    done_s: FloatArray  # shape ``(2, B n + 1, K)``. End time of stages, by number of slices.
    slices: IntArray  # shape ``(B n, 2)``. Sequences and granules of the slices on the path.
    best: IntArray  # the same, of the best one


@kept(nogil=True)
def shortest_path(best_s: float, most_steps: int, arrays: PathArrays) -> tuple[float, int, int]:
    """Search all slices in all orders for a time below ``best_s``, by branch and bound.

    The search is depth first; it drops a prefix whose bound reaches the best time.

    Returns:
        ``(best_s, num_slices, num_steps)``. The best slices are in ``best``; ``num_slices`` is 0 if
        none is faster. At ``most_steps`` the search stops, and proves nothing.
    """
    num_sequences, num_granules = arrays.rest_sum_s.shape[0] - 1, arrays.rest_sum_s.shape[2] - 1
    most = num_sequences * num_granules
    # Per slice on the path: sequences after its batch slice, granules done including it, sums.
    behind = np.zeros(most + 1, dtype=np.int64)
    ends = np.zeros(most + 1, dtype=np.int64)
    totals_s = np.zeros((most + 1, 3))
    behind[0], ends[0] = num_sequences, num_granules
    # The next slice to try after each prefix, as a number that counts (sequences, granules).
    following = np.zeros(most + 1, dtype=np.int64)
    depth, num_best, steps = 0, 0, 0
    while depth >= 0 and steps < most_steps:
        is_new = ends[depth] == num_granules
        start = 0 if is_new else ends[depth]
        choice = following[depth]
        sequences = arrays.slices[depth - 1, 0] if not is_new else choice // num_granules + 1
        size = choice % num_granules + 1 if is_new else choice + 1
        following[depth] += 1
        if (is_new and sequences > behind[depth]) or (not is_new and size > num_granules - start):
            depth -= 1
            continue
        steps += 1
        end = start + size
        remaining = behind[depth] - sequences if is_new else behind[depth]
        cell = end * (end - 1) // 2 + size - 1
        forward_s = arrays.forward_s[sequences - 1, cell]
        backward_s = arrays.backward_s[sequences - 1, cell]
        if forward_s == np.inf or arrays.rest_sum_s[remaining, sequences, end] == np.inf:
            continue
        _run(depth, forward_s, backward_s, totals_s, arrays)
        is_whole = remaining == 0 and end == num_granules
        if _least_s(depth + 1, remaining, sequences, end, totals_s, arrays) >= best_s:
            continue
        arrays.slices[depth, 0], arrays.slices[depth, 1] = sequences, size
        depth += 1
        if is_whole:
            best_s, num_best = arrays.done_s[0, depth, -1] + arrays.done_s[1, depth, -1], depth
            arrays.best[:depth] = arrays.slices[:depth]
            depth -= 1
            continue
        behind[depth], ends[depth], following[depth] = remaining, end, 0
    return best_s, num_best, steps


@kept(nogil=True)
def _run(
    depth: int, forward_s: float, backward_s: float, totals_s: FloatArray, arrays: PathArrays
) -> None:
    """Append a slice: update the end times of all stages, the sum and the slowest passes."""
    totals_s[depth + 1, 0] = totals_s[depth, 0] + (forward_s + backward_s)
    totals_s[depth + 1, 1] = max(totals_s[depth, 1], forward_s)
    totals_s[depth + 1, 2] = max(totals_s[depth, 2], backward_s)
    for way in range(2):
        took_s = forward_s if way == 0 else backward_s
        before, after = arrays.done_s[way, depth], arrays.done_s[way, depth + 1]
        arrived_s = 0.0
        for stage in range(arrays.factors.size):
            arrived_s = max(arrived_s, before[stage]) + took_s * arrays.factors[stage]
            after[stage] = arrived_s


@kept(nogil=True)
def _least_s(
    depth: int, left: int, sequences: int, end: int, totals_s: FloatArray, arrays: PathArrays
) -> float:
    """Return a lower bound on the time of all orders that begin with the slices so far.

    On each stage the remaining slices follow those done there, and the last slice then passes the
    later stages. The bound is slightly lowered, so that rounding cannot drop the best.
    """
    rest_s = arrays.rest_sum_s[left, sequences, end]
    forward_s, backward_s = arrays.done_s[0, depth], arrays.done_s[1, depth]
    num_stages = arrays.factors.size
    least_s = forward_s[-1] + backward_s[-1]
    if rest_s == 0.0:
        return float(least_s)
    later = 0.0
    for stage in range(num_stages - 1, -1, -1):
        done_s = forward_s[stage] + backward_s[stage]
        least_s = max(least_s, done_s + arrays.factors[stage] * rest_s + later * arrays.last_s)
        later += arrays.factors[stage]
    sum_s = totals_s[depth, 0] + rest_s
    slowest_s = max(totals_s[depth, 1], arrays.rest_slowest_s[0, left, sequences, end]) + max(
        totals_s[depth, 2], arrays.rest_slowest_s[1, left, sequences, end]
    )
    for pair in range(len(arrays.bounds)):
        least_s = max(least_s, arrays.bounds[pair, 0] * sum_s + arrays.bounds[pair, 1] * slowest_s)
    return float(least_s * (1.0 - 1e-14))
