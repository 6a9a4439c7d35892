"""Stages of a chain of operators and the cheapest chain of stages, compiled.

Stages are placed from the last one to the first. So the number of stages behind a stage, which
decides how many micro-batches it holds at once, is known when the stage is priced.
"""

from typing import Any

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.jit import kept, njit
from amp_ray.planners.operators.partition.programme import Blocks, OperatorProgramme
from amp_ray.planners.operators.recompute.kernels import INLINED, PER_STAGE, relaxed_s

# Kernels allocate nothing, so references to arrays need not be counted: numba would count them
# atomically at every look-up and call, which takes twenty times as long as the rest of a stage.
COUNTLESS: dict[str, Any] = {"nogil": True, "_nrt": False}


@kept(**COUNTLESS)
def fill_front(cap_s: float, programme: OperatorProgramme, front: IntArray) -> None:
    """Compute how many operators stages can hold from the front with no stage above ``cap_s``.

    A stage counts only what can never shrink as it grows: its operators' own time, its state, and
    the recompute of its whole layers. Parts of layers are taken to save as much as possible.
    ``front`` is overwritten with the array that `layout.front_within` returns.
    """
    num_devices = programme.num_devices
    front[:] = -1
    front[:, 0] = 0
    for behind in range(front.shape[0] - 2, -1, -1):
        for option in range(programme.devices.size):
            for taken in range(num_devices - programme.devices[option] + 1):
                total, reached = taken + programme.devices[option], front[behind + 1, taken]
                if reached >= 0 and programme.allowed[option, taken]:
                    least = max(reached, front[behind, total])
                    end = _furthest(option, behind, (reached, least), cap_s, programme)
                    front[behind, total] = end


@kept(**COUNTLESS)
def fill_back(cap_s: float, programme: OperatorProgramme, back: IntArray) -> None:
    """Compute how far stages reach from the back of the chain, as `fill_front` from its front.

    ``back``, shape ``(S + 1, G + 1)``, is overwritten: by number of stages and number of devices,
    the first operator from which they can hold the rest of the chain.
    """
    num_devices = programme.num_devices
    size = programme.time_prefix_s.shape[1] - 1
    back[:] = size + 1
    back[0, 0] = size
    for behind in range(back.shape[0] - 1):
        for option in range(programme.devices.size):
            for taken in range(num_devices - programme.devices[option] + 1):
                total, reached = taken + programme.devices[option], back[behind, taken]
                if reached <= size and programme.allowed[option, num_devices - total]:
                    most = min(reached, back[behind + 1, total])
                    start = _earliest(option, behind, (reached, most), cap_s, programme)
                    back[behind + 1, total] = start


@njit(**PER_STAGE)
def _is_small(
    option: int, behind: int, start: int, end: int, cap_s: float, programme: OperatorProgramme
) -> bool:
    """Return whether a stage may fit and be fast enough, with partial layers at its ends free."""
    if start >= end:
        return True
    begin, most_s = programme.layer_begin, cap_s * (1 + 1e-12)
    seconds = programme.time_prefix_s[option, end] - programme.time_prefix_s[option, start]
    state = programme.state_prefix[option, end] - programme.state_prefix[option, start]
    weight = programme.weight_prefix[option, end] - programme.weight_prefix[option, start]
    step_s = programme.step_end_prefix_s[option, end] - programme.step_end_prefix_s[option, start]
    if programme.step_start_s[option] + step_s > programme.step_end_cap_s * (1 + 1e-12):
        return False
    if state + weight > programme.limit_bytes or seconds > most_s:
        return False
    low, high = programme.layer_of[start], programme.layer_of[end - 1] + 1
    low += 1 if begin[low] < start else 0
    high -= 1 if begin[high] > end or programme.free_end[end - 1] else 0
    if high <= low:
        return True
    held = programme.held_prefix[option, begin[high]] - programme.held_prefix[option, begin[low]]
    kept = min(behind + 1, programme.most_in_flight) * held
    excess = state + kept + max(programme.least_reserved[option], weight) - programme.limit_bytes
    if excess > 0.0:
        more_s = np.nextafter(most_s - seconds, np.inf)
        seconds += _relaxed_s(option, behind, excess, more_s, (-1, low, high, -1), programme)
    return bool(seconds <= most_s)


