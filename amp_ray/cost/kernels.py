"""Compiled loops of the cost model: arrays in, numbers out."""

from typing import Any, NamedTuple

import numba
import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.jit import kept

# Called by other kernels only: no wrapper for Python, which makes compiling faster.
INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@kept("f8(f8[:,::1],f8[:,::1],i8,b1,b1)")
def time_1f1b(
    passes_s: FloatArray,
    sends_s: FloatArray,
    num_micro_batches: int,
    blocking: bool,  # noqa: FBT001 - compiled code has no keywords
    duplex: bool,  # noqa: FBT001
) -> float:
    """Time one iteration of 1F1B.

    Turn ``i`` of stage ``j`` is the forward pass of micro-batch ``i`` and then the backward pass of
    micro-batch ``i + j + 1 - pp``, where they exist. Before the forward pass of stage ``j`` and the
    backward pass of stage ``j - 1`` in their turn ``i``, both send the tensor that the other needs.
    All of this happens in step ``2 i + j``, in which every second stage takes part.

    Args:
        passes_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        sends_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.
        blocking: Whether a transfer keeps both stages of a cut busy until it ends; otherwise a
            message delays only the pass that needs it.
        duplex: Whether an activation and a gradient may cross a cut at the same time.

    Returns:
        Seconds until the last backward pass ends.
    """
    pp = passes_s.shape[1]
    clock = np.zeros(pp)
    last_turn = num_micro_batches + pp - 2
    for step in range(2 * last_turn + pp + 1):
        for j in range(max(step % 2, step - 2 * last_turn), min(pp, step) + 1, 2):
            turn = (step - j) // 2
            goes, returns = turn < num_micro_batches, 0 <= turn + j - pp < num_micro_batches
            if 0 < j < pp and (goes or returns):
                forward_s = sends_s[0, j - 1] if goes else 0.0
                backward_s = sends_s[1, j - 1] if returns else 0.0
                before, after = clock[j - 1], clock[j]
                if blocking:
                    exchange_s = max(forward_s, backward_s) if duplex else forward_s + backward_s
                    clock[j - 1] = clock[j] = max(before, after) + exchange_s
                else:
                    if goes:
                        clock[j] = max(after, before + forward_s)
                    if returns:
                        clock[j - 1] = max(before, after + backward_s)
            if j > 0 and returns:
                clock[j - 1] += passes_s[1, j - 1]
            if j < pp and goes:
                clock[j] += passes_s[0, j]
    return float(clock[0])


