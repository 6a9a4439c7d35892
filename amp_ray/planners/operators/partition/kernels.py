"""Stages of a chain of operators and the cheapest chain of stages, compiled.

Stages are placed from the last one to the first. So the number of stages behind a stage, which
decides how many micro-batches it holds at once, is known when the stage is priced.
"""

from dataclasses import dataclass

import cython
from cython.cimports.libc.math import nextafter

if cython.compiled:
    from cython.cimports.amp_ray.planners.operators.recompute.kernels import Relaxation, relaxed_s
else:
    from amp_ray.planners.operators.recompute.kernels import Relaxation, relaxed_s

INF = cython.declare(cython.double, float("inf"))


@cython.cclass
@dataclass(eq=False, repr=False)
class ProgrammeViews:
    """An `OperatorProgramme`, by the names of its fields, as compiled code takes it."""

    time_prefix_s: cython.const[cython.double][:, ::1]
    join_prefix_s: cython.const[cython.double][:, ::1]
    start_s: cython.const[cython.double][:, :, ::1]
    end_s: cython.const[cython.double][:, :, ::1]
    state_prefix: cython.const[cython.double][:, ::1]
    held_prefix: cython.const[cython.double][:, ::1]
    again_bytes: cython.const[cython.double][:, ::1]
    weight_prefix: cython.const[cython.double][:, ::1]
    input_bytes: cython.const[cython.double][:, ::1]
    forward_reserved: cython.const[cython.double][:, ::1]
    backward_reserved: cython.const[cython.double][:, ::1]
    devices: cython.const[cython.longlong][::1]
    allowed: cython.const[cython.uchar][:, ::1]
    edge_kind: cython.const[cython.longlong][::1]
    least_reserved: cython.const[cython.double][::1]
    free_end: cython.const[cython.uchar][::1]
    layer_begin: cython.const[cython.longlong][::1]
    layer_of: cython.const[cython.longlong][::1]
    operator_place: cython.const[cython.longlong][::1]
    relaxed: cython.const[cython.longlong][::1]
    relaxation: Relaxation
    limit_bytes: cython.double
    num_devices: cython.longlong
    most_in_flight: cython.longlong
    spared: cython.longlong
    step_end_prefix_s: cython.const[cython.double][:, ::1]
    step_start_s: cython.const[cython.double][::1]
    tied_s: cython.const[cython.double][::1]
    step_end_cap_s: cython.double


@cython.cclass
@dataclass(eq=False, repr=False)
class BlocksViews:
    """The arrays of `Blocks`, by the same names, as compiled code takes them."""

    behind: cython.const[cython.longlong][::1]
    taken: cython.const[cython.longlong][::1]
    size: cython.const[cython.longlong][::1]
    low_start: cython.const[cython.longlong][::1]
    high_start: cython.const[cython.longlong][::1]
    low_end: cython.const[cython.longlong][::1]
    high_end: cython.const[cython.longlong][::1]
    table: cython.const[cython.longlong][::1]
    example: cython.const[cython.longlong][::1]
    row_low: cython.longlong[:, ::1]
    row_begin: cython.longlong[:, ::1]


@cython.ccall
def fill_front(
    cap_s: cython.double, programme: ProgrammeViews, front: cython.longlong[:, ::1]
) -> None:
    """Compute how many operators stages can hold from the front with no stage above ``cap_s``.

    A stage counts only what can never shrink as it grows: its operators' own time, its state, and
    the recompute of its whole layers. Parts of layers are taken to save as much as possible.
    ``front`` is overwritten with the array that `layout.front_within` returns.
    """
    least: cython.longlong
    num_devices = programme.num_devices
    front[:, :] = -1
    front[:, 0] = 0
    for behind in range(front.shape[0] - 2, -1, -1):
        for option in range(programme.devices.shape[0]):
            for taken in range(num_devices - programme.devices[option] + 1):
                total, reached = taken + programme.devices[option], front[behind + 1, taken]
                if reached >= 0 and programme.allowed[option, taken]:
                    least = max(reached, front[behind, total])
                    end = _furthest(option, behind, (reached, least), cap_s, programme)
                    front[behind, total] = end