@njit(**PER_STAGE)
def _furthest(
    option: int,
    behind: int,
    start: tuple[int, int],
    cap_s: float,
    programme: OperatorProgramme,
) -> int:
    """Return the last end of a stage with a given start, or the end reached without it."""
    first, low = start
    high = programme.time_prefix_s.shape[1] - 1
    if low < high and not _is_small(option, behind, first, low + 1, cap_s, programme):
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if _is_small(option, behind, first, middle, cap_s, programme):
            low = middle
        else:
            high = middle - 1
    return low


@njit(**PER_STAGE)
def _earliest(
    option: int,
    behind: int,
    end: tuple[int, int],
    cap_s: float,
    programme: OperatorProgramme,
) -> int:
    """Return the first start of a stage with a given end, or the start reached without it."""
    last, high = end
    low = 0
    if low < high and not _is_small(option, behind, high - 1, last, cap_s, programme):
        return high
    while low < high:
        middle = (low + high) // 2
        if _is_small(option, behind, middle, last, cap_s, programme):
            high = middle
        else:
            low = middle + 1
    return low


@kept(**COUNTLESS)
def fill_rows(
    cap_s: float,
    cuts: IntArray,
    programme: OperatorProgramme,
    blocks: Blocks,
    row_high: IntArray,
) -> None:
    """Give each start of a table the ends of its blocks, as far as the cap allows.

    Stages whose operators alone take longer than ``cap_s`` are left out, whatever they recompute.
    ``cuts`` has shape ``(C,)``. The rows of ``blocks`` and ``row_high``, shape ``(T, C)``, are
    overwritten.
    """
    row_low, row_begin = blocks.row_low, blocks.row_begin
    row_low[:] = cuts.size
    for block in range(blocks.behind.size):
        table = blocks.table[block]
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low = max(start + 1, blocks.low_end[block])
            row_low[table, start] = min(row_low[table, start], low)
            row_high[table, start] = max(row_high[table, start], blocks.high_end[block])
    begin = 0
    for table in range(blocks.example.size):
        for start in range(cuts.size):
            low, high = row_low[table, start], row_high[table, start]
            if low < high:
                high = _last_end(cap_s, (table, start, low, high), cuts, programme, blocks) + 1
            row_begin[table, start] = begin
            begin += max(high - low, 0)
        row_begin[table, cuts.size] = begin


@njit(**PER_STAGE)
def _last_end(
    cap_s: float,
    row: tuple[int, int, int, int],
    cuts: IntArray,
    programme: OperatorProgramme,
    blocks: Blocks,
) -> int:
    """Return the last end of a row at which some option's operators take at most the cap."""
    table, start, low, high = row
    last, example = low - 1, blocks.example[table]
    size = blocks.size[example]
    place = programme.num_devices - blocks.taken[example] - size
    for option in range(programme.devices.size):
        if programme.devices[option] == size and programme.allowed[option, place]:
            prefix_s, end = programme.time_prefix_s[option], high - 1
            while last < end:
                middle = (last + end + 1) // 2
                if prefix_s[cuts[middle]] - prefix_s[cuts[start]] <= cap_s:
                    last = middle
                else:
                    end = middle - 1
    return last


@kept(**COUNTLESS)
def trim_rows(
    wanted: BoolArray, blocks: Blocks, row_low: IntArray, row_begin: IntArray, values: FloatArray
) -> int:
    """Cut rows to the range from the first to the last wanted stage.

    Args:
        wanted: Shape ``(E,)``. Stages to keep.
        blocks: Blocks that hold the stages.
        row_low: Shape ``(T, C)``. Overwritten with the new ``row_low`` of the blocks.
        row_begin: Shape ``(T, C + 1)``. Overwritten with the new ``row_begin`` of the blocks.
        values: Shape ``(E,)``. Values of the remaining stages are moved to its beginning.

    Returns:
        Number of stages that remain.
    """
    size = 0
    for table in range(row_low.shape[0]):
        for start in range(row_low.shape[1]):
            begin, end = blocks.row_begin[table, start], blocks.row_begin[table, start + 1]
            first = begin
            while first < end and not wanted[first]:
                first += 1
            while end > first and not wanted[end - 1]:
                end -= 1
            row_low[table, start] = blocks.row_low[table, start] + first - begin
            row_begin[table, start] = size
            for index in range(first, end):
                values[size] = values[index]
                size += 1
        row_begin[table, row_low.shape[1]] = size
    return size


