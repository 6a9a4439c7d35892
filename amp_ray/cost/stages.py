"""What a strategy takes whose stages each have their own devices, tp, dp and shares.

A stage waits for its slowest rank. Ranks whose samples never meet in another stage run on their
own until gradients are synchronised, so a pipeline is simulated for every part of the samples that
all stages keep together. A uniform strategy has one such part per replica, and costs the same here
as by the tables of its candidate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.cost.crossings import CrossingModel, StageGroup, common_parts
from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.groups import GroupTables
from amp_ray.cost.memory import MemoryModel
from amp_ray.cost.replicas import slowest_replica
from amp_ray.cost.roofline import Rank
from amp_ray.cost.stages_tail import stages_tail
from amp_ray.cost.tail import TailModel
from amp_ray.cost.topology import FloatArray, Topology
from amp_ray.cost.weights import Weights
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Stage, StageOptions, Strategy

NO_RUNTIME: Final = "no runtime runs stages of different tp or dp yet"
"""Warning of what cannot be launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesEstimate:
    """What is expected of a strategy.

    Args:
        breakdown: Where the time goes.
        peaks_bytes: Per stage, the need of the rank that comes closest to its device's memory.
        devices: Per stage, that rank's device.
        extrapolated: Whether any layer time lies outside of what was measured.
    """

    breakdown: Breakdown
    peaks_bytes: tuple[float, ...]
    devices: tuple[Device, ...]
    extrapolated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagesModel:
    """Estimates strategies with any stages.

    Args:
        experiment: What is given.
        topology: Links.
        groups: Layer times.
        crossings: Messages between stages.
        tail: The end of an iteration.
        memory: Gives the memory of a candidate's stages.
    """

    experiment: Experiment
    topology: Topology
    groups: GroupTables
    crossings: CrossingModel
    tail: TailModel
    memory: Callable[[Candidate, Rank], MemoryModel]

    def estimate(self, strategy: Strategy) -> StagesEstimate:
        """Estimate any strategy that covers the model on devices that exist.

        Raises:
            ValueError: If the profile is measured, but not for a stage's tp on its devices.
        """
        groups = stage_groups(self.topology, strategy)
        parts = common_parts([group.shares for group in groups])
        times, extrapolated = self._times(strategy, groups, parts)
        sends = self._sends(strategy, groups, parts)
        traits = self.experiment.traits
        pipeline = slowest_replica(times, sends, strategy.num_micro_batches, traits)
        weights = [self.weights(stage.tp) for stage in strategy.stages]
        tail = stages_tail(self.tail, [group.devices for group in groups], strategy.bounds, weights)
        worst = [self._worst(strategy, index, group) for index, group in enumerate(groups)]
        return StagesEstimate(
            breakdown=replace(
                pipeline,
                gradient_sync_s=tail.gradient_sync_s,
                optimizer_s=tail.optimizer_s,
                other_s=self.experiment.constants.host_s_per_iteration,
            ),
            peaks_bytes=tuple(peak for peak, _ in worst),
            devices=tuple(device for _, device in worst),
            extrapolated=extrapolated,
        )

    def weights(self, tp: int) -> Weights:
        """Return what a rank of a tensor-parallel group holds."""
        rank = self.rank(tp, 1)
        degrees = Candidate(
            micro_batch_size=1, options=StageOptions(tp=tp, dp=1), pp=1, num_micro_batches=1
        )
        return self.memory(degrees, rank).weights

    def rank(self, tp: int, samples: int) -> Rank:
        """Return a rank's part of the work; its device does not matter."""
        return Rank(
            device=self.topology.cluster.device_types[0],
            tp=tp,
            micro_batch_size=samples,
            precision=self.experiment.precision,
        )

    def _times(
        self,
        strategy: Strategy,
        groups: tuple[StageGroup, ...],
        parts: tuple[tuple[int, ...], ...],
    ) -> tuple[FloatArray, bool]:
        """Return times of the slowest rank by stage and part, as `slowest_replica` takes them."""
        times = np.zeros((3, strategy.pp, parts[0][-1] + 1))
        outside = False
        for index, (stage, group) in enumerate(zip(strategy.stages, groups, strict=True)):
            kinds = self.topology.type_of_device[group.devices].tolist()
            for place, part in enumerate(parts[index]):
                table, extrapolated = self.groups.table(
                    tuple(sorted(set(kinds[place]))),
                    group.rings[place],
                    self.rank(stage.tp, group.shares[place]),
                    stage.options.recompute,
                )
                took = table[:, stage.end_layer] - table[:, stage.first_layer]
                times[:, index, part] = np.maximum(times[:, index, part], took)
                outside |= extrapolated
        times[0] += self.experiment.constants.host_s_per_micro_batch
        return times, outside

    def _sends(
        self,
        strategy: Strategy,
        groups: tuple[StageGroup, ...],
        parts: tuple[tuple[int, ...], ...],
    ) -> FloatArray:
        """Return times of messages by cut and part, as `slowest_replica` takes them."""
        sends = np.zeros((2, strategy.pp - 1, parts[0][-1] + 1))
        for index, (left, right) in enumerate(pairwise(groups)):
            cut = strategy.bounds[index + 1]
            sends[:, index] = self.crossings.sends(left, right, parts[index : index + 2], cut)
        return sends

    def _worst(self, strategy: Strategy, index: int, group: StageGroup) -> tuple[float, Device]:
        """Return need and device of the stage's rank that comes closest to its memory."""
        stage, known = strategy.stages[index], self.topology.cluster.device_types
        held = {
            (share, kind)
            for share, row in zip(
                group.shares, self.topology.type_of_device[group.devices].tolist(), strict=True
            )
            for kind in row
        }
        needs = {
            share: self._memory_of(strategy, stage, share).peak(
                index, stage.first_layer, stage.end_layer
            )
            for share in sorted({share for share, _ in held})
        }
        found = [(needs[share], known[kind]) for share, kind in sorted(held)]
        return max(found, key=lambda need: (need[0] / need[1].memory_bytes, need[0]))

    def _memory_of(self, strategy: Strategy, stage: Stage, share: int) -> MemoryModel:
        """Return the memory of stages with a stage's degrees, for a rank with a share."""
        candidate = Candidate(
            micro_batch_size=share,
            options=stage.options,
            pp=strategy.pp,
            num_micro_batches=strategy.num_micro_batches,
        )
        return self.memory(candidate, self.rank(stage.tp, share))


def stage_groups(topology: Topology, strategy: Strategy) -> tuple[StageGroup, ...]:
    """Return the devices of every stage with their shares and tensor-parallel rings."""
    grids = [
        np.array(strategy.devices(index), dtype=np.int64).reshape(stage.dp, stage.tp)
        for index, stage in enumerate(strategy.stages)
    ]
    rings = topology.unequal_rings([row for grid in grids for row in grid.tolist()])
    paths = [rings.paths[index] for index in rings.index]
    groups = []
    for stage, grid in zip(strategy.stages, grids, strict=True):
        shares = stage.shares or (strategy.micro_batch_size,) * stage.dp
        own, paths = paths[: stage.dp], paths[stage.dp :]
        groups.append(StageGroup(devices=grid, shares=shares, rings=tuple(own)))
    return tuple(groups)
