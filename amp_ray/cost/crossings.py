"""Times of the messages between stages that have their own devices, tp, dp and shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from amp_ray.cost.collective import Path, start_s
from amp_ray.cost.kernels import RankTable, crossings, num_lanes
from amp_ray.cost.topology import FloatArray, IntArray, Topology
from amp_ray.spec.constants import Constants
from amp_ray.spec.model import Model
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.units import BYTES_PER_ELEMENT, Precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageGroup:
    """The devices of one stage, and what each of them takes.

    Args:
        devices: Shape ``(dp, tp)``.
        shares: Samples of one micro-batch per dp index.
        rings: What the tensor-parallel group of each dp index meets.
    """

    devices: IntArray
    shares: tuple[int, ...]
    rings: tuple[Path, ...]

    @property
    def dp(self) -> int:
        """Data parallel degree."""
        return int(self.devices.shape[0])

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return int(self.devices.shape[1])

    @property
    def ends(self) -> IntArray:
        """Shape ``(dp + 1,)``. Samples up to each dp index, from 0."""
        return np.array([0, *accumulate(self.shares)], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossingModel:
    """Times messages between any two stages.

    Args:
        model: The chain of layers.
        topology: Links.
        traits: What a message holds.
        constants: Start of a message.
        precision: Of activations.
    """

    model: Model
    topology: Topology
    traits: RuntimeTraits
    constants: Constants
    precision: Precision

    def sends(
        self, left: StageGroup, right: StageGroup, parts: Sequence[Sequence[int]], cut: int
    ) -> FloatArray:
        """Return what the messages between two stages take.

        Args:
            left: The stage before the cut.
            right: The stage after it.
            parts: Of every dp index of both stages, as in `common_parts`.
            cut: The boundary.

        Returns:
            Shape ``(2, num_parts)``: activations, gradients; the worst rank's.
        """
        ranks = rank_table(self.topology, (left, right), parts)
        found = crossings(np.array([[0, 1]]), ranks, *self.links, parts[0][-1] + 1)[0]
        seconds = self.seconds(found, left.tp, right.tp)
        if max(left.tp, right.tp) > 1:
            slower = np.maximum(gathers(left, parts[0]), gathers(right, parts[1]))
            seconds += self.gathered(slower, left.tp, right.tp)
        at_cut: FloatArray = seconds[:, :, cut]
        return at_cut

    def seconds(self, found: FloatArray, tp: int, next_tp: int) -> FloatArray:
        """Return the time of messages at every boundary, without gathering slices.

        Args:
            found: Shape ``(num_rows, 4)``. What messages meet, as `crossings` finds it.
            tp: Of the stage before the cut.
            next_tp: Of the stage after it.

        Returns:
            Shape ``(2, num_rows, num_layers + 1)``.
        """
        start = start_s(self.constants, self.traits)
        lanes = num_lanes(tp, next_tp)
        fixed = found[:, 0] * start + found[:, 1]
        kinds = ((next_tp, self.traits.sliced_activations), (tp, self.traits.sliced_gradients))
        rows = []
        for receiving, sliced in kinds:
            share = receiving / lanes / (receiving if sliced else 1)
            rows.append(fixed[:, None] + found[:, 2:3] * (self.sample_bytes(receiving) * share))
        rows[0] += (found[:, 3] * (self.traits.mask_bytes * (next_tp / lanes)))[:, None]
        return np.array(rows)

    def gathered(self, slower: FloatArray, tp: int, next_tp: int) -> FloatArray:
        """Return what putting slices together adds, where a runtime sends slices.

        Both ends of a cut do so at the same time, so the slower one counts.

        Args:
            slower: Shape ``(num_rows, 2)``. Latency of all steps, seconds per byte of a sample.
            tp: Of the stage before the cut.
            next_tp: Of the stage after it.

        Returns:
            Shape ``(2, num_rows, num_layers + 1)``; zeros where nothing is sliced.
        """
        held = np.maximum(self.sample_bytes(tp), self.sample_bytes(next_tp))
        took = start_s(self.constants, self.traits) + slower[:, :1] + slower[:, 1:] * held
        kinds = (self.traits.sliced_activations, self.traits.sliced_gradients)
        return np.array([took * sliced for sliced in kinds])

    def sample_bytes(self, tp: int) -> FloatArray:
        """Return what one rank holds of a sample at each boundary, shape ``(num_layers + 1,)``.

        Nothing enters the chain and nothing leaves it.
        """
        elements = [
            layer.output_elements / (tp if layer.output_sharded else 1)
            for layer in self.model.layers[:-1]
        ]
        return np.array([0.0, *elements, 0.0]) * BYTES_PER_ELEMENT[self.precision]

    @cached_property
    def links(self) -> tuple[FloatArray, FloatArray]:
        """Rates and latencies between nodes; within them on the diagonal."""
        rates, steps = (table.copy() for table in self.topology.between)
        np.fill_diagonal(rates, self.topology.intra_bytes_per_s)
        np.fill_diagonal(steps, self.topology.intra_step_s)
        return rates, steps


def rank_table(
    topology: Topology, groups: Sequence[StageGroup], parts: Sequence[Sequence[int]]
) -> RankTable:
    """Lay the ranks of several stages out for the kernel.

    Args:
        topology: Nodes of devices.
        groups: The stages.
        parts: Of every dp index of each stage, as in `common_parts`.
    """
    sizes = [0, *(group.devices.size for group in groups)]
    lengths = [0, *(group.dp + 1 for group in groups)]
    devices = np.concatenate([group.devices.ravel() for group in groups])
    return RankTable(
        nodes=topology.node_of_device[devices],
        first_node=np.cumsum(sizes, dtype=np.int64),
        ends=np.concatenate([group.ends for group in groups]),
        parts=np.array([part for row in parts for part in (*row, 0)], dtype=np.int64),
        first_end=np.cumsum(lengths, dtype=np.int64),
    )


def common_parts(shares: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Divide samples into the smallest parts that no rank of any stage has only a piece of.

    Ranks of different parts never wait for each other before gradients are synchronised.

    Args:
        shares: Samples of every rank, by stage; each adds up to the same number.

    Returns:
        The part of every rank, by stage, counted from 0.

    Example:
        >>> common_parts([(2, 2), (1, 1, 2), (4,)])
        ((0, 0), (0, 0, 0), (0,))
        >>> common_parts([(2, 2), (1, 1, 2)])
        ((0, 1), (0, 0, 1))
    """
    ends = [list(accumulate(row)) for row in shares]
    borders = sorted(set(ends[0]).intersection(*ends[1:]))
    return tuple(tuple(int(np.searchsorted(borders, end)) for end in row_ends) for row_ends in ends)


def gathers(group: StageGroup, parts: Sequence[int]) -> FloatArray:
    """Return what putting slices together takes in the slowest rank of each part.

    Args:
        group: The stage.
        parts: Of every dp index, as in `common_parts`.

    Returns:
        Shape ``(num_parts, 2)``: latency of all steps, seconds per byte of a sample.
    """
    found = np.zeros((parts[-1] + 1, 2))
    slices = group.tp - 1
    for part, share, ring in zip(parts, group.shares, group.rings, strict=True):
        price = (slices * ring.step_s, share * slices / group.tp / ring.bytes_per_s)
        found[part] = np.maximum(found[part], price)
    return found