@kept(**COUNTLESS)
def fill_most(
    cap_s: float,
    limit_s: float,
    num_later: int,
    floor_s: float,
    stage_s: FloatArray,
    through_s: FloatArray,
) -> None:
    """Compute the longest time that each stage may take in a chain that costs less than a limit.

    Above the floor, each extra second of a stage counts once for every micro-batch.

    Args:
        cap_s: Upper limit on every result.
        limit_s: Limit on the cost of a chain.
        num_later: Micro-batches after the first.
        floor_s: Lower bound on the slowest stage of any chain.
        stage_s: Shape ``(E,)``. Lower bounds on the time of stages.
        through_s: Shape ``(E,)``. Bounds from `fill_through`. Overwritten with the longest times;
            negative infinity if no such chain contains the stage.
    """
    for index in range(stage_s.size):
        if through_s[index] < limit_s:
            left_s = limit_s - through_s[index]
            below_s = max(floor_s - stage_s[index], 0.0) + left_s / (num_later + 1)
            most_s = stage_s[index] + min(left_s, below_s) * (1 + 1e-9)
            through_s[index] = min(most_s, cap_s)
        else:
            through_s[index] = -np.inf


@kept(**COUNTLESS)
def fill_stages(
    cap_s: float,
    cuts: IntArray,
    blocks: Blocks,
    programme: OperatorProgramme,
    most_s: FloatArray,
    stage_s: FloatArray,
) -> None:
    """Bound the time of every stage of every block from below.

    Args:
        cap_s: Stages above it become infinite.
        cuts: Shape ``(C,)``. Where stages may begin and end, ascending from 0 to L.
        blocks: Stages to bound.
        programme: The problem.
        most_s: Shape ``(E,)``. Stages above their entry become infinite, too. If empty, there is no
            such limit, and recompute is left out of the bounds.
        stage_s: Shape ``(E,)``. Overwritten with the bounds.
    """
    stage_s[:] = np.inf
    for table in range(blocks.example.size):
        size = blocks.size[blocks.example[table]]
        place = programme.num_devices - blocks.taken[blocks.example[table]] - size
        for option in range(programme.devices.size):
            if programme.devices[option] == size and programme.allowed[option, place]:
                _fill_table(cap_s, table, (option, place), cuts, blocks, programme, most_s, stage_s)


@njit(**PER_STAGE)
def _fill_table(
    cap_s: float,
    table: int,
    use: tuple[int, int],
    cuts: IntArray,
    blocks: Blocks,
    programme: OperatorProgramme,
    most_s: FloatArray,
    stage_s: FloatArray,
) -> None:
    """Lower the bounds of a table's stages to those of one option."""
    option, _ = use
    flying = float(min(blocks.behind[blocks.example[table]] + 1, programme.most_in_flight))
    # Upper bound on the reserve of any stage: the largest values of all operators.
    reserves = (
        _largest(programme.forward_reserved[option])
        + _largest(programme.backward_reserved[option])
        + _largest(programme.again_bytes[option])
    )
    for row in range(cuts.size - 1):  # no stage begins at the end
        begin, end = blocks.row_begin[table, row], blocks.row_begin[table, row + 1]
        ends = cuts[blocks.row_low[table, row] :]
        _fill_row(
            (cap_s, flying, reserves),
            (cuts[row], begin, end),
            use,
            ends,
            programme,
            most_s,
            stage_s,
        )


