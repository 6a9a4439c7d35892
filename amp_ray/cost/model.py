"""The cost model: what a strategy takes, in time and memory."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from amp_ray.cost.collective import Path, all_gather_s, start_s
from amp_ray.cost.estimate import Breakdown, Estimate
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.memory import MemoryModel
from amp_ray.cost.pipeline import CutTimes, RankKinds, prefix_sums
from amp_ray.cost.roofline import Rank
from amp_ray.cost.schedule import simulate_s
from amp_ray.cost.tail import Tail, TailModel
from amp_ray.cost.topology import FloatArray, IntArray, Topology
from amp_ray.cost.verdict import Judge
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.optimizer import find_optimizer
from amp_ray.spec.strategy import Candidate, Strategy, candidate_of

_TableKey = tuple[tuple[int, ...], Path, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateCosts:
    """Everything about a candidate that does not depend on its cuts.

    Args:
        candidate: Degrees.
        grid: Shape ``(pp, dp, tp)``. Device of each rank.
        kinds: Layer times of its ranks.
        cuts: Times across its cuts.
        memory: Peak bytes of its stages.
        smallest: Shape ``(pp,)``. The device of each stage with the least memory.
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

    Layer tables are kept, since many candidates share them; a cost model therefore belongs to
    one process. It holds no other state.

    Args:
        experiment: What is given.
    """

    experiment: Experiment
    _tables: dict[_TableKey, tuple[FloatArray, bool]] = field(default_factory=dict)

    @cached_property
    def topology(self) -> Topology:
        """The cluster's links."""
        return Topology(cluster=self.experiment.cluster, constants=self.experiment.constants)

    @cached_property
    def _layer_costs(self) -> LayerCosts:
        """Filler of layer tables."""
        given = self.experiment
        return LayerCosts(
            model=given.model, profile=given.profile, traits=given.traits, constants=given.constants
        )

    @cached_property
    def _tail(self) -> TailModel:
        """The end of an iteration."""
        given = self.experiment
        return TailModel(
            model=given.model,
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
            optimizer=find_optimizer(given.optimizer),
            precision=given.precision,
            zero_stage=given.zero_stage,
        )

    @cached_property
    def _judge(self) -> Judge:
        """What tells whether a strategy runs."""
        given = self.experiment
        return Judge(model=given.model, traits=given.traits, constants=given.constants)

    def costs(
        self, candidate: Candidate, placement: tuple[int, ...] | None = None
    ) -> CandidateCosts:
        """Return what can be told of a candidate before it is cut.

        Args:
            candidate: Degrees.
            placement: Device of every rank; by default rank ``r`` runs on device ``r``.

        Raises:
            ValueError: If the profile is measured, but not for this tp on these devices.
        """
        devices = range(candidate.num_devices) if placement is None else placement
        grid = np.array(devices, dtype=np.int64).reshape(candidate.pp, candidate.dp, candidate.tp)
        return CandidateCosts(
            candidate=candidate,
            grid=grid,
            kinds=self._kinds(candidate, grid),
            cuts=self._cuts(candidate, grid),
            memory=self._memory(candidate),
            smallest=self._smallest(grid),
        )

    def estimate(self, strategy: Strategy) -> Estimate:
        """Estimate a uniform strategy: simulated pipeline of the slowest replica, then the tail.

        Args:
            strategy: One tp and dp for all stages.

        Raises:
            ValueError: If stages differ in tp, dp or recompute, or the profile lacks the tp.
        """
        costs = self.costs(candidate_of(strategy), strategy.placement)
        return self.estimate_cut(costs, strategy)

    def estimate_cut(self, costs: CandidateCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy whose candidate's costs are known."""
        tail = self._tail.estimate(costs.grid, strategy.bounds)
        breakdown = self._breakdown(costs, strategy.bounds, tail)
        peaks = costs.memory.peak_bytes(strategy.bounds)
        verdict = self._judge.judge(strategy.bounds, breakdown.total_s, peaks, costs.smallest)
        return Estimate(
            strategy=strategy,
            iteration_time_s=breakdown.total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in costs.smallest),
            reasons=verdict.reasons,
            warnings=("extrapolated micro-batch",) if costs.kinds.extrapolated else (),
            failure_probability=verdict.failure_probability,
        )

    def _breakdown(self, costs: CandidateCosts, bounds: tuple[int, ...], tail: Tail) -> Breakdown:
        """Simulate every distinct replica and take the slowest one apart."""
        constants, traits = self.experiment.constants, self.experiment.traits
        m = costs.candidate.num_micro_batches
        times = costs.kinds.stage_times(bounds)
        times[0] += constants.host_s_per_micro_batch
        sends = costs.cuts.sends(bounds)
        signatures = np.concatenate(
            [times.reshape(-1, costs.candidate.dp), sends.reshape(-1, costs.candidate.dp)]
        )
        _, replicas = np.unique(signatures, axis=1, return_index=True)
        chunks = traits.virtual_stages
        best: Breakdown | None = None
        for replica in replicas:
            stage_s = np.ascontiguousarray(times[:2, :, replica])
            send_s = np.ascontiguousarray(sends[:, :, replica]) * chunks
            pipeline_s, still_s = (
                simulate_s(
                    stage_s,
                    send,
                    m,
                    blocking=traits.blocking_transfers,
                    duplex=traits.duplex_transfers,
                )
                for send in (send_s, np.zeros_like(send_s))
            )
            totals = stage_s.sum(axis=0)
            slowest = int(np.argmax(totals))
            talking_s = m * float(times[2, slowest, replica])
            parts = Breakdown(
                compute_s=m * float(totals[slowest]) - talking_s,
                tensor_parallel_s=talking_s,
                bubble_s=max(0.0, still_s - m * float(totals[slowest])) / chunks,
                pipeline_p2p_s=pipeline_s - still_s,
                gradient_sync_s=tail.gradient_sync_s,
                optimizer_s=tail.optimizer_s,
                other_s=constants.host_s_per_iteration,
            )
            if best is None or parts.total_s > best.total_s:
                best = parts
        assert best is not None
        return best

    def _kinds(self, candidate: Candidate, grid: IntArray) -> RankKinds:
        """Find the different tensor-parallel groups of a grid and their layer tables."""
        pp, dp, tp = grid.shape
        types = self.topology.type_of_device[grid].reshape(pp * dp, tp)
        rings = self.topology.rings(grid.reshape(pp * dp, tp))
        index: dict[tuple[tuple[int, ...], Path], int] = {}
        kind = [
            index.setdefault((tuple(sorted(set(group))), path), len(index))
            for group, path in zip(
                types.tolist(), (rings.paths[ring] for ring in rings.index), strict=True
            )
        ]
        tables = [self._table(group, path, candidate) for group, path in index]
        return RankKinds(
            tables=np.array([table for table, _ in tables]),
            kind=np.array(kind, dtype=np.int64).reshape(pp, dp),
            extrapolated=any(extrapolated for _, extrapolated in tables),
        )

    def _table(
        self, types: tuple[int, ...], path: Path, candidate: Candidate
    ) -> tuple[FloatArray, bool]:
        """Return prefix sums of one kind of group; mixed devices go at the slowest one's pace."""
        key = (types, path, candidate.tp, candidate.micro_batch_size, candidate.recompute)
        if key not in self._tables:
            tables = [
                self._layer_costs.table(self._rank(candidate, index), path, candidate.recompute)
                for index in types
            ]
            slowest = max(
                tables, key=lambda table: float((table.forward_s + table.backward_s).sum())
            )
            self._tables[key] = prefix_sums(slowest), slowest.extrapolated
        return self._tables[key]

    def _rank(self, candidate: Candidate, type_index: int = 0) -> Rank:
        """Return one rank's share of the work."""
        return Rank(
            device=self.experiment.cluster.device_types[type_index],
            tp=candidate.tp,
            micro_batch_size=candidate.micro_batch_size,
            precision=self.experiment.precision,
        )

    def _cuts(self, candidate: Candidate, grid: IntArray) -> CutTimes:
        """Return the times across all cuts of a grid."""
        traits, tp = self.experiment.traits, candidate.tp
        start = start_s(self.experiment.constants, traits)
        rank = self._rank(candidate)
        full = np.array(
            [0.0]
            + [
                layer.output_elements / (tp if layer.output_sharded else 1)
                for layer in self.experiment.model.layers
            ]
        ) * (candidate.micro_batch_size * rank.bytes_per_element)
        transfers = self.topology.transfers(grid)
        slices = [traits.sliced_activations and tp > 1, traits.sliced_gradients and tp > 1]
        gather = np.zeros_like(full)
        if any(slices):
            paths = self.topology.rings(grid.reshape(-1, tp)).paths
            path = min(paths, key=lambda ring: ring.bytes_per_s)
            gather = np.array([all_gather_s(num_bytes, tp, path, start) for num_bytes in full])
        return CutTimes(
            bytes_forward=full / (tp if slices[0] else 1) + traits.mask_bytes,
            bytes_backward=full / (tp if slices[1] else 1),
            gather_forward_s=gather * slices[0],
            gather_backward_s=gather * slices[1],
            start_s=start,
            step_s=transfers.step_s,
            s_per_byte=transfers.s_per_byte,
        )

    def _smallest(self, grid: IntArray) -> tuple[Device, ...]:
        """Return the device with the least memory of each stage."""
        found = self.experiment.cluster.device_types
        types = self.topology.type_of_device[grid].reshape(len(grid), -1)
        return tuple(
            min((found[index] for index in set(row)), key=lambda device: device.memory_bytes)
            for row in types.tolist()
        )

    def _memory(self, candidate: Candidate) -> MemoryModel:
        """Return the memory of a candidate's stages."""
        given = self.experiment
        return MemoryModel(
            model=given.model,
            rank=self._rank(candidate),
            recompute=candidate.recompute,
            dp=candidate.dp,
            pp=candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            zero_stage=given.zero_stage,
            optimizer=find_optimizer(given.optimizer),
            traits=given.traits,
            constants=given.constants,
        )
