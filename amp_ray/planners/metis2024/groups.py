"""All device groups that a stage of a Metis (2024) plan can have, as arrays: links, times, memory.

Ranks are ordered by device type, and every stage takes a run of consecutive ranks. So a group is a
run of ranks of one or more types, and a variant is a group with a tensor parallel degree.
`GroupSpace` holds everything that does not depend on the number of micro-batches, `GroupTable`
everything that does. Layers are counted from the last to the first, since stages take devices from
the last one on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray, SmallIntArray
from amp_ray.inputs.published_profile import PublishedEntry
from amp_ray.partition.resources import NO_KIND, ResourceGraph, resource_graph
from amp_ray.partition.rows import distinct_rows
from amp_ray.planners.metis2024.plan import (
    BYTES_PER_GBYTE,
    NO_REST_S,
    MetisSetting,
    proportional_shares,
)
from amp_ray.units import GIGA

NEARLY: Final = 1e-9
"""Fractions of samples that are closer than this may compare either way, by order of additions."""

_BLOCK: Final = 1 << 17
"""Groups computed at once, so that arrays stay at about ten megabytes."""

_MOST_RANKS: Final = 1 << 20
"""Ranks whose links are computed at once, so that arrays stay at about ten megabytes."""

UNLIMITED: Final = 1 << 30
"""A number larger than any degree or size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisLimits:
    """Limits of the published planner's search."""

    max_tp: int = UNLIMITED
    max_size: int = UNLIMITED  # most samples of a micro-batch per data-parallel index, rounded down


@dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """Device groups with their degrees: ``V`` variants over ``K`` device types.

    A piece is the part of a group with one device type; pieces are in the order of the ranks.
    """

    edge: IntArray  # shape ``(V,)``. Edge of `GroupSpace.graph`.
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
        mixed: BoolArray = (self.kinds != NO_KIND).sum(axis=1) > 1
        return mixed

    def reach(self, rows: IntArray) -> IntArray:
        """Return the end of the last data-parallel index that begins in each piece of groups."""
        tp = self.tp[rows, None]
        end: IntArray = -(-self.ends[rows] // tp) * tp
        return end


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSpace:
    """Every group of every order of the device types, or of one order."""

    setting: MetisSetting
    limits: MetisLimits  # of the search
    type_order: tuple[str, ...] | None = None  # the only order of types; None means every order

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Device types of the ranks, in alphabetical order."""
        return tuple(sorted(set(self._types)))

    @cached_property
    def _types(self) -> tuple[str, ...]:
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
    def device_bytes(self) -> FloatArray:
        """Shape ``(K,)``. Memory of one device of each type."""
        return np.array([self.setting.memory_bytes[kind] for kind in self.kinds], np.float64)

    @cached_property
    def graph(self) -> ResourceGraph:
        """Graph whose states count the devices that later stages have taken."""
        return resource_graph(tuple(self.counts.tolist()))

    @cached_property
    def variants(self) -> Variants:
        """Every group at every tp that divides it and leaves each index at least one sample."""
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
        """Return a mask of the edges of the graph that the required order of types allows."""
        graph, order = self.graph, list(dict.fromkeys(self._types))
        if self.type_order is None:
            return np.ones(len(graph.size), np.bool_)
        # A group takes the last remaining types: later types are used up, earlier ones are not.
        place = np.array([order.index(kind) for kind in self.kinds])
        behind = np.array([sum(1 << kind for kind in np.flatnonzero(place > at)) for at in place])
        closed = np.array([closed for closed, _, _ in graph.states])[graph.from_state]
        last = np.take_along_axis(graph.kinds, graph.num_kinds[:, None] - 1, axis=1)[:, 0]
        allowed: BoolArray = closed == behind[last]
        for column in range(1, len(order)):
            both = graph.kinds[:, column] != NO_KIND
            step = place[graph.kinds[:, column]] - place[graph.kinds[:, column - 1]]
            allowed &= ~both | (step == 1)
        return allowed

    def scarcest(self, rows: IntArray) -> SmallIntArray:
        """Return, per piece, the type with the least memory in the last index that begins there."""
        kinds, scarcest = self.variants.kinds[rows], self.variants.kinds[rows]
        starts = np.pad(self.variants.ends[rows], ((0, 0), (1, 0)))[:, :-1]
        reach = self.variants.reach(rows)
        for piece in range(len(self.kinds)):
            for later in range(piece + 1, len(self.kinds)):
                kind = kinds[:, later]
                touched = (kind != NO_KIND) & (starts[:, later] < reach[:, piece])
                less = self.device_bytes[kind] < self.device_bytes[scarcest[:, piece]]
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
        """Shape ``(V,)``. Bytes per second of the slowest of the groups that all-reduce gradients.

        The published planner forms these groups of every dp-th rank, with tp ranks each.
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
        """Whether every rate equals the slowest type's, whatever nodes the groups share."""
        equal = bool((self._rates[:, 0] == self._rates[:, 1]).all())
        return equal and not (self.counts % self._per_node).any()

    @cached_property
    def labels(self) -> IntArray:
        """Shape ``(V,)``. Groups with the same label receive transfers at the same rate."""
        rates = np.unique(self.slowest_rate)
        variants = self.variants
        last_rank = variants.first_rank + self.graph.size[variants.edge] - 1
        in_one = variants.first_rank // self._per_node == last_rank // self._per_node
        flag = np.zeros_like(in_one) if self.is_plain else in_one
        label: IntArray = 2 * np.searchsorted(rates, self.slowest_rate) + flag
        return label

    def transfer_rate(self, variant: IntArray, next_label: IntArray) -> FloatArray:
        """Return bytes per second from groups to the next groups, by label of the next groups."""
        variants = self.variants
        rate = np.minimum(self.slowest_rate[variant], np.unique(self.slowest_rate)[next_label // 2])
        if self.is_plain:
            return rate
        first = variants.first_rank[variant]
        end = first + self.graph.size[variants.edge[variant]]
        shared = (next_label % 2 == 1) & (first // self._per_node == end // self._per_node)
        within: FloatArray = np.where(shared, self._rates[variants.kinds[variant, 0], 0], rate)
        return within

    @property
    def _per_node(self) -> int:
        """Devices per node; the published planner takes every node to be as large as the first."""
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
        closed, _, used = self.graph.states[state]
        whole = sum(int(count) for kind, count in enumerate(self.counts) if closed >> kind & 1)
        return whole + used

    def _shared_rate(self, rows: IntArray, ranks: list[IntArray]) -> FloatArray:
        """Return the rate of groups of ranks: within one node its type's, else the slowest one."""
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
        last = len(self.kinds) - 1
        return np.take_along_axis(kinds, np.minimum(piece, last), axis=1)

    @cached_property
    def most_samples(self) -> int:
        """Upper limit on the samples of a device: sums of measured powers of two are below it."""
        return 2 * max(size for _, _, size in self.setting.profile.entries)

    @property
    def num_rows(self) -> int:
        """Number of rows of a table by type, tp and samples per index, samples fastest.

        Rows with 0 samples or without a measurement are NaN. `layer_s` has twice as many rows.
        """
        return len(self.kinds) * len(self.tps) * (self.most_samples + 1)

    @cached_property
    def layer_s(self) -> FloatArray:
        """Shape ``(2 * num_rows, L)``. Samples run in powers of two, then run all at once."""
        times = self._table("layer_s")
        split = times.copy()
        for samples in range(1, self.most_samples + 1):
            rest = samples & (samples - 1)
            if rest:
                split[:, :, samples] = split[:, :, rest] + split[:, :, samples - rest]
        return np.concatenate([split, times]).reshape(2 * self.num_rows, -1)

    @cached_property
    def layer_bytes(self) -> FloatArray:
        """Shape ``(num_rows, L)``. Bytes at the smallest measured size that holds the samples."""
        held = self._table("layer_memory_bytes")
        for samples in range(self.most_samples - 1, 0, -1):
            missing = np.isnan(held[:, :, samples])
            held[:, :, samples] = np.where(missing, held[:, :, samples + 1], held[:, :, samples])
        return held.reshape(self.num_rows, -1)

    @cached_property
    def rest_s(self) -> FloatArray:
        """Shape ``(num_rows,)``. Time of a last stage beyond its layers."""
        rest = np.full((len(self.kinds), len(self.tps), self.most_samples + 1), np.nan)
        for of, tp, size, entry in self._entries():
            if entry.rest_s is not None and abs(entry.rest_s) >= NO_REST_S:
                rest[of, tp, size] = entry.rest_s
        return rest.reshape(-1)

    @cached_property
    def is_known(self) -> BoolArray:
        """Shape ``(2 * num_rows,)``. Whether each row of `layer_s` was measured."""
        measured: BoolArray = ~np.isnan(self.layer_s[:, 0])
        return measured

    def row(self, kind: IntArray | SmallIntArray, tp: IntArray, samples: IntArray) -> IntArray:
        """Return row numbers; samples beyond the table give the row of 0 samples, which is NaN."""
        inside = np.where(samples > self.most_samples, 0, samples)
        tp_index = np.searchsorted(self.tps, tp)
        row: IntArray = (kind * len(self.tps) + tp_index) * (self.most_samples + 1) + inside
        return row

    def _table(self, name: str) -> FloatArray:
        """Return one measured figure of every layer, the last layer first."""
        shape = (
            len(self.kinds),
            len(self.tps),
            self.most_samples + 1,
            self.setting.profile.num_layers,
        )
        table = np.full(shape, np.nan)
        for of, tp, size, entry in self._entries():
            values: FloatArray = getattr(entry, name)
            table[of, tp, size] = values[::-1]
        return table

    def _entries(self) -> Iterator[tuple[int, int, int, PublishedEntry]]:
        """Yield type index, tp index, size and entry of each measurement for this cluster."""
        for (kind, tp, size), entry in self.setting.profile.entries.items():
            if kind in self.kinds and tp in self.tps:
                yield self.kinds.index(kind), self.tps.index(tp), size, entry


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Samples of the data-parallel indices of groups, by the piece in which they begin."""

    valid: BoolArray  # shape ``(V,)``. Whether every sample is taken, and every device takes some.
    # Shape ``(V, K)``. Samples of the first indices of a piece; 0 where none begins.
    more: IntArray
    less: IntArray  # shape ``(V, K)``. Samples of the last index of a piece.


def group_shares(space: GroupSpace, rows: IntArray, num_samples: int) -> Shares:
    """Split a micro-batch between the ranks of groups.

    ``rows``, shape ``(V,)``, are variants of the space.
    """
    variants, dp = space.variants, space.variants.dp[rows]
    even = num_samples // dp
    allowed = (even > 0) & (even <= space.limits.max_size)
    more = np.where(variants.replicas[rows] > 0, even[:, None], 0)
    less = more.copy()
    valid = allowed & (even * dp == num_samples)
    mixed = np.flatnonzero(allowed & variants.mixed[rows])
    if mixed.size:
        valid[mixed], more[mixed], less[mixed] = _by_speed(space, rows[mixed], num_samples)
    return Shares(valid=valid, more=more, less=less)


def _by_speed(
    space: GroupSpace, rows: IntArray, num_samples: int
) -> tuple[BoolArray, IntArray, IntArray]:
    """Split samples in mixed groups, in proportion to speeds."""
    variants = space.variants
    count = variants.replicas[rows]
    tp_index = np.searchsorted(space.tps, variants.tp[rows])
    speed = np.where(count > 0, _speeds(space)[variants.kinds[rows], tp_index[:, None]], 0.0)
    profiled = ~np.isnan(speed).any(axis=1)
    speed[~profiled] = 1.0
    exact = num_samples * speed / (count * speed).sum(axis=1)[:, None]
    base = exact.astype(np.int64)
    fraction = np.where(count > 0, exact - base, -1.0)
    remainder = num_samples - (count * base).sum(axis=1)
    order = np.argsort(-fraction, axis=1, kind="stable")
    sorted_count = np.take_along_axis(count, order, axis=1)
    before = sorted_count.cumsum(axis=1) - sorted_count
    extra = np.zeros_like(count)
    np.put_along_axis(extra, order, np.clip(remainder[:, None] - before, 0, sorted_count), axis=1)
    more, less = base + (extra > 0), base + ((extra > 0) & (extra == count))
    doubtful = np.flatnonzero(profiled & _is_doubtful(exact, fraction))
    tied = [variants.tp[rows], *variants.kinds[rows].T, *count.T]
    for same in _alike(doubtful, tied):
        replicas = count[same[0]]
        shares = proportional_shares(num_samples, np.repeat(speed[same[0]], replicas).tolist())
        ends = replicas.cumsum()
        for piece in np.flatnonzero(replicas):
            more[same, piece] = shares[ends[piece] - replicas[piece]]
            less[same, piece] = shares[ends[piece] - 1]
    more, less = np.where(count > 0, more, 0), np.where(count > 0, less, 0)
    takes_some = (less > 0) | (count == 0)
    valid: BoolArray = np.logical_and(profiled, takes_some.all(axis=1))
    return valid, more, less


def _speeds(space: GroupSpace) -> FloatArray:
    """Return the inverse of a whole model's time at micro-batch size 1, by type and tp."""
    entries = space.setting.profile.entries
    rows = [[entries.get((kind, tp, 1)) for tp in space.tps] for kind in space.kinds]
    return np.array(
        [
            [np.nan if entry is None else 1 / float(entry.layer_s.sum()) for entry in row]
            for row in rows
        ]
    )


def _is_doubtful(exact: FloatArray, fraction: FloatArray) -> BoolArray:
    """Return where a rounding error could move a sample to another index, as a mask."""
    ascending = np.sort(fraction, axis=1)
    begins = ascending[:, :-1] >= 0
    alike = begins & (np.diff(ascending, axis=1) < NEARLY)
    whole = (np.abs(exact - np.rint(exact)) < NEARLY) & (fraction >= 0)
    doubtful: BoolArray = np.logical_or(alike.any(axis=1), whole.any(axis=1))
    return doubtful


def _alike(rows: IntArray, columns: list[IntArray]) -> Iterator[IntArray]:
    """Group the rows that are equal in all columns, and yield each group."""
    if rows.size:
        _, number = distinct_rows([column[rows] for column in columns])
        order = np.argsort(number, kind="stable")
        yield from np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTable:
    """The ``W`` groups that can run a micro-batch.

    A stage takes as long as its slowest rank, and fits if the layers of every rank fit its memory.
    """

    space: GroupSpace
    num_micro_batches: int  # per optimizer step
    variant: IntArray  # shape ``(W,)``. Index into the variants of the space.
    # Distinct sets of rows of `GroupSpace.layer_s`, shape ``(C, 2 K)``, and the set of each group
    rank_set: tuple[IntArray, IntArray]
    # Distinct sets of memory needs, shape ``(H, 3 K)``, and the set of each group. A need is the
    # row of `GroupSpace.layer_bytes` times ``K``, plus the type whose memory it must fit.
    holding: tuple[IntArray, IntArray]
    rest_s: FloatArray  # shape ``(W,)``. Once per step, in a last stage; 0 in others.

    @cached_property
    def leading(self) -> IntArray:
        """Shape ``(C,)``. The rank of each set that takes longest over all layers."""
        ranks, _ = self.rank_set
        total_s = self.space.layer_s.sum(axis=1)[ranks]
        longest = total_s.argmax(axis=1)
        leading: IntArray = np.take_along_axis(ranks, longest[:, None], axis=1)[:, 0]
        return leading

    @cached_property
    def is_led(self) -> BoolArray:
        """Shape ``(C,)``. Whether that rank takes longest in every layer, not only in total."""
        ranks, _ = self.rank_set
        layer_s = self.space.layer_s
        led = np.ones(len(ranks), np.bool_)
        for column in range(ranks.shape[1]):
            led &= (layer_s[ranks[:, column]] <= layer_s[self.leading]).all(axis=1)
        return led

    @cached_property
    def layer_s(self) -> FloatArray:
        """Shape ``(C, L)``. Times of the leading ranks, which bound those of a stage from below."""
        times: FloatArray = self.space.layer_s[self.leading]
        return times

    @cached_property
    def holders(self) -> tuple[IntArray, IntArray]:
        """Earliest start by distinct set of memory needs and end, and the set of each group."""
        sets, number = self.holding
        kept, index = np.unique(sets, return_inverse=True)
        starts = _earliest_starts(
            self.space.layer_bytes[kept // len(self.space.kinds)],
            self.space.device_bytes[kept % len(self.space.kinds)],
        )
        return starts[index.reshape(sets.shape)].max(axis=1), number


def group_table(space: GroupSpace, num_micro_batches: int) -> GroupTable:
    """Compute times and memory of the groups of a space."""
    every = np.arange(len(space.variants.edge))
    blocks = np.split(every, range(_BLOCK, len(every), _BLOCK))
    parts = [_block(space, rows, num_micro_batches) for rows in blocks]
    return GroupTable(
        space=space,
        num_micro_batches=num_micro_batches,
        variant=np.concatenate([variant for variant, _, _, _ in parts]),
        rank_set=_merged([ranks for _, ranks, _, _ in parts]),
        holding=_merged([holding for _, _, holding, _ in parts]),
        rest_s=np.concatenate([rest_s for _, _, _, rest_s in parts]),
    )


def _block(
    space: GroupSpace, rows: IntArray, num_micro_batches: int
) -> tuple[IntArray, tuple[IntArray, IntArray], tuple[IntArray, IntArray], FloatArray]:
    """Return the fields of a table for the variants among ``rows`` that can run a micro-batch."""
    num_samples = space.setting.global_batch_size // num_micro_batches
    shares, num_kinds = group_shares(space, rows, num_samples), len(space.kinds)
    rest_s = num_micro_batches * _rest_s(space, rows, num_samples)
    some = np.flatnonzero(shares.valid & ~np.isnan(rest_s))
    groups, variants = rows[some], space.variants
    kinds, tp = variants.kinds[groups], variants.tp[groups, None]
    more, less = (space.row(kinds, tp, samples[some]) for samples in (shares.more, shares.less))
    at_once = np.where(variants.mixed[groups], 0, space.num_rows)[:, None]
    begins = variants.replicas[groups] > 0
    ranks = np.sort(_padded([more + at_once, less + at_once], begins), axis=1)
    held = ((more, kinds), (less, kinds), (less, space.scarcest(groups)))
    holding = _padded([row * num_kinds + limit for row, limit in held], begins)
    memory_known = ~np.isnan(space.layer_bytes[:, 0])
    profiled = space.is_known[ranks].all(axis=1)
    profiled &= memory_known[holding // num_kinds].all(axis=1)
    return (
        groups[profiled],
        _distinct(ranks[profiled]),
        _distinct(holding[profiled]),
        rest_s[some[profiled]],
    )


def _distinct(rows: IntArray) -> tuple[IntArray, IntArray]:
    first, number = distinct_rows(list(rows.T))
    return rows[first], number


def _merged(parts: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """Return the distinct rows of several blocks, and the number of each row."""
    sets, number = _distinct(np.concatenate([rows for rows, _ in parts]))
    ends = accumulate((len(rows) for rows, _ in parts), initial=0)
    numbers = [number[end:][row] for end, (_, row) in zip(ends, parts, strict=False)]
    return sets, np.concatenate(numbers)


def _padded(pieces: Sequence[IntArray], begins: BoolArray) -> IntArray:
    """Fill pieces in which no data-parallel index begins with the rows of the first piece."""
    rows = np.concatenate(pieces, axis=1)
    return np.where(np.tile(begins, len(pieces)), rows, rows[:, :1])


def _rest_s(space: GroupSpace, rows: IntArray, num_samples: int) -> FloatArray:
    """Return the time of a micro-batch beyond its layers in last stages; 0 in others."""
    variants = space.variants
    rest_s = np.zeros(len(rows))
    is_last = np.flatnonzero(space.graph.from_state[variants.edge[rows]] == 0)
    last = rows[is_last]
    kinds, tp = variants.kinds[last], variants.tp[last, None]
    entry = space.row(np.maximum(kinds, 0), tp, (num_samples // variants.dp[last])[:, None])
    kind_rest_s = np.where(kinds == NO_KIND, -np.inf, space.rest_s[entry])
    unknown = np.isnan(kind_rest_s).any(axis=1)
    rest_s[is_last] = np.where(unknown, np.nan, kind_rest_s.max(axis=1, initial=-np.inf))
    return rest_s


def _earliest_starts(layer_bytes: FloatArray, limit_bytes: FloatArray) -> IntArray:
    """Return, per row and end, the smallest start whose layers fit."""
    prefix = np.pad(layer_bytes.cumsum(axis=1), ((0, 0), (1, 0)))
    starts = np.zeros(prefix.shape, np.int64)
    for end in range(1, prefix.shape[1]):
        over = prefix[:, end, None] - prefix[:, :end] > limit_bytes[:, None]
        starts[:, end] = over.sum(axis=1)
    return starts