@njit(**INLINED)
def _fill_row(
    limits: tuple[float, float, float],
    row: tuple[int, int, int],
    use: tuple[int, int],
    ends: IntArray,
    programme: OperatorProgramme,
    most_s: FloatArray,
    stage_s: FloatArray,
) -> None:
    """Lower the bounds of the stages that begin at one operator to those of one option."""
    (cap_s, flying, reserves), (start, begin, stop), (option, place) = limits, row, use
    time_s, join_s = programme.time_prefix_s[option], programme.join_prefix_s[option]
    start_s = programme.start_s[option, programme.edge_kind[place]]
    end_s = programme.end_s[option, programme.edge_kind[place + programme.devices[option]]]
    step_s, step = programme.step_end_prefix_s[option], _step_of(option, programme)
    state, held = programme.state_prefix[option], programme.held_prefix[option]
    weight, kept = programme.weight_prefix[option], programme.input_bytes[option, start]
    forward, backward, again, seen = 0.0, 0.0, 0.0, start
    for index in range(begin, stop):
        end = ends[index - begin]
        if time_s[end] - time_s[start] + (join_s[end - 1] - join_s[start]) > cap_s:
            break
        seconds = _plain_s(start, end, time_s, join_s, start_s, end_s, step_s, step)
        if seconds > cap_s or seconds >= stage_s[index]:
            continue
        if most_s.size > 0:
            if seconds > most_s[index]:
                continue
            while seen < end - programme.spared and forward + backward + again < reserves:
                forward = max(forward, programme.forward_reserved[option, seen])
                backward = max(backward, programme.backward_reserved[option, seen])
                again = max(again, programme.again_bytes[option, seen])
                seen += 1
            spare = max(forward + backward, weight[end] - weight[start])
            fixed = (state[end] - state[start]) + spare
            needed = fixed + flying * (kept + (held[end] - held[start]))
            excess = again + (needed - programme.limit_bytes)
            if excess > 0.0:
                known_s = min(most_s[index], stage_s[index]) - seconds
                seconds += _recompute_s(excess, flying, known_s, (start, end), option, programme)
        if seconds <= cap_s:
            stage_s[index] = min(stage_s[index], seconds)


@njit(**INLINED)
def _recompute_s(
    excess: float,
    flying: float,
    known_s: float,
    stage: tuple[int, int],
    option: int,
    programme: OperatorProgramme,
) -> float:
    """Bound the seconds of recompute that save ``excess`` bytes of a stage, by `relaxed_s`."""
    start, end = stage
    first, whole = programme.layer_of[start], programme.layer_of[end - 1]
    part = programme.operator_place[start] if whole > first else -1
    share = programme.relaxed[option]
    seconds: float = relaxed_s(
        excess,
        flying,
        known_s,
        programme.hints,
        programme.charged[share],
        programme.levels[share],
        programme.rest[share],
        programme.layers[share],
        programme.head[share],
        (part, min(first + 1, whole), whole, programme.operator_place[end - 1]),
    )
    return seconds


@njit(**PER_STAGE)
def _largest(values: FloatArray) -> float:
    largest = 0.0
    for value in values:
        largest = max(largest, value)
    return largest


@kept(**COUNTLESS)
def plain_s(option: int, place: int, start: int, end: int, programme: OperatorProgramme) -> float:
    """Return the time of a stage without recompute; infinite above the cap on step ends."""
    last = min(place + programme.devices[option], programme.num_devices)
    return float(
        _plain_s(
            start,
            end,
            programme.time_prefix_s[option],
            programme.join_prefix_s[option],
            programme.start_s[option, programme.edge_kind[place]],
            programme.end_s[option, programme.edge_kind[last]],
            programme.step_end_prefix_s[option],
            _step_of(option, programme),
        )
    )


@kept(**COUNTLESS)
def stage_end_s(option: int, start: int, end: int, programme: OperatorProgramme) -> float:
    """Return the seconds of a stage's step end."""
    step_s = programme.step_end_prefix_s[option]
    return float(_stage_end_s(start, end, step_s, _step_of(option, programme)))


@njit(**PER_STAGE)
def _step_of(option: int, programme: OperatorProgramme) -> tuple[float, float, float]:
    """Return an option's step start, its time of tied weights, and the cap on step ends."""
    tied_s, cap_s = programme.tied_s[option], programme.step_end_cap_s
    return programme.step_start_s[option], tied_s, cap_s


