"""Plans of the planner published as Metis (2024): cost by its formulas, and their defects.

Kept for comparison, and to check that Metis's files are read as Metis reads them. The formulas are
restated with their errors: the bandwidth between nodes is never read, the groups of the gradient
all-reduce are the tensor-parallel ones, activations count as one byte per element. The published
planner does not check that a plan can run; `metis_defects` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Final

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.device import Device
from amp_ray.cost.estimate import Reason
from amp_ray.errors import InputError
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile
from amp_ray.units import GIB, GIGA, MILLISECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisPlan:
    """A plan as the published planner prints it; its device groups follow from the degrees."""

    # Device types in the order of the ranks: all devices of the first one come first
    type_order: tuple[str, ...]
    degrees: tuple[tuple[int, int], ...]  # ``(dp, tp)`` of each stage
    num_micro_batches: int  # micro-batches per optimizer step, the same for all stages
    # First layer of each stage and the end of the last. Printed plans may have empty stages and
    # lose layers, so the only assumption is that bounds never decrease.
    bounds: tuple[int, ...]

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.degrees)

    @property
    def first_rank(self) -> tuple[int, ...]:
        """First rank of each stage, then the number of ranks."""
        return (0, *accumulate(dp * tp for dp, tp in self.degrees))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRank:
    """One data-parallel index of a stage."""

    group_types: tuple[str, ...]  # device types of its tensor-parallel group
    samples: int  # its samples of a micro-batch

    @property
    def device_type(self) -> str:
        """Type of the first device, which the formulas use for the whole group."""
        return self.group_types[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisSetting:
    """All inputs of the published planner.

    Raises:
        InputError: If the published rule gives types to fewer ranks than there are devices.
    """

    cluster: Cluster  # nodes in the hostfile's order
    profile: PublishedProfile  # has every type of the cluster
    hidden_size: int  # width of an activation
    sequence_length: int  # tokens per sample
    vocab_size: int  # size of the activation before the last layer, in place of hidden_size
    global_batch_size: int  # samples per optimizer step
    # File that the published planner happened to list first in the folder: it reads parameters,
    # optimizer and batch generator from that file, for all device types
    listed_first: Key
    # Whether each node gives its type as many ranks as the first node has devices, as the planner
    # counts them; ranks beyond the cluster's devices are cut off
    first_node_counts: bool = False

    def __post_init__(self) -> None:
        """Raise if some ranks have no type."""
        devices, mapped = self.cluster.num_devices, len(self._types_in(self.node_types))
        if mapped < devices:
            message = (
                f"the published rule gives types to {mapped} of {devices} ranks: as many for each "
                "node as the first one has devices; list a larger node first"
            )
            raise InputError(message)

    @cached_property
    def node_types(self) -> tuple[str, ...]:
        """Device type of each node."""
        return tuple(self._type_of(node.device) for node in self.cluster.nodes)

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Nominal memory by device type; the smallest if nodes differ."""
        sizes: dict[str, int] = {}
        for device in self.cluster.device_types:
            kind, size = self._type_of(device), device.nominal_bytes or device.memory_bytes
            sizes[kind] = min(size, sizes.get(kind, size))
        return sizes

    def _type_of(self, device: Device) -> str:
        kind = self.profile.type_of(device)
        assert kind is not None, f"{self.profile.source} was read without {device.name!r}"
        return kind

    @property
    def whole(self) -> PublishedEntry:
        """Entry of the file that supplies the model-level values."""
        return self.profile.entries[self.listed_first]

    def ordered_types(self, type_order: Sequence[str]) -> tuple[str, ...]:
        """Return the device type of each rank for an order of the types."""
        return self._types_in(type_order)[: self.cluster.num_devices]

    def _types_in(self, type_order: Sequence[str]) -> tuple[str, ...]:
        """Return the types of ranks, counted node by node; there may be more ranks than devices."""
        nodes = self.cluster.nodes
        return tuple(
            kind
            for kind in dict.fromkeys(type_order)
            for of, node in zip(self.node_types, nodes, strict=True)
            if of == kind
            for _ in range((nodes[0] if self.first_node_counts else node).num_slots)
        )

    def stage_types(self, plan: MetisPlan) -> tuple[tuple[str, ...], ...]:
        """Return the device types of each stage's ranks."""
        ranks = self.ordered_types(plan.type_order)
        return tuple(ranks[first:end] for first, end in pairwise(plan.first_rank))

    def samples(self, plan: MetisPlan, stage: int) -> int:
        """Return the samples of a micro-batch that each replica of a stage takes, rounded down."""
        dp, _ = plan.degrees[stage]
        return self.global_batch_size // dp // plan.num_micro_batches

    def data_ranks(self, plan: MetisPlan, stage: int) -> tuple[DataRank, ...] | None:
        """Return the data-parallel indices of one stage with their samples of a micro-batch.

        A stage of one device type shares samples evenly. In a mixed stage, a data-parallel index
        counts as its first device; its share is proportional to the inverse of a whole model's time
        at micro-batch size 1, rounded down, and the remaining samples go one each to the largest
        fractions. The result has an entry per data-parallel index, or is None if a type was not
        measured at that tp.
        """
        dp, tp = plan.degrees[stage]
        types = self.stage_types(plan)[stage]
        groups = [types[tp * index : tp * (index + 1)] for index in range(dp)]
        if len(set(types)) == 1:
            shares: Sequence[int] = [self.samples(plan, stage)] * dp
        else:
            alone = [self.profile.entries.get((group[0], tp, 1)) for group in groups]
            speeds = [1 / float(entry.layer_s.sum()) for entry in alone if entry is not None]
            if len(speeds) != dp:
                return None
            shares = proportional_shares(self.global_batch_size // plan.num_micro_batches, speeds)
        return tuple(
            DataRank(group_types=group, samples=share)
            for group, share in zip(groups, shares, strict=True)
        )


def proportional_shares(num_samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide samples in proportion to speeds, in whole numbers that add up.

    Returns:
        Shares rounded down, plus one sample each for the largest fractions; ties go to the first.

    Example:
        >>> proportional_shares(8, [3.0, 3.0, 1.0])
        [4, 3, 1]
    """
    total = sum(speeds)
    exact = [num_samples * speed / total for speed in speeds]
    shares = [int(share) for share in exact]
    by_fraction = sorted(range(len(speeds)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_fraction[: num_samples - sum(shares)]:
        shares[rank] += 1
    return shares


NOT_PROFILED: Final = "not in the profile"
NO_WHOLE_TIME: Final = "no forward_backward_time_ms"

BYTES_PER_GBYTE: Final = 2**20 * MILLISECONDS_PER_SECOND
"""Bytes per second that the published planner reads from 1 GB/s: 2**20 per millisecond."""

OPTIMIZER_FACTOR: Final = 2
"""Factor on the measured optimizer step: the published planner counts it twice."""

NO_REST_S: Final = 1e-12
"""A smaller rest counts as missing: the published planner drops 0, and sums of layers round."""

_BITS: Final = 64
"""More binary digits than any number of samples has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisCost:
    """The terms of the published planner's time."""

    execution_s: float  # all micro-batches through all stages
    # Time of the whole model beyond its layers, in the last stage, once per micro-batch
    rest_s: float
    batch_generator_s: float
    optimizer_s: float  # the optimizer step of the slowest stage
    gradient_sync_s: float  # the gradient all-reduce of the slowest stage
    pipeline_p2p_s: float  # activations between stages, once

    @property
    def total_s(self) -> float:
        """Seconds per optimizer step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


def metis_cost(setting: MetisSetting, plan: MetisPlan) -> MetisCost | Reason:
    """Compute the time of a plan by the published formulas.

    ``(B - 1) max(t) + sum(t)`` for ``B`` micro-batches and stage times ``t``, plus the other terms
    of `MetisCost`. A plan may even lose layers or have empty stages.

    Returns:
        The cost, or the reason why the planner drops the plan: a time that no profile file has.

    References:
        Um et al., Metis, USENIX ATC 2024, and its public planner.
    """
    times = []
    for stage in range(plan.pp):
        time_s = stage_time_s(setting, plan, stage)
        if isinstance(time_s, Reason):
            return time_s
        times.append(time_s)
    rest_s = _rest_s(setting, plan)
    if isinstance(rest_s, Reason):
        return rest_s
    num_micro_batches = plan.num_micro_batches
    return MetisCost(
        execution_s=(num_micro_batches - 1) * max(times) + sum(times),
        rest_s=rest_s,
        batch_generator_s=setting.whole.batch_generator_s * num_micro_batches,
        optimizer_s=_optimizer_s(setting, plan),
        gradient_sync_s=max(_gradient_sync_s(setting, plan, stage) for stage in range(plan.pp)),
        pipeline_p2p_s=sum(_transfer_s(setting, plan, stage) for stage in range(plan.pp - 1)),
    )


def stage_time_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float | Reason:
    """Return the time of one micro-batch in one stage.

    A stage of one type was measured at its samples. In a mixed stage, the slowest data-parallel
    index counts; it runs its share as a sum of powers of two, one after the other, since only
    powers of two were measured.
    """
    ranks = setting.data_ranks(plan, stage)
    _, tp = plan.degrees[stage]
    if ranks is None:
        return Reason(kind=NOT_PROFILED, detail=f"stage {stage}: tp {tp}, micro-batch size 1")
    mixed = len({kind for rank in ranks for kind in rank.group_types}) > 1
    worst_s = 0.0
    for rank in ranks if mixed else ranks[:1]:
        sizes = binary_sizes(rank.samples) if mixed else (rank.samples,)
        seconds = _layers_s(setting, rank, tp, sizes, plan.bounds[stage : stage + 2])
        if seconds is None:
            detail = f"stage {stage}: {rank.device_type}, tp {tp}, {rank.samples} samples"
            return Reason(kind=NOT_PROFILED, detail=detail)
        worst_s = max(worst_s, seconds)
    return worst_s


def binary_sizes(samples: int) -> tuple[int, ...]:
    """Return the distinct powers of two whose sum is a number.

    Example:
        >>> binary_sizes(6), binary_sizes(0)
        ((2, 4), ())
    """
    return tuple(1 << digit for digit in range(_BITS) if samples >> digit & 1)


def _layers_s(
    setting: MetisSetting,
    rank: DataRank,
    tp: int,
    sizes: tuple[int, ...],
    bounds: tuple[int, ...],
) -> float | None:
    seconds = 0.0
    for size in sizes:
        entry = setting.profile.entries.get((rank.device_type, tp, size))
        if entry is None:
            return None
        seconds += float(entry.layer_s[bounds[0] : bounds[1]].sum())
    return seconds


def _rest_s(setting: MetisSetting, plan: MetisPlan) -> float | Reason:
    last = plan.pp - 1
    _, tp = plan.degrees[last]
    size = setting.samples(plan, last)
    rest_s = []
    for kind in sorted(set(setting.stage_types(plan)[last])):
        entry = setting.profile.entries.get((kind, tp, size))
        if entry is None:
            return Reason(kind=NOT_PROFILED, detail=f"{kind}, tp {tp}, {size} samples")
        if entry.rest_s is None or abs(entry.rest_s) < NO_REST_S:
            return Reason(kind=NO_WHOLE_TIME, detail=f"{kind}, tp {tp}, {size} samples")
        rest_s.append(entry.rest_s)
    return plan.num_micro_batches * max(rest_s)


def _optimizer_s(setting: MetisSetting, plan: MetisPlan) -> float:
    """Return the optimizer step of the stage with the most layers per tp."""
    per_layer_s = OPTIMIZER_FACTOR * setting.whole.optimizer_s / setting.profile.num_layers
    return max(
        per_layer_s / tp * (end - first)
        for (_, tp), (first, end) in zip(plan.degrees, pairwise(plan.bounds), strict=True)
    )


def _gradient_sync_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return a stage's gradient all-reduce.

    Its groups are every dp-th rank, tp of them: the published planner swaps dp and tp.
    """
    dp, tp = plan.degrees[stage]
    first = plan.first_rank[stage]
    groups = ([first + index + step * dp for step in range(tp)] for index in range(dp))
    rate = min(bytes_per_s(setting, plan, group) for group in groups)
    first_layer, end_layer = plan.bounds[stage : stage + 2]
    held = float(counted_parameter_bytes(setting)[first_layer:end_layer].sum())
    return 2 * (dp - 1) / dp * held / tp / rate


def _transfer_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return the transfer of one micro-batch's activation to the next stage.

    The published planner counts one byte per element, and sends logits to the last layer.
    """
    _, tp = plan.degrees[stage]
    tokens = setting.samples(plan, stage) * setting.sequence_length
    elements = float(tokens * setting.hidden_size)
    if plan.bounds[stage + 1] == setting.profile.num_layers - 1:
        elements = tokens * setting.vocab_size / tp
    ranks = list(range(plan.first_rank[stage], plan.first_rank[stage + 2]))
    return elements / bytes_per_s(setting, plan, ranks)


def bytes_per_s(setting: MetisSetting, plan: MetisPlan, ranks: list[int]) -> float:
    """Return the bandwidth that ranks share: of the first node of their type, or the least of all.

    Like the published planner, it takes every node to be as large as the first, and the bandwidth
    between nodes to be the one within a node.
    """
    types = setting.ordered_types(plan.type_order)
    nodes = {rank // setting.cluster.nodes[0].num_slots for rank in ranks}
    present = {types[rank] for rank in ranks}
    if len(nodes) == 1:
        present = {types[ranks[0]]}
    rates = [
        node.intra.bandwidth_bytes_per_s
        for kind, node in zip(setting.node_types, setting.cluster.nodes, strict=True)
        if kind in present
    ]
    return (rates[0] if len(nodes) == 1 else min(rates)) / GIGA * BYTES_PER_GBYTE


def counted_parameter_bytes(setting: MetisSetting) -> FloatArray:
    """Return the parameters of every layer, as the gradient all-reduce counts them.

    Like the published planner, it counts every middle layer as the second one.
    """
    held = setting.whole.layer_parameter_bytes.copy()
    held[1:-1] = held[1]
    return held


LAYERS_LOST: Final = "layers lost"
EMPTY_STAGE: Final = "empty stage"
SAMPLES_LOST: Final = "samples lost"
OUT_OF_MEMORY: Final = "out of memory"


def metis_defects(setting: MetisSetting, plan: MetisPlan) -> tuple[Reason, ...]:
    """Return the reasons why a plan cannot run.

    A plan can run if every layer is in a stage, every stage has a layer, every sample is taken, and
    every device holds the whole measured memory of its layers at its own samples. The published
    planner compares sums over stages, and loses layers if no stage holds more than half of one.
    """
    defects = []
    num_layers = setting.profile.num_layers
    if (plan.bounds[0], plan.bounds[-1]) != (0, num_layers):
        detail = f"bounds {plan.bounds[0]} to {plan.bounds[-1]} of {num_layers} layers"
        defects.append(Reason(kind=LAYERS_LOST, detail=detail))
    empty = [stage for stage, (first, end) in enumerate(pairwise(plan.bounds)) if first == end]
    if empty:
        defects.append(Reason(kind=EMPTY_STAGE, detail=f"stage {', '.join(map(str, empty))}"))
    ranks_of = [setting.data_ranks(plan, stage) for stage in range(plan.pp)]
    for stage, ranks in enumerate(ranks_of):
        taken = plan.num_micro_batches * sum(rank.samples for rank in ranks or ())
        if ranks is not None and taken != setting.global_batch_size:
            detail = f"stage {stage} takes {taken} of {setting.global_batch_size}"
            defects.append(Reason(kind=SAMPLES_LOST, detail=detail))
    return (*defects, *_memory_defects(setting, plan, ranks_of))


def _memory_defects(
    setting: MetisSetting, plan: MetisPlan, ranks_of: Sequence[tuple[DataRank, ...] | None]
) -> Iterator[Reason]:
    """Yield, per stage, why the device with the largest share that does not fit cannot run."""
    for stage, ranks in enumerate(ranks_of):
        if ranks is None:
            _, tp = plan.degrees[stage]
            detail = f"stage {stage}: tp {tp}, micro-batch size 1"
            yield Reason(kind=NOT_PROFILED, detail=detail)
            continue
        most_first = sorted(dict.fromkeys(ranks), key=lambda rank: -rank.samples)
        reasons = (_of_rank(setting, plan, stage, rank) for rank in most_first)
        yield from islice(filter(None, reasons), 1)


def _of_rank(setting: MetisSetting, plan: MetisPlan, stage: int, rank: DataRank) -> Reason | None:
    """Return a reason if the devices of one data-parallel index cannot hold the stage's layers."""
    if rank.samples == 0:
        return None
    held = rank_memory(setting, plan, stage, rank)
    if held is None:
        _, tp = plan.degrees[stage]
        detail = f"stage {stage}: {rank.device_type}, tp {tp}, {rank.samples} samples"
        return Reason(kind=NOT_PROFILED, detail=detail)
    needed, smallest, limit = held
    if needed <= limit:
        return None
    detail = (
        f"stage {stage} needs {needed / GIB:.1f} GiB of {limit / GIB:.1f} ({smallest}, "
        f"{rank.samples} samples)"
    )
    return Reason(kind=OUT_OF_MEMORY, detail=detail)


def rank_memory(
    setting: MetisSetting, plan: MetisPlan, stage: int, rank: DataRank
) -> tuple[float, str, int] | None:
    """Return the need and the memory of the devices of one data-parallel index.

    Returns:
        Needed bytes at the smallest measured size that holds the samples; the type in the group
        with the least memory; and that memory in bytes. None if no measured size holds the samples.
    """
    _, tp = plan.degrees[stage]
    first, end = plan.bounds[stage : stage + 2]
    sizes = setting.profile.sizes(rank.device_type, tp)
    enough = [size for size in sizes if size >= rank.samples]
    if not enough:
        return None
    table = setting.profile.entries[rank.device_type, tp, enough[0]].layer_memory_bytes
    smallest = min(sorted(set(rank.group_types)), key=setting.memory_bytes.__getitem__)
    return float(table[first:end].sum()), smallest, setting.memory_bytes[smallest]
