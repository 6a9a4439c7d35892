"""The evaluator: time and memory of a complete strategy. Nothing else adds up a step.

It is compiled ahead of time, and runs as plain Python, too. All physics is in tables, which
`tables.Tables` fills when a row is first needed: layer times, memory, bytes of messages, paths of
rings. `Evaluator.place` prices what does not depend on the cuts, `Evaluator.at` prices the cuts.

A stage waits for its slowest tensor-parallel group. The samples divide into *parts*: groups of
different parts exchange no samples and run independently until gradients are synchronised. Parts
of equal times form a *class*, which is timed once.
"""

from typing import Any

import cython
import numpy as np
from cython import bint, ccall, cclass, cfunc, double, longlong, ulonglong, void

from amp_ray.cost.kernels.rings import RingTable, seconds_at
from amp_ray.cost.memory import CHECKPOINT_BUFFERS
from amp_ray.strategies.zero import MOST_ZERO_STAGE, SHARDED_GRADIENTS

# ---------------------------------------------------------------------------- numbers of rows


@cclass
class Index:
    """Numbers of rows of integers, counted as they are first met."""

    width: longlong
    count: longlong
    key: longlong[::1]  # to be filled before `find` and `add`
    keys: longlong[:, ::1]
    slots: longlong[::1]

    def __init__(self, width: longlong) -> None:
        self.width = width
        self.count = 0
        self.key = np.zeros(width, np.int64)
        self.keys = np.zeros((32, width), np.int64)
        self.slots = np.full(128, -1, np.int64)

    @cfunc
    def _slot(self) -> longlong:
        """Return the slot of the key, or the empty one where it belongs."""
        prime: ulonglong = 1099511628211
        mixed: ulonglong = 1469598103934665603
        for i in range(self.width):
            mixed = (mixed ^ cython.cast(ulonglong, self.key[i])) * prime
            if not cython.compiled:
                mixed %= 1 << 64
        mixed ^= mixed >> 29
        last = self.slots.shape[0] - 1
        slot = cython.cast(longlong, mixed & cython.cast(ulonglong, last))
        while True:
            number = self.slots[slot]
            if number < 0:
                return slot
            for i in range(self.width):
                if self.keys[number, i] != self.key[i]:
                    break
            else:
                return slot
            slot = (slot + 1) & last

    @cfunc
    def find(self) -> longlong:
        """Return the number of the key, or -1."""
        return self.slots[self._slot()]

    @ccall
    def add(self) -> longlong:
        """Number the key, which is new, and return its number."""
        number = self.count
        if number == self.keys.shape[0]:
            self._grow()
        self.slots[self._slot()] = number
        for i in range(self.width):
            self.keys[number, i] = self.key[i]
        self.count += 1
        return number

    def _grow(self) -> None:
        key = np.array(self.key)
        old = np.asarray(self.keys)
        self.keys = np.concatenate([old, np.zeros_like(old)])
        self.slots = np.full(4 * len(self.keys), -1, np.int64)
        for number in range(self.count):
            for i in range(self.width):
                self.key[i] = self.keys[number, i]
            self.slots[self._slot()] = number
        for i in range(self.width):
            self.key[i] = key[i]


# ------------------------------------------------------------------------------------- inputs


@cclass
class Layout:
    """A complete strategy as numbers; see `tables.Tables.layout`."""

    pp: longlong
    num_micro_batches: longlong
    virtual_stages: longlong
    share: longlong  # number of the largest token slice's share; 0 for whole samples
    is_placed: bint  # whether an evaluator has placed it since it changed, but for its cuts
    option: longlong[::1]  # by stage, number of its options
    devices: longlong[::1]  # of ranks: tp fastest, then dp, which includes cp, then stages
    samples: longlong[::1]  # of each group in one micro-batch, stage after stage
    bounds: longlong[::1]  # of chunks, first 0; shape ``(pp * virtual_stages + 1,)``

    def __init__(
        self,
        option: longlong[::1],
        devices: longlong[::1],
        samples: longlong[::1],
        bounds: longlong[::1],
    ) -> None:
        self.pp = option.shape[0]
        self.num_micro_batches = 1
        self.virtual_stages = 1
        self.share = 0
        self.is_placed = False
        self.option = option
        self.devices = devices
        self.samples = samples
        self.bounds = bounds

    @ccall
    def schedule(
        self,
        pp: longlong,
        num_micro_batches: longlong,
        virtual_stages: longlong,
    ) -> void:
        """Set the numbers of stages, micro-batches, and chunks of a stage."""
        self.pp = pp
        self.num_micro_batches = num_micro_batches
        self.virtual_stages = virtual_stages
        self.is_placed = False

    def cut(self, bounds: longlong[::1]) -> None:
        """Set the bounds of all chunks."""
        assert bounds.shape[0] == self.pp * self.virtual_stages + 1, (
            "bounds are those of all chunks"
        )
        self.bounds = bounds

    def slice_by(self, share: longlong) -> None:
        """Set the number of the largest token slice's share of a micro-batch."""
        if share != self.share:
            self.share = share
            self.is_placed = False

    def numbers(self) -> list[Any]:
        """Return stages, micro-batches, chunks of a stage, options, devices and samples."""
        return [
            self.pp,
            self.num_micro_batches,
            self.virtual_stages,
            np.asarray(self.option),
            np.asarray(self.devices),
            np.asarray(self.samples),
        ]


@cclass
class Options:
    """Options of stages by number; dp includes cp."""

    tp: longlong[::1]
    dp: longlong[::1]
    zero: longlong[::1]
    shards: longlong[::1]  # ranks of a shard group
    keeps: longlong[::1]  # whether gathered weights stay until the backward pass
    ep: longlong[::1]
    expert_ranks: longlong[::1]  # ranks that hold the experts of a layer together
    expert_dp: longlong[::1]
    expert_shards: longlong[::1]
    spreads: longlong[::1]  # whether experts are spread in another way than tp
    divides: longlong[::1]  # whether sequence parallelism is on
    blocks: longlong[::1]  # recomputed blocks of a stage; -1 for all
    of_times: longlong[::1]  # number of the part that layer times depend on
    of_memory: longlong[::1]  # number of the part that memory depends on
    weights: longlong[::1]  # number of its prefix sums of parameters
    expert_weights: longlong[::1]  # number of those of its experts

    def __init__(self, columns: Any) -> None:
        (
            self.tp,
            self.dp,
            self.zero,
            self.shards,
            self.keeps,
            self.ep,
            self.expert_ranks,
            self.expert_dp,
            self.expert_shards,
            self.spreads,
            self.divides,
            self.blocks,
            self.of_times,
            self.of_memory,
            self.weights,
            self.expert_weights,
        ) = columns


@cclass
class Costs:
    """Constants of an experiment, in SI units."""

    start_s: double  # of a message or collective
    host_s: double  # host work per iteration
    micro_batch_s: double  # host work per micro-batch
    mask_bytes: double
    gradient_bytes: double  # of a parameter: reduced
    gathered_bytes: double  # gathered
    tied_bytes: double  # summed between the stages of a tied weight
    bucket_traffic_bytes: double  # moved to and from buckets
    step_traffic_bytes: double  # moved in the optimizer step
    bucket_elements: double
    gather_slice_s: double
    most_curved_bytes: double  # largest size of a curve
    blocking: bint
    duplex: bint
    sliced_activations: bint
    sliced_gradients: bint
    overlaps_sync: bint
    overlaps_gather: bint
    scatters_gradients: bint
    reduces_at_once: bint
    gathers_every_pass: bint
    buckets_alone: bint
    defers_sync: bint  # whether only the last micro-batch reduces gradients that are sharded

    def __init__(self, numbers: Any, switches: Any) -> None:
        (
            self.start_s,
            self.host_s,
            self.micro_batch_s,
            self.mask_bytes,
            self.gradient_bytes,
            self.gathered_bytes,
            self.tied_bytes,
            self.bucket_traffic_bytes,
            self.step_traffic_bytes,
            self.bucket_elements,
            self.gather_slice_s,
            self.most_curved_bytes,
        ) = numbers
        (
            self.blocking,
            self.duplex,
            self.sliced_activations,
            self.sliced_gradients,
            self.overlaps_sync,
            self.overlaps_gather,
            self.scatters_gradients,
            self.reduces_at_once,
            self.gathers_every_pass,
            self.buckets_alone,
            self.defers_sync,
        ) = switches


@cclass
class Devices:
    """Devices, and the links of messages by kind of node."""

    type: longlong[::1]  # of each device
    node: longlong[::1]  # of each device
    memory_bytes: double[::1]  # of each type
    stream_bytes_per_s: double[::1]  # of each type, effective
    taken: double[::1]  # of each type: share of its rate that a collective takes
    slowness: longlong[::1]  # of each type: 0 for that with the slowest memory
    kind: longlong[::1]  # of each node
    host: longlong[::1]  # of each node: the first node of its host
    num_hosts: double[::1]  # of a node of each kind, each with an interface
    within_bytes_per_s: double[::1]  # of a rank within a node, by kind
    within_step_s: double[::1]
    between_bytes_per_s: double[:, ::1]  # that all ranks of a node share, by two kinds
    between_step_s: double[:, ::1]

    def __init__(self, columns: Any) -> None:
        (
            self.type,
            self.node,
            self.memory_bytes,
            self.stream_bytes_per_s,
            self.taken,
            self.slowness,
            self.kind,
            self.host,
            self.num_hosts,
            self.within_bytes_per_s,
            self.within_step_s,
            self.between_bytes_per_s,
            self.between_step_s,
        ) = columns


@cclass
class Layers:
    """Rows over the layers of the model, by number."""

    times_s: double[:, :, ::1]  # prefix sums: forward, backward, all-reduces in both
    plain_s: double[:, :, ::1]  # the same without recompute, for stages that recompute in part
    plain: longlong[::1]  # its row of ``plain_s``
    extrapolates: longlong[::1]  # whether a row extrapolates from measurements
    memory_bytes: double[:, :, ::1]  # as `memory.LayerMemory.rows`
    weights: double[:, ::1]  # prefix sums of a rank's parameters
    experts: double[:, ::1]  # of these, those of experts
    replicated: double[:, ::1]  # one row of prefix sums: of parameters that every tp rank has
    tensors: double[:, ::1]  # the same of the number of weights
    block_counts: longlong[::1]  # blocks before each boundary
    first_with: longlong[::1]  # by number of blocks, the first boundary behind them
    message_row: longlong[:, ::1]  # row of ``message_bytes`` by tp and whether it is divided
    message_bytes: double[:, ::1]  # of a sample in a rank, by boundary
    trained: longlong[::1]  # layers with parameters before each boundary

    def __init__(self, columns: Any) -> None:
        (
            self.times_s,
            self.plain_s,
            self.plain,
            self.extrapolates,
            self.memory_bytes,
            self.weights,
            self.experts,
            self.replicated,
            self.tensors,
            self.block_counts,
            self.first_with,
            self.message_row,
            self.message_bytes,
            self.trained,
        ) = columns