@njit(**INLINED)
def _plain_s(
    start: int,
    end: int,
    time_s: FloatArray,
    join_s: FloatArray,
    start_s: FloatArray,
    end_s: FloatArray,
    step_s: FloatArray,
    step: tuple[float, float, float],
) -> float:
    if _stage_end_s(start, end, step_s, step) > step[2]:
        return np.inf
    edges_s = 0.0
    if start > 0:
        edges_s += start_s[start]
    if end < time_s.size - 1:
        edges_s += end_s[end]
    own_s = time_s[end] - time_s[start]
    return float(own_s + (join_s[end - 1] - join_s[start]) + edges_s)


@njit(**INLINED)
def _stage_end_s(
    start: int, end: int, step_s: FloatArray, step: tuple[float, float, float]
) -> float:
    seconds = step[0] + (step_s[end] - step_s[start])
    if (start == 0) != (end == step_s.size - 1):
        seconds += step[1]
    return float(seconds)


@kept(**COUNTLESS)
def excess_of(
    option: int, behind: int, start: int, end: int, reserved: float, programme: OperatorProgramme
) -> float:
    """Return the bytes above the limit without recompute, leaving out peaks."""
    state, held = programme.state_prefix[option], programme.held_prefix[option]
    weight = programme.weight_prefix[option]
    kept = programme.input_bytes[option, start] + (held[end] - held[start])
    spare = max(reserved, weight[end] - weight[start])
    fixed = (state[end] - state[start]) + spare
    return float(fixed + min(behind + 1, programme.most_in_flight) * kept - programme.limit_bytes)


@njit(**PER_STAGE)
def _relaxed_s(
    option: int,
    behind: int,
    excess: float,
    known_s: float,
    where: tuple[int, int, int, int],
    programme: OperatorProgramme,
) -> float:
    """Bound the recompute time that parts of a stage need to save ``excess`` bytes."""
    row = programme.relaxed[option]
    bound_s = relaxed_s(
        excess,
        float(min(behind + 1, programme.most_in_flight)),
        known_s,
        programme.hints,
        programme.charged[row],
        programme.levels[row],
        programme.rest[row],
        programme.layers[row],
        programme.head[row],
        where,
    )
    return float(bound_s)


@kept(**COUNTLESS)
def cheapest_operators(
    cap_s: float,
    cuts: IntArray,
    blocks: Blocks,
    stage_s: FloatArray,
    num_stages_allowed: tuple[int, int],
    best_s: FloatArray,
    choice: IntArray,
    path: IntArray,
) -> tuple[float, float, int, float]:
    """Find the chain of stages with the smallest sum of times and no stage above ``cap_s``.

    Args:
        cap_s: May be infinite.
        cuts: Shape ``(C,)``.
        blocks: In ascending order of the stages behind them.
        stage_s: Shape ``(E,)``.
        num_stages_allowed: Smallest and largest number of stages.
        best_s: Shape ``(S + 1, G + 1, C)``. Overwritten, by number of stages, number of devices and
            cut: the smallest sum of stages that take all operators from the cut on.
        choice: Shape ``(S + 1, G + 1, C, 2)``. Overwritten: block and end of the first such stage.
        path: Shape ``(S,)``. Overwritten: the index of each stage of the best chain.

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
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low, high, offset = _row(block, start, blocks)
            for end in range(low, high):
                seconds = stage_s[offset + end]
                if seconds > cap_s:
                    next_cap_s = min(next_cap_s, seconds)
                elif source[end] + seconds < target[start]:
                    target[start] = source[end] + seconds
                    picks[start, 0], picks[start, 1] = block, end
    sum_s, num_stages = np.inf, 0
    for stages in range(num_stages_allowed[0], num_stages_allowed[1] + 1):
        if best_s[stages, num_devices, 0] < sum_s:
            sum_s, num_stages = best_s[stages, num_devices, 0], stages
    if num_stages == 0:
        return np.inf, np.inf, 0, max(next_cap_s, np.nextafter(cap_s, np.inf))
    slowest_s = walk_stages(num_stages, blocks, stage_s, choice, path)
    return sum_s, slowest_s, num_stages, next_cap_s


@kept(**COUNTLESS)
def least_slowest(
    blocks: Blocks, stage_s: FloatArray, num_stages_allowed: tuple[int, int], best_s: FloatArray
) -> float:
    """Return the least possible time of a chain's slowest stage; infinite if there is no chain.

    Args:
        blocks: In ascending order of the stages behind them.
        stage_s: Shape ``(E,)``.
        num_stages_allowed: Smallest and largest number of stages.
        best_s: Shape ``(S + 1, G + 1, C)``. Overwritten, by number of stages, number of devices and
            cut: the least possible slowest stage of those that take all operators from the cut on.
    """
    num_devices, last_cut = best_s.shape[1] - 1, best_s.shape[2] - 1
    best_s[:] = np.inf
    best_s[0, 0, last_cut] = 0.0
    for block in range(blocks.behind.size):
        behind, taken = blocks.behind[block], blocks.taken[block]
        source, target = best_s[behind, taken], best_s[behind + 1, taken + blocks.size[block]]
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low, high, offset = _row(block, start, blocks)
            least_s = target[start]
            for end in range(low, high):
                least_s = min(least_s, max(source[end], stage_s[offset + end]))
            target[start] = least_s
    least_s = np.inf
    for stages in range(num_stages_allowed[0], num_stages_allowed[1] + 1):
        least_s = min(least_s, best_s[stages, num_devices, 0])
    return float(least_s)


@njit(**PER_STAGE)
def _row(block: int, start: int, blocks: Blocks) -> tuple[int, int, int]:
    """Return a block's range of ends at a start, and the number that turns an end into an index."""
    table = blocks.table[block]
    begin, low = blocks.row_begin[table, start], blocks.row_low[table, start]
    high = low + blocks.row_begin[table, start + 1] - begin
    return max(low, blocks.low_end[block]), min(high, blocks.high_end[block]), begin - low


