"""Estimate plans of operators by our cost model: measured kernels, communication and step end.

The time of a stage is the sum of the measured passes of its operators, its recompute, exchanges
between neighbouring operators that divide a tensor differently, and the transfers that its ranks
receive: activations from the stage before and gradients from the stage behind. The size of a
transfer follows from the receiving rank's own samples, so a stage whose degrees differ from its
neighbour's pays for its own layout. Ranks that receive from another node share its network
interface. One iteration takes::

    sum of stages + (m - 1) * slowest stage + longest step end + host

where the step end of a stage is its gradient synchronisation and optimizer step, as in
`cost.step_end`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import Path, all_gather_s, all_reduce_s, start_s
from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.step_end import MANY_PARAMETERS, Beside, StepEndModel
from amp_ray.cost.topology import Topology
from amp_ray.cost.verdict import NOT_SEARCHED, OUT_OF_MEMORY, Judge
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.operator_profile import CollectiveKind, OperatorProfile
from amp_ray.planners.operators.resharding import stage_exchanges
from amp_ray.planners.operators.strategy import operator_uses, refuse_uneven
from amp_ray.runtimes.traits import HALF_BYTES
from amp_ray.strategies.candidate import GroupsCandidate, StageOptions
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.units import BYTES_PER_FP32

NOT_PROFILED: Final = "not in the profile"

SLOWER: Final = "slower than another micro-batch size"

WHY_NO_STAGES: Final = {
    "not posed": NOT_PROFILED,
    "slower": SLOWER,
    "memory": OUT_OF_MEMORY,
    "not searched": NOT_SEARCHED,
}
"""Kind of reason to report, by the solver's reason."""

INTERPOLATED: Final = "micro-batch size between the measured ones: operators are interpolated"
"""Warning: no measurement has this micro-batch size."""

NO_OPERATORS: Final = "stages cut between operators, which are exported, not launched"
"""Warning that the plan cannot be launched."""

