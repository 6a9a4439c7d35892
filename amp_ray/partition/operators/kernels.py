"""Stages of a chain of operators and the cheapest chain of stages, compiled.

Stages are placed from the last one forward, so that the number of stages behind a stage, which
decides how many micro-batches it holds at once, is known when the stage is priced.
"""

from typing import Any

import numpy as np
from numba import njit

from amp_ray.partition.arrays import FloatArray, IntArray
from amp_ray.partition.operators.programme import Blocks, OperatorProgramme, Reach
from amp_ray.partition.recompute.kernels import relaxed_s

INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True}


@njit(cache=True, nogil=True)
def fill_reach(cap_s: float, programme: OperatorProgramme, reach: Reach) -> None:
    """Find how far any number of devices gets from either end with no stage above ``cap_s``.

    Stages count by what cannot shrink when they grow: their operators' own time, their state, and
    the recompute of their whole layers. Parts of layers hold at least what they can save.

    Args:
        cap_s: Bound on every stage's time.
        programme: The problem.
        reach: Overwritten.
    """
    num_devices, most_stages = programme.num_devices, reach.front.shape[0] - 1
    size = programme.time_prefix_s.shape[1] - 1
    reach.front[:], reach.back[:] = -1, size + 1
    reach.front[:, 0], reach.back[0, 0] = 0, size
    for step in range(most_stages):
        behind = most_stages - 1 - step
        for option in range(programme.devices.size):
            for taken in range(num_devices - programme.devices[option] + 1):
                total = taken + programme.devices[option]
                known = reach.front[behind + 1, taken]
                if known >= 0 and programme.allowed[option, taken]:
                    end = _furthest(option, behind, known, cap_s, programme)
                    reach.front[behind, total] = max(reach.front[behind, total], end)
                known = reach.back[step, taken]
                if known <= size and programme.allowed[option, num_devices - total]:
                    start = _earliest(option, step, known, cap_s, programme)
                    reach.back[step + 1, total] = min(reach.back[step + 1, total], start)


@njit(**INNER)
def _is_small(
    option: int, behind: int, start: int, end: int, cap_s: float, programme: OperatorProgramme
) -> bool:
    """Say whether a stage may fit and be fast enough, parts of layers at its ends being free."""
    if start >= end:
        return True
    prefix_s = programme.time_prefix_s[option]
    state, weight = programme.state_prefix[option], programme.weight_prefix[option]
    held, begin = programme.held_prefix[option], programme.layer_begin
    seconds = prefix_s[end] - prefix_s[start]
    fixed = (state[end] - state[start]) + (weight[end] - weight[start])
    step_s = programme.step_end_prefix_s[option]
    ends_s = programme.step_start_s[option] + (step_s[end] - step_s[start])
    if ends_s > programme.step_end_cap_s * (1 + 1e-12):
        return False
    if fixed > programme.limit_bytes or seconds > cap_s * (1 + 1e-12):
        return False
    low, high = programme.layer_of[start], programme.layer_of[end - 1] + 1
    low += 1 if begin[low] < start else 0
    high -= 1 if begin[high] > end or programme.free_end[end - 1] else 0
    if high <= low:
        return True
    reserved = max(programme.least_reserved[option], weight[end] - weight[start])
    flying = min(behind + 1, programme.most_in_flight)
    kept = flying * (held[begin[high]] - held[begin[low]])
    excess = (state[end] - state[start]) + kept + reserved - programme.limit_bytes
    if excess > 0.0:
        seconds += _relaxed_s(option, behind, excess, (-1, low, high, -1), programme)
    return bool(seconds <= cap_s * (1 + 1e-12))


@njit(**INNER)
def _furthest(
    option: int, behind: int, start: int, cap_s: float, programme: OperatorProgramme
) -> int:
    """Return the last end of a stage that begins at ``start``; itself if there is none."""
    low, high = start, programme.time_prefix_s.shape[1] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _is_small(option, behind, start, middle, cap_s, programme):
            low = middle
        else:
            high = middle - 1
    return low