@kept(**COUNTLESS)
def walk_stages(
    num_stages: int, blocks: Blocks, stage_s: FloatArray, choice: IntArray, path: IntArray
) -> float:
    """Write the stages of the chain to ``path``, first stage first; return the slowest time.

    ``path``, of at least ``num_stages`` entries, gets the index of each stage. ``blocks`` ascend by
    the stages behind them; ``stage_s`` has shape ``(E,)``, and ``choice``, from
    `cheapest_operators`, shape ``(S + 1, G + 1, C, 2)``.
    """
    taken, start, slowest_s = choice.shape[1] - 1, 0, 0.0
    for stage in range(num_stages):
        remaining = num_stages - stage
        block, end = choice[remaining, taken, start, 0], choice[remaining, taken, start, 1]
        path[stage] = _row(block, start, blocks)[2] + end
        slowest_s = max(slowest_s, stage_s[path[stage]])
        taken, start = blocks.taken[block], end
    return slowest_s


@kept(**COUNTLESS)
def fill_through(
    blocks: Blocks,
    stage_s: FloatArray,
    num_later: int,
    floor_s: float,
    best_s: FloatArray,
    front_s: FloatArray,
    through_s: FloatArray,
) -> None:
    """Compute, per stage, a lower bound on the objective of every chain that contains it.

    Args:
        blocks: In ascending order of the stages behind them.
        stage_s: Shape ``(E,)``.
        num_later: Micro-batches after the first.
        floor_s: Lower bound on the slowest stage of any chain.
        best_s: Shape ``(S + 1, G + 1, C)``, from `cheapest_operators` without a cap.
        front_s: Shape ``(S + 1, G + 1, C)``. Overwritten: the same for all operators up to a cut.
        through_s: Shape ``(E,)``. Overwritten with the bounds.
    """
    front_s[:] = np.inf
    for stages in range(1, best_s.shape[0]):
        front_s[stages, best_s.shape[1] - 1, 0] = 0.0
    through_s[:] = np.inf
    for block in range(blocks.behind.size - 1, -1, -1):
        behind, taken = blocks.behind[block], blocks.taken[block]
        before_start = front_s[behind + 1, taken + blocks.size[block]]
        before_end, after = front_s[behind, taken], best_s[behind, taken]
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low, high, offset = _row(block, start, blocks)
            for end in range(low, high):
                seconds = stage_s[offset + end]
                before_end[end] = min(before_end[end], before_start[start] + seconds)
                total_s = before_start[start] + seconds + after[end]
                if num_later:  # a stage that fits nowhere takes infinite time: 0 * inf is nan
                    total_s += num_later * max(seconds, floor_s)
                through_s[offset + end] = min(through_s[offset + end], total_s)
