"""Peak memory of a rank, by stage and position in the schedule."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from amp_ray.cost.kernels import FloatArray, IntArray, earliest_starts, stage_peak
from amp_ray.cost.roofline import Rank
from amp_ray.spec.constants import Constants
from amp_ray.spec.model import Layer, Model
from amp_ray.spec.optimizer import Optimizer
from amp_ray.spec.strategy import Recompute
from amp_ray.spec.traits import RuntimeTraits

CHECKPOINT_BUFFERS = 2
"""With full recompute what enters a stage is kept per micro-batch as its checkpoint already; at
each end there is one buffer for what arrives and one for what is sent."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """Peak bytes of the stages of one kind of rank.

    Args:
        model: The chain of layers.
        rank: tp, micro-batch size, precision; the device does not matter.
        recompute: What blocks compute again.
        dp: Data parallel degree.
        pp: Number of stages.
        num_micro_batches: Per replica.
        zero_stage: What is sharded over dp.
        optimizer: What keeps moments.
        traits: What the runtime keeps.
        constants: Context and allocator.
    """

    model: Model
    rank: Rank
    recompute: Recompute
    dp: int
    pp: int
    num_micro_batches: int
    zero_stage: int
    optimizer: Optimizer
    traits: RuntimeTraits
    constants: Constants

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once under 1F1B."""
        return min(self.pp - stage, self.num_micro_batches)

    def peak_bytes(self, bounds: tuple[int, ...]) -> tuple[float, ...]:
        """Return the peak of each stage.

        Args:
            bounds: Shape ``(pp + 1,)``.
        """
        return tuple(
            float(stage_peak(self._layers, self._stages[stage], self._tied, start, end))
            for stage, (start, end) in enumerate(pairwise(bounds))
        )

    def earliest_starts(self, limits_bytes: FloatArray) -> IntArray:
        """Return per stage and end the smallest start from which every stage fits.

        Args:
            limits_bytes: Shape ``(pp,)``. What the smallest device of each stage has.

        Returns:
            Shape ``(pp, num_layers + 1)``; the end itself where nothing fits.
        """
        return earliest_starts(self._layers, self._stages, self._tied, limits_bytes)

    @cached_property
    def _layers(self) -> FloatArray:
        """Rows for the kernels: prefix sums of parameters and kept bytes, then the rest."""
        layers, positions = self.model.distinct_layers
        columns = np.array(
            [
                (
                    layer.sharded_parameters / self.rank.tp + layer.replicated_parameters,
                    self._kept_bytes(layer),
                    self._temporary_bytes(layer),
                    self._boundary_bytes(layer),
                )
                for layer in layers
            ]
        )[list(positions)].T
        rows = np.zeros((4, self.model.num_layers + 1))
        np.cumsum(columns[:2], axis=1, out=rows[:2, 1:])
        rows[2, :-1] = columns[2]
        rows[3, 1:] = columns[3]
        rows[3, -1] = 0.0
        return rows

    @cached_property
    def _stages(self) -> FloatArray:
        """Columns for the kernels, one row per stage."""
        traits, full = self.traits, self.recompute == "full"
        parameter = traits.bytes_per_parameter(self.rank.precision)
        shards = self.dp if self.zero_stage >= 1 else 1
        states = parameter.kept + (parameter.master + self.optimizer.moment_bytes) / shards
        return np.array(
            [
                (
                    states,
                    in_flight,
                    CHECKPOINT_BUFFERS if full else in_flight + 1,
                    CHECKPOINT_BUFFERS if full else in_flight,
                    parameter.bucket if self.dp > 1 else 0.0,
                    traits.bucket_elements,
                    parameter.step / shards,
                    traits.context_bytes * self.constants.context_scale,
                    traits.allocator_factor * self.constants.allocator_scale,
                )
                for in_flight in map(self.in_flight, range(self.pp))
            ],
            dtype=np.float64,
        )

    @cached_property
    def _tied(self) -> IntArray:
        """Positions of the two layers that share a weight, and its parameters on this rank."""
        where = [i for i, layer in enumerate(self.model.layers) if layer.tied_parameters]
        if len(where) != 2:  # noqa: PLR2004 - a weight is shared by two layers or by none
            return np.array([-1, -1, 0], np.int64)
        return np.array(
            [*where, self.model.layers[where[0]].tied_parameters // self.rank.tp], np.int64
        )

    def _kept_bytes(self, layer: Layer) -> float:
        """Bytes that one micro-batch in flight keeps: everything saved, or a block's input."""
        size, width = self.rank.micro_batch_size, self.rank.bytes_per_element
        if self.recompute == "full" and layer.kind == "block":
            return size * width * layer.output_elements
        return size * layer.saved_bytes(tp=self.rank.tp, bytes_per_element=width)

    def _temporary_bytes(self, layer: Layer) -> float:
        """Bytes that live while the layer runs: its working set, or logits and their copies."""
        size, width = self.rank.micro_batch_size, self.rank.bytes_per_element
        logits = size * layer.logits * self.traits.logit_bytes / self.rank.tp
        if self.recompute == "full" and layer.kind == "block":
            working = layer.saved_bytes(tp=self.rank.tp, bytes_per_element=width)
        else:
            working = 3 * layer.largest_saved_bytes(tp=self.rank.tp, bytes_per_element=width)
        return max(logits, size * working)

    def _boundary_bytes(self, layer: Layer) -> float:
        """Bytes of a micro-batch that cross the boundary after a layer."""
        size, width = self.rank.micro_batch_size, self.rank.bytes_per_element
        share = self.rank.tp if layer.output_sharded else 1
        return size * width * layer.output_elements / share + self.traits.mask_bytes