@kept()  # compiled when first called: many runtimes never do
def time_chunks(
    passes_s: FloatArray,
    sends_s: FloatArray,
    order: IntArray,
    ahead: IntArray,
    blocking: bool,  # noqa: FBT001 - compiled code has no keywords
    duplex: bool,  # noqa: FBT001
) -> float:
    """Time chunks or token slices: stage ``j`` has chunks ``j``, ``j + pp``, ... of the model.

    Args:
        passes_s: Shape ``(2, num_chunks, num_slices)``. Forward and backward of each slice.
        sends_s: Shape ``(2, num_chunks - 1, num_slices)``. Activation and gradient across each cut.
        order: Shape ``(4, num_passes)``. Chunk of each forward and of each backward pass of a
            stage, and the unit of both: ``micro_batch * num_slices + token_slice``.
        ahead: Shape ``(pp,)``. Forward passes of each stage before its first backward pass, without
            the one right before it.
        blocking: Whether a stage waits until the tensor that it sends has arrived.
        duplex: Whether the messages of two alternating passes then cross at the same time.

    Returns:
        Seconds until the last pass of any stage ends.
    """
    pp, last, total, slices = len(ahead), passes_s.shape[1] - 1, order.shape[1], passes_s.shape[2]
    clock, pending, end_s = np.zeros(pp), np.zeros(pp), 0.0
    forward, backward = np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    arrived = np.full((2, last + 1, total * pp // (last + 1)), -1.0)
    arrived[0, 0] = 0.0
    num_left = 2 * total * pp
    while num_left > 0:
        before = num_left
        for j in range(pp):
            num_forward, num_backward, now_s = forward[j], backward[j], clock[j]
            while num_backward < total:
                goes_back = num_forward == total or num_forward - num_backward > ahead[j]
                way, index = (1, num_backward) if goes_back else (0, num_forward)
                chunk, unit = j + pp * order[way, index], order[2 + way, index]
                ready_s, piece = arrived[way, chunk, unit], unit % slices
                if ready_s < 0.0:
                    break
                now_s, sends = max(now_s, ready_s) + passes_s[way, chunk, piece], 0.0
                receiver = chunk - 1 if goes_back else chunk + 1
                if 0 <= receiver <= last:
                    sends = sends_s[way, min(chunk, receiver), piece]
                    arrived[way, receiver, unit] = now_s + sends
                elif not goes_back:
                    arrived[1, chunk, unit] = now_s
                num_forward, num_backward = num_forward + 1 - way, num_backward + way
                if goes_back:
                    now_s += max(sends, pending[j]) if blocking else 0.0
                    pending[j] = 0.0
                elif duplex and num_forward > ahead[j]:
                    pending[j] = sends
                elif blocking:
                    now_s += sends
            num_left -= num_forward + num_backward - forward[j] - backward[j]
            forward[j], backward[j], clock[j] = num_forward, num_backward, now_s
            end_s = max(end_s, now_s)  # `clock.max()` takes two thirds of a second to compile
        assert num_left < before, "stages wait for each other in a circle"
    return end_s


@kept("f8(f8[:,::1],f8[::1],f8[::1],UniTuple(i8,2),f8,f8)")
def peak_with(
    layers: FloatArray,
    stage: FloatArray,
    tied: FloatArray,
    ends: tuple[int, int],
    kept_each: float,
    temporary: float,
) -> float:
    """Return the peak bytes of a stage, given its kept and largest temporary bytes.

    Args:
        layers: Shape ``(4, num_layers + 1)``. Prefix sums of parameters and of bytes kept per
            micro-batch in flight; temporary bytes of each layer; bytes that cross each boundary.
            The kept and temporary bytes in them are ignored here.
        stage: Shape ``(9,)``. State bytes per parameter; micro-batches in flight; buffers for the
            input and the output; bytes per bucket element; largest bucket; bytes per parameter in
            the optimizer step; constant bytes; allocator factor.
        tied: Shape ``(3,)``. Positions of the two layers that share a weight (or -1), and its
            parameters on this rank.
        ends: First layer of the stage, and the layer after its last.
        kept_each: Bytes kept per micro-batch in flight.
        temporary: Bytes of the largest temporary.
    """
    start, end = ends
    parameters = layers[0, end] - layers[0, start]
    if start <= tied[0] and tied[1] < end and tied[0] >= 0:
        parameters -= tied[2]
    kept = stage[1] * kept_each
    buffers = stage[2] * layers[3, start] + stage[3] * layers[3, end]
    tail = max(stage[4] * min(parameters, stage[5]), stage[6] * parameters)
    return float(stage[7] + stage[0] * parameters + stage[8] * (kept + buffers + temporary + tail))


@kept("b1(f8[:,::1],f8[::1],i8)")
def _needs_no_more(stages: FloatArray, limits: FloatArray, stage: int) -> bool:
    """Return whether a stage needs no more memory than the one before it with the same layers."""
    if stage == 0 or limits[stage] < limits[stage - 1]:
        return False
    for column in range(stages.shape[1]):
        if stages[stage, column] > stages[stage - 1, column]:
            return False
    return True


@kept("i8[:,::1](f8[:,::1],f8[:,::1],f8[::1],f8[::1])")
def earliest_starts(
    layers: FloatArray, stages: FloatArray, tied: FloatArray, limits: FloatArray
) -> IntArray:
    """Return the earliest start from which a stage with this end fits.

    A longer stage can need less than a shorter one if a smaller tensor crosses the boundary at its
    start. So starts close to the end that do not fit are skipped, and the earliest start of the
    first run of fitting starts is returned. A longer stage saves at most the buffer at its start
    and a weight that it would hold twice; the scan stops beyond that. If the next stage needs no
    more in any respect, all layers that fit this stage fit it too, so its scan begins where this
    scan ended.

    Args:
        layers: As in `peak_with`.
        stages: Shape ``(num_stages, 9)``, rows as in `peak_with`.
        tied: As in `peak_with`.
        limits: Shape ``(num_stages,)``. Memory limit of a rank of each stage, in bytes.

    Returns:
        Shape ``(num_stages, num_layers + 1)``; the end itself where no stage fits.
    """
    num_layers = layers.shape[1] - 1
    starts = np.zeros((len(limits), num_layers + 1), np.int64)
    most, at_once = np.zeros(num_layers + 1), np.zeros(num_layers + 1, np.bool_)
    for stage in range(len(limits)):
        if limits[stage] == np.inf:  # every stage fits; no later one goes on from here
            continue
        goes_on = _needs_no_more(stages, limits, stage)
        for end in range(1, num_layers + 1):
            first, temporary = end, 0.0
            if goes_on and at_once[end]:
                first, temporary = starts[stage - 1, end], most[end]
            at_once[end] = first < end
            for start in range(first - 1, -1, -1):
                live = max(temporary, layers[2, start])
                kept_each = layers[1, end] - layers[1, start]
                peak = peak_with(layers, stages[stage], tied, (start, end), kept_each, live)
                buffers = stages[stage, 8] * stages[stage, 2] * layers[3, start]
                temporary_each = stages[stage, 8] * max(stages[stage, 4], stages[stage, 6])
                spared = buffers + (stages[stage, 0] + temporary_each) * max(tied[2], 0.0)
                if peak <= limits[stage]:
                    at_once[end] |= start == end - 1
                    first = start
                elif first < end or peak - spared > limits[stage]:
                    break
                temporary = live
            starts[stage, end], most[end] = first, temporary
    return starts


class PartRows(NamedTuple):
    """Memory of layers if a stage recomputes only its first blocks, for `part_starts`."""

    layers: FloatArray  # as in `peak_with`, recomputed
    plain: FloatArray  # the same, not recomputed
    # Shape ``(num_layers + 1, num_layers + 1)``. Largest temporary of the layers from one boundary
    # to another, recomputed.
    layers_most: FloatArray
    plain_most: FloatArray  # the same, not recomputed
    block_counts: IntArray  # shape ``(num_layers + 1,)``. Blocks before each boundary.
    # Shape ``(num_blocks + 1,)``. By number of blocks, the first boundary that has them before it.
    first_with: IntArray


@kept()  # compiled when first called
def part_starts(
    num_again: int,
    rows: PartRows,
    stages: FloatArray,
    part_stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
) -> IntArray:
    """Return `earliest_starts` for stages that recompute only their first blocks.

    Args:
        num_again: Recomputed blocks of each stage; a stage with fewer blocks recomputes all.
        rows: Memory of the layers.
        stages: As in `earliest_starts`, for stages that recompute all their blocks.
        part_stages: The same for stages that recompute only some blocks.
        tied: As in `peak_with`.
        limits: As in `earliest_starts`.
    """
    num_layers = rows.plain.shape[1] - 1
    starts = np.zeros((len(limits), num_layers + 1), np.int64)
    kept, kept_plain = rows.layers[1], rows.plain[1]
    at_once = np.zeros(num_layers + 1, np.bool_)
    for stage in range(len(limits)):
        goes_on = _needs_no_more(stages, limits, stage)
        goes_on = goes_on and _needs_no_more(part_stages, limits, stage)
        for end in range(1, num_layers + 1):
            first = starts[stage - 1, end] if goes_on and at_once[end] else end
            at_once[end] = first < end
            for start in range(first - 1, -1, -1):
                columns, split = stages[stage], end
                last = rows.block_counts[start] + num_again
                if rows.block_counts[end] > last:
                    columns, split = part_stages[stage], rows.first_with[last]
                kept_each = kept[split] - kept[start] + kept_plain[end] - kept_plain[split]
                temporary = max(rows.layers_most[start, split], rows.plain_most[split, end])
                peak = peak_with(rows.plain, columns, tied, (start, end), kept_each, temporary)
                state_bytes = columns[0] + columns[8] * max(columns[4], columns[6])
                spared = (
                    state_bytes * max(tied[2], 0.0) + columns[8] * columns[2] * rows.plain[3, start]
                )
                if peak <= limits[stage]:
                    at_once[end] |= start == end - 1
                    first = start
                elif first < end or peak - spared > limits[stage]:
                    break
            starts[stage, end] = first
    return starts


class LikeBlocks(NamedTuple):
    """Least memory of each of several equal blocks of a chain."""

    kept_again: float  # bytes kept per micro-batch in flight, if the block is recomputed
    kept: float  # the same if it is not
    parameters: float
    temporary: float  # bytes that live while it runs
    temporary_again: float  # the same in a stage that recomputes blocks
    crossing: float  # bytes that cross a boundary between stages, if there are several
    num_others: int  # most other blocks that a stage can have
    keeps_ends_once: bool  # whether micro-batches in flight keep no boundaries in addition


@kept()  # compiled when first called
def most_like_blocks(
    stages: FloatArray, block: LikeBlocks, limit: float, numbers: tuple[int, int, int, int]
) -> IntArray:
    """Return the largest number of equal blocks that fit each stage, whatever its other layers.

    In an interleaved schedule of at least ``pp`` micro-batches, a stage has run every chunk for
    ``pp`` micro-batches once, and has ended only backward passes of its last chunk: with ``n``
    micro-batches in flight, summed over chunks, ``max(0, chunks * pp - n)`` of them. So every other
    chunk has ``pp`` micro-batches in flight at that time.

    Args:
        stages: Shape ``(pp, 9)``, rows as in `peak_with`.
        block: Memory of each block.
        limit: Bytes that a rank may need.
        numbers: Blocks of the chain, most recomputed blocks of a stage, chunks per stage, and
            micro-batches.

    Returns:
        Shape ``(pp,)``; -1 where nothing fits.
    """
    num_blocks, num_again, chunks, batches = numbers
    pp = len(stages)
    most = np.full(pp, -1, np.int64)
    for stage in range(pp):
        columns = stages[stage]
        flying = columns[1]
        whole, ended = chunks * flying, max(0.0, chunks * (pp - flying))
        if chunks == 1:
            leaving = min(columns[3], flying) * (stage < pp - 1)
            buffers = columns[2] * (stage > 0) + leaving
        elif block.keeps_ends_once:
            buffers = columns[2] + columns[3]
        elif batches >= pp:  # each chunk in flight keeps what enters and leaves it
            buffers = 1.0 + 2 * (chunks * pp - ended) - pp * ((stage == 0) + (stage == pp - 1))
        else:
            buffers = 1.0
        for number in range(num_blocks, -1, -1):
            again = min(num_again, number)
            spared_each = again * (block.kept - block.kept_again)
            if chunks == 1:
                held = flying * (number * block.kept - spared_each)
            else:
                of_chunk = number // chunks  # blocks of each, at least
                spared = min(float(batches), whole) * spared_each
                least = whole * of_chunk * min(block.kept, block.kept_again)
                held = max(whole * of_chunk * block.kept - spared, least)
                if batches >= pp:
                    of_last = min(number, -(-(number + block.num_others) // chunks))
                    kept = pp * number * block.kept - ended * of_last * block.kept
                    held = max(held, kept - pp * max(spared_each, 0.0))
            parameters = block.parameters * number
            tail = max(columns[4] * min(parameters, columns[5]), columns[6] * parameters)
            temporary = block.temporary_again if again > 0 else block.temporary
            live = held + buffers * block.crossing + (number > 0) * temporary + tail
            if columns[7] + columns[0] * parameters + columns[8] * live <= limit:
                most[stage] = number
                break
    return most


class RankTable(NamedTuple):
    """The ranks of several stages, for `slowest_messages`."""

    nodes: IntArray  # node of each rank, stage by stage; tp fastest, then dp
    # Shape ``(num_stages + 1,)``. Where each stage's ranks begin in ``nodes``.
    first_node: IntArray
    ends: IntArray  # per stage ``dp + 1`` values: samples up to each dp index, from 0
    parts: IntArray  # the same shape. Part of the samples that each dp index belongs to, then 0.
    first_end: IntArray  # shape ``(num_stages + 1,)``. Where each stage's values begin in ``ends``.


class LinkTable(NamedTuple):
    """Rates and latencies of messages within and between nodes, by the kind of node."""

    kind_of_node: IntArray  # shape ``(num_nodes,)``
    num_hosts: FloatArray  # shape ``(num_kinds,)``. Hosts of a node, each with an interface.
    intra_bytes_per_s: FloatArray  # shape ``(num_kinds,)``. Rate of a rank within its node.
    intra_step_s: FloatArray  # shape ``(num_kinds,)``. Latency within a node.
    # Shape ``(num_kinds, num_kinds)``. Rate that all ranks of a node share, and latency.
    inter_bytes_per_s: FloatArray
    inter_step_s: FloatArray


@kept()
def slowest_messages(
    pairs: IntArray, ranks: RankTable, links: LinkTable, num_parts: int
) -> FloatArray:
    """Find the slowest message of each cut when all its messages are sent at once.

    A rank sends the samples that it has to the ranks that need them. Samples of a tensor are cut
    into pieces, as many as both tp divide; each piece of a sample is one unit. All units that leave
    or enter a node over its network interfaces share them, and so do all units of a rank its link.
    A rank has at most the interface of its host.

    Args:
        pairs: Shape ``(num_cuts, 2)``. The stage before and the stage after each cut.
        ranks: Ranks of the stages.
        links: Links of the nodes.
        num_parts: Number of parts of the samples.

    Returns:
        Shape ``(num_cuts, num_parts, 4)``, of the slowest message in each part: messages of its
        rank, latency, seconds per byte of a unit, seconds per byte of a message.
    """
    slowest = np.zeros((len(pairs), num_parts, 4))
    for index in range(len(pairs)):
        messages = _messages(pairs[index, 0], pairs[index, 1], ranks)
        _meet(messages, links, slowest[index])
    return slowest


@numba.njit(**INNER)
def _messages(left: int, right: int, ranks: RankTable) -> IntArray:
    """Return rows of sender, receiver, their nodes, samples and part of every message."""
    first, second = ranks.first_node[left], ranks.first_node[right]
    ends = ranks.ends[ranks.first_end[left] : ranks.first_end[left + 1]]
    next_ends = ranks.ends[ranks.first_end[right] : ranks.first_end[right + 1]]
    tp = (ranks.first_node[left + 1] - first) // (ends.size - 1)
    next_tp = (ranks.first_node[right + 1] - second) // (next_ends.size - 1)
    pieces = tp  # the least common multiple: no rank's part is split
    while pieces % next_tp:
        pieces += tp
    rows = np.empty(((ends.size + next_ends.size) * pieces, 6), np.int64)
    size, j = 0, 0
    for i in range(ends.size - 1):
        part = ranks.parts[ranks.first_end[left] + i]
        while next_ends[j + 1] <= ends[i]:
            j += 1
        k = j
        while k < next_ends.size - 1 and next_ends[k] < ends[i + 1]:
            samples = min(ends[i + 1], next_ends[k + 1]) - max(ends[i], next_ends[k])
            for piece in range(pieces):
                a, b = i * tp + piece * tp // pieces, k * next_tp + piece * next_tp // pieces
                rows[size, 0], rows[size, 1] = a, b
                rows[size, 2], rows[size, 3] = ranks.nodes[first + a], ranks.nodes[second + b]
                rows[size, 4], rows[size, 5] = samples, part
                size += 1
            k += 1
    return rows[:size]


@numba.njit(**INNER)
def _meet(messages: IntArray, links: LinkTable, slowest: FloatArray) -> None:
    """Write the slowest message of each part; arrays as in `slowest_messages`."""
    # Units and messages: of each sender, of each receiver, out of each node, into each node.
    # The last message goes from the last rank of its stage to the last rank of the other.
    num_ranks = max(messages[-1, 0], messages[-1, 1]) + 1
    loads = np.zeros((4, max(num_ranks, links.kind_of_node.size), 2))
    for message in range(len(messages)):
        source, target = messages[message, 2], messages[message, 3]
        for kind in range(2):
            units = messages[message, 4] if kind == 0 else 1
            for end in range(2):
                loads[end, messages[message, end], kind] += units
                if source != target:
                    loads[2 + end, messages[message, 2 + end], kind] += units
    for message in range(len(messages)):
        a, b, part = messages[message, 0], messages[message, 1], messages[message, 5]
        source, target = messages[message, 2], messages[message, 3]
        slowest[part, 0] = max(slowest[part, 0], loads[0, a, 1], loads[1, b, 1])
        one, other = links.kind_of_node[source], links.kind_of_node[target]
        step_s = links.intra_step_s[one] if source == target else links.inter_step_s[one, other]
        slowest[part, 1] = max(slowest[part, 1], step_s)
        rank_rate = min(links.intra_bytes_per_s[one], links.intra_bytes_per_s[other])
        num_hosts = max(links.num_hosts[one], links.num_hosts[other])
        for kind in range(2):
            of_rank = max(loads[0, a, kind], loads[1, b, kind])
            seconds = of_rank / rank_rate
            if source != target:
                shared = max(loads[2, source, kind], loads[3, target, kind], of_rank * num_hosts)
                seconds = max(seconds, shared / links.inter_bytes_per_s[one, other])
            slowest[part, 2 + kind] = max(slowest[part, 2 + kind], seconds)