@njit(**INNER)
def _earliest(
    option: int, behind: int, end: int, cap_s: float, programme: OperatorProgramme
) -> int:
    """Return the first start of a stage that ends at ``end``; itself if there is none."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if _is_small(option, behind, middle, end, cap_s, programme):
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)
def fill_stages(
    cap_s: float,
    cuts: IntArray,
    blocks: Blocks,
    programme: OperatorProgramme,
    stage_s: FloatArray,
) -> None:
    """Bound the time of every stage of every block from below.

    Args:
        cap_s: Stages above it are of no interest: infinite.
        cuts: Shape ``(C,)``. Where stages may begin and end, ascending from 0 to L.
        blocks: Which stages.
        programme: The problem.
        stage_s: Shape ``(E,)``. Filled.
    """
    stage_s[:] = np.inf
    for block in range(blocks.behind.size):
        place = programme.num_devices - blocks.taken[block] - blocks.size[block]
        for option in range(programme.devices.size):
            fits = programme.devices[option] == blocks.size[block]
            if fits and programme.allowed[option, place]:
                _fill_block(cap_s, block, option, place, cuts, blocks, programme, stage_s)


@njit(**INNER)
def _fill_block(
    cap_s: float,
    block: int,
    option: int,
    place: int,
    cuts: IntArray,
    blocks: Blocks,
    programme: OperatorProgramme,
    stage_s: FloatArray,
) -> None:
    """Offer one option for all stages of a block."""
    width = blocks.high_end[block] - blocks.low_end[block]
    for column in range(width):
        end = cuts[blocks.low_end[block] + column]
        forward, backward, seen = 0.0, 0.0, end - programme.spared
        for row in range(blocks.high_start[block] - blocks.low_start[block] - 1, -1, -1):
            start = cuts[blocks.low_start[block] + row]
            if start >= end:
                continue
            while seen > start:
                seen -= 1
                forward = max(forward, programme.forward_reserved[option, seen])
                backward = max(backward, programme.backward_reserved[option, seen])
            seconds = plain_s(option, place, start, end, programme)
            own_s = programme.time_prefix_s[option, end] - programme.time_prefix_s[option, start]
            if own_s > cap_s:
                break
            index = blocks.offset[block] + row * width + column
            if seconds > cap_s or seconds >= stage_s[index]:
                continue
            excess = excess_of(
                option, blocks.behind[block], start, end, forward + backward, programme
            )
            seconds += _extra_s(option, blocks.behind[block], start, end, excess, programme)
            if seconds <= cap_s:
                stage_s[index] = min(stage_s[index], seconds)


@njit(cache=True, nogil=True)
def plain_s(option: int, place: int, start: int, end: int, programme: OperatorProgramme) -> float:
    """Return the time of a stage without recompute; infinite above the cap on step ends."""
    if stage_end_s(option, start, end, programme) > programme.step_end_cap_s:
        return np.inf
    prefix_s, join_s = programme.time_prefix_s[option], programme.join_prefix_s[option]
    last = place + programme.devices[option]
    edges_s = 0.0
    if start > 0:
        edges_s += programme.start_s[option, programme.edge_kind[place], start]
    if end < prefix_s.size - 1:
        edges_s += programme.end_s[option, programme.edge_kind[last], end]
    own_s = prefix_s[end] - prefix_s[start]
    return float(own_s + (join_s[end - 1] - join_s[start]) + edges_s)


@njit(cache=True, nogil=True)
def stage_end_s(option: int, start: int, end: int, programme: OperatorProgramme) -> float:
    """Return what follows the pipeline in a stage."""
    step_s = programme.step_end_prefix_s[option]
    seconds = programme.step_start_s[option] + (step_s[end] - step_s[start])
    if (start == 0) != (end == step_s.size - 1):
        seconds += programme.tied_s[option]
    return float(seconds)


@njit(cache=True, nogil=True)
def excess_of(
    option: int, behind: int, start: int, end: int, reserved: float, programme: OperatorProgramme
) -> float:
    """Return the bytes above the limit without recompute, peaks left out."""
    state, held = programme.state_prefix[option], programme.held_prefix[option]
    weight = programme.weight_prefix[option]
    kept = programme.input_bytes[option, start] + (held[end] - held[start])
    spare = max(reserved, weight[end] - weight[start])
    fixed = (state[end] - state[start]) + spare
    return float(fixed + min(behind + 1, programme.most_in_flight) * kept - programme.limit_bytes)


@njit(**INNER)
def _extra_s(
    option: int, behind: int, start: int, end: int, excess: float, programme: OperatorProgramme
) -> float:
    """Bound the recompute of a stage from below."""
    if excess <= 0.0:
        return 0.0
    first, last = programme.layer_of[start], programme.layer_of[end - 1]
    place = programme.operator_place[start] if last > first else -1
    where = (place, min(first + 1, last), last, programme.operator_place[end - 1])
    return float(_relaxed_s(option, behind, excess, where, programme))


@njit(**INNER)
def _relaxed_s(
    option: int,
    behind: int,
    excess: float,
    where: tuple[int, int, int, int],
    programme: OperatorProgramme,
) -> float:
    """Bound the recompute that parts of a stage need to save ``excess`` bytes."""
    row = programme.relaxed[option]
    bound_s = relaxed_s(
        excess,
        float(min(behind + 1, programme.most_in_flight)),
        programme.charged[row],
        programme.levels[row],
        programme.rest[row],
        programme.layers[row],
        programme.head[row],
        where,
    )
    return float(bound_s)


@njit(cache=True, nogil=True)
def cheapest_operators(
    cap_s: float,
    cuts: IntArray,
    blocks: Blocks,
    stage_s: FloatArray,
    num_stages_allowed: tuple[int, int],
    best_s: FloatArray,
    choice: IntArray,
) -> tuple[float, float, int, float]:
    """Place all operators at the smallest sum with no stage slower than ``cap_s``.

    Args:
        cap_s: May be infinite.
        cuts: Shape ``(C,)``.
        blocks: Ascending in the stages behind.
        stage_s: Shape ``(E,)``.
        num_stages_allowed: Fewest and most.
        best_s: Shape ``(S + 1, G + 1, C)``. Overwritten: smallest sum of so many stages on so
            many devices that take all operators from a cut on.
        choice: Shape ``(S + 1, G + 1, C, 2)``. Overwritten: block and index of the first stage.

    Returns:
        ``(sum_s, slowest_s, num_stages, next_cap_s)`` as `partition.kernels.cheapest_chain`.
    """
    num_devices, last_cut = best_s.shape[1] - 1, cuts.size - 1
    best_s[:] = np.inf
    best_s[0, 0, last_cut] = 0.0
    next_cap_s = np.inf
    for block in range(blocks.behind.size):
        behind, taken = blocks.behind[block], blocks.taken[block]
        source, target = best_s[behind, taken], best_s[behind + 1, taken + blocks.size[block]]
        picks = choice[behind + 1, taken + blocks.size[block]]
        low_end, width = blocks.low_end[block], blocks.high_end[block] - blocks.low_end[block]
        for row in range(blocks.high_start[block] - blocks.low_start[block]):
            start = blocks.low_start[block] + row
            for column in range(width):
                index = blocks.offset[block] + row * width + column
                seconds = stage_s[index]
                if seconds > cap_s:
                    next_cap_s = min(next_cap_s, seconds)
                elif source[low_end + column] + seconds < target[start]:
                    target[start] = source[low_end + column] + seconds
                    picks[start, 0], picks[start, 1] = block, index
    sum_s, num_stages = np.inf, 0
    for stages in range(num_stages_allowed[0], num_stages_allowed[1] + 1):
        if best_s[stages, num_devices, 0] < sum_s:
            sum_s, num_stages = best_s[stages, num_devices, 0], stages
    if num_stages == 0:
        return np.inf, np.inf, 0, max(next_cap_s, np.nextafter(cap_s, np.inf))
    slowest_s = walk_stages(num_stages, blocks, stage_s, choice, np.empty(num_stages, np.int64))
    return sum_s, slowest_s, num_stages, next_cap_s


@njit(cache=True, nogil=True)
def walk_stages(
    num_stages: int, blocks: Blocks, stage_s: FloatArray, choice: IntArray, path: IntArray
) -> float:
    """Write the stages of the chain found, first stage first; return the slowest.

    Args:
        num_stages: Of the chain.
        blocks: Ascending in the stages behind.
        stage_s: Shape ``(E,)``.
        choice: Shape ``(S + 1, G + 1, C, 2)``.
        path: Shape ``(num_stages,)``. Becomes the index of each stage.

    Returns:
        Time of the slowest stage.
    """
    taken, start, slowest_s = choice.shape[1] - 1, 0, 0.0
    for stage in range(num_stages):
        block, index = choice[num_stages - stage, taken, start]
        path[stage] = index
        slowest_s = max(slowest_s, stage_s[index])
        width = blocks.high_end[block] - blocks.low_end[block]
        start = blocks.low_end[block] + (index - blocks.offset[block]) % width
        taken = blocks.taken[block]
    return slowest_s


@njit(cache=True, nogil=True)
def least_through(
    blocks: Blocks,
    stage_s: FloatArray,
    num_later: int,
    floor_s: float,
    best_s: FloatArray,
) -> FloatArray:
    """Bound the objective of every chain that contains a stage.

    Args:
        blocks: Ascending in the stages behind.
        stage_s: Shape ``(E,)``.
        num_later: Micro-batches after the first.
        floor_s: No chain of interest has a slowest stage below it.
        best_s: Shape ``(S + 1, G + 1, C)``, as `cheapest_operators` left it without a cap.

    Returns:
        Shape ``(E,)``.
    """
    front_s = np.full(best_s.shape, np.inf)
    front_s[1:, best_s.shape[1] - 1, 0] = 0.0
    through_s = np.full(stage_s.size, np.inf)
    for block in range(blocks.behind.size - 1, -1, -1):
        behind, taken = blocks.behind[block], blocks.taken[block]
        before = front_s[behind + 1, taken + blocks.size[block]]
        own, after = front_s[behind, taken], best_s[behind, taken]
        low_end, width = blocks.low_end[block], blocks.high_end[block] - blocks.low_end[block]
        for row in range(blocks.high_start[block] - blocks.low_start[block]):
            start = blocks.low_start[block] + row
            for column in range(width):
                index = blocks.offset[block] + row * width + column
                seconds, end = stage_s[index], low_end + column
                own[end] = min(own[end], before[start] + seconds)
                total_s = before[start] + seconds + after[end]
                through_s[index] = total_s + num_later * max(seconds, floor_s)
    return through_s