@cclass
class MemoryKinds:
    """Memory of ranks by number: all that it depends on beside the layers and the schedule."""

    state_bytes: double[::1]  # per parameter
    bucket_bytes: double[::1]  # per element of a bucket
    bucket_elements: double[::1]
    step_bytes: double[::1]  # per parameter, in the optimizer step
    constant_bytes: double[::1]
    last_bytes: double[::1]  # more of them in the last stage
    factor: double[::1]  # of the allocator
    once: longlong[::1]  # whether batches in flight keep no boundaries beside their layers
    frees: longlong[::1]  # whether outputs are freed once they are sent
    rows: longlong[::1]  # number of its rows in ``Layers.memory_bytes``
    plain: longlong[::1]  # the same without recompute
    tied: double[::1]  # parameters of the weight that two layers share
    share: double[::1]  # largest token slice as a share of a micro-batch

    def __init__(self, columns: Any) -> None:
        (
            self.state_bytes,
            self.bucket_bytes,
            self.bucket_elements,
            self.step_bytes,
            self.constant_bytes,
            self.last_bytes,
            self.factor,
            self.once,
            self.frees,
            self.rows,
            self.plain,
            self.tied,
            self.share,
        ) = columns


_SHARDED_GRADIENTS = cython.declare(longlong, SHARDED_GRADIENTS)
_SHARDED_WEIGHTS = cython.declare(longlong, MOST_ZERO_STAGE)

_CHECKPOINT_BUFFERS = cython.declare(double, CHECKPOINT_BUFFERS)


# -------------------------------------------------------------------------------------- paths


@cclass
class Paths:
    """Collectives over the paths of rings."""

    rings: RingTable
    costs: Costs

    def __init__(self, rings: RingTable, costs: Costs) -> None:
        self.rings = rings
        self.costs = costs

    @cfunc
    def all_reduce_s(self, path: longlong, num_ranks: double, num_bytes: double) -> double:
        """Time an all-reduce; see `collective.all_reduce_s`."""
        if num_ranks == 1.0:
            return 0.0
        start = self.costs.start_s
        if self.rings.has_curves[path]:
            return start + seconds_at(self.rings.reduce_s, path, num_bytes)
        latency_s = 2 * (num_ranks - 1) * self.rings.step_s[path]
        if self.rings.tree_s[path] > 0.0:
            latency_s = min(latency_s, 2 * self.rings.tree_s[path])
        carried_s = (num_ranks - 1) * (num_bytes / num_ranks / self.rings.bytes_per_s[path])
        return start + latency_s + 2 * carried_s

    @cfunc
    def gather_of_s(self, path: longlong, num_ranks: double, num_bytes: double) -> double:
        """Time an all-gather or a reduce-scatter; see `collective.all_gather_s`."""
        if num_ranks == 1.0:
            return 0.0
        start = self.costs.start_s
        if self.rings.has_curves[path]:
            return start + seconds_at(self.rings.gather_s, path, num_bytes)
        carried_s = (num_ranks - 1) * (num_bytes / num_ranks / self.rings.bytes_per_s[path])
        return start + (num_ranks - 1) * self.rings.step_s[path] + carried_s

    @cfunc
    def _size_s(
        self,
        sums: bint,
        path: longlong,
        num_ranks: double,
        num_bytes: double,
    ) -> double:
        if sums:
            return self.all_reduce_s(path, num_ranks, num_bytes)
        return self.gather_of_s(path, num_ranks, num_bytes)

    @cfunc
    def in_buckets(
        self,
        sums: bint,
        path: longlong,
        num_ranks: double,
        bucket_bytes: double,
        line: double[::1],
        first: longlong,
    ) -> void:
        """Write four figures of a collective in buckets, see `collective.in_buckets_s`.

        These are fixed seconds, bytes of a bucket and its seconds, and seconds per largest size of
        a curve. ``sums`` says whether it is an all-reduce.
        """
        most = self.costs.most_curved_bytes
        empty_s = self._size_s(sums, path, num_ranks, 0.0)
        line[first] = empty_s
        line[first + 1] = bucket_bytes
        if bucket_bytes < most:
            line[first + 2] = self._size_s(sums, path, num_ranks, bucket_bytes)
            line[first + 3] = 0.0
            return
        full_s = self._size_s(sums, path, num_ranks, most)
        more_s = self._size_s(sums, path, num_ranks, 2 * most) - full_s
        line[first] = max(empty_s, full_s - more_s)
        line[first + 2] = empty_s
        line[first + 3] = more_s


# ------------------------------------------------------------------------------------- stages


@cclass
class Stages:
    """Groups of the stages of a layout, and the parts and classes of its samples."""

    layout: Layout
    options: Options
    num_chunks: longlong
    first_rank: longlong[::1]
    first_group: longlong[::1]
    row: longlong[::1]  # of each group, in ``Layers.times_s``
    type: longlong[::1]  # of each group: its device type, or a set of them
    part: longlong[::1]  # of each group
    end: longlong[::1]  # of each group: samples up to it, in its stage
    num_parts: longlong
    num_classes: longlong
    part_of: longlong[::1]  # a part of each class
    class_of: longlong[::1]  # the class of each part
    cell_first: longlong[::1]  # where the rows of a stage and part begin
    cell_rows: longlong[::1]  # distinct rows of a stage and part
    pointers: longlong[::1]

    def __init__(self, num_devices: longlong) -> None:
        self.first_rank = np.zeros(num_devices + 1, np.int64)
        self.first_group = np.zeros(num_devices + 1, np.int64)
        self.row = np.zeros(num_devices, np.int64)
        self.type = np.zeros(num_devices, np.int64)
        self.part = np.zeros(num_devices, np.int64)
        self.end = np.zeros(num_devices, np.int64)
        self.part_of = np.zeros(num_devices, np.int64)
        self.class_of = np.zeros(num_devices, np.int64)
        self.cell_first = np.zeros(num_devices + 1, np.int64)
        self.cell_rows = np.zeros(num_devices, np.int64)
        self.pointers = np.zeros(num_devices, np.int64)
        none = np.zeros(0, np.int64)
        self.layout = Layout(none, none, none, none)

    @cfunc
    def read(self, layout: Layout, options: Options) -> void:
        """Find where the ranks and groups of each stage begin, and the parts of the samples."""
        self.layout, self.options = layout, options
        self.num_chunks = layout.pp * layout.virtual_stages
        for stage in range(layout.pp):
            option = layout.option[stage]
            self.first_rank[stage + 1] = (
                self.first_rank[stage] + options.tp[option] * options.dp[option]
            )
            self.first_group[stage + 1] = self.first_group[stage] + options.dp[option]
        self._count_samples()
        if self._shares_alike():
            self._part_by_group()
        else:
            self._part_by_samples()

    @cfunc
    def _count_samples(self) -> void:
        for stage in range(self.layout.pp):
            total = 0
            for group in range(self.first_group[stage], self.first_group[stage + 1]):
                total += self.layout.samples[group]
                self.end[group] = total

    @cfunc
    def _shares_alike(self) -> bint:
        size = self.first_group[1]
        for stage in range(1, self.layout.pp):
            if self.first_group[stage + 1] - self.first_group[stage] != size:
                return False
            for i in range(size):
                if self.end[self.first_group[stage] + i] != self.end[i]:
                    return False
        return True

    @cfunc
    def _part_by_group(self) -> void:
        self.num_parts = self.first_group[1]
        for stage in range(self.layout.pp):
            for group in range(self.first_group[stage], self.first_group[stage + 1]):
                self.part[group] = group - self.first_group[stage]

    @cfunc
    def _part_by_samples(self) -> void:
        """Divide samples into the smallest parts such that no rank has samples of two parts."""
        for stage in range(self.layout.pp):
            self.pointers[stage] = self.first_group[stage]
        self.num_parts = 0
        for border in range(self.first_group[1]):
            is_border = True
            for stage in range(1, self.layout.pp):
                pointer = self.pointers[stage]
                while self.end[pointer] < self.end[border]:
                    pointer += 1
                self.pointers[stage] = pointer
                is_border = is_border and self.end[pointer] == self.end[border]
            if not is_border:
                continue
            for stage in range(self.layout.pp):
                pointer = self.first_group[stage]
                if self.num_parts > 0:
                    pointer = self.cell_first[stage]
                group = pointer
                while group < self.first_group[stage + 1] and self.end[group] <= self.end[border]:
                    self.part[group] = self.num_parts
                    group += 1
                self.cell_first[stage] = group
            self.num_parts += 1

    @cfunc
    def fill_cells(self) -> void:
        """Collect the distinct rows of each stage and part."""
        size = 0
        cell = 0
        for stage in range(self.layout.pp):
            group = self.first_group[stage]
            while group < self.first_group[stage + 1]:
                if group == self.first_group[stage] or self.part[group] != self.part[group - 1]:
                    self.cell_first[cell] = size
                    cell += 1
                for i in range(self.cell_first[cell - 1], size):
                    if self.cell_rows[i] == self.row[group]:
                        break
                else:
                    self.cell_rows[size] = self.row[group]
                    size += 1
                group += 1
        self.cell_first[cell] = size

    @cfunc
    def are_alike(self, one: longlong, other: longlong) -> bint:
        """Return whether two parts have the same rows in all stages."""
        for stage in range(self.layout.pp):
            at = self.cell_first[stage * self.num_parts + one]
            beside = self.cell_first[stage * self.num_parts + other]
            size = self.cell_first[stage * self.num_parts + one + 1] - at
            if self.cell_first[stage * self.num_parts + other + 1] - beside != size:
                return False
            for i in range(size):
                if self.cell_rows[at + i] != self.cell_rows[beside + i]:
                    return False
        return True


# ----------------------------------------------------------------------------------- messages


