"""What every device group of a Metis (2024) plan takes and holds, for one number of micro-batches.

Layers count backwards here, since stages take devices from the last one on.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.baselines.metis2024_groups import GroupSpace
from amp_ray.baselines.metis2024_shares import Shares, group_shares
from amp_ray.baselines.metis2024_works import Works
from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.resources import NO_KIND
from amp_ray.partition.tails import distinct_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Menu:
    """The groups that can run a micro-batch: ``W`` of them.

    A stage takes as long as the slowest of its works, and fits where all of its holdings do.

    Args:
        space: The groups.
        works: Tables.
        num_micro_batches: Per optimizer step.
        variant: Shape ``(W,)``. Of the space.
        work: Shape ``(W, 2 K)``. Rows of `Works.layer_s`.
        holding: Shape ``(W, 3 K)``. Row of `Works.memory_bytes` times ``K``, plus the type whose
            memory it must fit.
        rest_s: Shape ``(W,)``. Once per step, of a last stage; 0 of others.
    """

    space: GroupSpace
    works: Works
    num_micro_batches: int
    variant: IntArray
    work: IntArray
    holding: IntArray
    rest_s: FloatArray

    @cached_property
    def crew(self) -> tuple[IntArray, IntArray]:
        """Distinct sets of works, shape ``(C, 2 K)``, and the one of each group."""
        works = np.sort(self.work, axis=1)
        first, number = distinct_rows(list(works.T))
        return works[first], number

    @cached_property
    def leading(self) -> IntArray:
        """Shape ``(C,)``. Of each set the work that takes longest over all layers."""
        works, _ = self.crew
        total_s = self.works.layer_s.sum(axis=1)[works]
        longest = total_s.argmax(axis=1)
        found: IntArray = np.take_along_axis(works, longest[:, None], axis=1)[:, 0]
        return found

    @cached_property
    def is_led(self) -> BoolArray:
        """Shape ``(C,)``. Whether that work takes longest in every layer, so that it tells all."""
        works, _ = self.crew
        layer_s = self.works.layer_s
        led = np.ones(len(works), np.bool_)
        for column in range(works.shape[1]):
            led &= (layer_s[works[:, column]] <= layer_s[self.leading]).all(axis=1)
        return led

    @cached_property
    def layer_s(self) -> FloatArray:
        """Shape ``(W, L)``. Of the leading work: no stage is faster."""
        times: FloatArray = self.works.layer_s[self.leading[self.crew[1]]]
        return times

    @cached_property
    def holders(self) -> tuple[IntArray, IntArray]:
        """Earliest starts of each distinct set of holdings, and the one of each group."""
        first, number = distinct_rows(list(self.holding.T))
        sets = self.holding[first]
        kept, place = np.unique(sets, return_inverse=True)
        starts = _earliest_starts(
            self.works.memory_bytes[kept // len(self.space.kinds)],
            self.space.memory_bytes[kept % len(self.space.kinds)],
        )
        return starts[place.reshape(sets.shape)].max(axis=1), number


def stage_menu(space: GroupSpace, works: Works, num_micro_batches: int) -> Menu:
    """Find what the groups of a space take and hold.

    Args:
        space: The groups.
        works: Tables.
        num_micro_batches: A divisor of the global batch size.
    """
    num_samples = space.setting.global_batch_size // num_micro_batches
    shares = group_shares(space, num_samples)
    rest_s = num_micro_batches * _rest_s(space, works, num_samples)
    found = np.flatnonzero(shares.valid & ~np.isnan(rest_s))
    work, holding = _works(space, works, shares, found), _holdings(space, works, shares, found)
    memory_known = ~np.isnan(works.memory_bytes[:, 0])
    known = works.is_known[work].all(axis=1)
    known &= memory_known[holding // len(space.kinds)].all(axis=1)
    return Menu(
        space=space,
        works=works,
        num_micro_batches=num_micro_batches,
        variant=found[known],
        work=work[known],
        holding=holding[known],
        rest_s=rest_s[found[known]],
    )


def _works(space: GroupSpace, works: Works, shares: Shares, found: IntArray) -> IntArray:
    """Return the rows of what the indices of each group do."""
    variants = space.variants
    kinds, tp = variants.kinds[found], variants.tp[found, None]
    rows = [works.row(kinds, tp, samples[found]) for samples in (shares.more, shares.less)]
    at_once = np.where(variants.mixed[found], 0, works.num_rows)[:, None]
    return _padded(np.concatenate(rows, axis=1) + at_once, variants.replicas[found])


def _holdings(space: GroupSpace, works: Works, shares: Shares, found: IntArray) -> IntArray:
    """Return what the devices of each group must hold, in which memory."""
    variants = space.variants
    kinds, tp = variants.kinds[found], variants.tp[found, None]
    parts = (
        (shares.more, kinds),
        (shares.less, kinds),
        (shares.less, space.scarcest[found]),
    )
    rows = [
        works.row(kinds, tp, samples[found]) * len(space.kinds) + limit for samples, limit in parts
    ]
    return _padded(np.concatenate(rows, axis=1), variants.replicas[found])


def _padded(rows: IntArray, replicas: IntArray) -> IntArray:
    """Replace what stands for pieces in which no index begins by what the first piece says."""
    begins = np.tile(replicas > 0, rows.shape[1] // replicas.shape[1])
    return np.where(begins, rows, rows[:, :1])


def _rest_s(space: GroupSpace, works: Works, num_samples: int) -> FloatArray:
    """Return, of groups that are last, what a micro-batch takes beyond the layers; 0 of others."""
    variants = space.variants
    is_last = space.graph.from_state[variants.edge] == 0
    rest_s = np.zeros(len(variants.edge))
    last = np.flatnonzero(is_last)
    kinds, tp = variants.kinds[last], variants.tp[last, None]
    rows = works.row(np.maximum(kinds, 0), tp, (num_samples // variants.dp[last])[:, None])
    found = np.where(kinds == NO_KIND, -np.inf, works.rest_s[rows])
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
