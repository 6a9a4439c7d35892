"""What every device group of a Metis (2024) plan takes and holds, for one number of micro-batches.

Layers count backwards here, since stages take devices from the last one on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.baselines.metis2024.groups import GroupSpace
from amp_ray.baselines.metis2024.plan import proportional_shares
from amp_ray.baselines.metis2024.rank_times import RankTimes
from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.resources import NO_KIND
from amp_ray.partition.rows import distinct_rows

NEARLY: Final = 1e-9
"""Fractions of samples that differ by less depend on the order of additions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Samples of the data-parallel indices of groups, by the piece in which they begin."""

    valid: BoolArray  # shape ``(V,)``. Whether every sample is taken, and every device takes some.
    # Shape ``(V, K)``. Samples of the first indices of a piece; 0 where none begins.
    more: IntArray
    less: IntArray  # shape ``(V, K)``. Samples of the last index of a piece.


def group_shares(space: GroupSpace, num_samples: int) -> Shares:
    """Share a micro-batch out over every group.

    Args:
        space: The groups.
        num_samples: Of one micro-batch.
    """
    variants = space.variants
    even = num_samples // variants.dp
    allowed = (even > 0) & (even <= space.limits.max_size)
    more = np.where(variants.replicas > 0, even[:, None], 0)
    less = more.copy()
    valid = allowed & (even * variants.dp == num_samples)
    rows = np.flatnonzero(allowed & variants.mixed)
    if rows.size:
        valid[rows], more[rows], less[rows] = _by_speed(space, rows, num_samples)
    return Shares(valid=valid, more=more, less=less)


def _by_speed(
    space: GroupSpace, rows: IntArray, num_samples: int
) -> tuple[BoolArray, IntArray, IntArray]:
    """Share samples out in mixed groups, in proportion to their speeds."""
    variants = space.variants
    count = variants.replicas[rows]
    tp_index = np.searchsorted(space.tps, variants.tp[rows])
    speed = np.where(count > 0, _speeds(space)[variants.kinds[rows], tp_index[:, None]], 0.0)
    known = ~np.isnan(speed).any(axis=1)
    speed[~known] = 1.0
    exact = num_samples * speed / (count * speed).sum(axis=1)[:, None]
    base = exact.astype(np.int64)
    fraction = np.where(count > 0, exact - base, -1.0)
    left = num_samples - (count * base).sum(axis=1)
    order = np.argsort(-fraction, axis=1, kind="stable")
    sorted_count = np.take_along_axis(count, order, axis=1)
    before = sorted_count.cumsum(axis=1) - sorted_count
    extra = np.zeros_like(count)
    np.put_along_axis(extra, order, np.clip(left[:, None] - before, 0, sorted_count), axis=1)
    more, less = base + (extra > 0), base + ((extra > 0) & (extra == count))
    doubtful = np.flatnonzero(known & _is_doubtful(exact, fraction))
    tied = [variants.tp[rows], *variants.kinds[rows].T, *count.T]
    for same in _alike(doubtful, tied):
        each = count[same[0]]
        shares = proportional_shares(num_samples, np.repeat(speed[same[0]], each).tolist())
        ends = each.cumsum()
        for piece in np.flatnonzero(each):
            more[same, piece] = shares[ends[piece] - each[piece]]
            less[same, piece] = shares[ends[piece] - 1]
    more, less = np.where(count > 0, more, 0), np.where(count > 0, less, 0)
    takes_some = (less > 0) | (count == 0)
    valid: BoolArray = np.logical_and(known, takes_some.all(axis=1))
    return valid, more, less


def _speeds(space: GroupSpace) -> FloatArray:
    """Return the inverse of a whole model's time at micro-batch size 1, by type and tp."""
    entries = space.setting.profile.entries
    found = [[entries.get((kind, tp, 1)) for tp in space.tps] for kind in space.kinds]
    return np.array(
        [
            [np.nan if entry is None else 1 / float(entry.layer_s.sum()) for entry in row]
            for row in found
        ]
    )


def _is_doubtful(exact: FloatArray, fraction: FloatArray) -> BoolArray:
    """Tell where a rounding error could change which index takes a sample."""
    ascending = np.sort(fraction, axis=1)
    begins = ascending[:, :-1] >= 0
    alike = begins & (np.diff(ascending, axis=1) < NEARLY)
    whole = (np.abs(exact - np.rint(exact)) < NEARLY) & (fraction >= 0)
    found: BoolArray = np.logical_or(alike.any(axis=1), whole.any(axis=1))
    return found


