"""Time of every layer on one kind of rank: counted work, anchored at what was measured."""

from dataclasses import dataclass, replace

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import Constants
from amp_ray.cost.anchors import LayerAnchors, interpolate, layer_anchors
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.roofline import Phases, Rank, stream_s
from amp_ray.cost.work import PASSES, LayerWork
from amp_ray.inputs.profile import Profile
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.recompute import RecomputeKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTable:
    """Seconds of every layer for one micro-batch on one kind of rank."""

    forward_s: FloatArray  # shape ``(num_layers,)``. Everything that the forward pass takes.
    # Shape ``(num_layers,)``. Everything that the backward pass takes, recompute included.
    backward_s: FloatArray
    tensor_parallel_s: FloatArray  # shape ``(num_layers,)``. The all-reduces within both.
    extrapolated: bool  # whether the micro-batch lies outside of what was measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Fills layer tables for one model under one runtime."""

    model: Model  # the chain of layers
    profile: Profile  # measurements to anchor at, or none
    traits: RuntimeTraits  # what the runtime does
    constants: Constants  # efficiencies

    def table(
        self, rank: Rank, ring: Path, recompute: RecomputeKind, exchange: Path = NO_RING
    ) -> LayerTable:
        """Return the times of every layer.

        Args:
            rank: Device, tp, micro-batch size, precision.
            ring: What the tensor-parallel all-reduces meet.
            exchange: What the all-to-alls of experts meet.
            recompute: What every block computes again in the backward pass.

        Raises:
            ValueError: If the profile is measured, but not for this device and tp.
        """
        layers, positions = self.model.distinct_layers
        rank = replace(rank, collective_host_s=ring.host_s)
        scale = self.constants.program_scale
        anchors = layer_anchors(self.profile, self.model, rank, self.traits, scale)
        rows = np.array(
            [
                self._layer(layer, anchors[index], rank, (ring, exchange), recompute)
                for index, layer in enumerate(layers)
            ]
        )
        by_position = rows[list(positions)].T
        return LayerTable(
            forward_s=by_position[0].copy(),
            backward_s=by_position[1].copy(),
            tensor_parallel_s=by_position[2].copy(),
            extrapolated=any(anchor.extrapolated for anchor in anchors),
        )

    def _layer(
        self,
        layer: Layer,
        anchors: LayerAnchors,
        rank: Rank,
        met: tuple[Path, Path],
        recompute: RecomputeKind,
    ) -> tuple[float, float, float]:
        """Return forward, backward and all-reduce seconds of one layer."""
        if not layer.operators:
            return self._passing(anchors, rank)
        if layer.kind != "block":
            rank = rank.beside_fp8
        work = LayerWork(layer=layer, anchors=anchors, traits=self.traits, constants=self.constants)
        compute = work.compute(rank)
        ring, exchange = met
        forward_talk_s, backward_talk_s = (
            talk_s + work.exchanges_s(rank, exchange)
            for talk_s in self._visible_talk_s(work, compute, rank, ring)
        )
        runs, again, core_s = 1, 0, 0.0
        if layer.kind == "block":
            runs, again = self.traits.forward_runs, int(recompute == "full")
            if recompute == "selective":
                core_s = work.core_s(rank, compute.forward_s)
        forward_s = compute.forward_s + forward_talk_s
        backward_s = compute.backward_s + backward_talk_s + self._accumulation_s(layer, rank)
        talk_s = (runs + again) * forward_talk_s + backward_talk_s
        return runs * forward_s, again * forward_s + core_s + backward_s, talk_s

    def _visible_talk_s(
        self, work: LayerWork, compute: Phases, rank: Rank, ring: Path
    ) -> tuple[float, float]:
        """Return what the all-reduces add to each pass.

        Where the runtime does not wait for them, they first fill the time in which the device
        waits for the host.
        """
        forward_s, backward_s = (
            talk_s + work.restarts_s(direction, rank)
            for direction, talk_s in zip(PASSES, work.talk_s(rank, ring, compute), strict=True)
        )
        if not self.traits.waits_for_all_reduces:
            forward_s -= compute.forward_idle_s
            backward_s -= compute.backward_idle_s
        return max(0.0, forward_s), max(0.0, backward_s)

    def _passing(self, anchors: LayerAnchors, rank: Rank) -> tuple[float, float, float]:
        """Time a layer without counted work by what was measured, whatever its size.

        Where only the forward pass was measured, the backward pass takes as long.
        """
        if not anchors.at_tp:
            return 0.0, 0.0, 0.0
        forward = {size: measured.forward_s for size, measured in anchors.at_tp.items()}
        backward = {
            size: measured.backward_s
            for size, measured in anchors.at_tp.items()
            if measured.backward_s is not None
        }
        size = rank.micro_batch_size
        return interpolate(forward, size), interpolate(backward or forward, size), 0.0

    def _accumulation_s(self, layer: Layer, rank: Rank) -> float:
        """Time of adding a micro-batch's gradients to the step's, a kernel per tensor."""
        parameters = layer.sharded_parameters / rank.tp + layer.replicated_parameters
        per = self.traits.bytes_per_parameter(rank.precision)
        return stream_s(
            parameters * per.accumulation, len(layer.weights), rank.device, self.constants
        )
