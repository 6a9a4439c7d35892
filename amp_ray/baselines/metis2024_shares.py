"""How the groups of Metis (2024) share a micro-batch, for all groups at once.

`MetisSetting.data_ranks` says it for one stage of one plan. A data-parallel index counts as its
first device, and equal ones differ by one sample at most. So what a group does is two numbers of
samples per type.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.baselines.metis2024_groups import GroupSpace
from amp_ray.baselines.metis2024_plan import proportional_shares
from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.tails import distinct_rows

NEARLY: Final = 1e-9
"""Fractions of samples that differ by less are told apart by the order of additions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Samples of the data-parallel indices of groups, by the piece in which they begin.

    Args:
        valid: Shape ``(V,)``. Whether every sample is taken, and every device takes some.
        more: Shape ``(V, K)``. Samples of the first indices of a piece; 0 where none begins.
        less: Shape ``(V, K)``. Samples of the last index of a piece.
    """

    valid: BoolArray
    more: IntArray
    less: IntArray


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
    """Tell where rounding could decide who takes a sample."""
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
