"""What follows the pipeline: tied embedding, gradient all-reduce, optimizer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, start_s
from amp_ray.cost.roofline import stream_s
from amp_ray.cost.topology import FloatArray, IntArray, Topology
from amp_ray.cost.weights import Weights
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.optimizer import Optimizer
from amp_ray.spec.traits import ParameterBytes, RuntimeTraits
from amp_ray.units import BYTES_PER_ELEMENT, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Seconds after the last backward pass, of the stage that takes longest.

    Args:
        gradient_sync_s: All-reduces of gradients, and what ZeRO-1 gathers after the step.
        optimizer_s: The optimizer step.
    """

    gradient_sync_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class TailModel:
    """Times the end of an iteration.

    Args:
        topology: Links.
        traits: What the runtime sends and touches.
        constants: Efficiencies.
        precision: Of weights.
        optimizer: What the update touches.
        zero_stage: What is sharded over dp.
    """

    topology: Topology
    traits: RuntimeTraits
    constants: Constants
    precision: Precision
    optimizer: Optimizer
    zero_stage: int

    def estimate(self, grid: IntArray, bounds: tuple[int, ...], weights: Weights) -> Tail:
        """Return the tail of the slowest stage.

        All gradient rings run at once; stages that hold the tied embedding add its two
        gradients before.

        Args:
            grid: Shape ``(pp, dp, tp)``. Device of each rank.
            bounds: Shape ``(pp + 1,)``.
            weights: What a rank holds at this tp.
        """
        pp, dp, tp = grid.shape
        parameters = weights.of_stages(bounds).tolist()
        rings = self.topology.rings(grid.transpose(0, 2, 1).reshape(pp * tp, dp))
        sync, step = np.zeros(pp), np.zeros(pp)
        for stage, (held, device) in enumerate(zip(parameters, self.slowest(grid), strict=True)):
            paths = rings.among(stage * tp, (stage + 1) * tp)
            sync[stage] = max(self.sync_s(held, dp, path, device) for path in paths)
            step[stage] = self.optimizer_s(held, dp, device)
        self._add_tied(sync, grid, bounds, weights)
        worst = int(np.argmax(sync + step))
        return Tail(gradient_sync_s=float(sync[worst]), optimizer_s=float(step[worst]))

    def sync_s(self, parameters: float, dp: int, ring: Path, device: Device) -> float:
        """Time the data-parallel all-reduce of a rank's gradients, with its flat buckets.

        ZeRO-1 then gathers the weights that each rank updated.

        Args:
            parameters: Of the rank.
            dp: Ranks in the ring.
            ring: What it meets.
            device: What copies the buckets.
        """
        per, start = self._per_parameter, self._start_s
        buckets_s = stream_s(parameters * per.bucket_traffic, 0, device, self.constants)
        if dp == 1:
            return buckets_s if self.traits.buckets_alone else 0.0
        seconds = all_reduce_s(parameters * per.gradient, dp, ring, start) + buckets_s
        if self.zero_stage >= 1:
            num_bytes = parameters * BYTES_PER_ELEMENT[self.precision]
            seconds += all_gather_s(num_bytes, dp, ring, start)
        return seconds

    def optimizer_s(self, parameters: float, dp: int, device: Device) -> float:
        """Time the optimizer step by the memory that it touches.

        Args:
            parameters: Of the rank; ZeRO-1 divides them by dp.
            dp: Data parallel degree.
            device: What runs it.
        """
        shards = dp if self.zero_stage >= 1 else 1
        num_bytes = self._per_parameter.step_traffic + self.optimizer.update_traffic_bytes
        return stream_s(parameters / shards * num_bytes, 0, device, self.constants)

    def tied_s(self, parameters: float, ring: Path) -> float:
        """Time the all-reduce of a weight between two ranks that both hold it.

        Args:
            parameters: Of one rank.
            ring: What the two meet.
        """
        return all_reduce_s(parameters * self._per_parameter.tied, 2, ring, self._start_s)

    def slowest(self, grid: IntArray) -> list[Device]:
        """Return the device of each stage whose memory is slowest.

        Args:
            grid: Shape ``(pp, dp, tp)``. Device of each rank.
        """
        known = self.topology.cluster.device_types
        types = self.topology.type_of_device[grid].reshape(len(grid), -1).tolist()
        return [
            min((known[index] for index in set(row)), key=lambda device: device.memory_bytes_per_s)
            for row in types
        ]

    def _add_tied(
        self, sync: FloatArray, grid: IntArray, bounds: tuple[int, ...], weights: Weights
    ) -> None:
        """Add the all-reduce of a weight to the two stages that hold it, where they differ."""
        if weights.tied is None:
            return
        first, last = weights.tied.stages(bounds)
        if first == last:
            return
        parameters = weights.tied.parameters
        pairs = self.topology.rings(np.stack([grid[first].ravel(), grid[last].ravel()], axis=1))
        sync[[first, last]] += max(self.tied_s(parameters, path) for path in pairs.paths)

    @cached_property
    def _start_s(self) -> float:
        """Start of one collective."""
        return start_s(self.constants, self.traits)

    @cached_property
    def _per_parameter(self) -> ParameterBytes:
        """What a parameter takes in this precision."""
        return self.traits.bytes_per_parameter(self.precision)
