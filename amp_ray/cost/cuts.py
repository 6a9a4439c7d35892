"""Times of the messages across every possible cut, for every replica."""

from dataclasses import dataclass

import numpy as np

from amp_ray.cost.collective import start_s
from amp_ray.cost.roofline import Rank
from amp_ray.cost.topology import FloatArray, IntArray, Rings, Topology
from amp_ray.spec.constants import Constants
from amp_ray.spec.model import Model
from amp_ray.spec.traits import RuntimeTraits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """Seconds of one kind of message: a fixed part and one that grows with the boundary.

    Args:
        num_bytes: Shape ``(num_layers + 1,)``. What one rank holds of a micro-batch's tensor at
            each boundary.
        fixed_s: Shape ``(pp - 1, dp)``. Start, latency, and what does not grow.
        s_per_byte: Shape ``(pp - 1, dp)``. Inverse rate of the slowest rank's message.
    """

    num_bytes: FloatArray
    fixed_s: FloatArray
    s_per_byte: FloatArray

    def at(self, cuts: IntArray) -> FloatArray:
        """Return seconds across given cuts, shape ``(pp - 1, dp)``.

        Args:
            cuts: Shape ``(pp - 1,)``. Boundaries.
        """
        return self.fixed_s + self.num_bytes[cuts, None] * self.s_per_byte

    def everywhere(self, fixed_s: FloatArray, s_per_byte: FloatArray) -> FloatArray:
        """Return seconds at every boundary, shape ``(num_rows, num_layers + 1)``.

        Args:
            fixed_s: Shape ``(num_rows,)``. Fixed part of each kind of cut.
            s_per_byte: Shape ``(num_rows,)``. Its inverse rate.
        """
        return fixed_s[:, None] + self.num_bytes * s_per_byte[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutTimes:
    """Seconds of the two messages across every possible cut.

    Args:
        activations: Of the forward pass.
        gradients: Of the backward pass.
    """

    activations: Messages
    gradients: Messages

    def rows(self, *, duplex: bool) -> tuple[FloatArray, IntArray]:
        """Return cut rows for the partition and the row of each cut, by its slowest replica.

        Args:
            duplex: Whether both messages cross at the same time.

        Returns:
            Seconds of shape ``(num_rows, num_layers + 1)`` and rows of shape ``(pp - 1,)``.
        """
        both = (self.activations, self.gradients)
        worst = [part.max(axis=1) for kind in both for part in (kind.fixed_s, kind.s_per_byte)]
        distinct, row = np.unique(np.stack(worst, axis=1), axis=0, return_inverse=True)
        forward = self.activations.everywhere(distinct[:, 0], distinct[:, 1])
        backward = self.gradients.everywhere(distinct[:, 2], distinct[:, 3])
        seconds = np.maximum(forward, backward) if duplex else forward + backward
        return seconds, row.reshape(-1).astype(np.int64)

    def sends(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return activation and gradient seconds of given cuts, shape ``(2, pp - 1, dp)``."""
        cuts = np.array(bounds[1:-1], dtype=np.int64)
        return np.array([self.activations.at(cuts), self.gradients.at(cuts)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutModel:
    """Times messages between stages.

    Args:
        model: The chain of layers.
        topology: Links.
        traits: What a message holds.
        constants: Start of a message.
    """

    model: Model
    topology: Topology
    traits: RuntimeTraits
    constants: Constants

    def cuts(self, grid: IntArray, rank: Rank, tp_rings: Rings) -> CutTimes:
        """Return the times across all cuts of a grid.

        Args:
            grid: Shape ``(pp, dp, tp)``. Device of each rank.
            rank: tp, micro-batch size, precision; the device does not matter.
            tp_rings: Of the ``pp * dp`` tensor-parallel groups, in the grid's order.
        """
        traits = self.traits
        start = start_s(self.constants, traits)
        transfers = self.topology.transfers(grid)
        fixed_s, s_per_byte = start + transfers.step_s, transfers.s_per_byte
        num_bytes = boundary_bytes(self.model, rank)
        sliced_s, sliced_s_per_byte = fixed_s, s_per_byte
        if rank.tp > 1 and (traits.sliced_activations or traits.sliced_gradients):
            gather_s, gather_s_per_byte = _gathers(tp_rings, grid.shape, start)
            sliced_s = fixed_s + gather_s
            sliced_s_per_byte = s_per_byte / rank.tp + gather_s_per_byte
        mask_s = traits.mask_bytes * s_per_byte
        return CutTimes(
            activations=Messages(
                num_bytes=num_bytes,
                fixed_s=mask_s + (sliced_s if traits.sliced_activations else fixed_s),
                s_per_byte=sliced_s_per_byte if traits.sliced_activations else s_per_byte,
            ),
            gradients=Messages(
                num_bytes=num_bytes,
                fixed_s=sliced_s if traits.sliced_gradients else fixed_s,
                s_per_byte=sliced_s_per_byte if traits.sliced_gradients else s_per_byte,
            ),
        )


def boundary_bytes(model: Model, rank: Rank) -> FloatArray:
    """Return what one rank holds of a micro-batch at each boundary, shape ``(num_layers + 1,)``.

    Nothing enters the chain and nothing leaves it.
    """
    elements = [
        layer.output_elements / (rank.tp if layer.output_sharded else 1)
        for layer in model.layers[:-1]
    ]
    return np.array([0.0, *elements, 0.0]) * (rank.micro_batch_size * rank.bytes_per_element)


def _gathers(
    tp_rings: Rings, shape: tuple[int, ...], start: float
) -> tuple[FloatArray, FloatArray]:
    """Return fixed time and inverse rate of putting slices together, shape ``(pp - 1, dp)`` each.

    Both ends of a cut do so at the same time, so the slower one counts.
    """
    pp, dp, tp = shape
    paths = [tp_rings.paths[index] for index in tp_rings.index]
    step_s = np.array([path.step_s for path in paths]).reshape(pp, dp)
    s_per_byte = np.array([1.0 / path.bytes_per_s for path in paths]).reshape(pp, dp)
    slower_step_s = np.maximum(step_s[:-1], step_s[1:])
    slower_s_per_byte = np.maximum(s_per_byte[:-1], s_per_byte[1:])
    return start + (tp - 1) * slower_step_s, (tp - 1) / tp * slower_s_per_byte
