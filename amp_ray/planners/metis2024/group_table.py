"""Times and memory of every device group of a Metis (2024) plan, for one number of micro-batches.

Layers count backwards here, since stages take devices from the last one on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray, SmallIntArray
from amp_ray.inputs.published_profile import PublishedEntry
from amp_ray.partition.resources import NO_KIND
from amp_ray.partition.rows import distinct_rows
from amp_ray.planners.metis2024.groups import GroupSpace
from amp_ray.planners.metis2024.plan import NO_REST_S, proportional_shares


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTimes:
    """What one data-parallel index does and holds.

    Rows count type, tp and samples, samples fastest; samples 0 and what was not measured are NaN.
    """

    space: GroupSpace  # the groups

    @cached_property
    def most(self) -> int:
        """Samples that no device takes more of: binary digits of measured sizes end there."""
        return 2 * max(size for _, _, size in self.space.setting.profile.entries)

    @property
    def num_rows(self) -> int:
        """Rows of every table but `layer_s`, which has twice as many."""
        return len(self.space.kinds) * len(self.space.tps) * (self.most + 1)

    @cached_property
    def layer_s(self) -> FloatArray:
        """Shape ``(2 * num_rows, L)``. First of samples as binary digits, then of all at once."""
        times = self._table("layer_s")
        split = times.copy()
        for samples in range(1, self.most + 1):
            rest = samples & (samples - 1)
            if rest:
                split[:, :, samples] = split[:, :, rest] + split[:, :, samples - rest]
        return np.concatenate([split, times]).reshape(2 * self.num_rows, -1)

    @cached_property
    def memory_bytes(self) -> FloatArray:
        """Shape ``(num_rows, L)``. At the smallest measured size that holds the samples."""
        held = self._table("layer_memory_bytes")
        for samples in range(self.most - 1, 0, -1):
            missing = np.isnan(held[:, :, samples])
            held[:, :, samples] = np.where(missing, held[:, :, samples + 1], held[:, :, samples])
        return held.reshape(self.num_rows, -1)

    @cached_property
    def rest_s(self) -> FloatArray:
        """Shape ``(num_rows,)``. Of a last stage, beyond its layers."""
        space = self.space
        rest = np.full((len(space.kinds), len(space.tps), self.most + 1), np.nan)
        for of, tp, size, entry in self._entries():
            if entry.rest_s is not None and abs(entry.rest_s) >= NO_REST_S:
                rest[of, tp, size] = entry.rest_s
        return rest.reshape(-1)

    @cached_property
    def is_known(self) -> BoolArray:
        """Shape ``(2 * num_rows,)``. Of the rows of `layer_s`."""
        known: BoolArray = ~np.isnan(self.layer_s[:, 0])
        return known

    def row(self, kind: IntArray | SmallIntArray, tp: IntArray, samples: IntArray) -> IntArray:
        """Return rows; samples beyond the table have the row of none."""
        inside = np.where(samples > self.most, 0, samples)
        tp_index = np.searchsorted(self.space.tps, tp)
        found: IntArray = (kind * len(self.space.tps) + tp_index) * (self.most + 1) + inside
        return found

    def _table(self, name: str) -> FloatArray:
        """Return what was measured of every layer, the last one first."""
        space = self.space
        shape = (len(space.kinds), len(space.tps), self.most + 1, space.setting.profile.num_layers)
        table = np.full(shape, np.nan)
        for of, tp, size, entry in self._entries():
            values: FloatArray = getattr(entry, name)
            table[of, tp, size] = values[::-1]
        return table

    def _entries(self) -> Iterator[tuple[int, int, int, PublishedEntry]]:
        """Yield index of type and tp, size and entry of what the cluster can use."""
        space = self.space
        for (kind, tp, size), entry in space.setting.profile.entries.items():
            if kind in space.kinds and tp in space.tps:
                yield space.kinds.index(kind), space.tps.index(tp), size, entry


NEARLY: Final = 1e-9
"""Fractions of samples that differ by less depend on the order of additions."""

_BLOCK: Final = 1 << 17
"""Groups that are computed at once, for arrays of about ten megabytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Samples of the data-parallel indices of groups, by the piece in which they begin."""

    valid: BoolArray  # shape ``(V,)``. Whether every sample is taken, and every device takes some.
    # Shape ``(V, K)``. Samples of the first indices of a piece; 0 where none begins.
    more: IntArray
    less: IntArray  # shape ``(V, K)``. Samples of the last index of a piece.


def group_shares(space: GroupSpace, rows: IntArray, num_samples: int) -> Shares:
    """Split a micro-batch between the ranks of groups.

    Args:
        space: The groups.
        rows: Shape ``(V,)``. Which of its variants.
        num_samples: Of one micro-batch.
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
    found: BoolArray = np.logical_or(alike.any(axis=1), whole.any(axis=1))
    return found


