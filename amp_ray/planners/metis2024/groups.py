"""All device groups that a stage of a Metis (2024) plan can have, as arrays, with their links.

Ranks stand type after type, stages take them in a row. So a group is a run of ranks of one or
more types, and a variant of it says how many of them share a layer (tp). Nothing here depends on
the number of micro-batches.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray, SmallIntArray
from amp_ray.partition.resources import NO_KIND, ResourceGraph, resource_graph
from amp_ray.planners.metis2024.plan import BYTES_PER_GBYTE, MetisSetting
from amp_ray.units import GIGA

_MOST_RANKS: Final = 1 << 20
"""Ranks whose links are computed at once, for arrays of about ten megabytes."""

UNLIMITED: Final = 1 << 30
"""A number larger than any degree or size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisLimits:
    """Limits of the published planner's search."""

    max_tp: int = UNLIMITED
    max_size: int = UNLIMITED  # samples of a micro-batch per data-parallel index, rounded down


@dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """Device groups with their degrees: ``V`` variants over ``K`` device types.

    A piece is what a group takes of one type; pieces stand in the order of the ranks.
    """

    edge: IntArray  # shape ``(V,)``. Of the graph.
    tp: IntArray  # shape ``(V,)``
    dp: IntArray  # shape ``(V,)``
    kinds: SmallIntArray  # shape ``(V, K)``. Type of each piece, then -1.
    ends: SmallIntArray  # shape ``(V, K)``. End of each piece within the group.
    first_rank: IntArray  # shape ``(V,)``
    # Shape ``(V, K)``. Data-parallel indices whose first device is in the piece.
    replicas: SmallIntArray

    @cached_property
    def mixed(self) -> BoolArray:
        """Shape ``(V,)``. Whether the group has several types."""
        found: BoolArray = (self.kinds != NO_KIND).sum(axis=1) > 1
        return found

    def reach(self, rows: IntArray) -> IntArray:
        """Return where the last data-parallel index that begins in each piece of groups ends."""
        tp = self.tp[rows, None]
        end: IntArray = -(-self.ends[rows] // tp) * tp
        return end


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSpace:
    """Every group of every order of the device types, or of one order."""

    setting: MetisSetting
    limits: MetisLimits  # of the search
    type_order: tuple[str, ...] | None = None  # the only one; by default every order

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Device types of the ranks, in alphabetical order."""
        return tuple(sorted(set(self._types)))

    @cached_property
    def _types(self) -> tuple[str, ...]:
        """Type of every rank in the order, or in any."""
        return self.setting.ordered_types(self.type_order or self.setting.node_types)

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that were measured and are allowed, ascending."""
        profile = self.setting.profile
        measured = {tp for kind in self.kinds for tp in profile.tps(kind)}
        return tuple(sorted(tp for tp in measured if tp <= self.limits.max_tp))

    @cached_property
    def counts(self) -> IntArray:
        """Shape ``(K,)``. Devices of each type."""
        return np.array([self._types.count(kind) for kind in self.kinds])

    @cached_property
    def memory_bytes(self) -> FloatArray:
        """Shape ``(K,)``. Memory of one device of each type."""
        return np.array([self.setting.memory_bytes[kind] for kind in self.kinds], np.float64)

    @cached_property
    def graph(self) -> ResourceGraph:
        """Graph whose states count the devices that later stages have taken."""
        return resource_graph(tuple(self.counts.tolist()))

    @cached_property
    def variants(self) -> Variants:
        """Every group at every tp that divides it and leaves no index without a sample."""
        graph, most = self.graph, self.setting.global_batch_size
        size = graph.size
        allowed = self._in_order()
        pairs = [
            (np.flatnonzero(allowed & (size % tp == 0) & (size <= tp * most)), tp)
            for tp in self.tps
        ]
        edge = np.concatenate([edges for edges, _ in pairs] or [np.empty(0, np.int64)])
        tp = np.repeat([tp for _, tp in pairs], [len(edges) for edges, _ in pairs]).astype(np.int64)
        ends = graph.sizes[edge].cumsum(axis=1, dtype=np.int32)
        starts = ends - graph.sizes[edge]
        taken = np.array([self._taken(state) for state in range(len(graph.states))])
        end_rank = int(self.counts.sum()) - taken[graph.from_state[edge]]
        return Variants(
            edge=edge,
            tp=tp,
            dp=size[edge] // tp,
            kinds=graph.kinds[edge],
            ends=ends,
            first_rank=end_rank - size[edge],
            replicas=(-(-ends // tp[:, None]) + -starts // tp[:, None]).astype(np.int32),
        )

    def _in_order(self) -> BoolArray:
        """Return which groups of the graph stages can have in this order, as a mask."""
        graph, order = self.graph, list(dict.fromkeys(self._types))
        if self.type_order is None:
            return np.ones(len(graph.size), np.bool_)
        # A group takes the last types that are left: those behind its own are closed, no other is.
        place = np.array([order.index(kind) for kind in self.kinds])
        behind = np.array([sum(1 << kind for kind in np.flatnonzero(place > own)) for own in place])
        closed = np.array([closed for closed, _, _ in graph.states])[graph.from_state]
        last = np.take_along_axis(graph.kinds, graph.num_kinds[:, None] - 1, axis=1)[:, 0]
        allowed: BoolArray = closed == behind[last]
        for column in range(1, len(order)):
            both = graph.kinds[:, column] != NO_KIND
            step = place[graph.kinds[:, column]] - place[graph.kinds[:, column - 1]]
            allowed &= ~both | (step == 1)
        return allowed

    def weight(self, rows: IntArray, of_kind: FloatArray) -> FloatArray:
        """Sum the weights of groups' devices, from the weight of a device of each type."""
        device = np.append(of_kind, 0.0)[self.variants.kinds[rows]]
        total: FloatArray = (device * self.graph.sizes[self.variants.edge[rows]]).sum(axis=1)
        return total

    def scarcest(self, rows: IntArray) -> SmallIntArray:
        """Return the type with the least memory of the last index that begins in each piece."""
        kinds, scarcest = self.variants.kinds[rows], self.variants.kinds[rows]
        starts = np.pad(self.variants.ends[rows], ((0, 0), (1, 0)))[:, :-1]
        reach = self.variants.reach(rows)
        for piece in range(len(self.kinds)):
            for later in range(piece + 1, len(self.kinds)):
                kind = kinds[:, later]
                touched = (kind != NO_KIND) & (starts[:, later] < reach[:, piece])
                less = self.memory_bytes[kind] < self.memory_bytes[scarcest[:, piece]]
                scarcest[:, piece] = np.where(touched & less, kind, scarcest[:, piece])
        return scarcest

    @cached_property
    def slowest_rate(self) -> FloatArray:
        """Shape ``(V,)``. Bytes per second of the slowest node of the group's types."""
        rates = np.append(self._rates[:, 1], np.inf)[self.variants.kinds]
        slowest: FloatArray = rates.min(axis=1)
        return slowest

    @cached_property
    def gradient_rate(self) -> FloatArray:
        """Shape ``(V,)``. Bytes per second of the slowest group of its gradient all-reduce.

        Groups are every dp-th rank, tp of them.
        """
        if self.is_plain:
            return self.slowest_rate
        variants = self.variants
        rate = np.full(len(variants.edge), np.inf)
        for tp in self.tps:
            of_tp = np.flatnonzero(variants.tp == tp)
            at_once = max(1, _MOST_RANKS // (tp * int(variants.dp[of_tp].max(initial=1))))
            for first in range(0, len(of_tp), at_once):
                rows = of_tp[first : first + at_once]
                dp, index = variants.dp[rows, None], np.arange(variants.dp[rows].max())
                real = index < dp
                ranks = [np.where(real, index + step * dp, 0) for step in range(tp)]
                shared = self._shared_rate(rows, ranks)
                rate[rows] = np.where(real, shared, np.inf).min(axis=1, initial=np.inf)
        return rate

    @cached_property
    def is_plain(self) -> bool:
        """Whether every rate is the slowest type's, so that shared nodes make no difference."""
        equal = bool((self._rates[:, 0] == self._rates[:, 1]).all())
        return equal and not (self.counts % self._per_node).any()

    @cached_property
    def labels(self) -> IntArray:
        """Shape ``(V,)``. Groups of one label receive transfers at the same rate."""
        rates = np.unique(self.slowest_rate)
        variants = self.variants
        last_rank = variants.first_rank + self.graph.size[variants.edge] - 1
        in_one = variants.first_rank // self._per_node == last_rank // self._per_node
        flag = np.zeros_like(in_one) if self.is_plain else in_one
        label: IntArray = 2 * np.searchsorted(rates, self.slowest_rate) + flag
        return label

    def transfer_rate(self, variant: IntArray, next_label: IntArray) -> FloatArray:
        """Return bytes per second from groups to the next ones.

        Args:
            variant: Shape ``(O,)``.
            next_label: Shape ``(O,)``. Label of the next group.
        """
        variants = self.variants
        rate = np.minimum(self.slowest_rate[variant], np.unique(self.slowest_rate)[next_label // 2])
        if self.is_plain:
            return rate
        first = variants.first_rank[variant]
        end = first + self.graph.size[variants.edge[variant]]
        shared = (next_label % 2 == 1) & (first // self._per_node == end // self._per_node)
        own: FloatArray = np.where(shared, self._rates[variants.kinds[variant, 0], 0], rate)
        return own

    @property
    def _per_node(self) -> int:
        """Devices of a node; every one counts as large as the first."""
        return self.setting.cluster.nodes[0].num_slots

    @cached_property
    def _rates(self) -> FloatArray:
        """Shape ``(K, 2)``. Bytes per second within the first and the slowest node of each type."""
        nodes = self.setting.cluster.nodes
        rates_of_kinds = []
        for kind in self.kinds:
            rates = [
                node.intra.bandwidth_bytes_per_s / GIGA * BYTES_PER_GBYTE
                for of, node in zip(self.setting.node_types, nodes, strict=True)
                if of == kind
            ]
            rates_of_kinds.append((rates[0], min(rates)))
        return np.array(rates_of_kinds)

    def _taken(self, state: int) -> int:
        """Count the devices that later stages have taken."""
        closed, _, used = self.graph.states[state]
        whole = sum(int(count) for kind, count in enumerate(self.counts) if closed >> kind & 1)
        return whole + used

    def _shared_rate(self, rows: IntArray, ranks: list[IntArray]) -> FloatArray:
        """Return the rate of groups of ranks: of the first's type in one node, else the slowest."""
        kinds = [self._kind_at(rows, rank) for rank in ranks]
        first_rank = self.variants.first_rank[rows, None]
        nodes = [(first_rank + rank) // self._per_node for rank in ranks]
        one_node = np.all([node == nodes[0] for node in nodes], axis=0)
        slowest = np.min([self._rates[kind, 1] for kind in kinds], axis=0)
        rate: FloatArray = np.where(one_node, self._rates[kinds[0], 0], slowest)
        return rate

    def _kind_at(self, rows: IntArray, rank: IntArray) -> IntArray:
        """Return the type of a device of each group."""
        ends, kinds = self.variants.ends[rows], self.variants.kinds[rows].astype(np.int64)
        piece = (rank[:, :, None] >= ends[:, None, :]).sum(axis=2)
        found: IntArray = np.take_along_axis(kinds, np.minimum(piece, len(self.kinds) - 1), axis=1)
        return found