_ROUNDING: Final = 1e-3
"""Largest fraction of a byte that reading a decimal number may lose."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorFigures:
    """Times and memory of operators on a rank, shape ``(num_operators,)``; bytes are whole."""

    forward_s: FloatArray
    backward_s: FloatArray
    parameters: FloatArray
    state_bytes: FloatArray  # weights, gradients and optimizer
    step_bytes: FloatArray  # temporary copies during the step end
    held_bytes: FloatArray  # kept for the backward pass, per micro-batch in flight
    input_bytes: FloatArray
    output_bytes: FloatArray
    forward_reserved_bytes: FloatArray
    backward_reserved_bytes: FloatArray
    interpolated: bool = False  # whether the figures lie between two measured micro-batch sizes


FIGURES: Final = tuple(
    name for name in OperatorFigures.__dataclass_fields__ if name != "interpolated"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Times of a stage for one micro-batch and the step end, and its memory."""

    compute_s: float
    exchange_s: float
    transfer_s: float
    sync_s: float
    optimizer_s: float
    memory_bytes: dict[str, float]  # parts of the peak memory, by `amp_ray.cost.memory.PARTS`

    @property
    def peak_bytes(self) -> float:
        """Peak memory of a device of the stage."""
        return sum(self.memory_bytes.values())

    @property
    def total_s(self) -> float:
        """Time of one micro-batch."""
        return self.compute_s + self.exchange_s + self.transfer_s


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorCostModel:
    """Estimates plans of operators of one experiment with equal devices."""

    experiment: Experiment  # its profile has operators
    _figures: dict[tuple[int, int, int, int], OperatorFigures | Reason] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Raise if the device type was not measured."""
        types = self.experiment.cluster.device_types
        if len(types) > 1:
            names = ", ".join(device.name for device in types)
            message = f"a profile of operators is of one type of device; the cluster has {names}"
            raise ValueError(message)
        if self.experiment.zero_stage not in {0, 1} or self.experiment.shard_ranks:
            raise ValueError(
                "plans of operators have zero_stage 0 or 1 and no shard_ranks; found "
                f"{self.experiment.zero_stage} and {self.experiment.shard_ranks}"
            )

    @property
    def profile(self) -> OperatorProfile:
        """The measured times of operators."""
        profile = self.experiment.profile.operators
        assert profile is not None
        return profile

    @property
    def device(self) -> Device:
        """The device type, the same for all devices."""
        return self.experiment.cluster.device_types[0]

    @property
    def limit_bytes(self) -> float:
        """Memory of a device that operators may use, without the runtime's."""
        return float(self.device.memory_bytes) - self.context_bytes

    @property
    def context_bytes(self) -> float:
        """Memory that the runtime uses on every device."""
        return self.experiment.traits.context_bytes * self.experiment.constants.context_scale

    def figures(self, samples: int, tp: int, dp: int, algorithm: int) -> OperatorFigures | Reason:
        """Return times and memory of every operator, or a reason if one was not measured.

        ``samples`` are those of a micro-batch on one of the ``dp`` ranks that ZeRO shards the
        optimizer over. ``algorithm`` tells how matrices are divided.
        """
        key = samples, tp, dp, algorithm if tp > 1 else 0
        if key not in self._figures:
            self._figures[key] = self._new_figures(*key)
        return self._figures[key]

    def _new_figures(
        self, samples: int, tp: int, dp: int, algorithm: int
    ) -> OperatorFigures | Reason:
        profile, experiment = self.profile, self.experiment
        table = profile.table(samples, tp, algorithm)
        gap = profile.gap(samples, tp, algorithm)
        if table is None or gap is not None:
            return Reason(kind=NOT_PROFILED, detail=gap or "")
        width = BYTES_PER_FP32 if profile.family == "resnet" else HALF_BYTES
        per = experiment.traits.bytes_per_parameter(experiment.precision)
        shards = self.zero.shards(dp)
        states = per.kept + (per.master + self.step_end.optimizer.moment_bytes) / shards
        parameters = table.weight_bytes / width
        bucket = per.bucket if dp > 1 or experiment.traits.buckets_alone else 0.0
        return OperatorFigures(
            forward_s=table.forward_s,
            backward_s=table.backward_s,
            parameters=parameters,
            state_bytes=_whole(parameters * states),
            step_bytes=_whole(parameters * max(bucket, per.step)),
            held_bytes=_whole(profile.kept_share * table.activation_bytes),
            input_bytes=_whole(table.input_bytes),
            output_bytes=table.output_bytes,
            forward_reserved_bytes=_whole(table.forward_reserved_bytes),
            backward_reserved_bytes=_whole(table.backward_reserved_bytes),
            interpolated=table.interpolated,
        )

    def sharers(self, devices: Sequence[int], end: int | None) -> int:
        """Return how many ranks of a stage share a network interface to one neighbour.

        ``end`` is a device of the neighbouring stage; None at an end of the chain. The number is 0
        if all of them are on that device's node, or there is no neighbour.
        """
        if end is None:
            return 0
        nodes = self.topology.node_of_device
        counts = Counter(int(nodes[device]) for device in devices)
        return max((n for node, n in counts.items() if node != nodes[end]), default=0)

    def rings(self, devices: Sequence[int], tp: int) -> tuple[Path, ...] | None:
        """Return the paths of a stage's gradient rings; None if a tp group spans nodes."""
        grid = np.reshape(devices, (-1, tp))
        nodes = self.topology.node_of_device[grid]
        if (nodes != nodes[:, :1]).any():
            return None
        paths = self.topology.rings(grid.T.tolist()).paths
        return tuple(sorted(paths, key=lambda path: (path.bytes_per_s, path.step_s)))

    def transfers_s(self, num_bytes: FloatArray, sharers: int) -> FloatArray:
        """Return the seconds to receive tensors of some sizes."""
        table = self.profile.inter if sharers else self.profile.intra
        rates = np.interp(num_bytes, table.sizes_bytes, table.bytes_per_s)
        if sharers and self.profile.inter is self.profile.intra:  # not measured
            rates = np.minimum(rates, self.topology.links.inter_bytes_per_s.max())
        seconds: FloatArray = num_bytes / rates * max(sharers, 1)
        return seconds

    def joins_s(
        self, first: int, uses: Sequence[OperatorUse], input_bytes: FloatArray
    ) -> FloatArray:
        """Return the time of exchanges between neighbouring operators of a stage."""
        joins, exchange_s = np.zeros(len(uses)), cache(self._exchange_s)
        for operator, step in stage_exchanges(self.profile, first, uses):
            size_bytes = float(input_bytes[operator - first])
            for kind in (step.forward, step.backward):
                if kind is not None:
                    joins[operator - first - 1] += exchange_s(kind, step.num_devices, size_bytes)
        return joins

    def _exchange_s(self, kind: CollectiveKind, num_devices: int, size_bytes: float) -> float:
        """Return the time of a collective: measured, otherwise computed for a node's link."""
        table = self.profile.collectives.get((kind, num_devices))
        if table is not None and len(table.seconds):
            return table.interpolated_s(size_bytes)
        ring = self.topology.ring((0,), num_devices, {})
        start = start_s(self.experiment.constants, self.experiment.traits)
        timed = all_reduce_s if kind == "all_reduce" else all_gather_s
        return timed(size_bytes, num_devices, ring, start)

    def tied_s(self, num_ranks: int, figures: OperatorFigures) -> float:
        """Return the time of synchronising tied weights, for a stage at one end of the chain.

        The stage at the other end is taken to be alike, and at the other end of the cluster.
        """
        num_pairs = min(num_ranks, self.experiment.cluster.num_devices // 2)
        parameters = float(min(figures.parameters[0], figures.parameters[-1]))
        if self.profile.family == "resnet" or not num_pairs or not parameters:
            return 0.0
        return self.step_end.tied_s(parameters, self._tied_path(num_pairs))

    def _tied_path(self, num_pairs: int) -> Path:
        last = self.experiment.cluster.num_devices - 1
        paths = self.topology.rings([(pair, last - pair) for pair in range(num_pairs)]).paths
        return min(paths, key=lambda path: path.bytes_per_s)

    def estimate(self, strategy: Strategy) -> Result:
        """Estimate a plan of operators.

        Raises:
            ValueError: If its operators do not match the profile, a device does not exist, or
                replicas share samples unevenly.
        """
        costed = self._stages(strategy)
        if isinstance(costed, Infeasible):
            return costed
        stages, interpolated = costed
        return self._result(strategy, stages, interpolated=interpolated)

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return the parts of each stage's peak memory, in the form of `CostModel.memory_parts`."""
        costed = self._stages(strategy)
        assert not isinstance(costed, Infeasible)
        return [stage.memory_bytes for stage in costed[0]]

    def _stages(self, strategy: Strategy) -> tuple[list[StageSeconds], bool] | Infeasible:
        """Return the times of each stage, and whether some figures were interpolated."""
        samples = strategy.samples_per_micro_batch
        _check(strategy, self.experiment.cluster.num_devices)
        stages = []
        interpolated = False
        for index, uses in enumerate(operator_uses(strategy, self.profile)):
            figures = self._gathered(samples, strategy.stages[index].first_layer, uses)
            if isinstance(figures, Reason):
                return _infeasible(strategy, index, figures)
            rings = {tp: self.rings(strategy.devices(index), tp) for tp, *_ in uses}
            if None in rings.values():
                why = Reason(kind=NOT_PROFILED, detail="tensor-parallel groups on two nodes")
                return _infeasible(strategy, index, why)
            interpolated |= figures.interpolated
            stages.append(self._stage(strategy, index, uses, figures))
        return stages, interpolated

    def _gathered(
        self, samples: int, first: int, uses: Sequence[OperatorUse]
    ) -> OperatorFigures | Reason:
        values = {name: np.empty(len(uses)) for name in FIGURES}
        interpolated = False
        for use in dict.fromkeys(use[:3] for use in uses):
            tp, dp, algorithm = use
            figures = self.figures(samples // dp, tp, dp, algorithm)
            if isinstance(figures, Reason):
                return figures
            chosen = np.array([index for index, other in enumerate(uses) if other[:3] == use])
            for name, array in values.items():
                array[chosen] = getattr(figures, name)[first + chosen]
            interpolated |= figures.interpolated
        return OperatorFigures(**values, interpolated=interpolated)

    def _stage(
        self, strategy: Strategy, index: int, uses: Sequence[OperatorUse], figures: OperatorFigures
    ) -> StageSeconds:
        first, last = strategy.stages[index].first_layer, len(strategy.stages) - 1
        devices = strategy.devices(index)
        again = np.array([use[3] for use in uses])
        passes_s = figures.forward_s.sum() + figures.backward_s.sum()
        transfer_s = 0.0
        if index > 0:
            sharers = self.sharers(devices, strategy.devices(index - 1)[-1])
            transfer_s += float(self.transfers_s(figures.input_bytes[:1], sharers)[0])
        if index < last:
            sharers = self.sharers(devices, strategy.devices(index + 1)[0])
            transfer_s += float(self.transfers_s(figures.output_bytes[-1:], sharers)[0])
        sync_s, optimizer_s = self._step_ends_s(strategy, index, uses, figures)
        in_flight = min(last - index + 1, strategy.num_micro_batches)
        starts = self.profile.starts_block[first : first + len(uses)]
        return StageSeconds(
            compute_s=float(passes_s + figures.forward_s[again].sum())
            + self.experiment.constants.host_s_per_micro_batch,
            exchange_s=float(self.joins_s(first, uses, figures.input_bytes).sum()),
            transfer_s=transfer_s,
            sync_s=sync_s,
            optimizer_s=optimizer_s,
            memory_bytes={
                **self._state_parts(figures),
                **passing_bytes(figures, again, starts, in_flight),
                "context": self.context_bytes,
            },
        )

    def _state_parts(self, figures: OperatorFigures) -> dict[str, float]:
        """Divide the state of a stage into its parts, in whole bytes."""
        per = self.experiment.traits.bytes_per_parameter(self.experiment.precision)
        parameters = figures.parameters.sum()
        weights = float(np.round(parameters * per.weight))
        gradients = float(np.round(parameters * (per.kept - per.weight)))
        optimizer = float(figures.state_bytes.sum()) - weights - gradients
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer}

    def _step_ends_s(
        self, strategy: Strategy, index: int, uses: Sequence[OperatorUse], figures: OperatorFigures
    ) -> tuple[float, float]:
        """Return seconds of gradient synchronisation, once per tp and dp, and of the optimizer."""
        sync_s = optimizer_s = 0.0
        model, devices = self.step_end, strategy.devices(index)
        for tp, dp in dict.fromkeys(use[:2] for use in uses):
            chosen = np.array([use[:2] == (tp, dp) for use in uses])
            parameters = float(figures.parameters[chosen].sum())
            options = self.options(tp, dp)
            paths = model.whole_rings(options, self.rings(devices, tp) or (), self.device)
            sync_s += model.sync_s(parameters, options, paths, Beside(pp=len(strategy.stages)))
            optimizer_s += model.optimizer_s(parameters, options.zero.shards(dp), self.device)
        if (index == 0) != (index == len(strategy.stages) - 1):
            tp, dp, algorithm, _ = uses[0] if index == 0 else uses[-1]
            end_figures = self.figures(strategy.samples_per_micro_batch // dp, tp, dp, algorithm)
            assert isinstance(end_figures, OperatorFigures)
            sync_s += self.tied_s(tp * dp, end_figures)
        return sync_s, optimizer_s

    def _result(
        self, strategy: Strategy, stages: Sequence[StageSeconds], *, interpolated: bool
    ) -> Estimate:
        experiment, number = self.experiment, strategy.num_micro_batches
        slowest = max(stages, key=lambda stage: stage.total_s)
        last = max(stages, key=lambda stage: stage.sync_s + stage.optimizer_s)
        breakdown = Breakdown(
            compute_s=number * slowest.compute_s,
            tensor_parallel_s=number * slowest.exchange_s,
            pipeline_p2p_s=number * slowest.transfer_s,
            bubble_s=sum(stage.total_s for stage in stages) - slowest.total_s,
            gradient_sync_s=last.sync_s,
            optimizer_s=last.optimizer_s,
            other_s=experiment.constants.host_s_per_iteration,
        )
        peaks = tuple(stage.peak_bytes for stage in stages)
        devices = (self.device,) * len(stages)
        verdict = self._judge.judge(strategy.bounds, breakdown.total_s, peaks, devices)
        tokens = strategy.global_batch_size * experiment.model.shape.num_tokens
        return Estimate(
            strategy=strategy,
            iteration_time_s=breakdown.total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=(float(self.device.memory_bytes),) * len(stages),
            reasons=verdict.reasons,
            warnings=(*([INTERPOLATED] if interpolated else []), NO_OPERATORS),
            launchable=False,
            failure_probability=verdict.failure_probability,
            tokens_per_s=tokens / breakdown.total_s or None,
        )

    @cached_property
    def _layered(self) -> CostModel:
        """The cost model of layers, for its links and step end, which operators share."""
        return CostModel(experiment=self.experiment)

    @cached_property
    def topology(self) -> Topology:
        """The cluster's links."""
        return self._layered.topology

    @cached_property
    def step_end(self) -> StepEndModel:
        """The model of the end of an iteration."""
        return self._layered.step_end

    def options(self, tp: int, dp: int) -> StageOptions:
        """Return the options of a stage, with the experiment's ZeRO setting."""
        return StageOptions(tp=tp, dp=dp, zero=self.zero)

    @property
    def zero(self) -> Zero:
        """The ZeRO setting: stage 0 or 1."""
        return Zero(stage=self.experiment.zero_stage)

    def step_end_line(self, tp: int, dp: int, rings: Sequence[Path]) -> tuple[float, float]:
        """Return the step end of a stage as a line: seconds, and seconds per parameter.

        No part of it overlaps with the passes.
        """
        options, model = self.options(tp, dp), self.step_end
        paths = model.whole_rings(options, rings, self.device)
        shards = options.zero.shards(dp)
        none, many = (
            model.sync_s(parameters, options, paths, Beside(pp=2))
            + model.optimizer_s(parameters, shards, self.device)
            for parameters in (0.0, MANY_PARAMETERS)
        )
        return none, (many - none) / MANY_PARAMETERS

    @cached_property
    def _judge(self) -> Judge:
        """The check whether a plan fits in memory; limits on launching do not apply."""
        experiment = self.experiment
        traits = replace(experiment.traits, fails_without_parameters=False, launch_limit_s=None)
        return Judge(model=experiment.model, traits=traits, constants=experiment.constants)


def passing_bytes(
    figures: OperatorFigures, again: BoolArray, starts_block: BoolArray, in_flight: int
) -> dict[str, float]:
    """Return the bytes of a stage that its passes allocate.

    An operator need not keep its activation if it and its successor are recomputed, unless the
    successor begins a block. During the backward pass, the activations of such a run of operators
    are held once. The copies of the step end reuse memory that the passes reserved. ``again`` and
    ``starts_block`` have shape ``(n,)``; ``in_flight`` counts micro-batches.
    """
    held = figures.held_bytes
    spared = np.append(again[:-1] & again[1:] & ~starts_block[1:], False)
    kept = figures.input_bytes[0] + held.sum() - held[spared].sum()
    most = figures.forward_reserved_bytes.max() + figures.backward_reserved_bytes.max()
    reserved = max(figures.step_bytes.sum(), most)
    peak = run_sums(held, spared).max()
    return {"temporary": float(peak + reserved), "activations": float(in_flight * kept)}


def run_sums(values: FloatArray, chosen: BoolArray, ends: BoolArray | None = None) -> FloatArray:
    """Return the sum of each run of chosen operators, in order.

    A run also ends after each of ``ends``, whether chosen or not; all have shape ``(n,)``.
    """
    last = ~chosen if ends is None else ~chosen | ends
    stops = np.flatnonzero(last)
    starts = np.concatenate([[0], stops[:-1] + 1])
    sums: FloatArray = np.add.reduceat(np.where(chosen, values, 0.0), starts)
    return sums


def _whole(num_bytes: FloatArray) -> FloatArray:
    whole: FloatArray = np.ceil(num_bytes - _ROUNDING)
    return whole


def _infeasible(strategy: Strategy, stage: int, why: Reason) -> Infeasible:
    candidate = GroupsCandidate(
        micro_batch_size=strategy.samples_per_micro_batch,
        num_micro_batches=strategy.num_micro_batches,
    )
    return Infeasible(
        candidate=candidate, reason=replace(why, detail=f"stage {stage}: {why.detail}")
    )


def _check(strategy: Strategy, num_devices: int) -> None:
    """Reject uneven shares and devices that do not exist."""
    refuse_uneven(strategy, "operators divide")
    if max(strategy.placement) >= num_devices:
        raise ValueError(
            f"the cluster has {num_devices} devices, numbered from 0; found a rank on device "
            f"{max(strategy.placement)}"
        )