@cython.ccall
def fill_back(
    cap_s: cython.double, programme: ProgrammeViews, back: cython.longlong[:, ::1]
) -> None:
    """Compute how far stages reach from the back of the chain, as `fill_front` from its front.

    ``back``, shape ``(S + 1, G + 1)``, is overwritten: by number of stages and number of devices,
    the first operator from which they can hold the rest of the chain.
    """
    most: cython.longlong
    num_devices = programme.num_devices
    size = programme.time_prefix_s.shape[1] - 1
    back[:, :] = size + 1
    back[0, 0] = size
    for behind in range(back.shape[0] - 1):
        for option in range(programme.devices.shape[0]):
            for taken in range(num_devices - programme.devices[option] + 1):
                total, reached = taken + programme.devices[option], back[behind, taken]
                if reached <= size and programme.allowed[option, num_devices - total]:
                    most = min(reached, back[behind + 1, total])
                    start = _earliest(option, behind, (reached, most), cap_s, programme)
                    back[behind + 1, total] = start


@cython.cfunc
def _is_small(
    option: cython.longlong,
    behind: cython.longlong,
    start: cython.longlong,
    end: cython.longlong,
    cap_s: cython.double,
    programme: ProgrammeViews,
) -> cython.bint:
    """Return whether a stage may fit and be fast enough, with partial layers at its ends free."""
    if start >= end:
        return True
    held: cython.double
    kept: cython.double
    excess: cython.double
    seconds: cython.double
    most_s = cap_s * (1 + 1e-12)
    seconds = programme.time_prefix_s[option, end] - programme.time_prefix_s[option, start]
    state = programme.state_prefix[option, end] - programme.state_prefix[option, start]
    weight = programme.weight_prefix[option, end] - programme.weight_prefix[option, start]
    step_s = programme.step_end_prefix_s[option, end] - programme.step_end_prefix_s[option, start]
    if programme.step_start_s[option] + step_s > programme.step_end_cap_s * (1 + 1e-12):
        return False
    if state + weight > programme.limit_bytes or seconds > most_s:
        return False
    low, high = programme.layer_of[start], programme.layer_of[end - 1] + 1
    low += 1 if programme.layer_begin[low] < start else 0
    high -= 1 if programme.layer_begin[high] > end or programme.free_end[end - 1] else 0
    if high <= low:
        return True
    held = programme.held_prefix[option, programme.layer_begin[high]]
    held -= programme.held_prefix[option, programme.layer_begin[low]]
    kept = min(behind + 1, programme.most_in_flight) * held
    excess = state + kept + max(programme.least_reserved[option], weight) - programme.limit_bytes
    if excess > 0.0:
        more_s = nextafter(most_s - seconds, INF)
        seconds += _relaxed_s(option, behind, excess, more_s, (-1, low, high, -1), programme)
    return seconds <= most_s


@cython.cfunc
def _furthest(
    option: cython.longlong,
    behind: cython.longlong,
    start: tuple[cython.longlong, cython.longlong],
    cap_s: cython.double,
    programme: ProgrammeViews,
) -> cython.longlong:
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


@cython.cfunc
def _earliest(
    option: cython.longlong,
    behind: cython.longlong,
    end: tuple[cython.longlong, cython.longlong],
    cap_s: cython.double,
    programme: ProgrammeViews,
) -> cython.longlong:
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


