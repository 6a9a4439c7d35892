"""Stages before bounds are chosen: their devices, their options, and layer times on them.

Equal and different stages have the same form: arrays over the tensor-parallel groups of all
stages, stage after stage, in the order of the dp index. A stage waits for its slowest group. The
samples divide into *parts*: groups of different parts exchange no samples and run independently
until gradients are synchronised. With equal stages every replica is a part.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Self

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.layers import LayerCosts, rank_model
from amp_ray.cost.roofline import Rank
from amp_ray.cost.samples import ContextGroup, context_exchange_s
from amp_ray.cost.topology import Rings, Topology
from amp_ray.memo import memoised
from amp_ray.models.model import Model
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import Precision


def split_after(
    block_counts: IntArray,
    start: IntArray | int,
    end: IntArray | int,
    recompute: Recompute,
    before: IntArray | int = 0,
) -> IntArray:
    """Return the boundary up to which the blocks of each stage recompute.

    ``block_counts``, shape ``(num_layers + 1,)``, are the blocks before each boundary, ascending;
    ``before`` are the blocks of each stage in earlier chunks.

    Returns:
        Array of the shape of ``start``; equal to ``end`` if all blocks are treated alike.

    Example:
        >>> counts = np.array([0, 0, 1, 2, 3, 3])
        >>> split_after(counts, 0, 5, Recompute(kind="full", layers=2)).item()
        3
    """
    if recompute.layers is None:
        return np.asarray(end)
    count = block_counts[start] + np.maximum(recompute.layers - before, 0)
    last = np.maximum(np.searchsorted(block_counts, count), start)
    return np.where(block_counts[end] <= count, end, last)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedStages:
    """Stages with their devices, options and samples."""

    options: Sequence[StageOptions]
    devices: IntArray  # device of each rank: tp fastest, then dp, then stages
    # Per stage, samples of one micro-batch by dp index; all stages have the same sum
    shares: Sequence[tuple[int, ...]]
    num_micro_batches: int  # per optimizer step
    # Whether all samples count as one part, which waits for the slowest group
    one_part: bool = False
    virtual_stages: int = 1  # chunks per stage
    # Ranks that divide every sequence; the options count them in dp
    cp: int = 1

    @classmethod
    def of_candidate(cls, candidate: Candidate, devices: Sequence[int] | IntArray) -> Self:
        """Return the stages of a candidate, which are all equal."""
        options = without_context(candidate.options)
        return cls(
            options=(options,) * candidate.pp,
            devices=np.array(devices),
            shares=((candidate.micro_batch_size,) * options.dp,) * candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            virtual_stages=candidate.virtual_stages,
            cp=candidate.options.cp,
        )

    @classmethod
    def of_strategy(cls, strategy: Strategy) -> Self:
        """Return the stages of a strategy."""
        size, options = strategy.micro_batch_size, [stage.options for stage in strategy.stages]
        cp = options[0].cp
        if cp > 1:
            options = [without_context(of_stage) for of_stage in options]
        shares = [stage.shares for stage in strategy.stages]
        return cls(
            options=options,
            devices=np.array(strategy.placement),
            shares=[
                share or (size,) * of_stage.dp
                for share, of_stage in zip(shares, options, strict=True)
            ],
            num_micro_batches=strategy.num_micro_batches,
            virtual_stages=strategy.virtual_stages,
            cp=cp,
        )

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.options)

    @property
    def is_interleaved(self) -> bool:
        """Whether stages have several chunks each."""
        return self.virtual_stages > 1

    @property
    def num_cuts(self) -> int:
        """Number of pairs of consecutive stages; with chunks, the first also follows the last."""
        return self.pp if self.is_interleaved else self.pp - 1

    @cached_property
    def distinct_options(self) -> tuple[list[StageOptions], list[int]]:
        """Distinct options, and for each stage the index of its options among them."""
        first = self.options[0]
        if all(options is first for options in self.options):
            return [first], [0] * self.pp
        number = {options: index for index, options in enumerate(dict.fromkeys(self.options))}
        return list(number), [number[options] for options in self.options]

    @cached_property
    def grids(self) -> list[IntArray]:
        """Device of each rank, an array of shape ``(dp, tp)`` per stage."""
        ends = accumulate((options.num_ranks for options in self.options), initial=0)
        return [
            self.devices[first:end].reshape(options.dp, options.tp)
            for (first, end), options in zip(pairwise(ends), self.options, strict=True)
        ]

    @cached_property
    def groups(self) -> list[list[int]]:
        """Devices of every tensor-parallel group."""
        distinct, _ = self.distinct_options
        if len(distinct) == 1:
            groups: list[list[int]] = self.devices.reshape(-1, distinct[0].tp).tolist()
            return groups
        return list(chain.from_iterable(grid.tolist() for grid in self.grids))

    @property
    def tensor_groups(self) -> IntArray | list[list[int]]:
        """Devices of every tensor-parallel group; an array if all groups have the same size."""
        distinct, _ = self.distinct_options
        return self.devices.reshape(-1, distinct[0].tp) if len(distinct) == 1 else self.groups

    def expert_grid(self, stage: int) -> IntArray:
        """Return a stage's devices, indexed by expert replica, ep and etp (fastest)."""
        return self.grids[stage].reshape(-1, self.options[stage].ep, self.options[stage].expert_tp)

    def exchanges(self, topology: Topology, copies: int) -> list[Path]:
        """Return rate and latencies of each stage's expert all-to-alls if all run at once.

        ``copies`` is that of `Topology.exchange`.
        """
        if all(options.ep == 1 for options in self.distinct_options[0]):
            return [NO_RING] * self.pp
        grids = map(self.expert_grid, range(self.pp))
        return [
            topology.exchange(grid.swapaxes(1, 2).reshape(-1, options.ep), copies)
            for grid, options in zip(grids, self.options, strict=True)
        ]

    def context_rings(self, topology: Topology, head_ranks: int = 1) -> Rings:
        """Return each tensor-parallel group's slowest context-parallel ring, if all run at once.

        A ring has one of every ``head_ranks`` consecutive ranks, which divide attention's heads.
        """
        size = self.cp // head_ranks
        if size == 1:
            return Rings(paths=(NO_RING,), index=(0,) * self.first_group[-1])
        rows = [
            grid.reshape(-1, size, head_ranks * grid.shape[1]).swapaxes(1, 2) for grid in self.grids
        ]
        rings = topology.rings(np.concatenate([row.reshape(-1, size) for row in rows]))
        order = sorted(rings.paths, key=lambda path: (path.bytes_per_s, -path.step_s))
        place = np.array([order.index(path) for path in rings.paths])[list(rings.index)]
        ends = np.cumsum([row.shape[0] * row.shape[1] for row in rows])
        slowest = [
            np.repeat(ranks.reshape(len(row), -1).min(axis=1), self.cp)
            for ranks, row in zip(np.split(place, ends[:-1]), rows, strict=True)
        ]
        return Rings(paths=tuple(order), index=tuple(np.concatenate(slowest).tolist()))

    def head_exchanges(self, topology: Topology, head_ranks: int) -> list[Path]:
        """Return the path of each stage's all-to-alls of attention's heads, if all run at once."""
        if head_ranks == 1:
            return [NO_RING] * self.pp
        rows = [grid.reshape(-1, head_ranks, grid.shape[1]).swapaxes(1, 2) for grid in self.grids]
        return [topology.exchange(row.reshape(-1, head_ranks)) for row in rows]

    def types(self, cluster: Cluster) -> list[frozenset[int]]:
        """Return the device types of every tensor-parallel group."""
        if len(cluster.device_types) == 1:
            return [frozenset((0,))] * self.first_group[-1]
        type_of_device = cluster.type_of_device
        return [frozenset(map(type_of_device.__getitem__, group)) for group in self.groups]

    def leaves_nodes(self, topology: Topology) -> bool:
        """Return whether the devices are on more than one node."""
        nodes = topology.node_of_device[self.devices]
        return bool((nodes != nodes[0]).any())

    @cached_property
    def tp(self) -> IntArray:
        """Shape ``(pp,)``. Tensor parallel degree of each stage."""
        return np.array([options.tp for options in self.options])

    @cached_property
    def first_group(self) -> list[int]:
        """Length ``pp + 1``. Index of each stage's first group."""
        return [0, *accumulate(map(len, self.shares))]

    @cached_property
    def stage_of_group(self) -> IntArray:
        """Shape ``(num_groups,)``. Stage index of each group."""
        return np.repeat(np.arange(self.pp), [options.dp for options in self.options])

    @cached_property
    def samples(self) -> IntArray:
        """Shape ``(num_groups,)``. Samples of each group in one micro-batch."""
        return np.array(list(chain.from_iterable(self.shares)))

    @cached_property
    def parts(self) -> IntArray:
        """Shape ``(num_groups,)``. Part of the samples that each group belongs to."""
        if self.one_part:
            return np.zeros_like(self.samples)
        if len(set(self.shares)) == 1:
            return np.arange(len(self.samples)) % len(self.shares[0])
        return np.array(list(chain.from_iterable(common_parts(self.shares))))

    @property
    def num_parts(self) -> int:
        """Number of parts of the samples."""
        return int(self.parts[-1]) + 1

    def worst(self, values: FloatArray) -> FloatArray:
        """Return the largest value of each part in each stage, shape ``(..., pp, num_parts)``.

        Args:
            values: Shape ``(..., num_groups)``.
        """
        shape = (*values.shape[:-1], self.pp, self.num_parts)
        if values.shape[-1] > self.pp * self.num_parts:
            values = np.maximum.reduceat(values, self._first_of_part, axis=-1)
        return values.reshape(shape)

    @cached_property
    def _first_of_part(self) -> IntArray:
        places = self.stage_of_group * self.num_parts + self.parts
        return np.searchsorted(places, np.arange(self.pp * self.num_parts))


