"""Kernels for the cheapest slices under two caps, compiled.

For bounds on the forward and the backward time of every slice, `cheapest_slices` finds the cheapest
cut of each number of sequences, then of the batch. It takes at most O(B n^2 / 2); where times grow
with the size of a slice, it visits only the sizes that the caps admit.
"""

from dataclasses import dataclass

import cython
import numpy as np

INF = cython.declare(cython.double, float("inf"))


@cython.cclass
@dataclass(eq=False, repr=False)
class SliceArrays:
    """The tables of `SliceTables`, and the arrays that an evaluation writes."""

    forward_s: cython.const[cython.double][:, ::1]
    backward_s: cython.const[cython.double][:, ::1]
    total_s: cython.const[cython.double][:, ::1]
    regular: cython.const[cython.uchar][:, ::1]
    # Shape ``(B, 2)``. Lower bounds of the slowest passes, by number of sequences.
    least_s: cython.const[cython.double][:, ::1]
    # Shape ``(B, n + 1)``. Column ``n - end``: the cheapest cut of the first ``end`` granules,
    # reversed to match the order of the tables.
    cost_s: cython.double[:, ::1]
    batch_s: cython.double[::1]  # shape ``(B + 1,)``. Cheapest cut, by number of sequences.
    batch_slice: cython.longlong[::1]  # shape ``(B + 1,)``. Sequences of its last batch slice.
    # Shape ``(B, n)``. Granules of the slices by number of sequences, last slice first; then 0.
    path: cython.longlong[:, ::1]


@cython.ccall
def cheapest_slices(
    cap_forward_s: cython.double, cap_backward_s: cython.double, arrays: SliceArrays
) -> tuple[cython.double, cython.double, cython.double, cython.double, cython.double]:
    """Find the cheapest slices with no pass above its cap.

    Returns:
        ``(sum_s, slowest_forward_s, slowest_backward_s, next_forward_s, next_backward_s)``. The sum
        is infinite without any. The last two are the least times above one cap of slices that obey
        the other cap.
    """
    forward_s: cython.double
    backward_s: cython.double
    next_forward_s: cython.double
    next_backward_s: cython.double
    num_sequences = arrays.cost_s.shape[0]
    next_forward_s = next_backward_s = INF
    for row in range(num_sequences):
        if arrays.least_s[row, 0] > cap_forward_s:
            arrays.cost_s[row, 0] = INF
            next_forward_s = min(next_forward_s, arrays.least_s[row, 0])
            continue
        if arrays.least_s[row, 1] > cap_backward_s:
            arrays.cost_s[row, 0] = INF
            next_backward_s = min(next_backward_s, arrays.least_s[row, 1])
            continue
        first, second = _fill(row, cap_forward_s, cap_backward_s, arrays)
        next_forward_s = min(next_forward_s, first)
        next_backward_s = min(next_backward_s, second)
    arrays.batch_s[0] = 0.0
    for total in range(1, num_sequences + 1):
        best_s, best = INF, 0
        for size in range(total, 0, -1):
            sum_s = arrays.batch_s[total - size] + arrays.cost_s[size - 1, 0]
            if sum_s < best_s:
                best_s, best = sum_s, size
        arrays.batch_s[total], arrays.batch_slice[total] = best_s, best
    forward_s = backward_s = 0.0
    remaining = num_sequences if arrays.batch_s[num_sequences] < INF else 0
    while remaining > 0:
        size = arrays.batch_slice[remaining]
        slowest = _walk_back(size - 1, cap_forward_s, cap_backward_s, arrays)
        forward_s, backward_s = max(forward_s, slowest[0]), max(backward_s, slowest[1])
        remaining -= size
    return arrays.batch_s[num_sequences], forward_s, backward_s, next_forward_s, next_backward_s


@cython.cfunc
def _fill(
    row: cython.Py_ssize_t,
    cap_forward_s: cython.double,
    cap_backward_s: cython.double,
    arrays: SliceArrays,
) -> tuple[cython.double, cython.double]:
    """Fill the cheapest cuts of one number of sequences; return the least times above a cap."""
    best_s: cython.double
    limit: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    next_forward_s: cython.double
    next_backward_s: cython.double
    cost_s, num_granules = arrays.cost_s[row], arrays.cost_s.shape[1] - 1
    forward_s, backward_s = arrays.forward_s[row], arrays.backward_s[row]
    total_s, regular = arrays.total_s[row], arrays.regular[row]
    next_forward_s = next_backward_s = INF
    cost_s[num_granules] = 0.0
    first = limit = 0
    for end in range(1, num_granules + 1):
        before, best_s = num_granules - end + 1, INF
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


