"""Plans of the planner published as Metis (2024): their cost by its formulas, their defects.

Kept to check that its files are read as it reads them, and to compare. The formulas are taken as
they are, with what is wrong in them: bandwidth between nodes is never read, the groups of the
gradient all-reduce are the tensor-parallel ones, activations count as one byte per element. The
published planner does not check that a plan can run; `metis_defects` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Reason
from amp_ray.errors import InputError
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile
from amp_ray.units import GIB, GIGA, MILLISECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisPlan:
    """A plan as the published planner prints it.

    Raises:
        ValueError: If the figures of the stages differ in number, a degree is below one, or
            bounds run backwards.
    """

    # Device types in the order of the ranks: all devices of the first one come first
    type_order: tuple[str, ...]
    group_sizes: tuple[int, ...]  # devices of each stage
    degrees: tuple[tuple[int, int], ...]  # ``(dp, tp)`` of each stage
    num_micro_batches: int  # micro-batches per optimizer step, the same for all stages
    # First layer of each stage and the end of the last. Printed plans have empty stages and lose
    # layers, so nothing is assumed but that they do not run backwards.
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise if the values contradict each other."""
        pp = len(self.group_sizes)
        if not pp or len(self.degrees) != pp or len(self.bounds) != pp + 1:
            raise ValueError(
                f"a plan has one device group and one (dp, tp) per stage and one bound more, found "
                f"{pp}, {len(self.degrees)} and {len(self.bounds)}"
            )
        counts = [*self.group_sizes, *sum(self.degrees, ()), self.num_micro_batches]
        if min(counts) < 1:
            raise ValueError(f"devices, degrees and micro-batches start at 1, found {counts}")
        if self.bounds[0] < 0 or any(end < first for first, end in pairwise(self.bounds)):
            raise ValueError(f"bounds must not run backwards, found {self.bounds}")
        for size, (dp, tp) in zip(self.group_sizes, self.degrees, strict=True):
            if dp * tp != size:
                raise ValueError(f"dp {dp} x tp {tp} must be the {size} devices of the stage")

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.group_sizes)

    @property
    def first_rank(self) -> tuple[int, ...]:
        """First rank of each stage, and the number of ranks."""
        return (0, *accumulate(self.group_sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRank:
    """One data-parallel index of a stage."""

    device_type: str  # of its first device, which speaks for all of its tensor-parallel group
    group_types: tuple[str, ...]  # of all of them
    samples: int  # what it takes of a micro-batch


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisSetting:
    """All inputs of the published planner.

    Raises:
        ValueError: If the profile has no such file, or a device of the cluster no profile.
    """

    cluster: Cluster  # nodes in the hostfile's order
    profile: PublishedProfile
    memory_bytes: dict[str, int]  # nominal memory of every device type, as its cluster file says
    hidden_size: int  # width of an activation
    sequence_length: int  # tokens per sample
    vocab_size: int  # width of what crosses the boundary before the last layer
    global_batch_size: int  # samples per optimizer step
    # The file that a folder listing happened to name first: the planner takes parameters, optimizer
    # and batch generator from it, for all device types
    listed_first: Key
    # Whether each node gives its type as many ranks as the first node has devices, as the planner
    # counts them; what is beyond the cluster's devices is cut off
    first_node_counts: bool = False

    def __post_init__(self) -> None:
        """Raise if the profile does not cover the inputs."""
        if self.listed_first not in self.profile.entries:
            raise ValueError(f"{self.profile.source} has no file of {self.listed_first}")
        missing = [kind for kind in self.node_types if kind not in self.memory_bytes]
        if missing:
            message = f"memory_bytes has no {missing[0]!r}, only {', '.join(self.memory_bytes)}"
            raise ValueError(message)
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
        types = []
        for node in self.cluster.nodes:
            kind = self.profile.type_of(node.device)
            if kind is None:
                raise ValueError(f"{self.profile.source} has no {node.device.name!r}")
            types.append(kind)
        return tuple(types)

    @property
    def whole(self) -> PublishedEntry:
        """The file that model-level values come from."""
        return self.profile.entries[self.listed_first]

    def rank_types(self, plan: MetisPlan) -> tuple[str, ...]:
        """Return the device type of each rank of a plan.

        Raises:
            ValueError: If the plan does not order the cluster's types or uses other numbers of
                devices.
        """
        if sorted(plan.type_order) != sorted(set(self.node_types)):
            raise ValueError(
                f"the plan orders the types {', '.join(plan.type_order)}; the cluster has "
                f"{', '.join(dict.fromkeys(self.node_types))}"
            )
        ranks = self.ordered_types(plan.type_order)
        if len(ranks) != sum(plan.group_sizes):
            raise ValueError(
                f"the plan uses {sum(plan.group_sizes)} devices of the cluster's {len(ranks)}: "
                "this planner leaves none idle"
            )
        return ranks

    def ordered_types(self, type_order: Sequence[str]) -> tuple[str, ...]:
        """Return the device type of each rank where types stand in some order."""
        return self._types_in(type_order)[: self.cluster.num_devices]

    def _types_in(self, type_order: Sequence[str]) -> tuple[str, ...]:
        """Return the types that nodes give, more or fewer than there are devices by the rule."""
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
        ranks = self.rank_types(plan)
        return tuple(ranks[first:end] for first, end in pairwise(plan.first_rank))

    def samples(self, plan: MetisPlan, stage: int) -> int:
        """Return the samples of a micro-batch that each replica of a stage takes, rounded down."""
        dp, _ = plan.degrees[stage]
        return self.global_batch_size // dp // plan.num_micro_batches

    def data_ranks(self, plan: MetisPlan, stage: int) -> tuple[DataRank, ...] | None:
        """Return the data-parallel indices of one stage with their samples of a micro-batch.

        A stage of one device type shares evenly. In a mixed one a data-parallel index counts as
        its first device; shares go by the inverse of a whole model's time at micro-batch size 1,
        rounded down, and what is left goes one each to the largest fractions.

        Returns:
            One entry per data-parallel index; None if a type was not measured at that tp.
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
            DataRank(device_type=group[0], group_types=group, samples=share)
            for group, share in zip(groups, shares, strict=True)
        )

    def layer_s(self, device_type: str, tp: int, size: int) -> FloatArray | None:
        """Return the times of all layers at one size; None where they were not measured."""
        entry = self.profile.entries.get((device_type, tp, size))
        return None if entry is None else entry.layer_s


def proportional_shares(num_samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide samples in proportion to speeds, in whole numbers that add up.

    Returns:
        Rounded down, what is left one each to the largest fractions, the first of equal ones.

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
"""Bytes per second that 1 GB/s means to the published planner: 2**20 per millisecond."""

OPTIMIZER_FACTOR: Final = 2
"""Factor on the measured optimizer step: the published planner counts it twice."""

NO_REST_S: Final = 1e-12
"""Least rest: the planner treats 0 as missing, and sums of layers are no more exact."""

_BITS: Final = 64
"""More binary digits than any number of samples has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisCost:
    """The terms of the published planner's time."""

    execution_s: float  # all micro-batches through all stages
    # What the whole model takes beyond its layers, in the last stage, once per micro-batch
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

    ``(B - 1) max(t) + sum(t)`` for ``B`` micro-batches and stage times ``t``, then what the parts
    of `MetisCost` say.

    Args:
        setting: What is given.
        plan: Any plan of the cluster, also one that loses layers or has empty stages.

    Returns:
        The cost, or why the planner drops the plan: a time that is in no profile file.

    Raises:
        ValueError: If the plan is not one of this cluster.

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

    A stage of one type was measured at its samples. In a mixed one the slowest data-parallel
    index counts; it runs the binary digits of its share one after the other, since only
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
    """Return the powers of two that a number is the sum of.

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
    """Add up a stage's layers over micro-batch sizes; None where one was not measured."""
    seconds = 0.0
    for size in sizes:
        table = setting.layer_s(rank.device_type, tp, size)
        if table is None:
            return None
        seconds += float(table[bounds[0] : bounds[1]].sum())
    return seconds


def _rest_s(setting: MetisSetting, plan: MetisPlan) -> float | Reason:
    """Return the last stage's time beyond its layers, for all micro-batches."""
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

    Its groups are every dp-th rank, tp of them: dp and tp are the wrong way round.
    """
    dp, tp = plan.degrees[stage]
    first = plan.first_rank[stage]
    groups = ([first + index + step * dp for step in range(tp)] for index in range(dp))
    rate = min(bytes_per_s(setting, plan, group) for group in groups)
    held = _parameter_bytes(setting, plan.bounds[stage], plan.bounds[stage + 1])
    return 2 * (dp - 1) / dp * held / tp / rate


def _transfer_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return the transfer of one micro-batch's activation to the next stage."""
    elements = transfer_elements(setting, plan, stage)
    ranks = list(range(plan.first_rank[stage], plan.first_rank[stage + 2]))
    return elements / bytes_per_s(setting, plan, ranks)


def transfer_elements(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return what crosses the boundary after a stage; one byte per element to this planner.

    Before the last layer it takes logits to cross.
    """
    _, tp = plan.degrees[stage]
    tokens = setting.samples(plan, stage) * setting.sequence_length
    if plan.bounds[stage + 1] == setting.profile.num_layers - 1:
        return tokens * setting.vocab_size / tp
    return float(tokens * setting.hidden_size)


def bytes_per_s(setting: MetisSetting, plan: MetisPlan, ranks: list[int]) -> float:
    """Return the rate that ranks share: of the first node of their type, or the slowest of all.

    Every node counts as large as the first one, and the rate between nodes is the one within.
    """
    types = setting.rank_types(plan)
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


def _parameter_bytes(setting: MetisSetting, first: int, end: int) -> float:
    """Add up parameters as the planner does: every middle layer counts as the second one."""
    return float(counted_parameter_bytes(setting)[first:end].sum())


def counted_parameter_bytes(setting: MetisSetting) -> FloatArray:
    """Return the parameters of every layer that the gradient all-reduce counts."""
    held = setting.whole.layer_parameter_bytes.copy()
    held[1:-1] = held[1]
    return held


LAYERS_LOST: Final = "layers lost"
EMPTY_STAGE: Final = "empty stage"
SAMPLES_LOST: Final = "samples lost"
OUT_OF_MEMORY: Final = "out of memory"


def metis_defects(setting: MetisSetting, plan: MetisPlan) -> tuple[Reason, ...]:
    """Return the reasons why a plan cannot run.

    Every layer must be in a stage, every stage have one, every sample be taken, and every
    device hold what was measured for its layers: whole, at its samples, by itself. The planner
    compares sums over stages, and loses layers where no stage holds more than half of one.

    Returns:
        Reasons; none for a plan that can run.

    Raises:
        ValueError: If the plan is not one of this cluster.
    """
    return (
        *_layer_defects(setting, plan),
        *_sample_defects(setting, plan),
        *_memory(setting, plan),
    )


def _layer_defects(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    defects = []
    num_layers = setting.profile.num_layers
    if (plan.bounds[0], plan.bounds[-1]) != (0, num_layers):
        detail = f"bounds {plan.bounds[0]} to {plan.bounds[-1]} of {num_layers} layers"
        defects.append(Reason(kind=LAYERS_LOST, detail=detail))
    empty = [stage for stage, (first, end) in enumerate(pairwise(plan.bounds)) if first == end]
    if empty:
        defects.append(Reason(kind=EMPTY_STAGE, detail=f"stage {', '.join(map(str, empty))}"))
    return defects


def _sample_defects(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    """Find samples that no stage takes, because a division was rounded down."""
    defects = []
    for stage in range(plan.pp):
        ranks = setting.data_ranks(plan, stage)
        if ranks is None:
            continue
        taken = plan.num_micro_batches * sum(rank.samples for rank in ranks)
        if taken != setting.global_batch_size:
            detail = f"stage {stage} takes {taken} of {setting.global_batch_size}"
            defects.append(Reason(kind=SAMPLES_LOST, detail=detail))
    return defects


def _memory(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    """Find devices that cannot hold their layers, the worst one of each stage."""
    defects = []
    for stage in range(plan.pp):
        ranks = setting.data_ranks(plan, stage)
        _, tp = plan.degrees[stage]
        if ranks is None:
            detail = f"stage {stage}: tp {tp}, micro-batch size 1"
            defects.append(Reason(kind=NOT_PROFILED, detail=detail))
            continue
        reasons = [
            reason
            for rank in sorted(set(ranks), key=lambda rank: -rank.samples)
            for reason in [_of_rank(setting, plan, stage, rank)]
            if reason is not None
        ]
        defects += reasons[:1]
    return defects


def _of_rank(setting: MetisSetting, plan: MetisPlan, stage: int, rank: DataRank) -> Reason | None:
    """Return whether the devices of one data-parallel index hold the stage's layers."""
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
        Bytes that are needed, the type with the least memory, and its bytes; None where no
        measured size holds the samples.
    """
    _, tp = plan.degrees[stage]
    first, end = plan.bounds[stage : stage + 2]
    table = _layer_memory(setting, rank, tp)
    if table is None:
        return None
    smallest = min(sorted(set(rank.group_types)), key=setting.memory_bytes.__getitem__)
    return float(table[first:end].sum()), smallest, setting.memory_bytes[smallest]


def _layer_memory(setting: MetisSetting, rank: DataRank, tp: int) -> FloatArray | None:
    """Return the memory of all layers at the smallest measured size that holds the samples."""
    sizes = setting.profile.sizes(rank.device_type, tp)
    enough = [size for size in sizes if size >= rank.samples]
    if not enough:
        return None
    return setting.profile.entries[rank.device_type, tp, enough[0]].layer_memory_bytes
