"""The cost model: time and memory of a strategy.

`CostModel.estimate` takes these steps: stages, messages, memory, timer, step end, verdict. The
costs that do not depend on the cuts (`StageCosts`) are computed once for all cuts of the same
stages.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.columns import EXTRAPOLATED, Columns
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.memory import LayerMemory, MemoryModel, StageMemory, stage_memory
from amp_ray.cost.messages import MessageModel, Messages
from amp_ray.cost.roofline import Rank
from amp_ray.cost.samples import (
    Place,
    context_experiment,
    covers_slices,
    largest_share,
    slice_experiment,
    slice_places,
)
from amp_ray.cost.stages import GroupKinds, PlacedStages, StageTimes, TimeTables
from amp_ray.cost.step_end import StepEndModel, StepEnds
from amp_ray.cost.timer import longest_pipeline_s, slowest_replica
from amp_ray.cost.topology import Topology
from amp_ray.cost.verdict import Judge
from amp_ray.cost.weights import Weights
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy, all_bounds

TINY_S: Final = 1e-12
"""Replaces a counted time of 0 in divisions; such a time cannot be corrected."""

ROUNDING: Final = 1e-9
"""Relative difference between sums of the same times in another order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleCosts:
    """Costs of one kind of sample: whole sequences, their parts on ``cp`` ranks, or token slices.

    Many candidates share these costs. They belong to one process.
    """

    experiment: Experiment  # its model is that of these samples
    cp: int = 1  # ranks that divide every sequence; a sample is one rank's part
    head_ranks: int = 1  # those of them that divide the heads of attention

    @property
    def are_whole(self) -> bool:
        """Whether ranks have whole sequences."""
        return self.cp == 1

    @cached_property
    def topology(self) -> Topology:
        """The cluster's links."""
        experiment = self.experiment
        return Topology(
            cluster=experiment.cluster,
            constants=experiment.constants,
            has_pat=experiment.traits.has_pat,
        )

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Times of layers on devices."""
        experiment = self.experiment
        return LayerCosts(
            model=experiment.model,
            profile=experiment.profile,
            traits=experiment.traits,
            constants=experiment.constants,
        )

    @cached_property
    def time_tables(self) -> TimeTables:
        """Layer times of tensor-parallel groups."""
        return TimeTables(
            layer_costs=self.layer_costs,
            topology=self.topology,
            precision=self.experiment.precision,
            cp=self.cp,
            head_ranks=self.head_ranks,
        )

    @cached_property
    def messages(self) -> MessageModel:
        """Messages between stages."""
        experiment = self.experiment
        return MessageModel(
            model=experiment.model,
            topology=self.topology,
            traits=experiment.traits,
            constants=experiment.constants,
            precision=experiment.precision,
        )

    @cached_property
    def step_end(self) -> StepEndModel:
        """The end of an iteration."""
        experiment = self.experiment
        return StepEndModel(
            topology=self.topology,
            traits=experiment.traits,
            constants=experiment.constants,
            precision=experiment.precision,
            optimizer=experiment.traits.optimizer(experiment.optimizer),
        )

    @memoised
    def network(self, num_samples: int) -> tuple[Topology, MessageModel]:
        """Return the links at the message size of so many samples, and messages over them.

        These are the cluster's links, unless the rate of a link depends on the size of a message.
        """
        if not self.experiment.cluster.has_rates_by_size:
            return self.topology, self.messages
        num_bytes = num_samples * float(self.messages.sample_bytes(1).max())
        topology = replace(self.topology, cluster=self.experiment.cluster.at(num_bytes))
        return topology, replace(self.messages, topology=topology)

    def times_and_messages(self, stages: PlacedStages) -> tuple[StageTimes, Messages]:
        """Price passes and messages of stages, before they are cut and without the host."""
        topology, messages = self.network(max(map(max, stages.shares)))
        rings = topology.rings(stages.tensor_groups)
        types = stages.types(self.experiment.cluster)
        return self.time_tables.times(stages, types, rings), messages.between(stages, rings)

    @memoised
    def weights(self, tp: int, expert_ranks: int = 0) -> Weights:
        """Return the weights of a rank in a tensor-parallel group.

        ``expert_ranks`` ranks hold the experts of a layer together; by default the group.
        """
        return Weights(model=self.experiment.model, tp=tp, expert_ranks=expert_ranks or tp)

    @memoised
    def memory(self, candidate: Candidate) -> MemoryModel:
        """Return the memory of a candidate's stages; the candidate's dp includes its cp."""
        experiment, options = self.experiment, candidate.options
        device, size = experiment.cluster.device_types[0], candidate.micro_batch_size
        rank = Rank.of(device, options, size, experiment.precision)
        return MemoryModel.of(
            candidate,
            self._layer_memory(rank, options.ep, options.expert_tp),
            self.weights(options.tp, options.expert_ranks),
            self.step_end.optimizer,
            experiment.constants,
        )

    @memoised
    def _layer_memory(self, rank: Rank, ep: int, expert_tp: int) -> LayerMemory:
        model = self.time_tables.rank_model(rank.tp, ep, expert_tp)
        return LayerMemory(model=model, rank=rank, traits=self.experiment.traits)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """Everything about stages in a row that does not depend on their cuts."""

    stages: PlacedStages
    kinds: GroupKinds  # groups of equal times
    times: StageTimes  # layer times of their ranks
    messages: Messages
    memory: StageMemory  # peak bytes
    step_ends: StepEnds  # work after the pipeline
    slices: "SliceCosts"  # costs of token slices, if micro-batches are cut into them


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel(SampleCosts):
    """Estimates strategies of one experiment; it is also the costs of whole samples."""

    def estimate(self, strategy: Strategy) -> Estimate:
        """Estimate any strategy: simulated pipeline of the slowest replica, then the step end.

        Args:
            strategy: Its stages may differ in all options.

        Raises:
            ValueError: If the bounds do not cover the model, a device does not exist, or the
                profile lacks a tp.
        """
        num_layers = self.experiment.model.num_layers
        if strategy.bounds[-1] != num_layers:
            raise ValueError(
                f"the model has {num_layers} layers, so bounds must end there, found "
                f"{list(strategy.bounds)}"
            )
        return self.estimate_from(self.stage_costs(PlacedStages.of_strategy(strategy)), strategy)

    def costs(self, candidate: Candidate, placement: tuple[int, ...] | None = None) -> StageCosts:
        """Return `stage_costs` of a candidate; by default rank ``r`` runs on device ``r``."""
        devices = range(candidate.num_devices) if placement is None else placement
        return self.stage_costs(PlacedStages.of_candidate(candidate, devices))

    def stage_costs(self, stages: PlacedStages, memory: StageMemory | None = None) -> StageCosts:
        """Compute the costs of stages that do not depend on their cuts.

        Raises:
            ValueError: If a device does not exist, or the profile is measured, but not for a
                stage's tp on its devices.
        """
        self._check_devices(stages)
        samples, types = self._samples_at(stages), stages.types(self.experiment.cluster)
        topology, messages = samples.network(max(map(max, stages.shares)))
        rings = topology.rings(stages.tensor_groups)
        if stages.pp > 1 and (host_s := self.experiment.traits.piped_collective_s):
            rings = rings.started_in(host_s) if stages.leaves_nodes(topology) else rings
        kinds = samples.time_tables.kinds(stages, types, rings)
        times = samples.time_tables.of_kinds(kinds)
        return StageCosts(
            stages=stages,
            kinds=kinds,
            times=times,
            messages=messages.between(stages, rings),
            memory=memory or self.stage_memory(stages),
            step_ends=StepEnds(
                model=samples.step_end,
                stages=stages,
                times=times,
                types=[
                    frozenset().union(*types[first:end])
                    for first, end in pairwise(stages.first_group)
                ],
                weights=samples.weights,
            ),
            slices=SliceCosts(whole=self, stages=stages),
        )

    def costs_like(
        self, costs: StageCosts, stages: PlacedStages, memory: StageMemory
    ) -> StageCosts:
        """Return `stage_costs` of stages that differ from those of ``costs`` only in recompute."""
        kinds = replace(costs.kinds, stages=stages)
        times = self._samples_at(stages).time_tables.of_kinds(kinds)
        return replace(
            costs,
            stages=stages,
            kinds=kinds,
            times=times,
            memory=memory,
            step_ends=replace(costs.step_ends, stages=stages, times=times),
            slices=SliceCosts(whole=self, stages=stages),
        )

    def estimate_from(self, costs: StageCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy from the costs of its stages, without `with_columns`."""
        stages, experiment = costs.stages, self.experiment
        bounds = all_bounds(experiment.model, strategy)
        passes_s, sends_s = self.passes(costs, strategy)
        peaks, devices = zip(*_memory(costs, strategy).peaks(bounds), strict=True)
        pipeline = slowest_replica(
            passes_s, sends_s, stages.pp, stages.num_micro_batches, experiment.traits
        )
        step_end = costs.step_ends.at(bounds)
        breakdown = replace(
            pipeline,
            gradient_sync_s=step_end.gradient_sync_s,
            optimizer_s=step_end.optimizer_s,
            other_s=experiment.constants.host_s_per_iteration,
        )
        verdict = self._judge.judge(bounds, breakdown.total_s, peaks, devices)
        return Estimate(
            strategy=strategy,
            iteration_time_s=breakdown.total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in devices),
            reasons=verdict.reasons,
            warnings=(EXTRAPOLATED,) if costs.times.extrapolated else (),
            failure_probability=verdict.failure_probability,
            unexplained=experiment.traits.is_unexplained(strategy, len(experiment.cluster.nodes)),
        )

    def passes(self, costs: StageCosts, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages of a micro-batch, with the host's time.

        Returns:
            Forward, backward and the all-reduces within both, shape ``(3, num_chunks, num_parts,
            num_slices)``; activation and gradient across each cut, shape ``(2, num_chunks - 1,
            num_parts, num_slices)``.
        """
        if strategy.is_sliced:
            places = slice_places(strategy.token_slices)
            passes_s, sends_s = zip(
                *(costs.slices.seconds(strategy.bounds, place) for place in places), strict=True
            )
            return np.stack(passes_s, axis=-1), np.stack(sends_s, axis=-1)
        return self._whole_passes(costs, all_bounds(self.experiment.model, strategy))

    def _whole_passes(
        self, costs: StageCosts, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return `passes` for micro-batches that are not cut into token slices."""
        passes_s, sends_s = costs.times.at(bounds).copy(), costs.messages.at(bounds)
        num_chunks = (len(bounds) - 1) // costs.stages.pp
        passes_s[0] += self.experiment.constants.host_s_per_micro_batch / num_chunks
        return passes_s[..., None], sends_s[..., None]

    def may_take(self, costs: StageCosts, bounds: tuple[int, ...], limit_s: float) -> bool:
        """Return False only if an iteration certainly exceeds a limit, without a full estimate.

        Arguments as for `least_s`; times that differ from the limit by rounding are within it.
        """
        return self.least_s(costs, bounds, limit_s) <= limit_s

    def least_s(self, costs: StageCosts, bounds: tuple[int, ...], limit_s: float) -> float:
        """Return a lower bound on the seconds of an iteration, 0 for interleaved stages.

        A bound above ``limit_s`` need not be tight.
        """
        if costs.stages.is_interleaved:
            return 0.0
        passes_s, sends_s = self._whole_passes(costs, bounds)
        num_steps, traits = costs.stages.num_micro_batches, self.experiment.traits
        other_s = self.experiment.constants.host_s_per_iteration
        least_s = (other_s + num_steps * float((passes_s[0] + passes_s[1]).max())) / (1 + ROUNDING)
        if least_s > limit_s:
            return least_s
        pipeline_s = longest_pipeline_s(passes_s, sends_s, costs.stages.pp, num_steps, traits)
        least_s = (other_s + pipeline_s) / (1 + ROUNDING)
        if least_s > limit_s:
            return least_s
        step_end = costs.step_ends.at(bounds)
        step_end_s = step_end.gradient_sync_s + step_end.optimizer_s
        return (other_s + pipeline_s + step_end_s) / (1 + ROUNDING)

    def with_columns(self, estimate: Estimate) -> Estimate:
        """Add money, tokens per second, MFU, warnings, and whether the runtime can launch it."""
        samples = self.samples_of(estimate.strategy.stages[0].options)
        return self._columns.add(estimate, samples.messages, samples.weights)

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return the parts of each stage's peak, by `memory.PARTS`; they add up to its peaks.

        Raises:
            ValueError: If the strategy's bounds count operators instead of layers.
        """
        if strategy.has_operators:
            raise ValueError("the memory of a plan of operators is that of `OperatorCostModel`")
        costs = self.stage_costs(PlacedStages.of_strategy(strategy))
        return _memory(costs, strategy).parts(all_bounds(self.experiment.model, strategy))

    def seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages for these cuts, without the host's time."""
        times, messages = self._samples_at(stages).times_and_messages(stages)
        return times.at(bounds), messages.at(bounds)

    def stage_memory(self, stages: PlacedStages) -> StageMemory:
        """Return the memory of stages."""
        return stage_memory(stages, self.experiment.cluster, self._samples_at(stages).memory)

    def samples_of(self, options: StageOptions) -> SampleCosts:
        """Return the costs of the samples of ranks with these options."""
        return self.samples(options.cp, options.tp)

    def _samples_at(self, stages: PlacedStages) -> SampleCosts:
        return self.samples(stages.cp, stages.options[0].tp)

    def samples(self, cp: int, tp: int = 1) -> SampleCosts:
        """Return the costs of the samples of a rank, where ``cp`` ranks divide every sequence."""
        return self if cp == 1 else self._sequence_parts(cp, self.experiment.head_ranks(tp, cp))

    @memoised
    def _sequence_parts(self, cp: int, head_ranks: int) -> SampleCosts:
        experiment = context_experiment(self.experiment, cp, head_ranks)
        return SampleCosts(experiment=experiment, cp=cp, head_ranks=head_ranks)

    @memoised
    def slices(self, tokens: int, context: int, *, measured: bool) -> SampleCosts:
        """Return the costs of token slices; arguments as of `slice_experiment`."""
        experiment = slice_experiment(self.experiment, tokens, context, measured=measured)
        return SampleCosts(experiment=experiment)

    @cached_property
    def _columns(self) -> Columns:
        return Columns(experiment=self.experiment)

    @cached_property
    def _judge(self) -> Judge:
        experiment = self.experiment
        return Judge(
            model=experiment.model, traits=experiment.traits, constants=experiment.constants
        )

    def _check_devices(self, stages: PlacedStages) -> None:
        num_devices, last = self.experiment.cluster.num_devices, stages.devices.max()
        if last >= num_devices:
            raise ValueError(
                f"the cluster has {num_devices} devices, numbered from 0; "
                f"found a rank on device {last}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceCosts:
    """Costs of the token slices of some stages; slices of all lengths share their groups' kinds."""

    whole: CostModel  # costs of whole sequences
    stages: PlacedStages

    @memoised
    def seconds(self, bounds: tuple[int, ...], place: Place) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of a slice: measured if possible, otherwise counted.

        Counted times are corrected by measurements of whole sequences.

        Returns:
            Forward, backward and all-reduce seconds, shape ``(3, pp, num_parts)``, and those of
            activation and gradient across each cut, shape ``(2, pp - 1, num_parts)``.
        """
        times, messages = self._times_and_messages(place)
        passes_s, sends_s = times.at(bounds).copy(), messages.at(bounds)
        experiment = self.whole.experiment
        if experiment.profile.is_measured and not self._are_measured:
            measured, counted = self._sequences
            counted_s = np.maximum(counted.at(bounds), TINY_S)
            passes_s = passes_s * measured.at(bounds) / counted_s
        passes_s[0] += experiment.constants.host_s_per_micro_batch
        return passes_s, sends_s

    @cached_property
    def _are_measured(self) -> bool:
        """Whether the profile has slices for all devices and degrees."""
        experiment = self.whole.experiment
        devices = [device.name for device in experiment.cluster.device_types]
        return covers_slices(
            experiment.profile, devices, {options.tp for options in self.stages.options}
        )

    @cached_property
    def _sequences(self) -> tuple[StageTimes, StageTimes]:
        """Measured and counted times of whole sequences."""
        tokens = self.whole.experiment.model.shape.num_tokens
        counted = self.whole.slices(tokens, 0, measured=False)
        measured_times, _ = self.whole.times_and_messages(self.stages)
        counted_times, _ = counted.times_and_messages(self.stages)
        return measured_times, counted_times

    @memoised
    def _times_and_messages(self, place: Place) -> tuple[StageTimes, Messages]:
        sequences, tokens, context = place
        stages, cluster = self.stages, self.whole.experiment.cluster
        shares = [(sequences,) * len(share) for share in stages.shares]
        costs = self.whole.slices(tokens, context, measured=self._are_measured)
        if shares == list(stages.shares) and not cluster.has_rates_by_size:
            kinds, messages = self._whole_batches
            return costs.time_tables.of_kinds(kinds), replace(messages, model=costs.messages)
        return costs.times_and_messages(replace(stages, shares=shares))

    @cached_property
    def _whole_batches(self) -> tuple[GroupKinds, Messages]:
        """Kinds of groups, and messages, where a slice has all sequences of a micro-batch."""
        stages, whole = self.stages, self.whole
        rings = whole.topology.rings(stages.tensor_groups)
        kinds = whole.time_tables.kinds(stages, stages.types(whole.experiment.cluster), rings)
        return kinds, whole.messages.between(stages, rings)


def _memory(costs: StageCosts, strategy: Strategy) -> StageMemory:
    """Return the memory of a strategy's stages, where token slices may divide its micro-batches."""
    if not strategy.is_sliced:
        return costs.memory
    return costs.memory.sliced(largest_share(strategy.token_slices))
