"""Compiled loops of the cost model: arrays in, numbers out."""

from dataclasses import dataclass
from typing import NamedTuple

import cython
import numpy as np

from amp_ray.arrays import FloatArray, IntArray

INF = cython.declare(cython.double, float("inf"))


def time_1f1b(
    passes_s: FloatArray,
    sends_s: FloatArray,
    num_micro_batches: cython.longlong,
    blocking: cython.bint,
    duplex: cython.bint,
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
    seconds: float = _run_1f1b(passes_s, sends_s, num_micro_batches, blocking, duplex, clock)
    return seconds


@cython.cfunc
def _run_1f1b(
    passes_s: cython.const[cython.double][:, ::1],
    sends_s: cython.const[cython.double][:, ::1],
    num_micro_batches: cython.longlong,
    blocking: cython.bint,
    duplex: cython.bint,
    clock: cython.double[::1],
) -> cython.double:
    j: cython.longlong
    exchange_s: cython.double
    goes: cython.bint
    returns: cython.bint
    pp = clock.shape[0]
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
    return clock[0]


def time_chunks(
    passes_s: FloatArray,
    sends_s: FloatArray,
    order: IntArray,
    ahead: IntArray,
    blocking: cython.bint,
    duplex: cython.bint,
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
    clocks, counts = np.zeros((2, pp)), np.zeros((2, pp), np.int64)
    seconds: float = _run_chunks(
        passes_s, sends_s, order, ahead, blocking, duplex, clocks, counts, arrived
    )
    return seconds


@cython.cfunc
def _run_chunks(
    passes_s: cython.const[cython.double][:, :, ::1],
    sends_s: cython.const[cython.double][:, :, ::1],
    order: cython.const[cython.longlong][:, ::1],
    ahead: cython.const[cython.longlong][::1],
    blocking: cython.bint,
    duplex: cython.bint,
    clocks: cython.double[:, ::1],
    counts: cython.longlong[:, ::1],
    arrived: cython.double[:, :, ::1],
) -> cython.double:
    """Run `time_chunks`.

    ``clocks``, shape ``(2, pp)``, has the time of
    each stage and the seconds of a message that waits; ``counts``, shape ``(2, pp)``, the forward
    and backward passes of each stage so far: both begin as zeros. ``arrived``, shape ``(2,
    num_chunks, num_units)``, tells when a pass may start; below 0 if unknown.
    """
    end_s: cython.double = 0.0
    goes_back: cython.bint
    now_s: cython.double
    num_forward: cython.longlong
    num_backward: cython.longlong
    pp, last = ahead.shape[0], passes_s.shape[1] - 1
    total, slices = order.shape[1], passes_s.shape[2]
    clock, pending, forward, backward = clocks[0], clocks[1], counts[0], counts[1]
    num_left = 2 * total * pp
    while num_left > 0:
        before = num_left
        for j in range(pp):
            num_forward, num_backward, now_s = forward[j], backward[j], clock[j]
            while num_backward < total:
                goes_back = num_forward == total or num_forward - num_backward > ahead[j]
                way, index = (1 if goes_back else 0), (num_backward if goes_back else num_forward)
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
            end_s = max(end_s, now_s)
        assert num_left < before, "stages wait for each other in a circle"
    return end_s


@cython.ccall
def peak_with(
    layers: cython.const[cython.double][:, ::1],
    stages: cython.const[cython.double][:, ::1],
    stage: cython.Py_ssize_t,
    tied: cython.const[cython.double][::1],
    ends: tuple[cython.longlong, cython.longlong],
    kept_each: cython.double,
    temporary: cython.double,
) -> cython.double:
    """Return the peak bytes of a stage, given its kept and largest temporary bytes.

    Args:
        layers: Shape ``(4, num_layers + 1)``. Prefix sums of parameters and of bytes kept per
            micro-batch in flight; temporary bytes of each layer; bytes that cross each boundary.
            The kept and temporary bytes in them are ignored here.
        stages: Shape ``(num_stages, 9)``. State bytes per parameter; micro-batches in flight;
            buffers for the input and the output; bytes per bucket element; largest bucket; bytes
            per parameter in the optimizer step; constant bytes; allocator factor.
        stage: Row of the stage.
        tied: Shape ``(3,)``. Positions of the two layers that share a weight (or -1), and its
            parameters on this rank.
        ends: First layer of the stage, and the layer after its last.
        kept_each: Bytes kept per micro-batch in flight.
        temporary: Bytes of the largest temporary.
    """
    live: cython.double
    parameters: cython.double
    start, end = ends
    parameters = layers[0, end] - layers[0, start]
    if start <= tied[0] and tied[1] < end and tied[0] >= 0:
        parameters -= tied[2]
    kept = stages[stage, 1] * kept_each
    buffers = stages[stage, 2] * layers[3, start] + stages[stage, 3] * layers[3, end]
    bucket = stages[stage, 4] * min(parameters, stages[stage, 5])
    # No activations are left in the optimizer step.
    live = max(kept + buffers + temporary + bucket, stages[stage, 6] * parameters)
    return stages[stage, 7] + stages[stage, 0] * parameters + stages[stage, 8] * live


@cython.cfunc
def _needs_no_more(
    stages: cython.const[cython.double][:, ::1], stage: cython.Py_ssize_t
) -> cython.bint:
    """Return whether a stage needs no more memory than the one before it with its layers."""
    for column in range(stages.shape[1]):
        if stages[stage, column] > stages[stage - 1, column]:
            return False
    return True


def earliest_starts(
    layers: FloatArray,
    stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
    *,
    from_first: cython.bint = False,
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
    most, at_once = np.zeros(layers.shape[1]), np.zeros(layers.shape[1], np.bool_)
    _fill_starts(layers, stages, tied, limits, from_first, most, at_once, starts)
    return starts


@cython.cfunc
def _fill_starts(
    layers: cython.const[cython.double][:, ::1],
    stages: cython.const[cython.double][:, ::1],
    tied: cython.const[cython.double][::1],
    limits: cython.const[cython.double][::1],
    from_first: cython.bint,
    most: cython.double[::1],
    at_once: cython.uchar[::1],
    starts: cython.longlong[:, ::1],
) -> None:
    """Write `earliest_starts`; ``most`` and ``at_once`` are scratch of shape ``(L + 1,)``."""
    first: cython.longlong
    goes_on: cython.bint
    live: cython.double
    start: cython.longlong
    temporary: cython.double
    temporary_each: cython.double
    num_layers = layers.shape[1] - 1
    for stage in range(limits.shape[0]):
        if limits[stage] == INF:  # every stage fits; no later one goes on from here
            continue
        goes_on = stage > (1 if from_first else 0) and limits[stage] >= limits[stage - 1]
        goes_on = goes_on and _needs_no_more(stages, stage)
        for end in range(1, num_layers + 1):
            first, temporary = end, 0.0
            if goes_on and at_once[end]:
                first, temporary = starts[stage - 1, end], most[end]
            at_once[end] = first < end
            for start in range(first - 1, -1, -1):
                live = max(temporary, layers[2, start])
                if from_first and stage == 0 and start > 0:
                    temporary = live
                    continue
                kept_each = layers[1, end] - layers[1, start]
                peak = peak_with(layers, stages, stage, tied, (start, end), kept_each, live)
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


@cython.cclass
@dataclass(eq=False, repr=False)
class PartRows:
    """Memory of layers if a stage recomputes only its first blocks, for `part_starts`."""

    layers: cython.const[cython.double][:, ::1]  # as in `peak_with`, recomputed
    plain: cython.const[cython.double][:, ::1]  # the same, not recomputed
    # Shape ``(num_layers + 1, num_layers + 1)``. Largest temporary of the layers from one boundary
    # to another, recomputed.
    layers_most: cython.const[cython.double][:, ::1]
    plain_most: cython.const[cython.double][:, ::1]  # the same, not recomputed
    # Shape ``(num_layers + 1,)``. Blocks before each boundary.
    block_counts: cython.const[cython.longlong][::1]
    # Shape ``(num_blocks + 1,)``. By number of blocks, the first boundary that has them before it.
    first_with: cython.const[cython.longlong][::1]

    def __reduce__(self) -> tuple[type, tuple[FloatArray | IntArray, ...]]:
        both = np.asarray(self.layers), np.asarray(self.plain)
        largest = np.asarray(self.layers_most), np.asarray(self.plain_most)
        blocks = np.asarray(self.block_counts), np.asarray(self.first_with)
        return PartRows, (*both, *largest, *blocks)


def part_starts(
    num_again: cython.longlong,
    rows: PartRows,
    stages: FloatArray,
    part_stages: FloatArray,
    tied: FloatArray,
    limits: FloatArray,
    *,
    from_first: cython.bint = False,
) -> IntArray:
    """Return `earliest_starts` for stages that recompute only their first blocks.

    A stage with fewer than ``num_again`` blocks recomputes all. ``stages`` are those that recompute
    all their blocks, ``part_stages`` those that recompute only some.
    """
    width = rows.plain.shape[1]
    starts = np.zeros((len(limits), width), np.int64)
    at_once = np.zeros(width, np.bool_)
    both = np.concatenate([stages, part_stages])
    _fill_parts(num_again, rows, both, tied, limits, from_first, at_once, starts)
    return starts


@cython.cfunc
def _fill_parts(
    num_again: cython.longlong,
    rows: PartRows,
    stages: cython.const[cython.double][:, ::1],
    tied: cython.const[cython.double][::1],
    limits: cython.const[cython.double][::1],
    from_first: cython.bint,
    at_once: cython.uchar[::1],
    starts: cython.longlong[:, ::1],
) -> None:
    """Write `part_starts`; ``at_once`` is scratch of shape ``(num_layers + 1,)``.

    The first half of ``stages`` are those that recompute all their blocks.
    """
    temporary: cython.double
    first: cython.longlong
    goes_on: cython.bint
    split: cython.longlong
    start: cython.longlong
    spared: cython.double
    state_bytes: cython.double
    num_layers, num_stages = rows.plain.shape[1] - 1, limits.shape[0]
    for stage in range(num_stages):
        goes_on = stage > (1 if from_first else 0) and limits[stage] >= limits[stage - 1]
        goes_on = goes_on and _needs_no_more(stages, stage)
        goes_on = goes_on and _needs_no_more(stages, stage + num_stages)
        for end in range(1, num_layers + 1):
            first = starts[stage - 1, end] if goes_on and at_once[end] else end
            at_once[end] = first < end
            for start in range(0 if from_first and stage == 0 else first - 1, -1, -1):
                last = rows.block_counts[start] + num_again
                all_again = rows.block_counts[end] <= last
                split = end if all_again else rows.first_with[last]
                kept_each = rows.layers[1, split] - rows.layers[1, start]
                kept_each = kept_each + rows.plain[1, end] - rows.plain[1, split]
                temporary = max(rows.layers_most[start, split], rows.plain_most[split, end])
                row = stage if all_again else stage + num_stages
                peak = peak_with(rows.plain, stages, row, tied, (start, end), kept_each, temporary)
                state_bytes = stages[row, 0] + stages[row, 8] * max(stages[row, 4], stages[row, 6])
                spared = state_bytes * max(tied[2], 0.0)
                spared += stages[row, 8] * stages[row, 2] * rows.plain[3, start]
                if peak <= limits[stage]:
                    at_once[end] |= start == end - 1
                    first = start
                elif first < end or peak - spared > limits[stage]:
                    break
            starts[stage, end] = first


@cython.cclass
@dataclass(eq=False, repr=False)
class LikeBlocks:
    """Least memory of each of several equal blocks of a chain."""

    kept_again: cython.double  # bytes kept per micro-batch in flight, if the block is recomputed
    kept: cython.double  # the same if it is not
    parameters: cython.double
    temporary: cython.double  # bytes that live while it runs
    temporary_again: cython.double  # the same in a stage that recomputes blocks
    crossing: cython.double  # bytes that cross a boundary between stages, if there are several
    num_others: cython.longlong  # most other blocks that a stage can have
    keeps_ends_once: cython.bint  # whether micro-batches in flight keep no boundaries in addition

    def __reduce__(self) -> tuple[type, tuple[float | bool, ...]]:
        return LikeBlocks, (
            self.kept_again,
            self.kept,
            self.parameters,
            self.temporary,
            self.temporary_again,
            self.crossing,
            self.num_others,
            self.keeps_ends_once,
        )


def most_like_blocks(
    stages: FloatArray,
    block: LikeBlocks,
    limit: cython.double,
    numbers: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
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


@cython.cfunc
def _fill_most(
    stages: cython.const[cython.double][:, ::1],
    block: LikeBlocks,
    limit: cython.double,
    numbers: tuple[cython.longlong, cython.longlong, cython.longlong, cython.longlong],
    most: cython.longlong[::1],
) -> None:
    """Write `most_like_blocks`, where anything fits."""
    num_blocks, num_again, chunks, batches = numbers
    again: cython.longlong
    bucket: cython.double
    buffers: cython.double
    ended: cython.double
    held: cython.double
    leaving: cython.double
    least: cython.double
    live: cython.double
    of_last: cython.longlong
    spared: cython.double
    pp = stages.shape[0]
    for stage in range(pp):
        flying = stages[stage, 1]
        whole, ended = chunks * flying, max(0.0, chunks * (pp - flying))
        if chunks == 1:
            leaving = min(stages[stage, 3], flying) * (stage < pp - 1)
            buffers = stages[stage, 2] * (stage > 0) + leaving
        elif block.keeps_ends_once:
            buffers = stages[stage, 2] + stages[stage, 3]
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
                    of_last = min(number, (number + block.num_others + chunks - 1) // chunks)
                    kept = pp * number * block.kept - ended * of_last * block.kept
                    held = max(held, kept - pp * max(spared_each, 0.0))
            parameters = block.parameters * number
            bucket = stages[stage, 4] * min(parameters, stages[stage, 5])
            temporary = block.temporary_again if again > 0 else block.temporary
            live = held + buffers * block.crossing + (number > 0) * temporary + bucket
            live = max(live, stages[stage, 6] * parameters)
            if stages[stage, 7] + stages[stage, 0] * parameters + stages[stage, 8] * live <= limit:
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
    num_ranks = np.diff(ranks.first_node)
    num_ends = np.diff(ranks.first_end)  # one more than dp
    pieces = np.lcm(*(num_ranks // (num_ends - 1))[pairs].T)  # no rank's part is split
    messages = np.empty(((pieces * num_ends[pairs].sum(axis=1)).max(initial=0), 7), np.int64)
    loads = np.empty((4, max(num_ranks.max(), 2 * links.kind_of_node.size), 2))
    sends = _Sends(pairs, pieces, *ranks, *links, messages, loads, slowest)
    for index in range(len(pairs)):
        _find_slowest(sends, index, _list_messages(sends, index))
    return slowest


@cython.cclass
@dataclass(eq=False, repr=False)
class _Sends:
    """What `slowest_messages` takes, and the arrays that it writes."""

    pairs: cython.const[cython.longlong][:, ::1]
    pieces: cython.const[cython.longlong][::1]  # of a sample's tensor across each cut
    nodes: cython.const[cython.longlong][::1]
    first_node: cython.const[cython.longlong][::1]
    ends: cython.const[cython.longlong][::1]
    parts: cython.const[cython.longlong][::1]
    first_end: cython.const[cython.longlong][::1]
    kind_of_node: cython.const[cython.longlong][::1]
    host_of_node: cython.const[cython.longlong][::1]
    num_hosts: cython.const[cython.double][::1]
    intra_bytes_per_s: cython.const[cython.double][::1]
    intra_step_s: cython.const[cython.double][::1]
    inter_bytes_per_s: cython.const[cython.double][:, ::1]
    inter_step_s: cython.const[cython.double][:, ::1]
    # Row per message of a cut: sender, receiver, their nodes, part, places of the nodes in `loads`.
    messages: cython.longlong[:, ::1]
    # Shape ``(4, num_ranks_or_nodes, 2)``. Units and messages of each sender, of each receiver, out
    # of each node, into each node; messages between nodes of one host count behind all others, by
    # node.
    loads: cython.double[:, :, ::1]
    slowest: cython.double[:, :, ::1]


@cython.cfunc
def _list_messages(sends: _Sends, index: cython.Py_ssize_t) -> cython.longlong:
    """List the messages of a cut and add up their loads; return their number."""
    size: cython.longlong = 0
    stage, next_stage = sends.pairs[index, 0], sends.pairs[index, 1]
    begin, stop = sends.first_end[stage], sends.first_end[stage + 1] - 1
    next_begin, next_stop = sends.first_end[next_stage], sends.first_end[next_stage + 1] - 1
    j: cython.longlong = next_begin
    sends.loads[:, :, :] = 0.0
    for i in range(begin, stop):
        while sends.ends[j + 1] <= sends.ends[i]:
            j += 1
        k: cython.longlong = j
        while k < next_stop and sends.ends[k] < sends.ends[i + 1]:
            size = _add_messages(sends, index, i, k, size)
            k += 1
    return size


@cython.cfunc
def _add_messages(
    sends: _Sends,
    index: cython.Py_ssize_t,
    i: cython.longlong,
    k: cython.longlong,
    size: cython.longlong,
) -> cython.longlong:
    """Append the messages from one dp index to another across a cut; return the new number."""
    stage, next_stage = sends.pairs[index, 0], sends.pairs[index, 1]
    begin, next_begin = sends.first_end[stage], sends.first_end[next_stage]
    first, next_first = sends.first_node[stage], sends.first_node[next_stage]
    tp = (sends.first_node[stage + 1] - first) // (sends.first_end[stage + 1] - 1 - begin)
    next_dp = sends.first_end[next_stage + 1] - 1 - next_begin
    next_tp = (sends.first_node[next_stage + 1] - next_first) // next_dp
    samples: cython.longlong = min(sends.ends[i + 1], sends.ends[k + 1])
    samples -= max(sends.ends[i], sends.ends[k])
    num_nodes = sends.host_of_node.shape[0]
    for piece in range(sends.pieces[index]):
        a = (i - begin) * tp + piece * tp // sends.pieces[index]
        b = (k - next_begin) * next_tp + piece * next_tp // sends.pieces[index]
        source, target = sends.nodes[first + a], sends.nodes[next_first + b]
        out, into = sends.host_of_node[source], sends.host_of_node[target]
        if out == into:
            out, into = num_nodes + source, num_nodes + target
        sends.messages[size, 0], sends.messages[size, 1] = a, b
        sends.messages[size, 2], sends.messages[size, 3] = source, target
        sends.messages[size, 4] = sends.parts[i]
        sends.messages[size, 5], sends.messages[size, 6] = out, into
        size += 1
        _add_load(sends, 0, a, samples)
        _add_load(sends, 1, b, samples)
        if source != target:
            _add_load(sends, 2, out, samples)
            _add_load(sends, 3, into, samples)
    return size


@cython.cfunc
@cython.inline
def _add_load(
    sends: _Sends, row: cython.Py_ssize_t, place: cython.longlong, samples: cython.longlong
) -> None:
    """Count a message of a rank or a node."""
    sends.loads[row, place, 0] += samples
    sends.loads[row, place, 1] += 1


@cython.cfunc
def _find_slowest(sends: _Sends, index: cython.Py_ssize_t, size: cython.longlong) -> None:
    """Write the slowest of a cut's messages, in each part."""
    for number in range(size):
        a, b, part = sends.messages[number, 0], sends.messages[number, 1], sends.messages[number, 4]
        source, target = sends.messages[number, 2], sends.messages[number, 3]
        out, into = sends.messages[number, 5], sends.messages[number, 6]
        one, other = sends.kind_of_node[source], sends.kind_of_node[target]
        step_s = sends.intra_step_s[one] if source == target else sends.inter_step_s[one, other]
        most = max(sends.slowest[index, part, 0], sends.loads[0, a, 1], sends.loads[1, b, 1])
        sends.slowest[index, part, 0] = most
        sends.slowest[index, part, 1] = max(sends.slowest[index, part, 1], step_s)
        rank_rate: cython.double = min(sends.intra_bytes_per_s[one], sends.intra_bytes_per_s[other])
        for kind in range(2):
            of_rank: cython.double = max(sends.loads[0, a, kind], sends.loads[1, b, kind])
            seconds: cython.double = of_rank / rank_rate
            if source != target:
                shared: cython.double = max(sends.loads[2, out, kind], sends.loads[3, into, kind])
                num_hosts: cython.double = max(sends.num_hosts[one], sends.num_hosts[other])
                shared = max(shared, of_rank * num_hosts)
                seconds = max(seconds, shared / sends.inter_bytes_per_s[one, other])
            seconds = max(sends.slowest[index, part, 2 + kind], seconds)
            sends.slowest[index, part, 2 + kind] = seconds
