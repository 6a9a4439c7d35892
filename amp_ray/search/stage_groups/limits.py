"""Where a stage of a candidate may start so that it fits, counted from the last layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.cost.model import CostModel
from amp_ray.search.cuts import latest_starts
from amp_ray.strategies.candidate import Candidate, GroupsCandidate, StageOptions

Need = tuple[int, int, int, float]
"""tp, dp, samples, and bytes of the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimits:
    """Memory limits by how many stages there are from a stage to the end, itself included."""

    cost_model: CostModel  # tells what ranks need
    candidate: GroupsCandidate  # micro-batch, its number, recompute
    most_stages: int
    capped: bool = False  # whether there could be more stages than that
    # Whether stages near a limit, some of which fit and some do not, are left out
    strict: bool = False
    # From where stages fit, shape ``(num_positions, num_layers + 1)`` each, the first position
    # being the last stage's. Layers are counted from the end of the model.
    tables: list[IntArray] = field(init=False, default_factory=list)
    _rows: dict[tuple[Need, ...], int] = field(init=False, default_factory=dict)
    _known: dict[Need, IntArray] = field(init=False, default_factory=dict)

    @cached_property
    def num_positions(self) -> int:
        """Number of stages to the end beyond which no more micro-batches are in flight."""
        return min(self.most_stages, self.candidate.num_micro_batches)

    def row(self, tp: int, dp: int, needs: Sequence[tuple[int, float]]) -> int:
        """Number the limits of a stage.

        Args:
            tp: Tensor-parallel degree.
            dp: Data-parallel degree.
            needs: Samples of its different ranks, and bytes of their devices.

        Returns:
            Index into `tables`.
        """
        sharded = self.candidate.zero.stage >= 1
        key = tuple((tp, dp if sharded else min(dp, 2), *need) for need in needs)
        if key not in self._rows:
            self._rows[key] = len(self.tables)
            worst: IntArray = np.max([self._starts(need) for need in key], axis=0)
            self.tables.append(worst)
        return self._rows[key]

    @cached_property
    def latest_start(self) -> IntArray:
        """Where stages must start to have parameters, if they need any."""
        forwards = latest_starts(self.cost_model.experiment)
        if not len(forwards):
            return forwards
        num_layers = self.cost_model.experiment.model.num_layers
        has = np.flatnonzero(forwards[1:] == np.arange(num_layers))
        last = np.full(num_layers + 1, -1)
        for layer in has[::-1].tolist():
            last[num_layers - layer :] = num_layers - layer - 1
        return last

    def _starts(self, need: Need) -> IntArray:
        """Return from where a stage with one kind of rank fits."""
        tp, dp, samples, limit_bytes = need
        if need not in self._known:
            candidate = Candidate(
                micro_batch_size=samples,
                options=StageOptions(
                    tp=tp, dp=dp, recompute=self.candidate.recompute, zero=self.candidate.zero
                ),
                pp=self.num_positions,
                num_micro_batches=self.candidate.num_micro_batches,
            )
            memory = self.cost_model.memory(candidate)
            starts = memory.earliest_starts(np.full(self.num_positions, limit_bytes))
            # A stage that holds all layers has a tied weight once, and may be all that fits.
            num_layers = starts.shape[1] - 1
            last = self.num_positions - 1
            whole = memory.peak(last, 0, num_layers) <= limit_bytes
            self._known[need] = self._backwards(starts, whole=whole)[::-1]
        return self._known[need]

    def _backwards(self, starts: IntArray, *, whole: bool) -> IntArray:
        """Turn earliest starts by end into those of the model with its layers in reverse."""
        num_layers = starts.shape[1] - 1
        first, end = np.ogrid[: num_layers + 1, : num_layers + 1]
        fits = (starts[:, None, :] <= first) & (end > first)
        fits[-1, 0, num_layers] |= whole
        if self.strict:
            fits = np.logical_and.accumulate(fits | (end <= first), axis=2) & (end > first)
        last = np.where(fits, end, first).max(axis=2)
        turned: IntArray = (num_layers - last)[:, ::-1]
        return turned