def _alike(rows: IntArray, columns: list[IntArray]) -> Iterator[IntArray]:
    """Yield those of some rows that are equal in all columns, together."""
    if rows.size:
        first, number = distinct_rows([column[rows] for column in columns])
        for index in range(len(first)):
            yield rows[number == index]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTable:
    """The groups that can run a micro-batch: ``W`` of them.

    A stage takes as long as the slowest of its ranks, and fits where all of its holdings do.
    """

    space: GroupSpace
    rank_times: RankTimes
    num_micro_batches: int  # per optimizer step
    variant: IntArray  # shape ``(W,)``. Of the space.
    ranks: IntArray  # shape ``(W, 2 K)``. Rows of `RankTimes.layer_s`.
    # Shape ``(W, 3 K)``. Row of `RankTimes.memory_bytes` times ``K``, plus the type whose memory it
    # must fit.
    holding: IntArray
    rest_s: FloatArray  # shape ``(W,)``. Once per step, of a last stage; 0 of others.

    @cached_property
    def rank_set(self) -> tuple[IntArray, IntArray]:
        """Distinct sets of ranks, shape ``(C, 2 K)``, and the one of each group."""
        ranks = np.sort(self.ranks, axis=1)
        first, number = distinct_rows(list(ranks.T))
        return ranks[first], number

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
        """Shape ``(W, L)``. Times of the leading ranks, which bound those of a stage from below."""
        times: FloatArray = self.rank_times.layer_s[self.leading[self.rank_set[1]]]
        return times

    @cached_property
    def holders(self) -> tuple[IntArray, IntArray]:
        """Earliest start by distinct set of memory needs and end, and the set of each group."""
        first, number = distinct_rows(list(self.holding.T))
        sets = self.holding[first]
        kept, index = np.unique(sets, return_inverse=True)
        starts = _earliest_starts(
            self.rank_times.memory_bytes[kept // len(self.space.kinds)],
            self.space.memory_bytes[kept % len(self.space.kinds)],
        )
        return starts[index.reshape(sets.shape)].max(axis=1), number


def group_table(space: GroupSpace, rank_times: RankTimes, num_micro_batches: int) -> GroupTable:
    """Find what the groups of a space take and hold.

    Args:
        space: The groups.
        rank_times: Tables.
        num_micro_batches: A divisor of the global batch size.
    """
    num_samples = space.setting.global_batch_size // num_micro_batches
    shares = group_shares(space, num_samples)
    rest_s = num_micro_batches * _rest_s(space, rank_times, num_samples)
    found = np.flatnonzero(shares.valid & ~np.isnan(rest_s))
    ranks, holding = (
        _rank_rows(space, rank_times, shares, found),
        _holdings(space, rank_times, shares, found),
    )
    memory_known = ~np.isnan(rank_times.memory_bytes[:, 0])
    known = rank_times.is_known[ranks].all(axis=1)
    known &= memory_known[holding // len(space.kinds)].all(axis=1)
    return GroupTable(
        space=space,
        rank_times=rank_times,
        num_micro_batches=num_micro_batches,
        variant=found[known],
        ranks=ranks[known],
        holding=holding[known],
        rest_s=rest_s[found[known]],
    )


def _rank_rows(
    space: GroupSpace, rank_times: RankTimes, shares: Shares, found: IntArray
) -> IntArray:
    """Return the rows of `RankTimes` of the indices of each group."""
    variants = space.variants
    kinds, tp = variants.kinds[found], variants.tp[found, None]
    rows = [rank_times.row(kinds, tp, samples[found]) for samples in (shares.more, shares.less)]
    at_once = np.where(variants.mixed[found], 0, rank_times.num_rows)[:, None]
    return _padded(np.concatenate(rows, axis=1) + at_once, variants.replicas[found])


def _holdings(
    space: GroupSpace, rank_times: RankTimes, shares: Shares, found: IntArray
) -> IntArray:
    """Return what the devices of each group must hold, in which memory."""
    variants = space.variants
    kinds, tp = variants.kinds[found], variants.tp[found, None]
    parts = (
        (shares.more, kinds),
        (shares.less, kinds),
        (shares.less, space.scarcest[found]),
    )
    rows = [
        rank_times.row(kinds, tp, samples[found]) * len(space.kinds) + limit
        for samples, limit in parts
    ]
    return _padded(np.concatenate(rows, axis=1), variants.replicas[found])


def _padded(rows: IntArray, replicas: IntArray) -> IntArray:
    """Fill pieces in which no data-parallel index begins with the rows of the first piece."""
    begins = np.tile(replicas > 0, rows.shape[1] // replicas.shape[1])
    return np.where(begins, rows, rows[:, :1])


def _rest_s(space: GroupSpace, rank_times: RankTimes, num_samples: int) -> FloatArray:
    """Return what a micro-batch takes beyond the layers in groups that are last; 0 in others."""
    variants = space.variants
    is_last = space.graph.from_state[variants.edge] == 0
    rest_s = np.zeros(len(variants.edge))
    last = np.flatnonzero(is_last)
    kinds, tp = variants.kinds[last], variants.tp[last, None]
    rows = rank_times.row(np.maximum(kinds, 0), tp, (num_samples // variants.dp[last])[:, None])
    found = np.where(kinds == NO_KIND, -np.inf, rank_times.rest_s[rows])
    rest_s[last] = np.where(np.isnan(found).any(axis=1), np.nan, found.max(axis=1, initial=-np.inf))
    return rest_s


def _earliest_starts(layer_bytes: FloatArray, limit_bytes: FloatArray) -> IntArray:
    """Return, per row and end, the smallest start whose layers fit."""
    prefix = np.pad(layer_bytes.cumsum(axis=1), ((0, 0), (1, 0)))
    starts = np.zeros(prefix.shape, np.int64)
    for end in range(1, prefix.shape[1]):
        over = prefix[:, end, None] - prefix[:, :end] > limit_bytes[:, None]
        starts[:, end] = over.sum(axis=1)
    return starts