def _alike(rows: IntArray, columns: list[IntArray]) -> Iterator[IntArray]:
    """Yield those of some rows that are equal in all columns, together."""
    if rows.size:
        _, number = distinct_rows([column[rows] for column in columns])
        order = np.argsort(number, kind="stable")
        yield from np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTable:
    """The groups that can run a micro-batch: ``W`` of them.

    A stage takes as long as the slowest of its ranks, and fits where all of its holdings do.
    """

    space: GroupSpace
    rank_times: RankTimes
    num_micro_batches: int  # per optimizer step
    variant: IntArray  # shape ``(W,)``. Of the space.
    # Distinct sets of rows of `RankTimes.layer_s`, shape ``(C, 2 K)``, and the one of each group
    rank_set: tuple[IntArray, IntArray]
    # Distinct sets, shape ``(H, 3 K)``, and the one of each group: row of `RankTimes.memory_bytes`
    # times ``K``, plus the type whose memory it must fit.
    holding: tuple[IntArray, IntArray]
    rest_s: FloatArray  # shape ``(W,)``. Once per step, of a last stage; 0 of others.

    @cached_property
    def leading(self) -> IntArray:
        """Shape ``(C,)``. The rank of each set that takes longest over all layers."""
        ranks, _ = self.rank_set
        total_s = self.rank_times.layer_s.sum(axis=1)[ranks]
        longest = total_s.argmax(axis=1)
        found: IntArray = np.take_along_axis(ranks, longest[:, None], axis=1)[:, 0]
        return found

    @cached_property
    def is_led(self) -> BoolArray:
        """Shape ``(C,)``. Whether that rank takes longest in every layer, not only in total."""
        ranks, _ = self.rank_set
        layer_s = self.rank_times.layer_s
        led = np.ones(len(ranks), np.bool_)
        for column in range(ranks.shape[1]):
            led &= (layer_s[ranks[:, column]] <= layer_s[self.leading]).all(axis=1)
        return led

    @cached_property
    def layer_s(self) -> FloatArray:
        """Shape ``(C, L)``. Times of the leading ranks, which bound those of a stage from below."""
        times: FloatArray = self.rank_times.layer_s[self.leading]
        return times

    @property
    def is_last(self) -> BoolArray:
        """Shape ``(W,)``. Whether the group is that of a last stage."""
        last: BoolArray = self.space.graph.from_state[self.space.variants.edge[self.variant]] == 0
        return last

    @cached_property
    def holders(self) -> tuple[IntArray, IntArray]:
        """Earliest start by distinct set of memory needs and end, and the set of each group."""
        sets, number = self.holding
        kept, index = np.unique(sets, return_inverse=True)
        starts = _earliest_starts(
            self.rank_times.memory_bytes[kept // len(self.space.kinds)],
            self.space.memory_bytes[kept % len(self.space.kinds)],
        )
        return starts[index.reshape(sets.shape)].max(axis=1), number


def group_table(space: GroupSpace, rank_times: RankTimes, num_micro_batches: int) -> GroupTable:
    """Compute times and memory of the groups of a space.

    Args:
        space: The groups.
        rank_times: Tables.
        num_micro_batches: A divisor of the global batch size.
    """
    every = np.arange(len(space.variants.edge))
    blocks = np.split(every, range(_BLOCK, len(every), _BLOCK))
    parts = [_block(space, rank_times, rows, num_micro_batches) for rows in blocks]
    return GroupTable(
        space=space,
        rank_times=rank_times,
        num_micro_batches=num_micro_batches,
        variant=np.concatenate([variant for variant, _, _, _ in parts]),
        rank_set=_merged([ranks for _, ranks, _, _ in parts]),
        holding=_merged([holding for _, _, holding, _ in parts]),
        rest_s=np.concatenate([rest_s for _, _, _, rest_s in parts]),
    )


def _block(
    space: GroupSpace, rank_times: RankTimes, rows: IntArray, num_micro_batches: int
) -> tuple[IntArray, tuple[IntArray, IntArray], tuple[IntArray, IntArray], FloatArray]:
    """Return the fields of a table for those of some variants that can run a micro-batch."""
    num_samples = space.setting.global_batch_size // num_micro_batches
    shares, num_kinds = group_shares(space, rows, num_samples), len(space.kinds)
    rest_s = num_micro_batches * _rest_s(space, rank_times, rows, num_samples)
    some = np.flatnonzero(shares.valid & ~np.isnan(rest_s))
    groups, variants = rows[some], space.variants
    kinds, tp = variants.kinds[groups], variants.tp[groups, None]
    more, less = (rank_times.row(kinds, tp, own[some]) for own in (shares.more, shares.less))
    at_once = np.where(variants.mixed[groups], 0, rank_times.num_rows)[:, None]
    begins = variants.replicas[groups] > 0
    ranks = np.sort(_padded([more + at_once, less + at_once], begins), axis=1)
    held = ((more, kinds), (less, kinds), (less, space.scarcest(groups)))
    holding = _padded([own * num_kinds + limit for own, limit in held], begins)
    memory_known = ~np.isnan(rank_times.memory_bytes[:, 0])
    profiled = rank_times.is_known[ranks].all(axis=1)
    profiled &= memory_known[holding // num_kinds].all(axis=1)
    return (
        groups[profiled],
        _distinct(ranks[profiled]),
        _distinct(holding[profiled]),
        rest_s[some[profiled]],
    )


def _distinct(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct rows, ascending, and the number of each row."""
    first, number = distinct_rows(list(rows.T))
    return rows[first], number


def _merged(parts: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """Return the distinct rows of several blocks, and the number of each row."""
    sets, number = _distinct(np.concatenate([own for own, _ in parts]))
    ends = accumulate((len(own) for own, _ in parts), initial=0)
    numbers = [number[end:][own] for end, (_, own) in zip(ends, parts, strict=False)]
    return sets, np.concatenate(numbers)


def _padded(pieces: Sequence[IntArray], begins: BoolArray) -> IntArray:
    """Fill pieces in which no data-parallel index begins with the rows of the first piece."""
    rows = np.concatenate(pieces, axis=1)
    return np.where(np.tile(begins, len(pieces)), rows, rows[:, :1])


def _rest_s(
    space: GroupSpace, rank_times: RankTimes, rows: IntArray, num_samples: int
) -> FloatArray:
    """Return the time of a micro-batch beyond its layers in last stages; 0 in others."""
    variants = space.variants
    rest_s = np.zeros(len(rows))
    is_last = np.flatnonzero(space.graph.from_state[variants.edge[rows]] == 0)
    last = rows[is_last]
    kinds, tp = variants.kinds[last], variants.tp[last, None]
    entry = rank_times.row(np.maximum(kinds, 0), tp, (num_samples // variants.dp[last])[:, None])
    kind_rest_s = np.where(kinds == NO_KIND, -np.inf, rank_times.rest_s[entry])
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