def without_context(options: StageOptions) -> StageOptions:
    """Return options with cp folded into dp."""
    return options if options.cp == 1 else replace(options, dp=options.dp * options.cp, cp=1)


def common_parts(shares: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Divide samples into the smallest parts such that no rank holds samples of two parts.

    Ranks of different parts never wait for each other before gradients are synchronised.

    Args:
        shares: Samples of each rank, by stage; all stages have the same sum.

    Returns:
        Part index of each rank, by stage, counted from 0.

    Example:
        >>> common_parts([(2, 2), (1, 1, 2), (4,)])
        ((0, 0), (0, 0, 0), (0,))
        >>> common_parts([(2, 2), (1, 1, 2)])
        ((0, 1), (0, 0, 1))
    """
    ends = [list(accumulate(row)) for row in shares]
    borders = sorted(set(ends[0]).intersection(*ends[1:]))
    return tuple(tuple(bisect_left(borders, end) for end in row_ends) for row_ends in ends)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """Layer times of the tensor-parallel groups of some stages."""

    stages: PlacedStages
    # Shape ``(num_kinds, 3, num_layers + 1)``. Prefix sums over the layers: forward, backward, and
    # the all-reduces within both.
    tables: FloatArray
    # Times without recompute, in the same shape, for the blocks of a stage after those that
    # recompute.
    plain: FloatArray
    kind: IntArray  # shape ``(num_groups,)``. Index into ``tables``.
    block_counts: IntArray  # shape ``(num_layers + 1,)``; see `Model.block_counts`
    extrapolated: bool  # whether any table extrapolates from measurements

    @memoised
    def rows(self) -> tuple[FloatArray, IntArray]:
        """Return rows of layer times for the partition, and the row of each stage.

        Each layer of a stage takes the time of the slowest group.

        Returns:
            Prefix sums of shape ``(num_rows, num_layers + 1)`` and rows of shape ``(pp,)``.
        """
        both = self.tables[:, 0] + self.tables[:, 1]
        step_s = both[:, 1:] - both[:, :-1]
        rows: dict[tuple[int, ...], int] = {}
        kinds = self.kind.tolist()
        of_stage = [
            rows.setdefault(tuple(sorted(set(kinds[first:end]))), len(rows))
            for first, end in pairwise(self.stages.first_group)
        ]
        slowest = np.array([step_s[list(kinds)].max(axis=0) for kinds in rows])
        return prefix_sums(slowest), np.array(of_stage, dtype=np.int64)

    @memoised
    def at(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return forward, backward and all-reduce seconds, in an array that nobody may change.

        Args:
            bounds: Shape ``(num_chunks + 1,)``. Bounds of all chunks; without an interleaved
                schedule each stage is one chunk.

        Returns:
            Shape ``(3, num_chunks, num_parts)``.
        """
        cuts = np.array(bounds)
        firsts, ends = cuts[:-1], cuts[1:]
        split, num_rounds = self._splits(firsts, ends), len(firsts) // self.stages.pp
        is_one_kind = len(self.tables) == 1  # then one group stands for all of its stage
        stage = np.arange(self.stages.pp) if is_one_kind else self.stages.stage_of_group
        chunk = (np.arange(0, len(firsts), self.stages.pp)[:, None] + stage).ravel()
        kind = np.zeros_like(chunk) if is_one_kind else np.tile(self.kind, num_rounds)
        tables = self.tables.transpose(1, 0, 2)
        took = tables[:, kind, split[chunk]] - tables[:, kind, firsts[chunk]]
        if (split < ends).any():
            plain = self.plain.transpose(1, 0, 2)
            took += plain[:, kind, ends[chunk]] - plain[:, kind, split[chunk]]
        if is_one_kind:
            return np.repeat(took[..., None], self.stages.num_parts, axis=-1)
        worst = self.stages.worst(took.reshape(3, num_rounds, -1))
        return worst.reshape(3, len(firsts), -1)

    def layers(self) -> FloatArray:
        """Return forward, backward and all-reduce seconds of all layers in a single stage.

        Returns:
            Shape ``(3, num_layers)``: for each layer, the time of the slowest group.
        """
        num_layers = self.tables.shape[-1] - 1
        (split,) = self._splits(np.array([0]), np.array([num_layers]))
        tables = np.diff(self.tables, axis=-1)
        tables[..., split:] = np.diff(self.plain, axis=-1)[..., split:]
        slowest: FloatArray = tables.max(axis=0)
        return slowest

    def _splits(self, firsts: IntArray, ends: IntArray) -> IntArray:
        """Return the boundary up to which the blocks of each chunk recompute.

        Both arrays have shape ``(num_chunks,)``.
        """
        distinct, of_stage = self.stages.distinct_options
        if all(options.recompute.layers is None for options in distinct):
            return ends
        counts, split = self.block_counts, ends.copy()
        blocks = (counts[ends] - counts[firsts]).reshape(-1, self.stages.pp)
        before = (blocks.cumsum(axis=0) - blocks).ravel()  # in earlier chunks of the stage
        numbers = np.tile(of_stage, len(blocks))
        for number, options in enumerate(distinct):
            if options.recompute.layers is not None:
                alike = np.flatnonzero(numbers == number)
                split[alike] = split_after(
                    counts, firsts[alike], ends[alike], options.recompute, before[alike]
                )
        return split


def prefix_sums(rows: FloatArray) -> FloatArray:
    """Return prefix sums of shape ``(num_rows, num_layers + 1)`` of ``(num_rows, num_layers)``."""
    prefix = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=prefix[:, 1:])
    return prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """Key of the times of a tensor-parallel group: all that they depend on besides the layers."""

    types: tuple[int, ...]  # device types, ascending
    ring: Path  # path of its all-reduces
    exchange: Path  # path of its experts' all-to-alls
    context: Path  # path of keys and values between the ranks that divide its sequences
    heads: Path  # path of all-to-alls between those of them that divide attention's heads
    options: int  # index into `PlacedStages.distinct_options`
    samples: int  # in one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupKinds:
    """Kinds of tensor-parallel groups: groups of one kind take the same time for any layers."""

    stages: PlacedStages
    distinct: tuple[GroupKind, ...]
    kind: IntArray  # shape ``(num_groups,)``. Index into ``distinct``.


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeTables:
    """Layer times of every kind of tensor-parallel group; many candidates share a kind."""

    layer_costs: LayerCosts
    topology: Topology  # types of the devices, and the links between them
    precision: Precision  # precision of activations and weights
    cp: int = 1  # ranks that divide every sequence
    head_ranks: int = 1  # those of them that divide the heads of attention

    def times(
        self, stages: PlacedStages, types: Sequence[frozenset[int]], rings: Rings
    ) -> StageTimes:
        """Return the layer times of some stages.

        ``types`` are the device types of each tensor-parallel group, ``rings`` the paths of its
        all-reduces.

        Raises:
            ValueError: If the profile is measured, but not for a stage's tp on its devices.
        """
        return self.of_kinds(self.kinds(stages, types, rings))

    def kinds(
        self, stages: PlacedStages, types: Sequence[frozenset[int]], rings: Rings
    ) -> GroupKinds:
        """Sort tensor-parallel groups into kinds of equal times; for the arguments see `times`."""
        _, of_stage = stages.distinct_options
        exchanges: dict[Path, int] = {}
        context = stages.context_rings(self.topology, self.head_ranks)
        heads = stages.head_exchanges(self.topology, self.head_ranks)
        number: dict[tuple[frozenset[int], int, int, int, int, int, int], int] = {}
        kind: list[int] = []
        for stage, path in enumerate(stages.exchanges(self.topology, self.copies)):
            first, end = stages.first_group[stage : stage + 2]
            options, exchange, divided = (
                of_stage[stage],
                *(exchanges.setdefault(each, len(exchanges)) for each in (path, heads[stage])),
            )
            groups = zip(
                types[first:end],
                rings.index[first:end],
                context.index[first:end],
                stages.shares[stage],
                strict=True,
            )
            rest = options, exchange, divided
            kind += [number.setdefault((*row, *rest), len(number)) for row in groups]
        paths = list(exchanges)
        distinct = tuple(
            GroupKind(
                types=tuple(sorted(device_types)),
                ring=rings.paths[ring],
                exchange=paths[exchange],
                context=context.paths[around],
                heads=paths[divided],
                options=options,
                samples=samples,
            )
            for device_types, ring, around, samples, options, exchange, divided in number
        )
        return GroupKinds(stages=stages, distinct=distinct, kind=np.array(kind))

    def of_kinds(self, kinds: GroupKinds) -> StageTimes:
        """Return the layer times of stages, from the kinds of their groups."""

        def tables(options: Sequence[StageOptions]) -> tuple[FloatArray, bool]:
            priced = [self.of_kind(kind, options[kind.options]) for kind in kinds.distinct]
            return np.array([table for table, _ in priced]), any(more for _, more in priced)

        distinct, _ = kinds.stages.distinct_options
        whole, extrapolated = tables(distinct)
        plain = whole
        if any(options.recompute.layers is not None for options in distinct):
            plain, _ = tables([replace(option, recompute=NO_RECOMPUTE) for option in distinct])
        return StageTimes(
            stages=kinds.stages,
            tables=whole,
            plain=plain,
            kind=kinds.kind,
            block_counts=self.block_counts,
            extrapolated=extrapolated,
        )

    def of_kind(self, kind: GroupKind, options: StageOptions) -> tuple[FloatArray, bool]:
        """Return `table` of a kind of group, with exchanges between ranks of a sequence."""
        table, extrapolated = self.table(
            kind.types, kind.ring, options, kind.samples, kind.exchange
        )
        if self.cp > 1:
            table = self._with_context(table, kind, options)
        return table, extrapolated

    @cached_property
    def copies(self) -> int:
        """Copies of a token for its experts if each node receives only one, else 1."""
        costs = self.layer_costs
        once = costs.traits.sends_tokens_once
        return max(1, costs.model.shape.experts_per_token) if once else 1

    @memoised
    def rank_model(self, tp: int, ep: int, expert_tp: int) -> Model:
        """Return the model of one rank's work; see `layers.rank_model`."""
        costs = self.layer_costs
        return rank_model(costs.model, costs.constants, tp=tp, ep=ep, expert_tp=expert_tp)

    @cached_property
    def block_counts(self) -> IntArray:
        """Blocks before each boundary; see `Model.block_counts`."""
        return np.array(self.layer_costs.model.block_counts)

    def table(
        self,
        types: tuple[int, ...],
        ring: Path,
        options: StageOptions,
        samples: int,
        exchange: Path = NO_RING,
    ) -> tuple[FloatArray, bool]:
        """Return the times of one kind of group.

        Each layer takes the time of the slowest device, as all-reduces synchronise devices.
        ``types`` ascend; ``options`` are those of its stage, whose dp does not matter. By default
        ``exchange`` is free, which gives a lower bound.

        Returns:
            Prefix sums as in `StageTimes.tables`, and whether they extrapolate.

        Raises:
            ValueError: If the profile is measured, but not for this tp on these devices.
        """
        device_types = self.topology.cluster.device_types
        ranks = [Rank.of(device_types[kind], options, samples, self.precision) for kind in types]
        layout = options.ep, options.expert_tp
        return self._table(tuple(ranks), ring, layout, exchange, options.recompute.kind)

    @memoised
    def _table(
        self,
        ranks: tuple[Rank, ...],
        ring: Path,
        layout: tuple[int, int],
        exchange: Path,
        again: RecomputeKind,
    ) -> tuple[FloatArray, bool]:
        costs = self._costs_of(ranks[0].tp, *layout)
        tables = [costs.table(rank, ring, again, exchange) for rank in ranks]
        slowest = np.max([table for table, _ in tables], axis=0)
        return prefix_sums(slowest), any(extrapolated for _, extrapolated in tables)

    @memoised
    def _costs_of(self, tp: int, ep: int, expert_tp: int) -> LayerCosts:
        return replace(self.layer_costs, model=self.rank_model(tp, ep, expert_tp))

    @memoised
    def exchange_s(
        self, path: Path, tp: int, samples: int, heads: Path = NO_RING
    ) -> tuple[FloatArray, FloatArray]:
        """Return the time that exchanges between ranks of a sequence add to both passes by layer.

        By default all-to-alls of heads are free, which gives a lower bound.
        """
        costs, rows = self.layer_costs, []
        ring_ranks = self.cp // self.head_ranks
        group = ContextGroup(ring_ranks=ring_ranks, ring=path, exchange=heads)
        layers, positions = costs.model.distinct_layers
        for device in self.topology.cluster.device_types:
            rank = Rank(device=device, tp=tp, micro_batch_size=samples, precision=self.precision)
            rows.append(
                [
                    context_exchange_s(layer, rank, group, costs.traits, costs.constants)
                    for layer in layers
                ]
            )
        forward_s, backward_s = np.max(rows, axis=0)[list(positions)].T
        return forward_s, backward_s

    def _with_context(
        self, table: FloatArray, kind: GroupKind, options: StageOptions
    ) -> FloatArray:
        """Add the exchanges between ranks of a sequence to the times of a kind of group."""
        forward_s, backward_s = self.exchange_s(kind.context, options.tp, kind.samples, kind.heads)
        alone = prefix_sums(np.array([forward_s, backward_s, forward_s + backward_s]))
        keeps = options.recompute.kind in {"none", "per-operator"}  # results of attention
        again_s = np.zeros_like(forward_s) if keeps else forward_s
        return table + alone + prefix_sums(np.array([0 * again_s, again_s, again_s]))
