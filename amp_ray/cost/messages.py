"""Messages between stages: bytes, slices and gathers, for every possible cut.

A rank sends its samples to the ranks that need them; `slowest_messages` finds the slowest of these
messages. Seconds are linear in a rank's bytes of a sample at the boundary, so a message is kept as
coefficients until its boundary is known.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import start_s
from amp_ray.cost.kernels.stages import RankTable, slowest_messages
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Rings, Topology
from amp_ray.memo import memoised
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import StageOptions
from amp_ray.units import BYTES_PER_ELEMENT, Precision


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageModel:
    """Times messages between any stages."""

    model: Model  # the chain of layers
    topology: Topology
    traits: RuntimeTraits  # contents of a message
    constants: Constants  # start of a message
    precision: Precision  # precision of activations

    def between(
        self, stages: PlacedStages, rings: Rings, pairs: IntArray | None = None
    ) -> "Messages":
        """Return the messages across the cuts between stages.

        ``pairs``, shape ``(num_cuts, 2)``, are the stages before and after each cut; by default
        those that follow each other. Chunks of the last stage are followed by those of the first.
        """
        if pairs is None:
            pairs = (np.arange(stages.num_cuts)[:, None] + np.arange(2)) % stages.pp
        ranks = rank_table(self.topology, stages)
        slowest = slowest_messages(pairs, ranks, self.topology.links, stages.num_parts)
        gathers = None
        if self.slices and any(options.tp > 1 for options in stages.distinct_options[0]):
            gathers = self.gathers(stages, rings)[pairs].max(axis=1)
        divides = np.array([int(options.sequence_parallel) for options in stages.options])
        divided = divides[pairs].max(axis=1)
        return self.messages(stages.tp[pairs], slowest, gathers, divided)

    def messages(
        self,
        tps: IntArray,
        slowest: FloatArray,
        gathers: FloatArray | None,
        divided: IntArray | None = None,
    ) -> "Messages":
        """Return messages from the rates and latencies of the slowest ones.

        Args:
            tps: Shape ``(num_cuts, 2)``. Tp of the stages before and after each cut.
            slowest: Shape ``(num_cuts, num_parts, 4)``. Result of `slowest_messages`.
            gathers: Shape ``(num_cuts, num_parts, 2)``. Gathers at the slower end, as in `gathers`;
                None if no message is sliced.
            divided: Shape ``(num_cuts,)``. Whether sequence parallelism divides the tensors that
                cross a cut; these are then neither sliced nor gathered. None if it divides none.
        """
        divided = np.zeros(len(tps), np.int64) if divided is None else divided
        receiving, mask_bytes = tps[:, ::-1].T, self.traits.mask_bytes
        share = (receiving / np.lcm(tps[:, 0], tps[:, 1]))[:, :, None]
        fixed, latency, slope, of_message = slowest.transpose(2, 0, 1)
        coefficients = np.zeros((2, 3, *fixed.shape))
        coefficients[:, 0] = fixed * start_s(self.constants, self.traits) + latency
        coefficients[:, 1] = slope * share
        if gathers is not None:
            self._add_gathers(coefficients, np.where(divided[:, None], 1, tps), gathers)
        if mask_bytes:
            coefficients[0, 0] += of_message * (mask_bytes * share[0])
        return Messages(model=self, tps=tps, divided=divided, coefficients=coefficients)

    def _add_gathers(self, coefficients: FloatArray, tps: IntArray, gathers: FloatArray) -> None:
        """Replace messages by slices that the receiver gathers.

        Both ends of a cut gather at the same time, so the slower end counts, and the larger number
        of bytes per rank.
        """
        divides, equal = (tps.max(axis=1) > 1)[:, None], (tps[:, 0] == tps[:, 1])[:, None]
        step_s = divides * (start_s(self.constants, self.traits) + gathers[:, :, 0])
        slope = divides * gathers[:, :, 1]
        uneven = not equal.all()
        for kind, sliced in enumerate(
            (self.traits.sliced_activations, self.traits.sliced_gradients)
        ):
            if sliced:
                coefficients[kind, 0] += step_s
                coefficients[kind, 1] /= tps[:, 1 - kind, None]
                coefficients[kind, 1] += equal * slope if uneven else slope
                if uneven:
                    coefficients[kind, 2] = ~equal * slope

    def gathers(self, stages: PlacedStages, rings: Rings) -> FloatArray:
        """Return the time to gather slices in the slowest group of each part.

        Returns:
            Shape ``(pp, num_parts, 2)``: latency of all steps, seconds per byte of a sample.
        """
        tp = stages.tp[stages.stage_of_group]
        paths = rings.of_groups
        step_s = np.array([path.step_s for path in paths])
        rate = np.array([path.bytes_per_s for path in paths])
        price = ((tp - 1) * step_s, stages.samples * (tp - 1) / tp / rate)
        return stages.worst(np.array(price)).transpose(1, 2, 0)

    @property
    def slices(self) -> bool:
        """Whether the runtime sends slices that the receiver gathers."""
        return self.traits.sliced_activations or self.traits.sliced_gradients

    @memoised
    def sample_bytes(self, tp: int, *, divided: bool = False) -> FloatArray:
        """Return a rank's bytes of a sample at each boundary; see `sample_bytes`."""
        return sample_bytes(self.model, tp, self.precision, sequence_parallel=divided)

    def crossing_bytes(self, before: StageOptions, after: StageOptions) -> tuple[FloatArray, ...]:
        """Return the bytes of a sample's activation and gradient over all tp ranks of a cut.

        Both have shape ``(num_layers + 1,)``, by boundary.
        """
        divided = before.sequence_parallel or after.sequence_parallel
        kinds = (
            (self.traits.sliced_activations, after.tp),
            (self.traits.sliced_gradients, before.tp),
        )
        return tuple(
            self.sample_bytes(tp) * (1 if is_sliced or divided else tp) for is_sliced, tp in kinds
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Messages:
    """The two messages across some cuts: activations forward, gradients back."""

    model: MessageModel  # gives the bytes that ranks hold
    tps: IntArray  # shape ``(num_cuts, 2)``. Tp of the stages before and after each cut.
    divided: IntArray  # shape ``(num_cuts,)``. Whether sequence parallelism divides its tensors.
    # Shape ``(2, 3, num_cuts, num_parts)``. By message: fixed seconds; seconds per byte of a sample
    # in a receiving rank; seconds per byte of a sample in a rank of the end that has more.
    coefficients: FloatArray

    def at(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return activation and gradient seconds of the cuts at these bounds.

        Args:
            bounds: Shape ``(num_chunks + 1,)``. Cut ``i`` lies between the stages of pair ``i``
                modulo the number of pairs.

        Returns:
            Shape ``(2, num_chunks - 1, num_parts)``.
        """
        cuts = np.arange(len(bounds) - 2)
        if len(cuts) == len(self.tps):
            return self._seconds(self._held[:, cuts, bounds[1:-1], None])
        cuts %= max(1, len(self.tps))
        return self._seconds(self._held[:, cuts, bounds[1:-1], None], cuts)

    def rows(self) -> tuple[FloatArray, IntArray]:
        """Return cut rows for the partition and the row of each cut, by its slowest part.

        Returns:
            Seconds of both messages of shape ``(num_rows, num_layers + 1)``, at the same time or
            one after the other, depending on the runtime; and rows of shape ``(num_cuts,)``.
        """
        worst = self.coefficients.max(axis=3, keepdims=True)
        keys = np.concatenate([self.tps, self.divided[:, None], worst.reshape(6, -1).T], axis=1)
        index: dict[bytes, int] = {}
        row = [index.setdefault(key.tobytes(), len(index)) for key in keys]
        first = [row.index(number) for number in range(len(index))]
        distinct = replace(
            self, tps=self.tps[first], divided=self.divided[first], coefficients=worst[:, :, first]
        )
        return distinct.everywhere(), np.array(row, np.int64)

    def everywhere(self) -> FloatArray:
        """Return the time of both messages at every boundary, shape ``(num_cuts, num_layers + 1)``.

        All samples must form one part.
        """
        seconds = self._seconds(self._held)
        both: FloatArray = (
            seconds.max(axis=0) if self.model.traits.duplex_transfers else seconds.sum(axis=0)
        )
        return both

    def _seconds(self, held: FloatArray, cuts: IntArray | None = None) -> FloatArray:
        """Return the seconds of all or some cuts, given a receiving rank's bytes of a sample."""
        coefficients = self.coefficients if cuts is None else self.coefficients[:, :, cuts]
        seconds: FloatArray = coefficients[:, 0] + coefficients[:, 1] * held
        if self._changes_tp:
            seconds += coefficients[:, 2] * held.max(axis=0)
        return seconds

    @cached_property
    def _changes_tp(self) -> bool:
        return bool((self.tps[:, 0] != self.tps[:, 1]).any())

    @cached_property
    def _held(self) -> FloatArray:
        """Bytes of a sample in a receiving rank, shape ``(2, num_cuts, num_layers + 1)``."""
        keys = 2 * self.tps[:, ::-1].T + self.divided
        number: dict[int, int] = {}
        index = [[number.setdefault(key, len(number)) for key in row] for row in keys.tolist()]
        tables = [self.model.sample_bytes(key // 2, divided=bool(key % 2)) for key in number]
        shape = -1, self.model.model.num_layers + 1
        held: FloatArray = np.array(tables).reshape(shape)[np.array(index, np.int64)]
        return held


def sample_bytes(
    model: Model, tp: int, precision: Precision, *, sequence_parallel: bool = False
) -> FloatArray:
    """Return one rank's bytes of a sample at each boundary, shape ``(num_layers + 1,)``.

    It is 0 at both ends of the chain.
    """
    elements = [
        layer.output_elements / (tp if layer.output_sharded or sequence_parallel else 1)
        for layer in model.layers[:-1]
    ]
    return np.array([0.0, *elements, 0.0]) * BYTES_PER_ELEMENT[precision]


def rank_table(topology: Topology, stages: PlacedStages) -> RankTable:
    """Lay the ranks of stages out for the kernel."""
    stage, samples = stages.stage_of_group, stages.samples
    place = stage + np.arange(len(stage))
    ends, parts = np.zeros((2, len(stage) + stages.pp), np.int64)
    ends[place + 1] = samples.cumsum() - stage * sum(stages.shares[0])
    parts[place] = stages.parts
    sizes = [options.num_ranks for options in stages.options]
    return RankTable(
        nodes=topology.node_of_device[stages.devices],
        first_node=np.array([0, *accumulate(sizes)]),
        ends=ends,
        parts=parts,
        first_end=np.array(stages.first_group) + np.arange(stages.pp + 1),
    )
