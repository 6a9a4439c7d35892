"""What follows the pipeline: tied embedding, gradient all-reduce, optimizer."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, start_s
from amp_ray.cost.roofline import stream_s
from amp_ray.cost.topology import IntArray, Topology
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.model import Model
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.units import BYTES_PER_ELEMENT, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Seconds after the last backward pass, of the stage that takes longest."""

    gradient_sync_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TailModel:
    """Times the end of an iteration.

    Args:
        model: The chain of layers.
        topology: Links.
        traits: What the runtime sends and touches.
        constants: Efficiencies.
        precision: Of weights.
        zero_stage: What is sharded over dp.
    """

    model: Model
    topology: Topology
    traits: RuntimeTraits
    constants: Constants
    precision: Precision
    zero_stage: int

    def estimate(self, grid: IntArray, bounds: tuple[int, ...]) -> Tail:
        """Return the tail of the slowest stage.

        All gradient rings run at once; stages that hold the tied embedding add its two
        gradients before.

        Args:
            grid: Shape ``(pp, dp, tp)``. Device of each rank.
            bounds: Shape ``(pp + 1,)``.
        """
        pp, dp, tp = grid.shape
        parameters = self._parameters(bounds, tp)
        sync, step = np.zeros(pp), np.zeros(pp)
        rings = self.topology.rings(grid.transpose(0, 2, 1).reshape(pp * tp, dp))
        for stage, count in enumerate(parameters):
            device = self._slowest_memory(grid[stage])
            paths = set(rings[stage * tp : (stage + 1) * tp])
            sync[stage] = max(self._sync_s(count, dp, path, device) for path in paths)
            step[stage] = self._optimizer_s(count, dp, device)
        sync[[0, -1]] += self._tied_s(grid, bounds)
        worst = int(np.argmax(sync + step))
        return Tail(gradient_sync_s=float(sync[worst]), optimizer_s=float(step[worst]))

    @property
    def _start_s(self) -> float:
        """Start of one collective."""
        return start_s(self.constants, self.traits)

    def _parameters(self, bounds: tuple[int, ...], tp: int) -> list[float]:
        """Return the parameters of one rank of each stage; tied ones once per stage."""
        layers = self.model.layers
        held = [layer.sharded_parameters / tp + layer.replicated_parameters for layer in layers]
        prefix = np.concatenate(([0.0], np.cumsum(held)))
        tied = [i for i, layer in enumerate(layers) if layer.tied_parameters]
        result = []
        for first, end in pairwise(bounds):
            twice = [i for i in tied if first <= i < end][1:]
            again = sum(layers[i].tied_parameters for i in twice) / tp
            result.append(float(prefix[end] - prefix[first]) - again)
        return result

    def _slowest_memory(self, devices: IntArray) -> Device:
        """Return the device of a stage whose memory is slowest."""
        types = np.unique(self.topology.type_of_device[devices])
        known = self.topology.cluster.device_types
        found: list[Device] = [known[int(index)] for index in types]
        return min(found, key=lambda device: device.memory_bytes_per_s)

    def _sync_s(self, parameters: float, dp: int, ring: Path, device: Device) -> float:
        """Time the data-parallel all-reduce of a stage's gradients, with its flat buckets.

        ZeRO-1 then gathers the weights that each rank updated.
        """
        if dp == 1:
            return 0.0
        gradients = parameters * self.traits.gradient_bytes_per_parameter
        copies = parameters * self.traits.bucket_traffic_bytes_per_parameter
        seconds = all_reduce_s(gradients, dp, ring, self._start_s)
        seconds += stream_s(copies, 0, device, self.constants)
        if self.zero_stage >= 1:
            weights = parameters * BYTES_PER_ELEMENT[self.precision]
            seconds += all_gather_s(weights, dp, ring, self._start_s)
        return seconds

    def _optimizer_s(self, parameters: float, dp: int, device: Device) -> float:
        """Time the optimizer step by the memory that it touches."""
        shards = dp if self.zero_stage >= 1 else 1
        num_bytes = parameters * self.traits.optimizer_traffic_bytes_per_parameter / shards
        return stream_s(num_bytes, 0, device, self.constants)

    def _tied_s(self, grid: IntArray, bounds: tuple[int, ...]) -> float:
        """Time adding the gradients of a weight that the first and the last stage both hold."""
        tied = [i for i, layer in enumerate(self.model.layers) if layer.tied_parameters]
        apart = len(tied) > 1 and tied[0] < bounds[1] and tied[-1] >= bounds[-2]
        if len(grid) == 1 or not apart:
            return 0.0
        tp = grid.shape[2]
        parameters = self.model.layers[tied[0]].tied_parameters / tp
        num_bytes = parameters * self.traits.tied_bytes_per_parameter
        pairs = np.stack([grid[0].ravel(), grid[-1].ravel()], axis=1)
        paths = set(self.topology.rings(pairs))
        return max(all_reduce_s(num_bytes, 2, path, self._start_s) for path in paths)