@cclass
class Messages:
    """Messages between stages, all sent at once.

    A rank sends the samples that it has to the ranks that need them. Samples of a tensor are cut
    into pieces, as many as both tp divide; each piece of a sample is one unit. All units that leave
    or enter a node over its network interfaces share them, and so do all units of a rank its link.
    A rank has at most the interface of its host.
    """

    stages: Stages
    devices: Devices
    costs: Costs
    layers: Layers
    paths: Paths
    num_cuts: longlong
    # By cut and part, of the slowest message: messages of its rank, latency, seconds per byte of a
    # unit, seconds per byte of a message
    slowest: double[:, :, ::1]
    # By message (activation, gradient), cut and part: fixed seconds; seconds per byte of a sample
    # in a receiving rank; seconds per byte of a sample in a rank of the end that has more
    coefficients: double[:, :, :, ::1]
    rows: longlong[:, ::1]  # by message and cut, the row of ``Layers.message_bytes``
    before: longlong  # stages of the cut that is priced
    after: longlong
    tp: longlong  # their tp
    next_tp: longlong
    pieces: longlong  # of a sample's tensor
    num_sent: longlong
    # Scratch: sender, receiver, their nodes, part, and places of the nodes in ``loads``
    sent: longlong[:, ::1]
    # Units and messages of each sender, of each receiver, out of each node, into each node;
    # messages between nodes of one host count behind all others, by node
    loads: double[:, :, ::1]
    gathers: double[:, :, ::1]  # by stage and part: latency, seconds per byte of a sample

    def __init__(self, num_devices: longlong, num_nodes: longlong, stages: Stages) -> None:
        self.stages = stages
        self.slowest = np.zeros((1, num_devices, 4))
        self.coefficients = np.zeros((2, 1, num_devices, 3))
        self.rows = np.zeros((2, num_devices), np.int64)
        self.sent = np.zeros((16, 7), np.int64)
        self.loads = np.zeros((4, max(num_devices, 2 * num_nodes), 2))
        self.gathers = np.zeros((num_devices, 1, 2))

    @cfunc
    def place(self, paths_of_groups: longlong[::1]) -> void:
        """Price the messages between the stages of a layout, but for their bytes."""
        layout = self.stages.layout
        slices = self.costs.sliced_activations or self.costs.sliced_gradients
        self.num_cuts = layout.pp if layout.virtual_stages > 1 else layout.pp - 1
        self._make_room()
        if slices and self.num_cuts > 0:
            self._gather(paths_of_groups)
        for cut in range(self.num_cuts):
            self._load(cut)
            self._price(cut, slices)

    @cfunc
    def _make_room(self) -> void:
        stages = self.stages
        cuts = max(self.num_cuts, 1)
        if self.slowest.shape[0] < cuts or self.slowest.shape[1] < stages.num_parts:
            self.slowest = np.zeros((cuts, stages.num_parts, 4))
            self.coefficients = np.zeros((2, cuts, stages.num_parts, 3))
        if self.gathers.shape[0] < stages.layout.pp or self.gathers.shape[1] < stages.num_parts:
            self.gathers = np.zeros((stages.layout.pp, stages.num_parts, 2))

    @cfunc
    def _load(self, cut: longlong) -> void:
        """Find the slowest message of a cut."""
        layout = self.stages.layout
        options = self.stages.options
        self.before = cut
        self.after = (cut + 1) % layout.pp
        self.tp = options.tp[layout.option[self.before]]
        self.next_tp = options.tp[layout.option[self.after]]
        self.pieces = self.tp * self.next_tp // _divisor(self.tp, self.next_tp)
        most = self.pieces * (
            options.dp[layout.option[self.before]] + options.dp[layout.option[self.after]]
        )
        if self.sent.shape[0] < most:
            self.sent = np.zeros((2 * most, 7), np.int64)
        self._clear()
        self._send()
        self._find_slowest(cut)

    @cfunc
    def _clear(self) -> void:
        first = self.stages.first_rank
        for i in range(first[self.before + 1] - first[self.before]):
            self.loads[0, i, 0] = self.loads[0, i, 1] = 0.0
        for i in range(first[self.after + 1] - first[self.after]):
            self.loads[1, i, 0] = self.loads[1, i, 1] = 0.0
        for i in range(2 * self.devices.host.shape[0]):
            self.loads[2, i, 0] = self.loads[2, i, 1] = 0.0
            self.loads[3, i, 0] = self.loads[3, i, 1] = 0.0

    @cfunc
    def _send(self) -> void:
        """Write the messages of a cut, and what they add up to."""
        stages = self.stages
        j = stages.first_group[self.after]
        self.num_sent = 0
        for i in range(stages.first_group[self.before], stages.first_group[self.before + 1]):
            started = stages.end[i] - stages.layout.samples[i]
            while stages.end[j] <= started:
                j += 1
            k = j
            while k < stages.first_group[self.after + 1]:
                begins = stages.end[k] - stages.layout.samples[k]
                if begins >= stages.end[i]:
                    break
                self._send_pieces(i, k, min(stages.end[i], stages.end[k]) - max(started, begins))
                k += 1

    @cfunc
    def _send_pieces(self, group: longlong, next_group: longlong, samples: longlong) -> void:
        """Write the messages from a group to another, of so many samples."""
        devices = self.devices
        stages = self.stages
        num_hosts = devices.host.shape[0]
        a_first = (group - stages.first_group[self.before]) * self.tp
        b_first = (next_group - stages.first_group[self.after]) * self.next_tp
        for piece in range(self.pieces):
            a = a_first + piece * self.tp // self.pieces
            b = b_first + piece * self.next_tp // self.pieces
            source = devices.node[stages.layout.devices[stages.first_rank[self.before] + a]]
            target = devices.node[stages.layout.devices[stages.first_rank[self.after] + b]]
            out = devices.host[source]
            into = devices.host[target]
            if out == into:
                out = num_hosts + source
                into = num_hosts + target
            message = self.sent[self.num_sent]
            message[0] = a
            message[1] = b
            message[2] = source
            message[3] = target
            message[4] = stages.part[group]
            message[5] = out
            message[6] = into
            self.num_sent += 1
            self._add_load(0, a, samples)
            self._add_load(1, b, samples)
            if source != target:
                self._add_load(2, out, samples)
                self._add_load(3, into, samples)

    @cfunc
    def _add_load(self, kind: longlong, place: longlong, samples: longlong) -> void:
        self.loads[kind, place, 0] += samples
        self.loads[kind, place, 1] += 1.0

    @cfunc
    def _find_slowest(self, cut: longlong) -> void:
        """Write the figures of the slowest message of each part."""
        devices = self.devices
        for part in range(self.stages.num_parts):
            for way in range(4):
                self.slowest[cut, part, way] = 0.0
        for number in range(self.num_sent):
            a, b, part = self.sent[number, 0], self.sent[number, 1], self.sent[number, 4]
            crosses = self.sent[number, 2] != self.sent[number, 3]
            one = devices.kind[self.sent[number, 2]]
            other = devices.kind[self.sent[number, 3]]
            self._keep(cut, part, 0, max(self.loads[0, a, 1], self.loads[1, b, 1]))
            if crosses:
                self._keep(cut, part, 1, devices.between_step_s[one, other])
            else:
                self._keep(cut, part, 1, devices.within_step_s[one])
            for way in range(2):
                of_rank = max(self.loads[0, a, way], self.loads[1, b, way])
                seconds = of_rank / min(
                    devices.within_bytes_per_s[one], devices.within_bytes_per_s[other]
                )
                if crosses:
                    shared = max(
                        self.loads[2, self.sent[number, 5], way],
                        self.loads[3, self.sent[number, 6], way],
                    )
                    shared = max(
                        shared, of_rank * max(devices.num_hosts[one], devices.num_hosts[other])
                    )
                    seconds = max(seconds, shared / devices.between_bytes_per_s[one, other])
                self._keep(cut, part, 2 + way, seconds)

    @cfunc
    def _keep(
        self,
        cut: longlong,
        part: longlong,
        figure: longlong,
        value: double,
    ) -> void:
        self.slowest[cut, part, figure] = max(self.slowest[cut, part, figure], value)

    @cfunc
    def _gather(self, paths_of_groups: longlong[::1]) -> void:
        """Find the time to gather slices in the slowest group of each stage and part."""
        stages = self.stages
        rings = self.paths.rings
        for stage in range(stages.layout.pp):
            for part in range(stages.num_parts):
                self.gathers[stage, part, 0] = self.gathers[stage, part, 1] = 0.0
            tp = stages.options.tp[stages.layout.option[stage]]
            for group in range(stages.first_group[stage], stages.first_group[stage + 1]):
                part, path = stages.part[group], paths_of_groups[group]
                self.gathers[stage, part, 0] = max(
                    self.gathers[stage, part, 0], (tp - 1) * rings.step_s[path]
                )
                self.gathers[stage, part, 1] = max(
                    self.gathers[stage, part, 1],
                    stages.layout.samples[group]
                    * (tp - 1)
                    / tp
                    / self.paths.rings.bytes_per_s[path],
                )

    @cfunc
    def _price(self, cut: longlong, slices: bint) -> void:
        """Write the coefficients of a cut's messages."""
        layout = self.stages.layout
        options = self.stages.options
        layers = self.layers
        after = (cut + 1) % layout.pp
        tp = options.tp[layout.option[cut]]
        next_tp = options.tp[layout.option[after]]
        divided = max(options.divides[layout.option[cut]], options.divides[layout.option[after]])
        units = tp * next_tp // _divisor(tp, next_tp)
        self.rows[0, cut] = layers.message_row[next_tp, divided]
        self.rows[1, cut] = layers.message_row[tp, divided]
        for part in range(self.stages.num_parts):
            for kind in range(2):
                self.coefficients[kind, cut, part, 0] = (
                    self.slowest[cut, part, 0] * self.costs.start_s + self.slowest[cut, part, 1]
                )
                self.coefficients[kind, cut, part, 1] = self.slowest[cut, part, 2] * (
                    (tp if kind else next_tp) / units
                )
                self.coefficients[kind, cut, part, 2] = 0.0
            if slices and not divided:
                self._slice(cut, after, part, tp, next_tp)
            if self.costs.mask_bytes > 0.0:
                self.coefficients[0, cut, part, 0] += self.slowest[cut, part, 3] * (
                    self.costs.mask_bytes * (next_tp / units)
                )

    @cfunc
    def _slice(
        self,
        cut: longlong,
        after: longlong,
        part: longlong,
        tp: longlong,
        next_tp: longlong,
    ) -> void:
        """Replace messages by slices that the receiver gathers.

        Both ends of a cut gather at the same time, so the slower end counts, and the larger number
        of bytes per rank.
        """
        step_s = 0.0
        slope = 0.0
        if tp > 1 or next_tp > 1:
            step_s = self.costs.start_s + max(
                self.gathers[cut, part, 0], self.gathers[after, part, 0]
            )
            slope = max(self.gathers[cut, part, 1], self.gathers[after, part, 1])
        for kind in range(2):
            if not (self.costs.sliced_gradients if kind else self.costs.sliced_activations):
                continue
            self.coefficients[kind, cut, part, 0] += step_s
            self.coefficients[kind, cut, part, 1] /= tp if kind else next_tp
            if tp == next_tp:
                self.coefficients[kind, cut, part, 1] += slope
            else:
                self.coefficients[kind, cut, part, 2] = slope

    @cfunc
    def are_alike(self, one: longlong, other: longlong) -> bint:
        """Return whether two parts have the same messages across all cuts."""
        for kind in range(2):
            for cut in range(self.num_cuts):
                for i in range(3):
                    if (
                        self.coefficients[kind, cut, one, i]
                        != self.coefficients[kind, cut, other, i]
                    ):
                        return False
        return True

    @cfunc
    def seconds(
        self,
        kind: longlong,
        cut: longlong,
        part: longlong,
        bound: longlong,
    ) -> double:
        """Return the seconds of an activation (0) or gradient (1) across a cut at a boundary."""
        held = self.layers.message_bytes[self.rows[kind, cut], bound]
        more = self.layers.message_bytes[self.rows[1 - kind, cut], bound]
        return (
            self.coefficients[kind, cut, part, 0]
            + self.coefficients[kind, cut, part, 1] * held
            + self.coefficients[kind, cut, part, 2] * max(held, more)
        )