@cython.cfunc
def _walk_back(
    row: cython.Py_ssize_t,
    cap_forward_s: cython.double,
    cap_backward_s: cython.double,
    arrays: SliceArrays,
) -> tuple[cython.double, cython.double]:
    """Write the cheapest cut of one number of sequences; ties go to the shortest last slice."""
    slowest_forward_s: cython.double
    slowest_backward_s: cython.double
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


@cython.ccall
def tightened(
    lows_s: tuple[cython.double, cython.double],
    highs_s: tuple[cython.double, cython.double],
    arrays: SliceArrays,
) -> tuple[cython.double, cython.double]:
    """Raise the lower ends of a box of slowest passes to times of actual slices.

    The slice with the slowest forward pass has a backward pass below the top, and vice versa. The
    lower ends are infinite if no slice is in the box.
    """
    low_forward_s: cython.double
    low_backward_s: cython.double
    beside_forward_s: cython.double
    beside_backward_s: cython.double
    low_forward_s = low_backward_s = INF
    beside_forward_s = beside_backward_s = INF
    for row in range(arrays.least_s.shape[0]):
        if arrays.least_s[row, 0] <= highs_s[0] and arrays.least_s[row, 1] <= highs_s[1]:
            least_s = _least_of(row, lows_s, highs_s, arrays)
            low_forward_s = min(low_forward_s, least_s[0])
            low_backward_s = min(low_backward_s, least_s[1])
            beside_forward_s = min(beside_forward_s, least_s[2])
            beside_backward_s = min(beside_backward_s, least_s[3])
    return max(low_forward_s, beside_forward_s), max(low_backward_s, beside_backward_s)


@cython.cfunc
def _least_of(
    row: cython.Py_ssize_t,
    lows_s: tuple[cython.double, cython.double],
    highs_s: tuple[cython.double, cython.double],
    arrays: SliceArrays,
) -> tuple[cython.double, cython.double, cython.double, cython.double]:
    """Return the least times of slices below the top, by the pass that reaches the bottom.

    Let A be slices with a forward pass in the box, B those with a backward pass in it. The result
    is forward of A, backward of B, forward of B, backward of A.
    """
    begin: cython.Py_ssize_t
    last: cython.Py_ssize_t
    start: cython.Py_ssize_t
    second: cython.Py_ssize_t
    least_forward_s: cython.double
    least_backward_s: cython.double
    beside_forward_s: cython.double
    beside_backward_s: cython.double
    least_forward_s = least_backward_s = beside_forward_s = beside_backward_s = INF
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


@cython.cfunc
def _num_below(
    guess: cython.Py_ssize_t,
    times_s: cython.const[cython.double][::1],
    first: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    low_s: cython.double,
) -> cython.Py_ssize_t:
    """Count the entries of an ascending row below ``low_s``; ``guess`` is close to it."""
    number = guess
    while number > 0 and times_s[first + number - 1] >= low_s:
        number -= 1
    while number < end and times_s[first + number] < low_s:
        number += 1
    return number


@cython.cclass
@dataclass(eq=False, repr=False)
class PathArrays:
    """Arrays of the search through all slices of unequal stages."""

    forward_s: cython.const[cython.double][
        :, ::1
    ]  # shape ``(B, n (n + 1) / 2)``, as in `SliceTables`
    backward_s: cython.const[cython.double][:, ::1]  # the same
    factors: cython.const[cython.double][::1]  # shape ``(K,)``. Factor on the times, per stage.
    # Shape ``(P, 2)``. Weights of sum and slowest pass: each pair bounds the time.
    bounds: cython.const[cython.double][:, ::1]
    # Shape ``(B + 1, B + 1, n + 1)``. Least sum of the remaining slices, by sequences after the
    # current batch slice, sequences in it, and granules done.
    rest_sum_s: cython.const[cython.double][:, :, ::1]
    # Shape ``(2, B + 1, B + 1, n + 1)``. Least slowest forward and backward pass of them.
    rest_slowest_s: cython.const[cython.double][:, :, :, ::1]
    last_s: cython.double  # least sum of a slice that ends a sequence
    done_s: cython.double[
        :, :, ::1
    ]  # shape ``(2, B n + 1, K)``. End time of stages, by number of slices.
    slices: cython.longlong[
        :, ::1
    ]  # shape ``(B n, 2)``. Sequences and granules of the slices on the path.
    best: cython.longlong[:, ::1]  # the same, of the best one


