"""Compiled loops of the cost model: arrays in, numbers out.

Arrays that they write are made by Python, because numba takes long to compile what makes them.
"""

from typing import Any, NamedTuple

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.jit import kept

# Without new arrays, references to arrays need not be counted, which takes time to compile.
COUNTLESS: dict[str, Any] = {"_nrt": False}


def time_1f1b(
    passes_s: FloatArray,
    sends_s: FloatArray,
    num_micro_batches: int,
    blocking: bool,  # noqa: FBT001 - kernels take arguments by position
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
    clock = np.zeros(passes_s.shape[1])
    return float(_run_1f1b(passes_s, sends_s, num_micro_batches, blocking, duplex, clock))


@kept("f8(f8[:,::1],f8[:,::1],i8,b1,b1,f8[::1])", **COUNTLESS)
def _run_1f1b(
    passes_s: FloatArray,
    sends_s: FloatArray,
    num_micro_batches: int,
    blocking: bool,  # noqa: FBT001
    duplex: bool,  # noqa: FBT001
    clock: FloatArray,
) -> float:
    pp = clock.size
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


def time_chunks(
    passes_s: FloatArray,
    sends_s: FloatArray,
    order: IntArray,
    ahead: IntArray,
    blocking: bool,  # noqa: FBT001 - kernels take arguments by position
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
    pp, num_chunks, total = len(ahead), passes_s.shape[1], order.shape[1]
    arrived = np.full((2, num_chunks, total * pp // num_chunks), -1.0)
    arrived[0, 0] = 0.0
    scratch = np.zeros((2, pp)), np.zeros((2, pp), np.int64), arrived
    return float(_run_chunks(passes_s, sends_s, order, ahead, (blocking, duplex), *scratch))


@kept(**COUNTLESS)  # compiled when first called: many runtimes never do
def _run_chunks(
    passes_s: FloatArray,
    sends_s: FloatArray,
    order: IntArray,
    ahead: IntArray,
    modes: tuple[bool, bool],
    clocks: FloatArray,
    counts: IntArray,
    arrived: FloatArray,
) -> float:
    """Run `time_chunks`.

    ``modes`` are its ``blocking`` and ``duplex``. ``clocks``, shape ``(2, pp)``, has the time of
    each stage and the seconds of a message that waits; ``counts``, shape ``(2, pp)``, the forward
    and backward passes of each stage so far: both begin as zeros. ``arrived``, shape ``(2,
    num_chunks, num_units)``, tells when a pass may start; below 0 if unknown.
    """
    pp, last, total, slices = len(ahead), passes_s.shape[1] - 1, order.shape[1], passes_s.shape[2]
    (blocking, duplex), end_s = modes, 0.0
    clock, pending, forward, backward = clocks[0], clocks[1], counts[0], counts[1]
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


@kept("f8(f8[:,::1],f8[::1],f8[::1],UniTuple(i8,2),f8,f8)", **COUNTLESS)
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
    bucket = stage[4] * min(parameters, stage[5])
    # No activations are left in the optimizer step.
    live = max(kept + buffers + temporary + bucket, stage[6] * parameters)
    return float(stage[7] + stage[0] * parameters + stage[8] * live)


def _needs_no_more(stages: FloatArray, limits: FloatArray) -> BoolArray:
    """Return whether each stage needs no more memory than the one before it with its layers."""
    needs = np.zeros(len(limits), np.bool_)
    needs[1:] = (limits[1:] >= limits[:-1]) & (stages[1:] <= stages[:-1]).all(axis=1)
    return needs


def earliest_starts(
    layers: FloatArray,
    stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
    *,
    from_first: bool = False,
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
        from_first: Whether the first of the stages starts with the first layer, and nowhere else.

    Returns:
        Shape ``(num_stages, num_layers + 1)``; the end itself where no stage fits.
    """
    starts = np.zeros((len(limits), layers.shape[1]), np.int64)
    goes_on, most = _needs_no_more(stages, limits), np.zeros(layers.shape[1])
    goes_on[1:2] &= not from_first
    _fill_starts(layers, stages, tied, limits, goes_on, from_first, most, most > 0.0, starts)
    return starts


@kept("(f8[:,::1],f8[:,::1],f8[::1],f8[::1],b1[::1],b1,f8[::1],b1[::1],i8[:,::1])", **COUNTLESS)
def _fill_starts(
    layers: FloatArray,
    stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
    goes_on: BoolArray,
    from_first: bool,  # noqa: FBT001 - kernels take arguments by position
    most: FloatArray,
    at_once: BoolArray,
    starts: IntArray,
) -> None:
    """Write `earliest_starts`; ``most`` and ``at_once`` are scratch of shape ``(L + 1,)``."""
    num_layers = layers.shape[1] - 1
    for stage in range(len(limits)):
        if limits[stage] == np.inf:  # every stage fits; no later one goes on from here
            continue
        for end in range(1, num_layers + 1):
            first, temporary = end, 0.0
            if goes_on[stage] and at_once[end]:
                first, temporary = starts[stage - 1, end], most[end]
            at_once[end] = first < end
            for start in range(first - 1, -1, -1):
                live = max(temporary, layers[2, start])
                if from_first and stage == 0 and start > 0:
                    temporary = live
                    continue
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


def part_starts(
    num_again: int,
    rows: PartRows,
    stages: FloatArray,
    part_stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
    *,
    from_first: bool = False,
) -> IntArray:
    """Return `earliest_starts` for stages that recompute only their first blocks.

    A stage with fewer than ``num_again`` blocks recomputes all. ``stages`` are those that recompute
    all their blocks, ``part_stages`` those that recompute only some.
    """
    starts = np.zeros((len(limits), rows.plain.shape[1]), np.int64)
    goes_on = _needs_no_more(stages, limits) & _needs_no_more(part_stages, limits)
    goes_on[1:2] &= not from_first
    at_once, both = np.zeros(rows.plain.shape[1], np.bool_), (stages, part_stages)
    _fill_parts(num_again, rows, both, tied, limits, goes_on, from_first, at_once, starts)
    return starts


@kept(**COUNTLESS)  # compiled when first called
def _fill_parts(
    num_again: int,
    rows: PartRows,
    all_stages: tuple[FloatArray, FloatArray],
    tied: FloatArray,
    limits: FloatArray,
    goes_on: BoolArray,
    from_first: bool,  # noqa: FBT001 - kernels take arguments by position
    at_once: BoolArray,
    starts: IntArray,
) -> None:
    """Write `part_starts`; ``at_once`` is scratch of shape ``(num_layers + 1,)``."""
    num_layers = rows.plain.shape[1] - 1
    kept, kept_plain = rows.layers[1], rows.plain[1]
    stages, part_stages = all_stages
    for stage in range(len(limits)):
        for end in range(1, num_layers + 1):
            first = starts[stage - 1, end] if goes_on[stage] and at_once[end] else end
            at_once[end] = first < end
            for start in range(0 if from_first and stage == 0 else first - 1, -1, -1):
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


def most_like_blocks(
    stages: FloatArray, block: LikeBlocks, limit: float, numbers: tuple[int, int, int, int]
) -> IntArray:
    """Return the largest number of equal blocks that fit each stage, whatever its other layers.

    In an interleaved schedule of at least ``pp`` micro-batches, a stage has run every chunk for
    ``pp`` micro-batches once, and has ended only backward passes of its last chunk: with ``n``
    micro-batches in flight, summed over chunks, ``max(0, chunks * pp - n)`` of them. So every other
    chunk has ``pp`` micro-batches in flight at that time. ``stages``, shape ``(pp, 9)``, has rows
    as in `peak_with`. ``numbers`` are the blocks of the chain, the most recomputed blocks of a
    stage, chunks per stage, and micro-batches. The result has shape ``(pp,)``; -1 where nothing
    fits.
    """
    most = np.full(len(stages), -1)
    _fill_most(stages, block, limit, numbers, most)
    return most


@kept(**COUNTLESS)  # compiled when first called
def _fill_most(
    stages: FloatArray,
    block: LikeBlocks,
    limit: float,
    numbers: tuple[int, int, int, int],
    most: IntArray,
) -> None:
    """Write `most_like_blocks`, where anything fits."""
    num_blocks, num_again, chunks, batches = numbers
    pp = len(stages)
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
            bucket = columns[4] * min(parameters, columns[5])
            temporary = block.temporary_again if again > 0 else block.temporary
            live = held + buffers * block.crossing + (number > 0) * temporary + bucket
            live = max(live, columns[6] * parameters)
            if columns[7] + columns[0] * parameters + columns[8] * live <= limit:
                most[stage] = number
                break


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
    host_of_node: IntArray  # shape ``(num_nodes,)``. First node of its host, for its interface.
    num_hosts: FloatArray  # shape ``(num_kinds,)``. Hosts of a node, each with an interface.
    intra_bytes_per_s: FloatArray  # shape ``(num_kinds,)``. Rate of a rank within its node.
    intra_step_s: FloatArray  # shape ``(num_kinds,)``. Latency within a node.
    # Shape ``(num_kinds, num_kinds)``. Rate that all ranks of a node share, and latency.
    inter_bytes_per_s: FloatArray
    inter_step_s: FloatArray


def slowest_messages(
    pairs: IntArray, ranks: RankTable, links: LinkTable, num_parts: int
) -> FloatArray:
    """Find the slowest message of each cut when all its messages are sent at once.

    A rank sends the samples that it has to the ranks that need them. Samples of a tensor are cut
    into pieces, as many as both tp divide; each piece of a sample is one unit. All units that leave
    or enter a node over its network interfaces share them, and so do all units of a rank its link.
    A rank has at most the interface of its host. ``pairs``, shape ``(num_cuts, 2)``, are the stages
    before and after each cut.

    Returns:
        Shape ``(num_cuts, num_parts, 4)``, of the slowest message in each part: messages of its
        rank, latency, seconds per byte of a unit, seconds per byte of a message.
    """
    slowest = np.zeros((len(pairs), num_parts, 4))
    num_ranks = ranks.first_node[1:] - ranks.first_node[:-1]
    num_ends = ranks.first_end[1:] - ranks.first_end[:-1]  # one more than dp
    pieces = np.lcm(*(num_ranks // (num_ends - 1))[pairs].T)  # no rank's part is split
    messages = np.empty(((pieces * num_ends[pairs].sum(axis=1)).max(initial=0), 7), np.int64)
    loads = np.empty((4, max(num_ranks.max(), 2 * links.kind_of_node.size), 2))
    _fill_slowest(pairs, pieces, ranks, links, messages, loads, slowest)
    return slowest


@kept(**COUNTLESS)  # compiled when first called
def _fill_slowest(  # noqa: C901 - in parts, it takes longer to compile
    pairs: IntArray,
    pieces: IntArray,
    ranks: RankTable,
    links: LinkTable,
    messages: IntArray,
    loads: FloatArray,
    slowest: FloatArray,
) -> None:
    """Write `slowest_messages`.

    ``pieces``, shape ``(num_cuts,)``, counts the pieces of a sample's tensor across each cut.
    Scratch: ``messages`` has a row for each message of a cut (sender, receiver, their nodes, part,
    places of the nodes in ``loads``); ``loads``, shape ``(4, num_ranks_or_nodes, 2)``, has units
    and messages of each sender, of each receiver, out of each node, into each node; messages
    between nodes of one host count behind all others, by node. ``slowest`` begins as zeros.
    """
    nodes, ends, first_node, first_end = ranks.nodes, ranks.ends, ranks.first_node, ranks.first_end
    hosts = links.host_of_node
    for index in range(len(pairs)):
        loads[:] = 0.0
        stage, next_stage = pairs[index, 0], pairs[index, 1]
        begin, stop = first_end[stage], first_end[stage + 1] - 1
        j, size, next_stop = first_end[next_stage], 0, first_end[next_stage + 1] - 1
        tp = (first_node[stage + 1] - first_node[stage]) // (stop - begin)
        next_tp = (first_node[next_stage + 1] - first_node[next_stage]) // (next_stop - j)
        for i in range(begin, stop):
            while ends[j + 1] <= ends[i]:
                j += 1
            k = j
            while k < next_stop and ends[k] < ends[i + 1]:
                samples = min(ends[i + 1], ends[k + 1]) - max(ends[i], ends[k])
                for piece in range(pieces[index]):
                    a = (i - begin) * tp + piece * tp // pieces[index]
                    b = (k - first_end[next_stage]) * next_tp + piece * next_tp // pieces[index]
                    source, target = nodes[first_node[stage] + a], nodes[first_node[next_stage] + b]
                    message = messages[size]
                    message[0], message[1], message[2], message[3] = a, b, source, target
                    inside = hosts[source] == hosts[target]
                    out = hosts.size + source if inside else hosts[source]
                    into = hosts.size + target if inside else hosts[target]
                    message[4], message[5], message[6] = ranks.parts[i], out, into
                    size += 1
                    for kind, units in enumerate((samples, 1)):
                        loads[0, a, kind] += units
                        loads[1, b, kind] += units
                        if source != target:
                            loads[2, out, kind] += units
                            loads[3, into, kind] += units
                k += 1
        for number in range(size):
            message = messages[number]
            a, b, source, target = message[0], message[1], message[2], message[3]
            worst = slowest[index, message[4]]
            worst[0] = max(worst[0], loads[0, a, 1], loads[1, b, 1])
            one, other = links.kind_of_node[source], links.kind_of_node[target]
            step_s = links.intra_step_s[one] if source == target else links.inter_step_s[one, other]
            worst[1] = max(worst[1], step_s)
            rank_rate = min(links.intra_bytes_per_s[one], links.intra_bytes_per_s[other])
            num_hosts = max(links.num_hosts[one], links.num_hosts[other])
            for kind in range(2):
                of_rank = max(loads[0, a, kind], loads[1, b, kind])
                seconds = of_rank / rank_rate
                if source != target:
                    shared = max(loads[2, message[5], kind], loads[3, message[6], kind])
                    rate = links.inter_bytes_per_s[one, other]
                    seconds = max(seconds, max(shared, of_rank * num_hosts) / rate)
                worst[2 + kind] = max(worst[2 + kind], seconds)