@cfunc
def _divisor(one: longlong, other: longlong) -> longlong:
    """Return the greatest common divisor."""
    while other:
        one, other = other, one % other
    return one


# -------------------------------------------------------------------------------------- times


@cclass
class Times:
    """Times of the layers in the groups of all stages."""

    tables: Any  # `tables.Tables`
    stages: Stages
    devices: Devices
    costs: Costs
    layers: Layers
    paths: Paths  # at the size of messages
    plain_paths: Paths  # at any size
    messages: Messages
    index: Index  # of rows
    types: Index  # of sets of device types
    num_types: longlong
    path: longlong[::1]  # of each group's tensor-parallel ring
    plain_path: longlong[::1]  # the same at any size of message
    first_member: longlong[::1]
    # By group: paths of its experts' all-to-alls, of keys and values, and of all-to-alls of heads,
    # each by their number in the tables
    special: longlong[:, ::1]
    links: longlong  # number of the links at the size of messages
    hosted: longlong  # whether the host starts collectives as between nodes
    # By class, way and chunk: forward, with the host's time, backward, all-reduces within both, and
    # forward without the host
    passes_s: double[:, :, ::1]
    sends_s: double[:, :, ::1]  # class, message, cut
    splits: longlong[::1]  # by chunk: boundary up to which its blocks recompute

    def __init__(
        self,
        tables: Any,
        num_devices: longlong,
        num_types: longlong,
        stages: Stages,
    ) -> None:
        self.tables, self.stages, self.num_types = tables, stages, num_types
        self.index, self.types = Index(9), Index(1 + num_types // 62)
        self.path = np.zeros(num_devices, np.int64)
        self.plain_path = np.zeros(num_devices, np.int64)
        self.first_member = np.zeros(num_devices + 1, np.int64)
        self.special = np.zeros((3, num_devices), np.int64)
        self.passes_s = np.zeros((1, 4, num_devices))
        self.sends_s = np.zeros((1, 2, num_devices))
        self.splits = np.zeros(num_devices, np.int64)

    @cfunc
    def find_rings(self) -> void:
        """Find the paths of all tensor-parallel rings."""
        stages = self.stages
        layout = stages.layout
        num_groups = stages.first_group[layout.pp]
        num_ranks = stages.first_rank[layout.pp]
        if num_ranks == num_groups:
            for group in range(num_groups):
                self.path[group] = self.plain_path[group] = 0
            return
        for stage in range(layout.pp):
            tp = stages.options.tp[layout.option[stage]]
            for group in range(stages.first_group[stage], stages.first_group[stage + 1]):
                self.first_member[group] = (
                    stages.first_rank[stage] + (group - stages.first_group[stage]) * tp
                )
        self.first_member[num_groups] = num_ranks
        self.paths.rings.at_once(layout.devices, self.first_member, num_groups, self.path)
        if self.paths is not self.plain_paths:
            self.plain_paths.rings.at_once(
                layout.devices, self.first_member, num_groups, self.plain_path
            )
            return
        for group in range(num_groups):
            self.plain_path[group] = self.path[group]

    @cfunc
    def find_rows(self) -> void:
        """Find the row of layer times of each group, and fill those that are missing."""
        stages = self.stages
        layout = stages.layout
        key = self.index.key
        row = -1
        key[8] = self.links
        for stage in range(layout.pp):
            option = layout.option[stage]
            for group in range(stages.first_group[stage], stages.first_group[stage + 1]):
                kind = self._type(stage, group, stages.options.tp[option])
                changes = (
                    group == 0
                    or key[0] != stages.options.of_times[option]
                    or key[1] != kind
                    or key[2] != self.path[group]
                    or key[3] != self.hosted
                    or key[4] != self.special[0, group]
                    or key[5] != self.special[1, group]
                    or key[6] != self.special[2, group]
                    or key[7] != layout.samples[group]
                )
                if changes:
                    key[0] = stages.options.of_times[option]
                    key[1] = kind
                    key[2] = self.path[group]
                    key[3] = self.hosted
                    key[4] = self.special[0, group]
                    key[5] = self.special[1, group]
                    key[6] = self.special[2, group]
                    key[7] = layout.samples[group]
                    row = self.index.find()
                    if row < 0:
                        self.tables.add_times(key)
                        row = self.index.add()
                stages.row[group] = row

    @cfunc
    def _type(self, stage: longlong, group: longlong, tp: longlong) -> longlong:
        """Return the device type of a group, or the number of its set of types."""
        stages = self.stages
        first = stages.first_rank[stage] + (group - stages.first_group[stage]) * tp
        kind = self.devices.type[stages.layout.devices[first]]
        for rank in range(first + 1, first + tp):
            if self.devices.type[stages.layout.devices[rank]] != kind:
                return self._mixed_type(first, tp)
        return kind

    @cfunc
    def _mixed_type(self, first: longlong, tp: longlong) -> longlong:
        """Return the number of a set of device types."""
        key = self.types.key
        for rank in range(key.shape[0]):
            key[rank] = 0
        for rank in range(first, first + tp):
            kind = self.devices.type[self.stages.layout.devices[rank]]
            key[kind // 62] |= cython.cast(longlong, 1) << (kind % 62)
        number = self.types.find()
        if number < 0:
            self.tables.add_types(key)
            number = self.types.add()
        return self.num_types + number

    # ------------------------------------------------------------------------ with the cuts

    @cfunc
    def at(self) -> void:
        """Write the seconds of the passes and messages of each class of parts."""
        stages = self.stages
        layout = stages.layout
        self._make_room()
        for stage in range(layout.pp):
            self._split(stage)
        for number in range(stages.num_classes):
            self._pass(number, stages.part_of[number])
            self._send(number, stages.part_of[number])

    @cfunc
    def _make_room(self) -> void:
        classes, chunks = self.stages.num_classes, self.stages.num_chunks
        if self.passes_s.shape[0] < classes or self.passes_s.shape[2] < chunks:
            self.passes_s = np.zeros((classes, 4, chunks))
            self.sends_s = np.zeros((classes, 2, chunks))
        if self.splits.shape[0] < chunks:
            self.splits = np.zeros(chunks, np.int64)

    @cfunc
    def _split(self, stage: longlong) -> void:
        """Find the boundary up to which the blocks of each chunk of a stage recompute."""
        layout = self.stages.layout
        counts = self.layers.block_counts
        num_left = self.stages.options.blocks[layout.option[stage]]
        for chunk in range(stage, self.stages.num_chunks, layout.pp):
            first, end = layout.bounds[chunk], layout.bounds[chunk + 1]
            self.splits[chunk] = end
            if num_left < 0:
                continue
            last = counts[first] + num_left
            if counts[end] > last:
                self.splits[chunk] = max(self.layers.first_with[last], first)
            num_left = max(0, num_left - (counts[end] - counts[first]))

    @cfunc
    def _pass(self, number: longlong, part: longlong) -> void:
        """Write the passes of a class: of all groups of a stage and part the slowest counts."""
        stages = self.stages
        layout = stages.layout
        times_s, plain_s = self.layers.times_s, self.layers.plain_s
        host_s = self.costs.micro_batch_s / layout.virtual_stages
        for chunk in range(stages.num_chunks):
            cell = chunk % layout.pp * stages.num_parts + part
            first, end, split = layout.bounds[chunk], layout.bounds[chunk + 1], self.splits[chunk]
            for way in range(3):
                self.passes_s[number, way, chunk] = 0.0
            for i in range(stages.cell_first[cell], stages.cell_first[cell + 1]):
                row = stages.cell_rows[i]
                plain = self.layers.plain[row]
                for way in range(3):
                    took_s = times_s[row, way, split] - times_s[row, way, first]
                    if split < end:
                        took_s += plain_s[plain, way, end] - plain_s[plain, way, split]
                    self.passes_s[number, way, chunk] = max(
                        self.passes_s[number, way, chunk], took_s
                    )
            self.passes_s[number, 3, chunk] = self.passes_s[number, 0, chunk]
            self.passes_s[number, 0, chunk] += host_s

    @cfunc
    def _send(self, number: longlong, part: longlong) -> void:
        """Write the messages of a class."""
        layout = self.stages.layout
        for cut in range(self.stages.num_chunks - 1):
            for kind in range(2):
                self.sends_s[number, kind, cut] = self.messages.seconds(
                    kind, cut % self.messages.num_cuts, part, layout.bounds[cut + 1]
                )

    @cfunc
    def beside_s(self, stage: longlong, way: longlong) -> double:
        """Return the passes that run while a stage exchanges gradients or weights.

        These are the first forward pass of the stage and those of earlier stages before it, or the
        last backward pass of the stage and those of earlier stages after it, without the host.
        """
        layout = self.stages.layout
        of_stage_s = 0.0
        for chunk in range(stage, self.stages.num_chunks, layout.pp):
            of_stage_s += self._longest_s(chunk, way)
        before_s = 0.0
        for chunk in range(stage):
            before_s += self._longest_s(chunk, way)
        return of_stage_s + before_s

    @cfunc
    def _longest_s(self, chunk: longlong, way: longlong) -> double:
        """Return the longest pass of a chunk over all parts, without the host."""
        longest_s = 0.0
        for number in range(self.stages.num_classes):
            longest_s = max(longest_s, self.passes_s[number, 3 if way == 0 else 1, chunk])
        return longest_s

    @cfunc
    def layer_s(self, layer: longlong, way: longlong) -> double:
        """Return the seconds of a layer in the only stage, in its slowest group."""
        stages = self.stages
        longest_s = 0.0
        for number in range(stages.num_classes):
            part = stages.part_of[number]
            for i in range(stages.cell_first[part], stages.cell_first[part + 1]):
                longest_s = max(longest_s, self._layer_of_s(stages.cell_rows[i], layer, way))
        return longest_s

    @cfunc
    def _layer_of_s(self, row: longlong, layer: longlong, way: longlong) -> double:
        times_s = self.layers.times_s
        if layer >= self.splits[0]:
            times_s, row = self.layers.plain_s, self.layers.plain[row]
        return times_s[row, way, layer + 1] - times_s[row, way, layer]


# ----------------------------------------------------------------------------------- step end


@cclass
class Sharing:
    """Exchanges of gradients and weights between the data-parallel ranks of every stage.

    Each is linear in a rank's parameters on each path: seconds, and seconds per parameter.
    """

    num_lines: longlong
    first: longlong[::1]  # where the lines of a stage begin
    number: longlong[::1]  # paths of each line, to find the same again
    # Shape ``(num_lines, 12)``, figures of `Paths.in_buckets`: of reductions within shard groups,
    # between them, and of gathers
    lines: double[:, ::1]
    dp: longlong[::1]  # by stage
    shards: longlong[::1]
    costs: Costs

    def __init__(self, num_devices: longlong, costs: Costs) -> None:
        self.costs = costs
        self.first = np.zeros(num_devices + 1, np.int64)
        self.number = np.zeros(num_devices + 1, np.int64)
        self.lines = np.zeros((num_devices + 1, 12))
        self.dp = np.zeros(num_devices, np.int64)
        self.shards = np.zeros(num_devices, np.int64)

    @cfunc
    def _most_s(self, stage: longlong, num_bytes: double, first: longlong) -> double:
        """Return the seconds of a collective of a stage on its slowest path."""
        most_s = 0.0
        for n in range(self.first[stage], self.first[stage + 1]):
            fixed_s = (
                self.lines[n, first]
                + num_bytes / self.lines[n, first + 1] * self.lines[n, first + 2]
            )
            more_s = num_bytes / self.costs.most_curved_bytes * self.lines[n, first + 3]
            most_s = max(most_s, fixed_s + more_s)
        return most_s

    @cfunc
    def reduce_s(self, stage: longlong, parameters: double) -> double:
        """Return the seconds to reduce gradients: in each shard group, then between the groups."""
        num_bytes = parameters * self.costs.gradient_bytes
        within_s = self._most_s(stage, num_bytes, 0)
        return within_s + self._most_s(stage, num_bytes / self.shards[stage], 4)

    @cfunc
    def gather_s(self, stage: longlong, parameters: double) -> double:
        """Return the seconds to gather weights within each shard group."""
        return self._most_s(stage, parameters * self.costs.gathered_bytes, 8)


@cclass
class StepEnd:
    """The end of an iteration: gradient sync, tied weights, optimizer.

    All gradient rings of all stages run at once; before that, the two stages with a tied weight sum
    its gradients.
    """

    stages: Stages
    devices: Devices
    costs: Costs
    layers: Layers
    paths: Paths
    shared: Sharing
    experts: Sharing
    spreads: bint
    type: longlong[::1]  # of each stage: the device type whose memory is slowest
    held: double[::1]  # parameters of a rank of each stage
    sync_s: double[::1]
    step_s: double[::1]
    slowest: longlong
    forward_s: double  # passes that hide the gathers of the stage that is priced
    backward_s: double  # and its reductions
    largest: double  # share of its largest layer, whose gradients are reduced after all passes
    tied_first: longlong  # layers that share a weight; -1 without one
    tied_last: longlong
    tied_parameters: double  # of all tp ranks together
    gathers_s: double[::1]  # of each layer
    scatters_s: double[::1]
    last_held: double
    last_experts: double
    tied_stages: longlong[::1]  # those that `tied_seconds` is for; -1 without
    tied_seconds: double
    members: longlong[::1]
    first_member: longlong[::1]
    num_rings: longlong
    num_members: longlong
    numbers: longlong[::1]
    within: longlong[::1]  # paths of the rings within shard groups
    across: longlong[::1]  # and between them

    def __init__(self, num_devices: longlong, stages: Stages, costs: Costs, tied: Any) -> None:
        self.stages = stages
        self.shared, self.experts = Sharing(num_devices, costs), Sharing(num_devices, costs)
        self.type = np.zeros(num_devices, np.int64)
        self.held = np.zeros(num_devices)
        self.sync_s = np.zeros(num_devices)
        self.step_s = np.zeros(num_devices)
        self.tied_first, self.tied_last, self.tied_parameters = tied
        self.tied_stages = np.full(2, -1, np.int64)
        self.gathers_s, self.scatters_s = np.zeros(1), np.zeros(1)
        self.members = np.zeros(2 * num_devices, np.int64)
        self.first_member = np.zeros(num_devices + 1, np.int64)
        self.numbers = np.zeros(num_devices, np.int64)
        self.within = np.zeros(num_devices, np.int64)
        self.across = np.zeros(num_devices, np.int64)

    @cfunc
    def place(self) -> void:
        """Price the exchanges of a layout, by parameter."""
        layout = self.stages.layout
        self.spreads = False
        for stage in range(layout.pp):
            self.spreads = self.spreads or self.stages.options.spreads[layout.option[stage]] != 0
            self.type[stage] = self._slowest_type(stage)
        self._share(self.shared, False)
        if self.spreads:
            self._share(self.experts, True)
        self.tied_stages[0] = -1

    @cfunc
    def _slowest_type(self, stage: longlong) -> longlong:
        devices = self.devices
        slowest = -1
        for rank in range(self.stages.first_rank[stage], self.stages.first_rank[stage + 1]):
            kind = devices.type[self.stages.layout.devices[rank]]
            if slowest < 0 or devices.slowness[kind] < devices.slowness[slowest]:
                slowest = kind
        return slowest

    @cfunc
    def _share(self, sharing: Sharing, of_experts: bint) -> void:
        """Find the paths of all data-parallel rings, within shard groups and between them."""
        layout = self.stages.layout
        options = self.stages.options
        for stage in range(layout.pp):
            option = layout.option[stage]
            sharing.dp[stage] = options.expert_dp[option] if of_experts else options.dp[option]
            sharing.shards[stage] = (
                options.expert_shards[option] if of_experts else options.shards[option]
            )
        self._find_rings(sharing, True, self.within)
        self._find_rings(sharing, False, self.across)
        self._fill_lines(sharing)

    @cfunc
    def _find_rings(self, sharing: Sharing, within: bint, numbers: longlong[::1]) -> void:
        """Write the path of each ring of all stages, within shard groups or between them."""
        layout = self.stages.layout
        self.num_rings = self.num_members = 0
        for stage in range(layout.pp):
            width = (self.stages.first_rank[stage + 1] - self.stages.first_rank[stage]) // (
                sharing.dp[stage]
            )
            self._add_rings(stage, width, sharing, within)
        self.first_member[self.num_rings] = self.num_members
        if self.num_members > self.num_rings:
            self.paths.rings.at_once(self.members, self.first_member, self.num_rings, numbers)
            return
        for ring in range(self.num_rings):
            numbers[ring] = 0

    @cfunc
    def _add_rings(self, stage: longlong, width: longlong, sharing: Sharing, within: bint) -> void:
        """Write the rings of a stage; ``width`` ranks have different parameters."""
        shards = sharing.shards[stage]
        copies = sharing.dp[stage] // shards
        outer = copies if within else shards
        inner = shards if within else copies
        far = shards if within else 1
        near = 1 if within else shards
        first = self.stages.first_rank[stage]
        for t in range(width):
            for i in range(outer):
                self.first_member[self.num_rings] = self.num_members
                self.num_rings += 1
                for j in range(inner):
                    rank = first + (i * far + j * near) * width + t
                    self.members[self.num_members] = self.stages.layout.devices[rank]
                    self.num_members += 1

    @cfunc
    def _fill_lines(self, sharing: Sharing) -> void:
        layout = self.stages.layout
        first = 0
        second = 0
        sharing.num_lines = 0
        for stage in range(layout.pp):
            sharing.first[stage] = sharing.num_lines
            width = (self.stages.first_rank[stage + 1] - self.stages.first_rank[stage]) // (
                sharing.dp[stage]
            )
            for ring in range(width * (sharing.dp[stage] // sharing.shards[stage])):
                self._add_line(sharing, stage, self.within[first + ring], True)
            first += width * (sharing.dp[stage] // sharing.shards[stage])
            for ring in range(width * sharing.shards[stage]):
                self._add_line(sharing, stage, self.across[second + ring], False)
            second += width * sharing.shards[stage]
        sharing.first[layout.pp] = sharing.num_lines

    @cfunc
    def _add_line(
        self,
        sharing: Sharing,
        stage: longlong,
        path: longlong,
        within: bint,
    ) -> void:
        """Add the exchanges over a path to those of a stage, unless they are there."""
        key = 2 * path + within
        for n in range(sharing.first[stage], sharing.num_lines):
            if sharing.number[n] == key:
                return
        n = sharing.num_lines
        if n == sharing.number.shape[0]:
            sharing.number = np.concatenate([sharing.number, np.zeros(n, np.int64)])
            sharing.lines = np.concatenate([sharing.lines, np.zeros((n, 12))])
        sharing.number[n] = key
        sharing.num_lines += 1
        self._price_line(sharing, stage, path, within)

    @cfunc
    def _price_line(
        self,
        sharing: Sharing,
        stage: longlong,
        path: longlong,
        within: bint,
    ) -> void:
        costs = self.costs
        zero = self.stages.options.zero[self.stages.layout.option[stage]]
        shards = sharing.shards[stage]
        copies = sharing.dp[stage] // sharing.shards[stage]
        line = sharing.lines[sharing.num_lines - 1]
        bucket = max(costs.bucket_elements, 1.0) * costs.gradient_bytes
        if zero == 1 and costs.reduces_at_once:
            bucket = float("inf")
        for i in range(12):
            line[i] = 0.0
        line[1] = line[5] = line[9] = bucket
        if within:
            scatters = zero != 1 or copies > 1.0 or costs.scatters_gradients
            self.paths.in_buckets(not scatters, path, shards, bucket, line, 0)
            self.paths.in_buckets(False, path, shards, float("inf"), line, 8)
        else:
            self.paths.in_buckets(True, path, copies, bucket / shards, line, 4)

    # ------------------------------------------------------------------------ with the cuts

    @cfunc
    def at(self, times: Times) -> double:
        """Return the seconds of the slowest stage."""
        layout = self.stages.layout
        self._hold()
        for stage in range(layout.pp):
            self._sync(stage, times)
        if self._zero(0) >= _SHARDED_GRADIENTS and layout.pp == 1:
            self.sync_s[0] += self._exposed_s(times)
        self._add_tied()
        for stage in range(layout.pp):
            self._add_replicated(stage, times)
            self._add_slices(stage)
        self.slowest = 0
        for stage in range(1, layout.pp):
            if self._sum_s(stage) > self._sum_s(self.slowest):
                self.slowest = stage
        return self._sum_s(self.slowest)

    @cfunc
    def _sum_s(self, stage: longlong) -> double:
        return self.sync_s[stage] + self.step_s[stage]

    @cfunc
    def _zero(self, stage: longlong) -> longlong:
        return self.stages.options.zero[self.stages.layout.option[stage]]

    @cfunc
    def _first_gathered(self) -> longlong:
        """Return the first ZeRO stage that gathers weights for every pass of a single stage."""
        return _SHARDED_GRADIENTS if self.costs.gathers_every_pass else _SHARDED_WEIGHTS

    @cfunc
    def _of_stage(self, prefix: double[:, ::1], row: longlong, stage: longlong) -> double:
        """Return the sum of a row of prefix sums over the layers of a stage."""
        layout = self.stages.layout
        total = 0.0
        for chunk in range(stage, self.stages.num_chunks, layout.pp):
            total += prefix[row, layout.bounds[chunk + 1]] - prefix[row, layout.bounds[chunk]]
        return total

    @cfunc
    def _stage_of_layer(self, layer: longlong) -> longlong:
        """Return the stage of a layer; of several empty chunks before it the last counts."""
        layout = self.stages.layout
        chunk = 0
        while chunk + 1 < self.stages.num_chunks and layout.bounds[chunk + 1] <= layer:
            chunk += 1
        return chunk % layout.pp

    @cfunc
    def _hold(self) -> void:
        """Find the parameters of a rank of each stage; a tied weight counts once in a stage."""
        layout = self.stages.layout
        options = self.stages.options
        for stage in range(layout.pp):
            option = layout.option[stage]
            self.held[stage] = self._of_stage(self.layers.weights, options.weights[option], stage)
        if self.tied_first >= 0:
            stage = self._stage_of_layer(self.tied_first)
            if stage == self._stage_of_layer(self.tied_last):
                self.held[stage] -= self.tied_parameters / options.tp[layout.option[stage]]

    @cfunc
    def _sync(self, stage: longlong, times: Times) -> void:
        """Price the exchanges of a stage, and its optimizer step."""
        layout = self.stages.layout
        options = self.stages.options
        option = layout.option[stage]
        held = self.held[stage]
        self.forward_s = self.backward_s = 0.0
        self.largest = 1.0
        if self.costs.overlaps_sync or self.costs.overlaps_gather:
            self.forward_s = times.beside_s(stage, 0)
            self.backward_s = times.beside_s(stage, 1)
            if options.zero[option] == _SHARDED_WEIGHTS:
                self.largest = self._largest_share(stage)
        self.sync_s[stage] = self.step_s[stage] = 0.0
        if not options.spreads[option]:
            self._exchange(stage, self.shared, held)
            return
        experts = self._of_stage(self.layers.experts, options.expert_weights[option], stage)
        held -= experts * options.expert_ranks[option] / options.tp[option]
        self._exchange(stage, self.shared, held)
        self.forward_s = max(0.0, self.forward_s - self.shared.gather_s(stage, held))
        self.backward_s = max(0.0, self.backward_s - self.shared.reduce_s(stage, held))
        self._exchange(stage, self.experts, experts)

    @cfunc
    def _largest_share(self, stage: longlong) -> double:
        """Return the share of a stage's parameters in its largest layer."""
        layout = self.stages.layout
        row = self.stages.options.weights[layout.option[stage]]
        most = 0.0
        total = 0.0
        for chunk in range(stage, self.stages.num_chunks, layout.pp):
            for layer in range(layout.bounds[chunk], layout.bounds[chunk + 1]):
                of_layer = self.layers.weights[row, layer + 1] - self.layers.weights[row, layer]
                most = max(most, of_layer)
                total += of_layer
        return most / max(total, 1.0)

    @cfunc
    def _exchange(
        self,
        stage: longlong,
        sharing: Sharing,
        parameters: double,
    ) -> void:
        """Add the exchanges and the update of parameters that the same ranks hold."""
        costs = self.costs
        device = self.type[stage]
        zero = self._zero(stage)
        alone = self.stages.layout.pp == 1
        rate = self.devices.stream_bytes_per_s[device]
        reduce_s = 0.0
        gather_s = 0.0
        last = min(1.0, max(costs.bucket_elements, 1.0) / max(parameters, 1.0))
        if not (zero >= _SHARDED_GRADIENTS and alone):
            reduce_s = sharing.reduce_s(stage, parameters)
        if not (zero >= self._first_gathered() and alone):
            gather_s = sharing.gather_s(stage, parameters)
        if zero == _SHARDED_WEIGHTS:
            last = self.largest
        last = max(last, self.devices.taken[device])
        if costs.overlaps_sync and not (zero == 1 and costs.reduces_at_once):
            reduce_s = max(reduce_s - self.backward_s, last * reduce_s)
        if costs.overlaps_gather:
            gather_s = max(gather_s - self.forward_s, last * gather_s)
        buckets_s = 0.0
        if sharing.dp[stage] > 1 or costs.buckets_alone:
            buckets_s = parameters * costs.bucket_traffic_bytes / rate
        self.sync_s[stage] += reduce_s + gather_s + buckets_s
        self.step_s[stage] += parameters / sharing.shards[stage] * costs.step_traffic_bytes / rate

    @cfunc
    def _add_tied(self) -> void:
        """Add the all-reduce of a tied weight to its two stages, if they differ.

        If one stage has more ranks than the other, several of its ranks share a partner.
        """
        if self.tied_first < 0:
            return
        first = self._stage_of_layer(self.tied_first)
        last = self._stage_of_layer(self.tied_last)
        if first == last:
            return
        if self.tied_stages[0] != first or self.tied_stages[1] != last:
            self.tied_seconds = self._tied_s(first, last)
            self.tied_stages[0], self.tied_stages[1] = first, last
        self.sync_s[first] += self.tied_seconds
        self.sync_s[last] += self.tied_seconds

    @cfunc
    def _tied_s(self, first: longlong, last: longlong) -> double:
        stages = self.stages
        layout = stages.layout
        tp = stages.options.tp[layout.option[first]]
        last_tp = stages.options.tp[layout.option[last]]
        dp = stages.options.dp[layout.option[first]]
        last_dp = stages.options.dp[layout.option[last]]
        slices = tp * last_tp // _divisor(tp, last_tp)
        replicas = max(dp, last_dp)
        pair = 0
        most_s = 0.0
        if self.members.shape[0] < 2 * replicas * slices:
            self.members = np.zeros(2 * replicas * slices, np.int64)
        if self.first_member.shape[0] < replicas * slices + 1:
            self.first_member = np.zeros(replicas * slices + 1, np.int64)
            self.numbers = np.zeros(replicas * slices, np.int64)
        for i in range(replicas):
            for j in range(slices):
                self.first_member[pair] = 2 * pair
                self.members[2 * pair] = layout.devices[
                    stages.first_rank[first] + i * dp // replicas * tp + j * tp // slices
                ]
                self.members[2 * pair + 1] = layout.devices[
                    stages.first_rank[last]
                    + i * last_dp // replicas * last_tp
                    + j * last_tp // slices
                ]
                pair += 1
        self.first_member[pair] = 2 * pair
        self.paths.rings.at_once(self.members, self.first_member, pair, self.numbers)
        for i in range(pair):
            if i == 0 or self.numbers[i] != self.numbers[i - 1]:
                most_s = max(
                    most_s,
                    self.paths.all_reduce_s(
                        self.numbers[i],
                        2.0,
                        self.tied_parameters / slices * self.costs.tied_bytes,
                    ),
                )
        return most_s

    @cfunc
    def _add_replicated(self, stage: longlong, times: Times) -> void:
        """Add the tensor-parallel all-reduce of gradients that are partial sums over tokens.

        With sequence parallelism these are the gradients of norms, which every rank replicates.
        """
        layout = self.stages.layout
        option = layout.option[stage]
        most_s = 0.0
        if not self.stages.options.divides[option]:
            return
        held = self._of_stage(self.layers.replicated, 0, stage)
        for group in range(self.stages.first_group[stage], self.stages.first_group[stage + 1]):
            if (
                group == self.stages.first_group[stage]
                or times.plain_path[group] != times.plain_path[group - 1]
            ):
                most_s = max(
                    most_s,
                    self.paths.all_reduce_s(
                        times.plain_path[group],
                        self.stages.options.tp[option],
                        held * self.costs.gradient_bytes,
                    ),
                )
        self.sync_s[stage] += most_s

    @cfunc
    def _add_slices(self, stage: longlong) -> void:
        """Add the host's time to copy gathered weights, each in as many slices as a shard group."""
        shards = self.shared.shards[stage]
        if self.costs.gather_slice_s == 0.0 or self._zero(stage) != 1 or shards == 1:
            return
        held = self._of_stage(self.layers.tensors, 0, stage)
        self.sync_s[stage] += held * shards * self.costs.gather_slice_s

    # ------------------------------------------------------- gathers within every micro-batch

    @cfunc
    def _exposed_s(self, times: Times) -> double:
        """Return the time that all micro-batches wait for gathers and reduce-scatters.

        Where gradients are deferred, only the last micro-batch reduces them.
        """
        more = self.stages.layout.num_micro_batches - 1
        last_s = self._exposed_once_s(times, 1.0)
        if self.costs.defers_sync:
            return last_s + more * self._exposed_once_s(times, 0.0)
        return last_s + more * last_s

    @cfunc
    def _exposed_once_s(self, times: Times, reduces: double) -> double:
        """Return the time that a micro-batch waits for gathers and reduce-scatters of all layers.

        While a layer runs forward, the weights of the next one are gathered. While it runs
        backward, those of the previous one are gathered and the gradients of the next one reduced,
        over the same links. A layer waits for its gather, and computes at a lower rate during
        collectives. No computation hides the first gather and the last reduce-scatter. A tied
        weight is gathered with the first layer, and reduced with it at the end. The last layer's
        weights are kept, as its backward pass follows its forward pass. ``reduces`` is 1, or 0
        if gradients are only added up.

        References:
            Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.3: prefetching in both passes.
        """
        num_layers = self.layers.trained.shape[0] - 1
        again = self._zero(0) == _SHARDED_WEIGHTS
        if self.stages.options.keeps[self.stages.layout.option[0]]:
            again = False
        taken = self.devices.taken[self.type[0]]
        self._fill_collectives(num_layers)
        first_s, later_s = self.gathers_s[0], reduces * self.scatters_s[0]
        for layer in range(num_layers):
            beside_s = 0.0
            if layer > 0 and again:
                beside_s += self.gathers_s[layer - 1]
            if layer + 1 < num_layers:
                first_s += _left(self.gathers_s[layer + 1], times.layer_s(layer, 0), taken)
                beside_s += reduces * self.scatters_s[layer + 1]
            later_s += _left(beside_s, times.layer_s(layer, 1), taken)
        return first_s + later_s

    @cfunc
    def _fill_collectives(self, num_layers: longlong) -> void:
        """Write the time to gather each layer and to reduce its gradients."""
        if self.gathers_s.shape[0] < num_layers:
            self.gathers_s, self.scatters_s = np.zeros(num_layers), np.zeros(num_layers)
        for layer in range(num_layers):
            held, experts = self._held_by(layer, False), 0.0
            if self.spreads:
                experts = self._held_by(layer, True)
            if layer > 0 and held == self.last_held and experts == self.last_experts:
                self.gathers_s[layer] = self.gathers_s[layer - 1]
                self.scatters_s[layer] = self.scatters_s[layer - 1]
                continue
            self.last_held, self.last_experts = held, experts
            self.gathers_s[layer] = self._layer_gather_s(held, experts)
            self.scatters_s[layer] = self._layer_scatter_s(held, experts)

    @cfunc
    def _held_by(self, layer: longlong, of_experts: bint) -> double:
        """Return a rank's parameters of a layer that experts have, or that others have."""
        option = self.stages.layout.option[0]
        options = self.stages.options
        row = options.weights[option]
        if of_experts:
            row = options.expert_weights[option]
            return self.layers.experts[row, layer + 1] - self.layers.experts[row, layer]
        held = self.layers.weights[row, layer + 1] - self.layers.weights[row, layer]
        if layer == self.tied_last:
            held -= self.tied_parameters / options.tp[option]
        if options.spreads[option]:
            held -= self.layers.experts[row, layer + 1] - self.layers.experts[row, layer]
        return held

    @cfunc
    def _layer_gather_s(self, held: double, experts: double) -> double:
        seconds = 0.0
        if self._zero(0) < self._first_gathered():
            return 0.0
        if held > 0.0:
            seconds = self.shared.gather_s(0, held)
        if experts > 0.0:
            seconds += self.experts.gather_s(0, experts)
        return seconds

    @cfunc
    def _layer_scatter_s(self, held: double, experts: double) -> double:
        seconds = 0.0
        if held > 0.0:
            seconds = self.shared.reduce_s(0, held)
        if experts > 0.0:
            seconds += self.experts.reduce_s(0, experts)
        return seconds


@cfunc
def _left(collective_s: double, compute_s: double, taken: double) -> double:
    """Return the time that collectives add to simultaneous computation.

    Either the computation ends first, or it is slowed down while the collectives run.
    """
    return max(collective_s - compute_s, taken * collective_s)


# ------------------------------------------------------------------------------------- memory


@cclass
class Memory:
    """Peak memory of every stage: of its rank that comes closest to its limit."""

    tables: Any  # `tables.Tables`
    stages: Stages
    times: Times
    devices: Devices
    layers: Layers
    kinds: MemoryKinds
    index: Index
    tied_first: longlong
    tied_last: longlong
    # Ranks with the same samples: where those of a stage begin, their kind of memory, and the
    # device type of the smallest
    first_need: longlong[::1]
    kind: longlong[::1]
    smallest: longlong[::1]
    # Micro-batches in flight of each chunk of a stage, in all its states
    first_state: longlong[::1]
    states: double[:, ::1]
    scheduled: longlong[::1]  # pp, micro-batches and chunks of a stage in ``states``
    peak_bytes: double[::1]  # by stage
    peak_type: longlong[::1]
    most_full: double  # largest share of a device's memory
    fullest: longlong  # its stage
    kept: double[::1]

    def __init__(self, tables: Any, num_devices: longlong, stages: Stages, times: Times) -> None:
        self.tables, self.stages, self.times = tables, stages, times
        self.index = Index(5)
        self.first_need = np.zeros(num_devices + 1, np.int64)
        self.kind = np.zeros(num_devices, np.int64)
        self.smallest = np.zeros(num_devices, np.int64)
        self.scheduled = np.zeros(3, np.int64)
        self.peak_bytes = np.zeros(num_devices)
        self.peak_type = np.zeros(num_devices, np.int64)
        self.tied_first, self.tied_last = tables.tied[0], tables.tied[1]
        self.kept = np.zeros(16)

    @cfunc
    def place(self) -> void:
        """Find the kinds of memory of each stage's ranks, and fill those that are missing."""
        layout = self.stages.layout
        size = 0
        for stage in range(layout.pp):
            self.first_need[stage] = size
            size = self._find_needs(stage, size)
        self.first_need[layout.pp] = size
        if layout.virtual_stages > 1:
            self._find_states()

    @cfunc
    def _find_states(self) -> void:
        layout = self.stages.layout
        if (
            self.scheduled[0] != layout.pp
            or self.scheduled[1] != layout.num_micro_batches
            or self.scheduled[2] != layout.virtual_stages
        ):
            self.first_state, self.states = self.tables.states(
                layout.pp, layout.num_micro_batches, layout.virtual_stages
            )
            self.scheduled[0] = layout.pp
            self.scheduled[1] = layout.num_micro_batches
            self.scheduled[2] = layout.virtual_stages
            self.kept = np.zeros(layout.virtual_stages)

    @cfunc
    def _find_needs(self, stage: longlong, size: longlong) -> longlong:
        """Add the kinds of a stage: one for every number of samples."""
        stages = self.stages
        layout = stages.layout
        option = layout.option[stage]
        tp = stages.options.tp[option]
        first = size
        for group in range(stages.first_group[stage], stages.first_group[stage + 1]):
            for i in range(first, size):
                if self.kind[i] == -1 - layout.samples[group]:
                    break
            else:
                i = size
                self.kind[i] = -1 - layout.samples[group]
                self.smallest[i] = -1
                size += 1
            begin = stages.first_rank[stage] + (group - stages.first_group[stage]) * tp
            for rank in range(begin, begin + tp):
                kind = self.devices.type[layout.devices[rank]]
                if self.smallest[i] < 0 or (
                    self.devices.memory_bytes[kind] < self.devices.memory_bytes[self.smallest[i]]
                ):
                    self.smallest[i] = kind
        for i in range(first, size):
            self.kind[i] = self._kind(option, -1 - self.kind[i])
        return size

    @cfunc
    def _kind(self, option: longlong, samples: longlong) -> longlong:
        layout = self.stages.layout
        key = self.index.key
        key[0] = self.stages.options.of_memory[option]
        key[1] = samples
        key[2] = min(layout.pp, 2)
        key[3] = min(layout.num_micro_batches, 2)
        key[4] = layout.share
        number = self.index.find()
        if number < 0:
            self.tables.add_memory(key)
            number = self.index.add()
        return number

    # ------------------------------------------------------------------------ with the cuts

    @cfunc
    def at(self) -> void:
        """Write the peaks of all stages, and find the fullest device."""
        layout = self.stages.layout
        self.most_full = -1.0
        for stage in range(layout.pp):
            most = -1.0
            for i in range(self.first_need[stage], self.first_need[stage + 1]):
                peak_bytes = self._peak(stage, self.kind[i])
                share = peak_bytes / self.devices.memory_bytes[self.smallest[i]]
                if share > most or (share == most and peak_bytes > self.peak_bytes[stage]):
                    most = share
                    self.peak_bytes[stage] = peak_bytes
                    self.peak_type[stage] = self.smallest[i]
            if most > self.most_full:
                self.most_full, self.fullest = most, stage

    @cfunc
    def _peak(self, stage: longlong, kind: longlong) -> double:
        if self.stages.layout.virtual_stages > 1:
            return self._peak_of_chunks(stage, kind)
        return self._peak_of_stage(stage, kind)

    @cfunc
    def _peak_of_stage(self, stage: longlong, kind: longlong) -> double:
        layout = self.stages.layout
        kinds = self.kinds
        rows = self.layers.memory_bytes
        again = kinds.rows[kind]
        first = layout.bounds[stage]
        end = layout.bounds[stage + 1]
        split = self.times.splits[stage]
        flying = 1 + (layout.pp - 1 - stage) * kinds.share[kind]
        flying = min(flying, layout.num_micro_batches)
        entering = _CHECKPOINT_BUFFERS if kinds.once[kind] else flying + 1
        leaving = _CHECKPOINT_BUFFERS if kinds.once[kind] else flying
        if split < end and not kinds.frees[kind]:
            leaving = flying
        kept = self._kept(kind, first, split, end)
        parameters = rows[again, 0, end] - rows[again, 0, first]
        if first <= self.tied_first and self.tied_last < end and self.tied_first >= 0:
            parameters -= kinds.tied[kind]
        return self._need(
            stage,
            kind,
            parameters,
            flying * kept
            + (entering * rows[again, 3, first] + leaving * rows[again, 3, end])
            + self._temporary(kind, first, split, end),
        )

    @cfunc
    def _need(
        self,
        stage: longlong,
        kind: longlong,
        parameters: double,
        live: double,
    ) -> double:
        """Return the peak from a rank's parameters and its tensors; none live in the step."""
        kinds = self.kinds
        constant = kinds.constant_bytes[kind]
        if stage == self.stages.layout.pp - 1:
            constant += kinds.last_bytes[kind]
        live += kinds.bucket_bytes[kind] * min(parameters, kinds.bucket_elements[kind])
        live = max(live, kinds.step_bytes[kind] * parameters)
        return constant + kinds.state_bytes[kind] * parameters + kinds.factor[kind] * live

    @cfunc
    def _kept(
        self,
        kind: longlong,
        first: longlong,
        split: longlong,
        end: longlong,
    ) -> double:
        """Return the bytes that layers keep for each micro-batch in flight."""
        rows = self.layers.memory_bytes
        again = self.kinds.rows[kind]
        plain = self.kinds.plain[kind]
        return (
            rows[again, 1, split]
            - rows[again, 1, first]
            + rows[plain, 1, end]
            - rows[plain, 1, split]
        )

    @cfunc
    def _temporary(
        self,
        kind: longlong,
        first: longlong,
        split: longlong,
        end: longlong,
    ) -> double:
        """Return the largest bytes that live while one of some layers runs."""
        rows = self.layers.memory_bytes
        again = self.kinds.rows[kind]
        plain = self.kinds.plain[kind]
        most = 0.0
        for layer in range(first, split):
            most = max(most, rows[again, 2, layer])
        for layer in range(split, end):
            most = max(most, rows[plain, 2, layer])
        return most

    @cfunc
    def _peak_of_chunks(self, stage: longlong, kind: longlong) -> double:
        """Return the peak of a stage of an interleaved schedule."""
        layout = self.stages.layout
        rows = self.layers.memory_bytes
        again = self.kinds.rows[kind]
        entering = 0.0
        leaving = 0.0
        temporary = 0.0
        parameters = 0.0
        has_first = has_last = False
        for chunk in range(stage, self.stages.num_chunks, layout.pp):
            i = chunk // layout.pp
            first, end = layout.bounds[chunk], layout.bounds[chunk + 1]
            self.kept[i] = self._kept(kind, first, self.times.splits[chunk], end)
            if not self.kinds.once[kind]:
                self.kept[i] += rows[again, 3, first] + rows[again, 3, end]
            temporary = max(temporary, self._temporary(kind, first, self.times.splits[chunk], end))
            entering = max(entering, rows[again, 3, first])
            leaving = max(leaving, rows[again, 3, end])
            parameters += rows[again, 0, end] - rows[again, 0, first]
            has_first = has_first or first <= self.tied_first < end
            has_last = has_last or first <= self.tied_last < end
        if has_first and has_last:
            parameters -= self.kinds.tied[kind]
        buffers = entering
        if self.kinds.once[kind]:
            buffers = _CHECKPOINT_BUFFERS * entering + _CHECKPOINT_BUFFERS * leaving
        return self._need(stage, kind, parameters, self._most_kept(stage) + buffers + temporary)

    @cfunc
    def _most_kept(self, stage: longlong) -> double:
        """Return the most bytes that the micro-batches in flight of all chunks keep."""
        most = 0.0
        for state in range(self.first_state[stage], self.first_state[stage + 1]):
            held = 0.0
            for i in range(self.stages.layout.virtual_stages):
                held += self.states[state, i] * self.kept[i]
            most = max(most, held)
        return most


# ---------------------------------------------------------------------------------- everything


@cclass
class Evaluator:
    """Prices layouts of an experiment, whose samples are whole or parts of sequences."""

    tables: Any  # `tables.Tables`
    stages: Stages
    times: Times
    messages: Messages
    step_end: StepEnd
    memory: Memory
    costs: Costs
    layers: Layers
    options: Options
    clock: double[::1]
    without_special: longlong[:, ::1]  # zeros
    num_bound: longlong
    by_size: bint  # whether the rate of a link depends on the size of a message
    may_host: bint  # whether the host may start collectives as between nodes
    cp: longlong

    # What the last call of `at` found
    slowest: longlong  # class of parts
    pipeline_s: double
    step_end_s: double
    without_layers: longlong  # chunks
    without_parameters: longlong  # chunks

    def __init__(self, tables: Any) -> None:
        num_devices = tables.num_devices
        self.tables, self.costs = tables, tables.costs
        self.stages = Stages(num_devices)
        self.times = Times(tables, num_devices, tables.num_types, self.stages)
        self.messages = Messages(num_devices, tables.num_nodes, self.stages)
        self.step_end = StepEnd(num_devices, self.stages, self.costs, tables.tied)
        self.memory = Memory(tables, num_devices, self.stages, self.times)
        self.times.plain_paths = Paths(tables.rings, self.costs)
        self.clock = np.zeros(num_devices)
        self.without_special = np.zeros((3, num_devices), np.int64)
        self.times.messages = self.messages
        self.times.costs = self.messages.costs = self.step_end.costs = self.costs
        self.times.devices = self.messages.devices = tables.devices
        self.step_end.devices = self.memory.devices = tables.devices
        self.times.paths = self.messages.paths = self.step_end.paths = self.times.plain_paths
        self.times.links = 0
        self.num_bound = -1
        self.by_size, self.may_host, self.cp = tables.by_size, tables.may_host, tables.cp
        self._bind()

    def _bind(self) -> None:
        """Read the tables again, which have grown."""
        layers = Layers(self.tables.layer_columns)
        self.layers = layers
        self.times.layers = self.messages.layers = layers
        self.step_end.layers = self.memory.layers = layers
        self.options = Options(self.tables.option_columns)
        self.memory.kinds = MemoryKinds(self.tables.memory_columns)
        self.num_bound = self.tables.num_grown

    @cfunc
    def _bind_new(self) -> void:
        if self.num_bound != self.tables.num_grown:
            self._bind()

    @ccall
    def price(self, layout: Layout) -> double:
        """Return the seconds of an iteration of a layout."""
        self.place(layout)
        return self.at()

    @ccall
    def price_cuts(self, layout: Layout) -> double:
        """Return `price` of a layout; if it was the last one, only its cuts may have changed."""
        if self.stages.layout is not layout or not layout.is_placed:
            self.place(layout)
        return self.at()

    @ccall
    def place(self, layout: Layout) -> void:
        """Price all of a layout that does not depend on its cuts."""
        self._bind_new()
        self.stages.read(layout, self.options)
        if self.by_size:
            self._choose_links()
        self.times.hosted = self.tables.hosts(layout) if self.may_host else 0
        self.times.find_rings()
        self._find_special()
        self.times.find_rows()
        self.memory.place()
        self._bind_new()
        self.messages.place(self.times.path)
        self._classify()
        self.step_end.place()
        layout.is_placed = True

    @cfunc
    def _choose_links(self) -> void:
        """Take the links at the largest message's size, for layer times and messages."""
        stages = self.stages
        most = 0
        for group in range(stages.first_group[stages.layout.pp]):
            most = max(most, stages.layout.samples[group])
        self.times.links, self.times.paths, self.messages.devices = self.tables.links_at(most)
        self.messages.paths = self.times.paths

    @cfunc
    def _find_special(self) -> void:
        """Find the paths of exchanges of experts and between ranks of a sequence."""
        stages = self.stages
        is_special = self.cp > 1
        for stage in range(stages.layout.pp):
            is_special = is_special or self.options.ep[stages.layout.option[stage]] > 1
        if is_special:
            self.times.special = self.tables.special_paths(stages.layout)
            return
        self.times.special = self.without_special

    @cfunc
    def _classify(self) -> void:
        """Sort the parts of the samples into classes of equal rows and messages."""
        stages = self.stages
        stages.fill_cells()
        stages.num_classes = 0
        for part in range(stages.num_parts):
            for number in range(stages.num_classes - 1, -1, -1):
                if stages.are_alike(part, stages.part_of[number]) and self.messages.are_alike(
                    part, stages.part_of[number]
                ):
                    stages.class_of[part] = number
                    break
            else:
                stages.class_of[part] = stages.num_classes
                stages.part_of[stages.num_classes] = part
                stages.num_classes += 1

    # ------------------------------------------------------------------------ with the cuts

    @ccall
    def at(self) -> double:
        """Return the seconds of an iteration with the cuts of the layout that was placed."""
        self.times.at()
        self.pipeline_s = -1.0
        for number in range(self.stages.num_classes):
            seconds = self._pipeline_s(number, True)
            if seconds > self.pipeline_s:
                self.slowest, self.pipeline_s = number, seconds
        self.step_end_s = self.step_end.at(self.times)
        self.memory.at()
        self._count_empty()
        return self.pipeline_s + self.step_end_s + self.costs.host_s

    @cfunc
    def _count_empty(self) -> void:
        """Count the chunks without layers, and those without parameters."""
        layout = self.stages.layout
        self.without_layers = self.without_parameters = 0
        for chunk in range(self.stages.num_chunks):
            first, end = layout.bounds[chunk], layout.bounds[chunk + 1]
            self.without_layers += first == end
            self.without_parameters += self.layers.trained[first] == self.layers.trained[end]

    @cfunc
    def _pipeline_s(self, number: longlong, sends: bint) -> double:
        """Time the pipeline of a class, with or without its messages."""
        layout = self.stages.layout
        if layout.virtual_stages == 1:
            return self._time_1f1b(number, sends)
        return self._time_chunks(number, sends)

    def _time_chunks(self, number: longlong, sends: bint) -> double:
        chunks = self.stages.num_chunks
        passes_s = np.asarray(self.times.passes_s)[number, :2, :chunks, None]
        sends_s = np.asarray(self.times.sends_s)[number, :, : chunks - 1, None]
        layout = self.stages.layout
        return self.tables.time_chunks(
            passes_s,
            sends_s if sends else np.zeros_like(sends_s),
            layout.pp,
            layout.num_micro_batches,
        )

    @cfunc
    def _time_1f1b(self, number: longlong, sends: bint) -> double:
        """Time one iteration of 1F1B.

        Turn ``i`` of stage ``j`` is the forward pass of micro-batch ``i`` and then the backward
        pass of micro-batch ``i + j + 1 - pp``, where they exist. Before the forward pass of stage
        ``j`` and the backward pass of stage ``j - 1`` in their turn ``i``, both send the tensor
        that the other needs. All of this happens in step ``2 i + j``, in which every second stage
        takes part.
        """
        passes_s, sends_s, clock = self.times.passes_s, self.times.sends_s, self.clock
        pp, batches = self.stages.layout.pp, self.stages.layout.num_micro_batches
        share = 1.0 if sends else 0.0
        last = batches + pp - 2
        for j in range(pp):
            clock[j] = 0.0
        for step in range(2 * last + pp + 1):
            for j in range(max(step % 2, step - 2 * last), min(pp, step) + 1, 2):
                turn = (step - j) // 2
                goes, returns = turn < batches, 0 <= turn + j - pp < batches
                if 0 < j < pp and (goes or returns):
                    forward_s = share * sends_s[number, 0, j - 1] if goes else -1.0
                    backward_s = share * sends_s[number, 1, j - 1] if returns else -1.0
                    self._cross(j, forward_s, backward_s)
                if j > 0 and returns:
                    clock[j - 1] += passes_s[number, 1, j - 1]
                if j < pp and goes:
                    clock[j] += passes_s[number, 0, j]
        return clock[0]

    @cfunc
    def _cross(self, stage: longlong, forward_s: double, backward_s: double) -> void:
        """Send an activation to a stage and a gradient from it; negative seconds for none."""
        before, after = self.clock[stage - 1], self.clock[stage]
        if self.costs.blocking:
            forward_s, backward_s = max(0.0, forward_s), max(0.0, backward_s)
            both_s = max(forward_s, backward_s) if self.costs.duplex else forward_s + backward_s
            self.clock[stage - 1] = self.clock[stage] = max(before, after) + both_s
            return
        if forward_s >= 0.0:
            self.clock[stage] = max(after, before + forward_s)
        if backward_s >= 0.0:
            self.clock[stage - 1] = max(before, after + backward_s)

    # ------------------------------------------------------------------- parts, for people

    def breakdown(self) -> list[float]:
        """Return the parts of `Breakdown` in its order: a class is timed without messages, too."""
        layout = self.stages.layout
        passes_s = np.asarray(self.times.passes_s)[self.slowest, :3, : self.stages.num_chunks]
        by_stage = passes_s.reshape(3, -1, layout.pp).sum(axis=1)
        totals = by_stage[0] + by_stage[1]
        stage = int(np.argmax(totals))
        busy_s = layout.num_micro_batches * float(totals[stage])
        talking_s = layout.num_micro_batches * float(by_stage[2, stage])
        still_s = self._pipeline_s(self.slowest, False)
        end = self.step_end.slowest
        parts_s = [
            busy_s - talking_s,
            talking_s,
            max(0.0, still_s - busy_s),
            max(0.0, self.pipeline_s - still_s),
            self.step_end.sync_s[end],
            self.step_end.step_s[end],
            self.costs.host_s,
        ]
        return [float(part_s) for part_s in parts_s]

    def peaks(self) -> list[Any]:
        """Return each stage's peak bytes and device type."""
        memory = self.memory
        return [
            (float(memory.peak_bytes[stage]), int(memory.peak_type[stage]))
            for stage in range(self.stages.layout.pp)
        ]

    def extrapolates(self) -> bool:
        """Return whether a group's times extrapolate from measurements."""
        stages = self.stages
        return any(
            self.layers.extrapolates[stages.row[group]]
            for group in range(stages.first_group[stages.layout.pp])
        )

    def seconds_by_part(self) -> list[Any]:
        """Return the passes and messages of every part, see `CostModel.seconds`."""
        stages = self.stages
        of_part = np.asarray(stages.class_of)[: stages.num_parts]
        chunks = stages.num_chunks
        passes_s = np.asarray(self.times.passes_s)[of_part, :, :chunks].transpose(1, 2, 0)
        sends_s = np.asarray(self.times.sends_s)[of_part, :, : chunks - 1].transpose(1, 2, 0)
        return [np.ascontiguousarray(passes_s[[3, 1, 2]]), np.ascontiguousarray(sends_s)]
