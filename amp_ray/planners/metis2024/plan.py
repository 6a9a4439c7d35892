"""Plans of the planner published as Metis (2024): the devices of every stage, and their samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile


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
        """Refuse what no plan can be."""
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
    """Everything that is given to the published planner.

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
        """Refuse what its profile does not cover."""
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
