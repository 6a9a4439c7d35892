"""The cost model: time and memory of a strategy.

`CostModel.estimate` takes these steps: stages, messages, memory, timer, step end, verdict. The
costs that do not depend on the cuts (`StageCosts`) are computed once for all cuts of the same
stages.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.columns import EXTRAPOLATED, Columns
from amp_ray.cost.estimate import Breakdown, Estimate
from amp_ray.cost.kernels.evaluator import Evaluator, Layout
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
from amp_ray.cost.tables import Tables
from amp_ray.cost.timer import slowest_replica
from amp_ray.cost.topology import Rings, Topology
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
    # Whether the host of a pipeline over nodes starts collectives later, if the runtime's does
    starts_on_host: bool = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the evaluator and its tables, which every process makes for itself."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in {"evaluator", "tables"}
        }

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
    def tables(self) -> Tables:
        """Tables of the evaluator."""
        return Tables(self, starts_on_host=self.starts_on_host)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Prices layouts; it keeps the last one."""
        return Evaluator(self.tables)

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

    def of_parts_s(
        self, stages: PlacedStages, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages; see `CostModel.seconds`."""
        layout = self.tables.layout_of(stages)
        # Screens ask for stages as if each was one chunk
        num_chunks = (len(bounds) - 1) // stages.pp
        layout.schedule(stages.pp, stages.num_micro_batches, num_chunks)
        layout.cut(np.array(bounds, np.int64))
        self.evaluator.price_cuts(layout)
        passes_s, sends_s = self.evaluator.seconds_by_part()
        return passes_s, sends_s

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
    """Everything about stages in a row that does not depend on their cuts, computed when needed."""

    model: "CostModel"
    samples: SampleCosts  # costs of the samples on their ranks
    stages: PlacedStages
    chosen_memory: StageMemory | None = None  # None for that of the stages
    like: GroupKinds | None = None  # kinds of stages that differ only in recompute, if known

    @cached_property
    def layout(self) -> Layout:
        """The stages as the evaluator takes them."""
        return self.samples.tables.layout_of(self.stages)

    @cached_property
    def memory(self) -> StageMemory:
        """Peak bytes."""
        return self.chosen_memory or self.model.stage_memory(self.stages)

    @cached_property
    def kinds(self) -> GroupKinds:
        """Groups of equal times."""
        if self.like is not None:
            return replace(self.like, stages=self.stages)
        return self.samples.time_tables.kinds(self.stages, self._types, self._rings)

    @cached_property
    def times(self) -> StageTimes:
        """Layer times of the ranks."""
        return self.samples.time_tables.of_kinds(self.kinds)

    @cached_property
    def messages(self) -> Messages:
        """Messages between the stages."""
        return self._network[1].between(self.stages, self._rings)

    @cached_property
    def step_ends(self) -> StepEnds:
        """Work after the pipeline."""
        stages, types = self.stages, self._types
        return StepEnds(
            model=self.samples.step_end,
            stages=stages,
            times=self.times,
            types=[
                frozenset().union(*types[first:end]) for first, end in pairwise(stages.first_group)
            ],
            weights=self.samples.weights,
        )

    @cached_property
    def slices(self) -> "SliceCosts":
        """Costs of token slices, if micro-batches are cut into them."""
        return SliceCosts(whole=self.model, stages=self.stages)

    @cached_property
    def _types(self) -> list[frozenset[int]]:
        return self.stages.types(self.model.experiment.cluster)

    @cached_property
    def _network(self) -> tuple[Topology, MessageModel]:
        return self.samples.network(max(map(max, self.stages.shares)))

    @cached_property
    def _rings(self) -> Rings:
        stages, (topology, _) = self.stages, self._network
        rings = topology.rings(stages.tensor_groups)
        if stages.pp > 1 and (host_s := self.model.experiment.traits.piped_collective_s):
            rings = rings.started_in(host_s) if stages.leaves_nodes(topology) else rings
        return rings


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
        samples = self._samples_at(stages)
        return StageCosts(model=self, samples=samples, stages=stages, chosen_memory=memory)

    def costs_like(
        self, costs: StageCosts, stages: PlacedStages, memory: StageMemory
    ) -> StageCosts:
        """Return `stage_costs` of stages that differ from those of ``costs`` only in recompute."""
        return replace(costs, stages=stages, chosen_memory=memory, like=costs.kinds)

    def estimate_from(self, costs: StageCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy from the costs of its stages, without `with_columns`."""
        experiment, bounds = self.experiment, all_bounds(self.experiment.model, strategy)
        costs.layout.slice_by(costs.samples.tables.share(strategy.token_slices))
        self._price(costs, bounds)
        evaluator = costs.samples.evaluator
        breakdown = Breakdown.of(evaluator.breakdown())
        if strategy.is_sliced:
            breakdown = self._with_slices(breakdown, costs, strategy)
        types = experiment.cluster.device_types
        peaks, devices = zip(
            *((peak_bytes, types[kind]) for peak_bytes, kind in evaluator.peaks()), strict=True
        )
        verdict = self._judge.judge(bounds, breakdown.total_s, peaks, devices)
        return Estimate(
            strategy=strategy,
            iteration_time_s=breakdown.total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in devices),
            reasons=verdict.reasons,
            warnings=(EXTRAPOLATED,) if evaluator.extrapolates() else (),
            failure_probability=verdict.failure_probability,
            unexplained=experiment.traits.is_unexplained(strategy, len(experiment.cluster.nodes)),
        )

    def _price(self, costs: StageCosts, bounds: tuple[int, ...]) -> float:
        """Return the seconds of an iteration with these cuts; the evaluator has its parts."""
        costs.layout.cut(np.array(bounds, np.int64))
        return float(costs.samples.evaluator.price_cuts(costs.layout))

    def _with_slices(
        self, breakdown: Breakdown, costs: StageCosts, strategy: Strategy
    ) -> Breakdown:
        """Return a breakdown with the pipeline of token slices instead of whole micro-batches."""
        passes_s, sends_s = costs.slices.of_strategy(strategy)
        pipeline = slowest_replica(
            passes_s, sends_s, strategy.pp, strategy.num_micro_batches, self.experiment.traits
        )
        return replace(
            pipeline,
            gradient_sync_s=breakdown.gradient_sync_s,
            optimizer_s=breakdown.optimizer_s,
            other_s=breakdown.other_s,
        )

    def passes(self, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages of a micro-batch, with the host's time.

        Returns:
            Forward, backward and the all-reduces within both, shape ``(3, num_chunks, num_parts,
            num_slices)``; activation and gradient across each cut, shape ``(2, num_chunks - 1,
            num_parts, num_slices)``.
        """
        stages = PlacedStages.of_strategy(strategy)
        if strategy.is_sliced:
            return SliceCosts(whole=self, stages=stages).of_strategy(strategy)
        passes_s, sends_s = self.seconds(stages, all_bounds(self.experiment.model, strategy))
        passes_s[0] += self.experiment.constants.host_s_per_micro_batch / strategy.virtual_stages
        return passes_s[..., None], sends_s[..., None]

    def may_take(self, costs: StageCosts, bounds: tuple[int, ...], limit_s: float) -> bool:
        """Return whether an iteration takes at most a limit, up to rounding."""
        return self.least_s(costs, bounds) <= limit_s

    def least_s(self, costs: StageCosts, bounds: tuple[int, ...]) -> float:
        """Return the seconds of an iteration, less what rounding may have added.

        It is 0 for interleaved stages, whose chunks are cut otherwise.
        """
        if costs.stages.is_interleaved:
            return 0.0
        return self._price(costs, bounds) / (1 + ROUNDING)

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
        memory = costs.memory
        if strategy.is_sliced:
            memory = memory.sliced(largest_share(strategy.token_slices))
        return memory.parts(all_bounds(self.experiment.model, strategy))

    def seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages for these cuts, without the host's time.

        Returns:
            Forward, backward and the all-reduces within both, shape ``(3, num_chunks, num_parts)``;
            activation and gradient across each cut, shape ``(2, num_chunks - 1, num_parts)``.
        """
        return self._samples_at(stages).of_parts_s(stages, bounds)

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
        return SampleCosts(experiment=experiment, starts_on_host=False)

    @cached_property
    def alone(self) -> SampleCosts:
        """Costs of whole samples whose collectives start as within a node."""
        return SampleCosts(experiment=self.experiment, starts_on_host=False)

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

    def of_strategy(self, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return `CostModel.passes` of a strategy of these stages that has token slices."""
        places = slice_places(strategy.token_slices)
        passes_s, sends_s = zip(
            *(self.seconds(strategy.bounds, place) for place in places), strict=True
        )
        return np.stack(passes_s, axis=-1), np.stack(sends_s, axis=-1)

    @memoised
    def seconds(self, bounds: tuple[int, ...], place: Place) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of a slice: measured if possible, otherwise counted.

        Counted times are corrected by measurements of whole sequences.

        Returns:
            Forward, backward and all-reduce seconds, shape ``(3, pp, num_parts)``, and those of
            activation and gradient across each cut, shape ``(2, pp - 1, num_parts)``.
        """
        sequences, tokens, context = place
        shares = [(sequences,) * len(share) for share in self.stages.shares]
        costs = self.whole.slices(tokens, context, measured=self._are_measured)
        passes_s, sends_s = costs.of_parts_s(replace(self.stages, shares=shares), bounds)
        experiment = self.whole.experiment
        if experiment.profile.is_measured and not self._are_measured:
            passes_s = passes_s * self._corrections(bounds)
        passes_s[0] += experiment.constants.host_s_per_micro_batch
        return passes_s, sends_s

    @memoised
    def _corrections(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return measured over counted seconds of whole sequences."""
        tokens = self.whole.experiment.model.shape.num_tokens
        counted = self.whole.slices(tokens, 0, measured=False)
        measured_s, _ = self.whole.alone.of_parts_s(self.stages, bounds)
        counted_s, _ = counted.of_parts_s(self.stages, bounds)
        return measured_s / np.maximum(counted_s, TINY_S)

    @cached_property
    def _are_measured(self) -> bool:
        """Whether the profile has slices for all devices and degrees."""
        experiment = self.whole.experiment
        devices = [device.name for device in experiment.cluster.device_types]
        return covers_slices(
            experiment.profile, devices, {options.tp for options in self.stages.options}
        )