@cython.ccall
def fill_rows(
    cap_s: cython.double,
    cuts: cython.const[cython.longlong][::1],
    programme: ProgrammeViews,
    blocks: BlocksViews,
    row_high: cython.longlong[:, ::1],
) -> None:
    """Give each start of a table the ends of its blocks, as far as the cap allows.

    Stages whose operators alone take longer than ``cap_s`` are left out, whatever they recompute.
    ``cuts`` has shape ``(C,)``. The rows of ``blocks`` and ``row_high``, shape ``(T, C)``, are
    overwritten.
    """
    high: cython.longlong
    low: cython.longlong
    row_low, row_begin = blocks.row_low, blocks.row_begin
    row_low[:, :] = cuts.shape[0]
    for block in range(blocks.behind.shape[0]):
        table = blocks.table[block]
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low = max(start + 1, blocks.low_end[block])
            row_low[table, start] = min(row_low[table, start], low)
            row_high[table, start] = max(row_high[table, start], blocks.high_end[block])
    begin = 0
    for table in range(blocks.example.shape[0]):
        for start in range(cuts.shape[0]):
            low, high = row_low[table, start], row_high[table, start]
            if low < high:
                high = _last_end(cap_s, (table, start, low, high), cuts, programme, blocks) + 1
            row_begin[table, start] = begin
            begin += max(high - low, 0)
        row_begin[table, cuts.shape[0]] = begin


@cython.cfunc
def _last_end(
    cap_s: cython.double,
    row: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
    cuts: cython.const[cython.longlong][::1],
    programme: ProgrammeViews,
    blocks: BlocksViews,
) -> cython.longlong:
    """Return the last end of a row at which some option's operators take at most the cap."""
    table, start, low, high = row
    last, example = low - 1, blocks.example[table]
    size = blocks.size[example]
    place = programme.num_devices - blocks.taken[example] - size
    for option in range(programme.devices.shape[0]):
        if programme.devices[option] == size and programme.allowed[option, place]:
            end = high - 1
            start_s = programme.time_prefix_s[option, cuts[start]]
            while last < end:
                middle = (last + end + 1) // 2
                if programme.time_prefix_s[option, cuts[middle]] - start_s <= cap_s:
                    last = middle
                else:
                    end = middle - 1
    return last


@cython.ccall
def trim_rows(
    wanted: cython.const[cython.uchar][::1],
    blocks: BlocksViews,
    row_low: cython.longlong[:, ::1],
    row_begin: cython.longlong[:, ::1],
    values: cython.double[::1],
) -> cython.longlong:
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
    end: cython.longlong
    first: cython.longlong
    size: cython.longlong = 0
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


