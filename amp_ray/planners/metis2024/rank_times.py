"""Times and memory of every (type, tp, samples) of a Metis (2024) profile, as tables.

Layers count backwards here, since stages take devices from the last one on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.inputs.published_profile import PublishedEntry
from amp_ray.partition.arrays import SmallIntArray
from amp_ray.planners.metis2024.cost import NO_REST_S
from amp_ray.planners.metis2024.groups import GroupSpace


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
