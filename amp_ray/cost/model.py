"""The cost model: what a strategy takes, in time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from amp_ray.cost.crossings import CrossingModel
from amp_ray.cost.cuts import CutModel, CutTimes
from amp_ray.cost.estimate import Breakdown, Estimate
from amp_ray.cost.groups import GroupTables, RankKinds
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.memory import LayerMemory, MemoryModel
from amp_ray.cost.replicas import slowest_replica
from amp_ray.cost.roofline import Rank
from amp_ray.cost.stages import NO_RUNTIME, StagesModel
from amp_ray.cost.tail import TailModel
from amp_ray.cost.topology import FloatArray, IntArray, Topology
from amp_ray.cost.verdict import Judge
from amp_ray.cost.weights import Weights
from amp_ray.spec.candidate import Candidate, Recompute
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.optimizer import Optimizer, find_optimizer
from amp_ray.spec.strategy import Strategy, candidate_of

EXTRAPOLATED = "micro-batch size outside the measured ones: layer times are extrapolated"
"""Warning: the profile has no measurement on one side of this micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateCosts:
    """Everything about a candidate that does not depend on its cuts.

    Args:
        candidate: Degrees.
        grid: Shape ``(pp, dp, tp)``. Device of each rank.
        kinds: Layer times of its ranks.
        cuts: Times across its cuts.
        memory: Peak bytes of its stages.
        smallest: Length ``pp``. The device of each stage with the least memory.
    """

    candidate: Candidate
    grid: IntArray
    kinds: RankKinds
    cuts: CutTimes
    memory: MemoryModel
    smallest: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """Estimates strategies of one experiment.

    Tables that many candidates share are kept, in ``kept`` also those of a search; a cost model
    therefore belongs to one process. It holds no other state.

    Args:
        experiment: What is given.
    """

    experiment: Experiment
    kept: dict[type, object] = field(init=False, repr=False, default_factory=dict)
    _weights: dict[int, Weights] = field(init=False, default_factory=dict)
    _layer_memory: dict[tuple[int, int, Recompute], FloatArray] = field(
        init=False, default_factory=dict
    )

    def costs(
        self, candidate: Candidate, placement: tuple[int, ...] | None = None
    ) -> CandidateCosts:
        """Return what can be told of a candidate before it is cut.

        Args:
            candidate: Degrees.
            placement: Device of every rank; by default rank ``r`` runs on device ``r``.

        Raises:
            ValueError: If the cluster has too few devices, or the profile is measured, but not
                for this tp on these devices.
        """
        devices = range(candidate.num_devices) if placement is None else placement
        self._check_devices(devices)
        grid = np.array(devices, dtype=np.int64).reshape(candidate.pp, candidate.dp, candidate.tp)
        types = self.topology.type_of_device[grid]
        rings = self.topology.rings(grid.reshape(-1, candidate.tp))
        rank = self._groups.rank(candidate)
        return CandidateCosts(
            candidate=candidate,
            grid=grid,
            kinds=self._groups.kinds(candidate, types, rings),
            cuts=self._cuts.cuts(grid, rank, rings),
            memory=self._memory(candidate, rank),
            smallest=self._smallest(types),
        )

    def estimate(self, strategy: Strategy) -> Estimate:
        """Estimate any strategy: simulated pipeline of the slowest replica, then the tail.

        Args:
            strategy: Its stages may differ in everything; no runtime launches those yet.

        Raises:
            ValueError: If the bounds do not cover the model, a device does not exist, or the
                profile lacks a tp.
        """
        num_layers = self.experiment.model.num_layers
        if strategy.bounds[-1] != num_layers:
            message = (
                f"the model has {num_layers} layers, so bounds must end there, found "
                f"{list(strategy.bounds)}"
            )
            raise ValueError(message)
        if strategy.is_uniform and strategy.recompute is not None:
            costs = self.costs(candidate_of(strategy), strategy.placement)
            return self.estimate_cut(costs, strategy)
        self._check_devices(strategy.placement)
        return self._estimate_stages(strategy)

    def estimate_cut(self, costs: CandidateCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy whose candidate's costs are known.

        Args:
            costs: Of the candidate that the strategy was cut from, with the same placement.
            strategy: Its bounds count.
        """
        breakdown = self._breakdown(costs, strategy.bounds)
        peaks = costs.memory.peak_bytes(strategy.bounds)
        verdict = self._judge.judge(strategy.bounds, breakdown.total_s, peaks, costs.smallest)
        return Estimate(
            strategy=strategy,
            iteration_time_s=breakdown.total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in costs.smallest),
            reasons=verdict.reasons,
            warnings=(EXTRAPOLATED,) if costs.kinds.extrapolated else (),
            failure_probability=verdict.failure_probability,
        )

    def _estimate_stages(self, strategy: Strategy) -> Estimate:
        """Estimate a strategy whose stages may differ in everything."""
        found = self.stages.estimate(strategy)
        total_s, devices = found.breakdown.total_s, found.devices
        verdict = self._judge.judge(strategy.bounds, total_s, found.peaks_bytes, devices)
        warnings = (EXTRAPOLATED, NO_RUNTIME) if found.extrapolated else (NO_RUNTIME,)
        return Estimate(
            strategy=strategy,
            iteration_time_s=total_s,
            breakdown=found.breakdown,
            peak_memory_bytes=found.peaks_bytes,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in devices),
            reasons=verdict.reasons,
            warnings=warnings,
            launchable=False,
            failure_probability=verdict.failure_probability,
        )

    def _check_devices(self, devices: Sequence[int]) -> None:
        """Refuse a rank on a device that does not exist."""
        num_devices = self.experiment.cluster.num_devices
        if max(devices) >= num_devices:
            message = (
                f"the cluster has {num_devices} devices, numbered from 0; "
                f"found a rank on device {max(devices)}"
            )
            raise ValueError(message)

    @cached_property
    def stages(self) -> StagesModel:
        """What estimates stages with their own device groups."""
        given = self.experiment
        crossings = CrossingModel(
            model=given.model,
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
            precision=given.precision,
        )
        return StagesModel(
            experiment=given,
            topology=self.topology,
            groups=self._groups,
            crossings=crossings,
            tail=self.tail,
            memory=self._memory,
        )

    @cached_property
    def topology(self) -> Topology:
        """The cluster's links."""
        return Topology(cluster=self.experiment.cluster, constants=self.experiment.constants)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Times of layers on devices."""
        given = self.experiment
        return LayerCosts(
            model=given.model,
            profile=given.profile,
            traits=given.traits,
            constants=given.constants,
        )

    @cached_property
    def tail(self) -> TailModel:
        """The end of an iteration."""
        given = self.experiment
        return TailModel(
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
            precision=given.precision,
            optimizer=self._optimizer,
            zero_stage=given.zero_stage,
        )

    @cached_property
    def _optimizer(self) -> Optimizer:
        """The optimizer's record."""
        return find_optimizer(self.experiment.optimizer)

    @cached_property
    def _groups(self) -> GroupTables:
        """Layer tables of tensor-parallel groups."""
        return GroupTables(
            layer_costs=self.layer_costs,
            device_types=self.experiment.cluster.device_types,
            precision=self.experiment.precision,
        )

    @cached_property
    def _cuts(self) -> CutModel:
        """Messages between stages."""
        given = self.experiment
        return CutModel(
            model=given.model,
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
        )

    @cached_property
    def _judge(self) -> Judge:
        """What tells whether a strategy runs."""
        given = self.experiment
        return Judge(model=given.model, traits=given.traits, constants=given.constants)

    def _breakdown(self, costs: CandidateCosts, bounds: tuple[int, ...]) -> Breakdown:
        """Put pipeline and tail together."""
        constants = self.experiment.constants
        times = costs.kinds.stage_times(bounds)
        times[0] += constants.host_s_per_micro_batch
        pipeline = slowest_replica(
            times,
            costs.cuts.sends(bounds),
            costs.candidate.num_micro_batches,
            self.experiment.traits,
        )
        tail = self.tail.estimate(costs.grid, bounds, costs.memory.weights)
        return replace(
            pipeline,
            gradient_sync_s=tail.gradient_sync_s,
            optimizer_s=tail.optimizer_s,
            other_s=constants.host_s_per_iteration,
        )

    def _memory(self, candidate: Candidate, rank: Rank) -> MemoryModel:
        """Return the memory of a candidate's stages."""
        given = self.experiment
        weights = self._weights.setdefault(rank.tp, Weights(model=given.model, tp=rank.tp))
        key = (rank.tp, rank.micro_batch_size, candidate.recompute)
        if key not in self._layer_memory:
            layers = LayerMemory(
                model=given.model, rank=rank, recompute=candidate.recompute, traits=given.traits
            )
            self._layer_memory[key] = layers.rows(weights)
        return MemoryModel(
            layers=self._layer_memory[key],
            weights=weights,
            candidate=candidate,
            rank=rank,
            optimizer=self._optimizer,
            zero_stage=given.zero_stage,
            traits=given.traits,
            constants=given.constants,
        )

    def _smallest(self, types: IntArray) -> tuple[Device, ...]:
        """Return the device with the least memory of each stage."""
        found = self.experiment.cluster.device_types
        return tuple(
            min((found[index] for index in set(row)), key=lambda device: device.memory_bytes)
            for row in types.reshape(len(types), -1).tolist()
        )