@cython.ccall
def fill_most(
    cap_s: cython.double,
    limit_s: cython.double,
    num_later: cython.longlong,
    floor_s: cython.double,
    stage_s: cython.const[cython.double][::1],
    through_s: cython.double[::1],
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
    below_s: cython.double
    most_s: cython.double
    for index in range(stage_s.shape[0]):
        if through_s[index] < limit_s:
            left_s = limit_s - through_s[index]
            below_s = max(floor_s - stage_s[index], 0.0) + left_s / (num_later + 1)
            most_s = stage_s[index] + min(left_s, below_s) * (1 + 1e-9)
            through_s[index] = min(most_s, cap_s)
        else:
            through_s[index] = -INF


@cython.ccall
def fill_stages(
    cap_s: cython.double,
    cuts: cython.const[cython.longlong][::1],
    blocks: BlocksViews,
    programme: ProgrammeViews,
    most_s: cython.const[cython.double][::1],
    stage_s: cython.double[::1],
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
    stage_s[:] = INF
    for table in range(blocks.example.shape[0]):
        size = blocks.size[blocks.example[table]]
        place = programme.num_devices - blocks.taken[blocks.example[table]] - size
        for option in range(programme.devices.shape[0]):
            if programme.devices[option] == size and programme.allowed[option, place]:
                _fill_table(cap_s, table, option, place, cuts, blocks, programme, most_s, stage_s)


@cython.cfunc
def _fill_table(
    cap_s: cython.double,
    table: cython.longlong,
    option: cython.longlong,
    place: cython.longlong,
    cuts: cython.const[cython.longlong][::1],
    blocks: BlocksViews,
    programme: ProgrammeViews,
    most_s: cython.const[cython.double][::1],
    stage_s: cython.double[::1],
) -> None:
    """Lower the bounds of a table's stages to those of one option."""
    behind: cython.longlong = blocks.behind[blocks.example[table]] + 1
    flying: cython.double = min(behind, programme.most_in_flight)
    reserves = _largest_reserves(option, programme)
    for row in range(cuts.shape[0] - 1):  # no stage begins at the end
        _fill_row(
            cap_s,
            flying,
            reserves,
            table,
            row,
            option,
            place,
            cuts,
            blocks,
            programme,
            most_s,
            stage_s,
        )


@cython.cfunc
def _largest_reserves(option: cython.longlong, programme: ProgrammeViews) -> cython.double:
    """Bound the reserve of any stage from above: the largest values of all operators."""
    forward: cython.double = 0.0
    backward: cython.double = 0.0
    again: cython.double = 0.0
    for index in range(programme.forward_reserved.shape[1]):
        forward = max(forward, programme.forward_reserved[option, index])
        backward = max(backward, programme.backward_reserved[option, index])
        again = max(again, programme.again_bytes[option, index])
    return forward + backward + again


@cython.cfunc
def _fill_row(
    cap_s: cython.double,
    flying: cython.double,
    reserves: cython.double,
    table: cython.longlong,
    row: cython.longlong,
    option: cython.longlong,
    place: cython.longlong,
    cuts: cython.const[cython.longlong][::1],
    blocks: BlocksViews,
    programme: ProgrammeViews,
    most_s: cython.const[cython.double][::1],
    stage_s: cython.double[::1],
) -> None:
    """Lower the bounds of the stages that begin at one operator to those of one option."""
    forward: cython.double = 0.0
    backward: cython.double = 0.0
    again: cython.double = 0.0
    seconds: cython.double
    spare: cython.double
    known_s: cython.double
    begin, stop = blocks.row_begin[table, row], blocks.row_begin[table, row + 1]
    start, first_end = cuts[row], blocks.row_low[table, row]
    front, back = programme.edge_kind[place], programme.edge_kind[place + programme.devices[option]]
    time_s, join_s = programme.time_prefix_s[option], programme.join_prefix_s[option]
    state, held = programme.state_prefix[option], programme.held_prefix[option]
    weight, kept = programme.weight_prefix[option], programme.input_bytes[option, start]
    seen = start
    for index in range(begin, stop):
        end = cuts[first_end + index - begin]
        if time_s[end] - time_s[start] + (join_s[end - 1] - join_s[start]) > cap_s:
            break
        seconds = _plain_s(option, start, end, front, back, programme)
        if seconds > cap_s or seconds >= stage_s[index]:
            continue
        if most_s.shape[0] > 0:
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
                seconds += _recompute_s(excess, flying, known_s, start, end, option, programme)
        if seconds <= cap_s:
            stage_s[index] = min(stage_s[index], seconds)


@cython.cfunc
def _recompute_s(
    excess: cython.double,
    flying: cython.double,
    known_s: cython.double,
    start: cython.longlong,
    end: cython.longlong,
    option: cython.longlong,
    programme: ProgrammeViews,
) -> cython.double:
    """Bound the seconds of recompute that save ``excess`` bytes of a stage, by `relaxed_s`."""
    low: cython.longlong
    part: cython.longlong
    whole: cython.longlong
    first, whole = programme.layer_of[start], programme.layer_of[end - 1]
    part = programme.operator_place[start] if whole > first else -1
    low = min(first + 1, whole)
    last: cython.longlong = programme.operator_place[end - 1]
    row = programme.relaxed[option]
    return relaxed_s(excess, flying, known_s, programme.relaxation, row, (part, low, whole, last))


@cython.ccall
def plain_s(
    option: cython.longlong,
    place: cython.longlong,
    start: cython.longlong,
    end: cython.longlong,
    programme: ProgrammeViews,
) -> cython.double:
    """Return the time of a stage without recompute; infinite above the cap on step ends."""
    last: cython.longlong = min(place + programme.devices[option], programme.num_devices)
    front, back = programme.edge_kind[place], programme.edge_kind[last]
    return _plain_s(option, start, end, front, back, programme)


@cython.cfunc
@cython.inline
def _plain_s(
    option: cython.longlong,
    start: cython.longlong,
    end: cython.longlong,
    front: cython.longlong,
    back: cython.longlong,
    programme: ProgrammeViews,
) -> cython.double:
    """Return the same, given the kinds of the edges in front and behind."""
    edges_s: cython.double = 0.0
    if stage_end_s(option, start, end, programme) > programme.step_end_cap_s:
        return INF
    if start > 0:
        edges_s += programme.start_s[option, front, start]
    if end < programme.time_prefix_s.shape[1] - 1:
        edges_s += programme.end_s[option, back, end]
    own_s = programme.time_prefix_s[option, end] - programme.time_prefix_s[option, start]
    join_s = programme.join_prefix_s[option, end - 1] - programme.join_prefix_s[option, start]
    return own_s + join_s + edges_s


@cython.ccall
def stage_end_s(
    option: cython.longlong,
    start: cython.longlong,
    end: cython.longlong,
    programme: ProgrammeViews,
) -> cython.double:
    """Return the seconds of a stage's step end."""
    seconds: cython.double = programme.step_start_s[option]
    last = programme.step_end_prefix_s.shape[1] - 1
    step_s = programme.step_end_prefix_s[option, end] - programme.step_end_prefix_s[option, start]
    seconds = seconds + step_s
    if (start == 0) != (end == last):
        seconds += programme.tied_s[option]
    return seconds


@cython.ccall
def excess_of(
    option: cython.longlong,
    behind: cython.longlong,
    start: cython.longlong,
    end: cython.longlong,
    reserved: cython.double,
    programme: ProgrammeViews,
) -> cython.double:
    """Return the bytes above the limit without recompute, leaving out peaks."""
    flying: cython.longlong = min(behind + 1, programme.most_in_flight)
    held = programme.held_prefix[option, end] - programme.held_prefix[option, start]
    weight = programme.weight_prefix[option, end] - programme.weight_prefix[option, start]
    state = programme.state_prefix[option, end] - programme.state_prefix[option, start]
    spare: cython.double = max(reserved, weight)
    kept = programme.input_bytes[option, start] + held
    return (state + spare) + flying * kept - programme.limit_bytes


@cython.cfunc
def _relaxed_s(
    option: cython.longlong,
    behind: cython.longlong,
    excess: cython.double,
    known_s: cython.double,
    where: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
    programme: ProgrammeViews,
) -> cython.double:
    """Bound the recompute time that parts of a stage need to save ``excess`` bytes."""
    flying: cython.double = min(behind + 1, programme.most_in_flight)
    row = programme.relaxed[option]
    return relaxed_s(excess, flying, known_s, programme.relaxation, row, where)


@cython.ccall
def cheapest_operators(
    cap_s: cython.double,
    cuts: cython.const[cython.longlong][::1],
    blocks: BlocksViews,
    stage_s: cython.const[cython.double][::1],
    num_stages_allowed: tuple[cython.longlong, cython.longlong],
    best_s: cython.double[:, :, ::1],
    choice: cython.longlong[:, :, :, ::1],
    path: cython.longlong[::1],
) -> tuple[cython.double, cython.double, cython.longlong, cython.double]:
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
    next_cap_s: cython.double
    num_stages: cython.longlong
    num_devices, last_cut = best_s.shape[1] - 1, cuts.shape[0] - 1
    best_s[:, :, :] = INF
    best_s[0, 0, last_cut] = 0.0
    next_cap_s = INF
    for block in range(blocks.behind.shape[0]):
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
    sum_s, num_stages = INF, 0
    for stages in range(num_stages_allowed[0], num_stages_allowed[1] + 1):
        if best_s[stages, num_devices, 0] < sum_s:
            sum_s, num_stages = best_s[stages, num_devices, 0], stages
    if num_stages == 0:
        return INF, INF, 0, max(next_cap_s, nextafter(cap_s, INF))
    slowest_s = walk_stages(num_stages, blocks, stage_s, choice, path)
    return sum_s, slowest_s, num_stages, next_cap_s


@cython.ccall
def least_slowest(
    blocks: BlocksViews,
    stage_s: cython.const[cython.double][::1],
    num_stages_allowed: tuple[cython.longlong, cython.longlong],
    best_s: cython.double[:, :, ::1],
) -> cython.double:
    """Return the least possible time of a chain's slowest stage; infinite if there is no chain.

    Args:
        blocks: In ascending order of the stages behind them.
        stage_s: Shape ``(E,)``.
        num_stages_allowed: Smallest and largest number of stages.
        best_s: Shape ``(S + 1, G + 1, C)``. Overwritten, by number of stages, number of devices and
            cut: the least possible slowest stage of those that take all operators from the cut on.
    """
    least_s: cython.double
    num_devices, last_cut = best_s.shape[1] - 1, best_s.shape[2] - 1
    best_s[:, :, :] = INF
    best_s[0, 0, last_cut] = 0.0
    for block in range(blocks.behind.shape[0]):
        behind, taken = blocks.behind[block], blocks.taken[block]
        source, target = best_s[behind, taken], best_s[behind + 1, taken + blocks.size[block]]
        for start in range(blocks.low_start[block], blocks.high_start[block]):
            low, high, offset = _row(block, start, blocks)
            least_s = target[start]
            for end in range(low, high):
                least_s = min(least_s, max(source[end], stage_s[offset + end]))
            target[start] = least_s
    least_s = INF
    for stages in range(num_stages_allowed[0], num_stages_allowed[1] + 1):
        least_s = min(least_s, best_s[stages, num_devices, 0])
    return least_s


@cython.cfunc
def _row(
    block: cython.longlong, start: cython.longlong, blocks: BlocksViews
) -> tuple[cython.longlong, cython.longlong, cython.longlong]:
    """Return a block's range of ends at a start, and the number that turns an end into an index."""
    table = blocks.table[block]
    begin, low = blocks.row_begin[table, start], blocks.row_low[table, start]
    high = low + blocks.row_begin[table, start + 1] - begin
    return max(low, blocks.low_end[block]), min(high, blocks.high_end[block]), begin - low


@cython.ccall
def walk_stages(
    num_stages: cython.longlong,
    blocks: BlocksViews,
    stage_s: cython.const[cython.double][::1],
    choice: cython.const[cython.longlong][:, :, :, ::1],
    path: cython.longlong[::1],
) -> cython.double:
    """Write the stages of the chain to ``path``, first stage first; return the slowest time.

    ``path``, of at least ``num_stages`` entries, gets the index of each stage. ``blocks`` ascend by
    the stages behind them; ``stage_s`` has shape ``(E,)``, and ``choice``, from
    `cheapest_operators`, shape ``(S + 1, G + 1, C, 2)``.
    """
    slowest_s: cython.double = 0.0
    start: cython.longlong = 0
    taken: cython.longlong = choice.shape[1] - 1
    for stage in range(num_stages):
        remaining = num_stages - stage
        block, end = choice[remaining, taken, start, 0], choice[remaining, taken, start, 1]
        path[stage] = _row(block, start, blocks)[2] + end
        slowest_s = max(slowest_s, stage_s[path[stage]])
        taken, start = blocks.taken[block], end
    return slowest_s


@cython.ccall
def fill_through(
    blocks: BlocksViews,
    stage_s: cython.const[cython.double][::1],
    num_later: cython.longlong,
    floor_s: cython.double,
    best_s: cython.const[cython.double][:, :, ::1],
    front_s: cython.double[:, :, ::1],
    through_s: cython.double[::1],
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
    total_s: cython.double
    front_s[:, :, :] = INF
    for stages in range(1, best_s.shape[0]):
        front_s[stages, best_s.shape[1] - 1, 0] = 0.0
    through_s[:] = INF
    for block in range(blocks.behind.shape[0] - 1, -1, -1):
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