@cython.ccall
def shortest_path(
    best_s: cython.double, most_steps: cython.longlong, arrays: PathArrays
) -> tuple[cython.double, cython.longlong, cython.longlong]:
    """Search all slices in all orders for a time below ``best_s``, by branch and bound.

    The search is depth first; it drops a prefix whose bound reaches the best time.

    Returns:
        ``(best_s, num_slices, num_steps)``. The best slices are in ``best``; ``num_slices`` is 0 if
        none is faster. At ``most_steps`` the search stops, and proves nothing.
    """
    num_sequences, num_granules = arrays.rest_sum_s.shape[0] - 1, arrays.rest_sum_s.shape[2] - 1
    most, last = num_sequences * num_granules, arrays.factors.shape[0] - 1
    # Per slice on the path: sequences after its batch slice, granules done including it, sums.
    behind: cython.longlong[::1] = np.zeros(most + 1, dtype=np.int64)
    ends: cython.longlong[::1] = np.zeros(most + 1, dtype=np.int64)
    totals_s: cython.double[:, ::1] = np.zeros((most + 1, 3))
    behind[0], ends[0] = num_sequences, num_granules
    # The next slice to try after each prefix, as a number that counts (sequences, granules).
    following: cython.longlong[::1] = np.zeros(most + 1, dtype=np.int64)
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
        if forward_s == INF or arrays.rest_sum_s[remaining, sequences, end] == INF:
            continue
        _run(depth, forward_s, backward_s, totals_s, arrays)
        is_whole = remaining == 0 and end == num_granules
        if _least_s(depth + 1, remaining, sequences, end, totals_s, arrays) >= best_s:
            continue
        arrays.slices[depth, 0], arrays.slices[depth, 1] = sequences, size
        depth += 1
        if is_whole:
            best_s = arrays.done_s[0, depth, last] + arrays.done_s[1, depth, last]
            num_best = depth
            arrays.best[:depth] = arrays.slices[:depth]
            depth -= 1
            continue
        behind[depth], ends[depth], following[depth] = remaining, end, 0
    return best_s, num_best, steps


@cython.cfunc
def _run(
    depth: cython.Py_ssize_t,
    forward_s: cython.double,
    backward_s: cython.double,
    totals_s: cython.double[:, ::1],
    arrays: PathArrays,
) -> None:
    """Append a slice: update the end times of all stages, the sum and the slowest passes."""
    arrived_s: cython.double
    before_s: cython.double
    totals_s[depth + 1, 0] = totals_s[depth, 0] + (forward_s + backward_s)
    totals_s[depth + 1, 1] = max(totals_s[depth, 1], forward_s)
    totals_s[depth + 1, 2] = max(totals_s[depth, 2], backward_s)
    for way in range(2):
        took_s = forward_s if way == 0 else backward_s
        arrived_s = 0.0
        for stage in range(arrays.factors.shape[0]):
            before_s = max(arrived_s, arrays.done_s[way, depth, stage])
            arrived_s = before_s + took_s * arrays.factors[stage]
            arrays.done_s[way, depth + 1, stage] = arrived_s


@cython.cfunc
def _least_s(
    depth: cython.Py_ssize_t,
    left: cython.Py_ssize_t,
    sequences: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    totals_s: cython.const[cython.double][:, ::1],
    arrays: PathArrays,
) -> cython.double:
    """Return a lower bound on the time of all orders that begin with the slices so far.

    On each stage the remaining slices follow those done there, and the last slice then passes the
    later stages. The bound is slightly lowered, so that rounding cannot drop the best.
    """
    least_s: cython.double
    slowest_s: cython.double
    rest_s = arrays.rest_sum_s[left, sequences, end]
    num_stages = arrays.factors.shape[0]
    last = num_stages - 1
    least_s = arrays.done_s[0, depth, last] + arrays.done_s[1, depth, last]
    if rest_s == 0.0:
        return least_s
    later = 0.0
    for stage in range(num_stages - 1, -1, -1):
        done_s = arrays.done_s[0, depth, stage] + arrays.done_s[1, depth, stage]
        least_s = max(least_s, done_s + arrays.factors[stage] * rest_s + later * arrays.last_s)
        later += arrays.factors[stage]
    sum_s = totals_s[depth, 0] + rest_s
    slowest_s = max(totals_s[depth, 1], arrays.rest_slowest_s[0, left, sequences, end]) + max(
        totals_s[depth, 2], arrays.rest_slowest_s[1, left, sequences, end]
    )
    for pair in range(arrays.bounds.shape[0]):
        least_s = max(least_s, arrays.bounds[pair, 0] * sum_s + arrays.bounds[pair, 1] * slowest_s)
    return least_s * (1.0 - 1e-14)
