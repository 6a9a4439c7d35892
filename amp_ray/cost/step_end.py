"""The end of an iteration, after the pipeline: gradient sync, tied weights, optimizer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import Final

import numpy as np

from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, start_s
from amp_ray.cost.roofline import stream_s
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import IntArray, Topology
from amp_ray.cost.weights import Weights
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.optimizer import Optimizer
from amp_ray.spec.traits import ParameterBytes, RuntimeTraits
from amp_ray.units import BYTES_PER_ELEMENT, Precision

MANY_PARAMETERS: Final = 1e9
"""Where the time of a step end, which is linear in the parameters, is taken a second time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds after the last backward pass, of the stage that takes longest.

    Args:
        gradient_sync_s: All-reduces of gradients, and what ZeRO-1 gathers after the step.
        optimizer_s: The optimizer step.
    """

    gradient_sync_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEndModel:
    """Times the end of an iteration on one rank.

    Args:
        traits: What the runtime sends and touches.
        optimizer: What the update touches.
        zero_stage: What is sharded over dp.
    """

    topology: Topology
    traits: RuntimeTraits
    constants: Constants
    precision: Precision
    optimizer: Optimizer
    zero_stage: int

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
        """Time the optimizer step by the memory that it touches; ZeRO-1 divides it by dp."""
        shards = dp if self.zero_stage >= 1 else 1
        num_bytes = self._per_parameter.step_traffic + self.optimizer.update_traffic_bytes
        return stream_s(parameters / shards * num_bytes, 0, device, self.constants)

    def tied_s(self, parameters: float, ring: Path) -> float:
        """Time the all-reduce of a weight between two ranks that both hold it."""
        return all_reduce_s(parameters * self._per_parameter.tied, 2, ring, self._start_s)

    def replicated_s(self, parameters: float, tp: int, ring: Path) -> float:
        """Time the all-reduce of gradients of which each tensor-parallel rank has a part."""
        return all_reduce_s(parameters * self._per_parameter.gradient, tp, ring, self._start_s)

    def line(self, dp: int, paths: Iterable[Path], device: Device) -> tuple[float, float]:
        """Return both, without tied weights, as a line: seconds, and seconds per parameter.

        Args:
            dp: Data parallel degree.
            paths: What the gradient rings of the stage meet.
            device: That with the slowest memory.
        """
        rings = tuple(paths)
        none, many = (
            max(self.sync_s(parameters, dp, ring, device) for ring in rings)
            + self.optimizer_s(parameters, dp, device)
            for parameters in (0.0, MANY_PARAMETERS)
        )
        return none, (many - none) / MANY_PARAMETERS

    def slowest(self, types: Iterable[int]) -> Device:
        """Return the device whose memory is slowest, of some types."""
        known = self.topology.cluster.device_types
        return min((known[index] for index in types), key=lambda device: device.memory_bytes_per_s)

    @cached_property
    def _start_s(self) -> float:
        """Start of one collective."""
        return start_s(self.constants, self.traits)

    @cached_property
    def _per_parameter(self) -> ParameterBytes:
        """What a parameter takes in this precision."""
        return self.traits.bytes_per_parameter(self.precision)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEnds:
    """The end of an iteration for stages in a row, by what layers they hold.

    All gradient rings of all stages run at once; stages that hold a tied weight add its two
    gradients before.

    Args:
        types: Device types of each stage.
        weights: What a rank holds at some tp, with experts on some number of ranks.
    """

    model: StepEndModel
    stages: PlacedStages
    types: Sequence[frozenset[int]]
    weights: Callable[..., Weights]
    _tied_paths: dict[tuple[int, int], tuple[Path, ...]] = field(init=False, default_factory=dict)

    def at(self, bounds: tuple[int, ...]) -> StepEnd:
        """Return what the slowest stage takes.

        Args:
            bounds: Of all chunks.
        """
        sync_s, step_s = max(self.of_stages(bounds), key=sum)
        return StepEnd(gradient_sync_s=sync_s, optimizer_s=step_s)

    def of_stages(self, bounds: tuple[int, ...]) -> list[tuple[float, float]]:
        """Return what gradient sync and optimizer take each stage.

        Args:
            bounds: Of all chunks.
        """
        tps = [options.tp for options in self.stages.options]
        held = {tp: self.weights(tp).of_stages(bounds, len(tps)) for tp in set(tps)}
        sync, step = [], []
        for stage, (tp, paths, device) in enumerate(
            zip(tps, self._paths, self._devices, strict=True)
        ):
            options = self.stages.options[stage]
            parameters, dp = float(held[tp][stage]), options.dp
            if options.spreads_experts:
                parameters -= self._experts(stage, bounds) * options.expert_ranks / tp
            sync.append(max([self.model.sync_s(parameters, dp, path, device) for path in paths]))
            step.append(self.model.optimizer_s(parameters, dp, device))
        self._add_tied(sync, bounds)
        self._add_experts(sync, step, bounds)
        self._add_replicated(sync, bounds)
        return list(zip(sync, step, strict=True))

    def _add_replicated(self, sync: list[float], bounds: tuple[int, ...]) -> None:
        """Add the all-reduce of gradients that tensor-parallel ranks have of their tokens alone.

        Those are of the norms, which every rank holds whole, under sequence parallelism.
        """
        for stage, options in enumerate(self.stages.options):
            if options.sequence_parallel:
                weights = self.weights(options.tp)
                parameters = float(weights.replicated_of_stages(bounds, self.stages.pp)[stage])
                sync[stage] += max(
                    self.model.replicated_s(parameters, options.tp, path)
                    for path in self._tensor_paths[stage]
                )

    @cached_property
    def _tensor_paths(self) -> list[list[Path]]:
        """What the tensor-parallel rings of each stage meet."""
        rings = self.model.topology.rings(self.stages.groups)
        return [rings.among(first, end) for first, end in pairwise(self.stages.first_group)]

    def _experts(self, stage: int, bounds: tuple[int, ...]) -> float:
        """Return the parameters of experts on one rank of a stage."""
        options = self.stages.options[stage]
        weights = self.weights(options.tp, options.expert_ranks)
        return float(weights.experts_of_stages(bounds, self.stages.pp)[stage])

    def _add_experts(self, sync: list[float], step: list[float], bounds: tuple[int, ...]) -> None:
        """Add the experts of stages that spread them: other ranks hold the same ones."""
        for stage, options in enumerate(self.stages.options):
            if options.spreads_experts:
                parameters, dp = self._experts(stage, bounds), options.expert_dp
                device = self._devices[stage]
                sync[stage] += max(
                    self.model.sync_s(parameters, dp, path, device)
                    for path in self._expert_paths[stage]
                )
                step[stage] += self.model.optimizer_s(parameters, dp, device)

    @cached_property
    def _expert_paths(self) -> list[list[Path]]:
        """What the gradient rings of each stage's experts meet."""
        grids = [self.stages.expert_grid(stage) for stage in range(self.stages.pp)]
        rows = [grid.reshape(len(grid), -1).T.tolist() for grid in grids]
        rings = self.model.topology.rings(list(chain.from_iterable(rows)))
        ends = accumulate(map(len, rows), initial=0)
        return [rings.among(first, end) for first, end in pairwise(ends)]

    @cached_property
    def _paths(self) -> list[list[Path]]:
        """What the gradient rings of each stage meet."""
        groups = self.stages.groups
        rows = chain.from_iterable(
            zip(*groups[first:end], strict=True) for first, end in pairwise(self.stages.first_group)
        )
        rings = self.model.topology.rings(list(rows))
        ends = accumulate((options.tp for options in self.stages.options), initial=0)
        return [rings.among(first, end) for first, end in pairwise(ends)]

    @cached_property
    def _devices(self) -> list[Device]:
        """The device of each stage whose memory is slowest."""
        slowest = {types: self.model.slowest(types) for types in set(self.types)}
        return [slowest[types] for types in self.types]

    def _add_tied(self, sync: list[float], bounds: tuple[int, ...]) -> None:
        """Add the all-reduce of a weight to the two stages that hold it, where they differ.

        Where one stage has more ranks than the other, several of them meet the same one.
        """
        tied = self.weights(1).tied
        if tied is None:
            return
        first, last = ends = tied.stages(bounds, self.stages.pp)
        if first == last:
            return
        if ends not in self._tied_paths:
            pairs = tied_pairs(self.stages.grids[first], self.stages.grids[last])
            self._tied_paths[ends] = self.model.topology.rings(pairs).paths
        parameters = tied.parameters / lcm(*(self.stages.options[end].tp for end in ends))
        seconds = max(self.model.tied_s(parameters, path) for path in self._tied_paths[ends])
        for stage in ends:
            sync[stage] += seconds


def tied_pairs(first: IntArray, last: IntArray) -> list[tuple[int, int]]:
    """Pair the ranks of two stages that hold one weight: every replica, every slice of it."""
    if first.shape == last.shape:
        return list(zip(first.ravel().tolist(), last.ravel().tolist(), strict=True))
    replicas, slices = max(len(first), len(last)), lcm(first.shape[1], last.shape[1])
    ends = []
    for grid in (first, last):
        dp, tp = grid.shape
        rows = np.arange(replicas) * dp // replicas
        ends.append(grid[rows][:, np.arange(slices) * tp // slices].ravel())
    return list(zip(*(end.tolist() for end in ends), strict=True))
