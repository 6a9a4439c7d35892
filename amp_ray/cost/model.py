"""The cost model: what a strategy takes, in time and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import Path
from amp_ray.cost.context import (
    exchange_rings,
    exposed_s,
    rank_experiment,
    with_context,
    with_exchange,
    without_context,
)
from amp_ray.cost.estimate import Breakdown, Estimate
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.memory import LayerMemory, MemoryModel, RankMemory, StageMemory
from amp_ray.cost.messages import MessageModel, Messages
from amp_ray.cost.money import Cost, PriceModel
from amp_ray.cost.roofline import Rank
from amp_ray.cost.slices import (
    covers_slices,
    largest_share,
    slice_model,
    slice_places,
    slice_profile,
)
from amp_ray.cost.stages import GroupKinds, PlacedStages, StageTimes, TimeTables
from amp_ray.cost.step_end import StepEndModel, StepEnds
from amp_ray.cost.timer import longest_pipeline_s, slowest_replica
from amp_ray.cost.topology import Rings, Topology
from amp_ray.cost.verdict import Judge
from amp_ray.cost.weights import Weights
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import ANALYTIC
from amp_ray.runtimes.traits import find_optimizer
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import RecomputeKind
from amp_ray.strategies.strategy import Strategy, all_bounds

_PASSES: Final = 3
"""Forward passes that both passes of a step count as: a backward pass is two of them."""

TINY_S: Final = 1e-12
"""Stands for a counted time of 0, where nothing can be corrected."""

ROUNDING: Final = 1e-9
"""Share by which times may differ that were added up in another order."""

EXTRAPOLATED: Final = "micro-batch size outside the measured ones: layer times are extrapolated"
"""Warning: the profile has no measurement on one side of this micro-batch size."""

SLOW_LINK: Final = "{}: less than a quarter of what such boards reach; GB/s stated as Gbit/s?"
"""Warning of a link that is most likely stated in another unit."""

NO_SLICES: Final = "this runtime passes on whole micro-batches, not token slices"
"""Warning of a strategy with token slices that cannot be launched."""

NO_PROGRAM: Final = "a model that only a program of your own (trials.program) can train"
NO_RUNTIME: Final = "stages of different tp or dp, which only runtime torch runs"
"""Warning of what cannot be launched."""


Groups = frozenset[tuple[int, frozenset[int]]]
"""Samples and device types of different tensor-parallel groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Everything about stages in a row that does not depend on their cuts."""

    stages: PlacedStages
    times: StageTimes  # layer times of their ranks
    messages: Messages
    memory: StageMemory  # peak bytes
    step_ends: StepEnds  # what follows the pipeline


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """Estimates strategies of one experiment.

    Tables that many candidates share are kept; a cost model therefore belongs to one process. It
    holds no other state.
    """

    experiment: Experiment  # what is given
    cp: int = 1  # ranks that divide every sequence, of which the experiment's samples are parts
    _memory: dict[Candidate, MemoryModel] = field(init=False, default_factory=dict)
    _weights: dict[tuple[int, int], Weights] = field(init=False, default_factory=dict)
    _networks: dict[int, tuple[Topology, MessageModel]] = field(init=False, default_factory=dict)
    _slice_models: dict[tuple[int, int, bool], "CostModel"] = field(
        init=False, default_factory=dict
    )
    _sliced: dict[PlacedStages, "_SlicedStages"] = field(init=False, default_factory=dict)
    _context_models: dict[int, "CostModel"] = field(init=False, default_factory=dict)
    _exchanges: dict[tuple[Path, int, int], tuple[FloatArray, FloatArray]] = field(
        init=False, default_factory=dict
    )
    _layer_memory: dict[tuple[int | str, ...], FloatArray] = field(init=False, default_factory=dict)

    def costs(self, candidate: Candidate, placement: tuple[int, ...] | None = None) -> StageCosts:
        """Price a candidate as far as its cuts do not matter.

        Args:
            candidate: Degrees.
            placement: Device of every rank; by default rank ``r`` runs on device ``r``.

        Raises:
            ValueError: If the cluster has too few devices, or the profile is measured, but not
                for this tp on these devices.
        """
        devices = range(candidate.num_devices) if placement is None else placement
        return self.stage_costs(PlacedStages.of_candidate(candidate, devices))

    def stage_costs(self, stages: PlacedStages) -> StageCosts:
        """Price any stages as far as their cuts do not matter.

        Raises:
            ValueError: If a device does not exist, or the profile is measured, but not for a
                stage's tp on its devices.
        """
        self._check_devices(stages.devices)
        topology, messages = self.network(max(map(max, stages.shares)))
        rings, types = topology.rings(stages.tensor_groups), stages.types(self.experiment.cluster)
        if stages.pp > 1 and (host_s := self.experiment.traits.piped_collective_s):
            rings = rings.started_in(host_s) if stages.leaves_nodes(topology) else rings
        ends = pairwise(stages.first_group)
        times = self._times(stages, types, rings)
        return StageCosts(
            stages=stages,
            times=times,
            messages=messages.between(stages, rings),
            memory=self.stage_memory(stages),
            step_ends=StepEnds(
                model=self.step_end,
                stages=stages,
                times=times,
                types=[frozenset().union(*types[first:end]) for first, end in ends],
                weights=self.weights,
            ),
        )

    def estimate(self, strategy: Strategy) -> Estimate:
        """Estimate any strategy: simulated pipeline of the slowest replica, then the step end.

        Args:
            strategy: Its stages may differ in everything.

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
        own, plain = self.of_ranks(strategy)
        if own is not self:
            result = with_context(own.estimate(plain), own.cp, self.experiment.traits)
            assert isinstance(result, Estimate)
            return result
        return self.estimate_from(self.stage_costs(PlacedStages.of_strategy(strategy)), strategy)

    def of_ranks(self, strategy: Strategy) -> tuple["CostModel", Strategy]:
        """Return what prices a strategy without context parallelism, and that strategy.

        They are this cost model and the strategy itself where no ranks divide sequences.
        """
        cp = strategy.stages[0].options.cp
        return (self, strategy) if cp == 1 else (self.with_context(cp), without_context(strategy))

    def with_context(self, cp: int) -> "CostModel":
        """Return the cost model of parts of sequences that ``cp`` ranks divide; see `context`."""
        if cp not in self._context_models:
            own = rank_experiment(self.experiment, cp)
            self._context_models[cp] = CostModel(experiment=own, cp=cp)
        return self._context_models[cp]

    def _times(
        self, stages: PlacedStages, types: Sequence[frozenset[int]], rings: Rings
    ) -> StageTimes:
        """Return layer times, with the exchange of keys and values where ranks divide sequences."""
        times = self.time_tables.times(stages, types, rings)
        if self.cp == 1:
            return times
        rings = exchange_rings(stages, self.cp, self.topology)
        return with_exchange(times, rings, self.exchange_s)

    def exchange_s(self, path: Path, tp: int, samples: int) -> tuple[FloatArray, FloatArray]:
        """Return what the exchange of keys and values adds to both passes of every layer."""
        key = path, tp, samples
        if key not in self._exchanges:
            given = self.experiment
            layers, positions = given.model.distinct_layers
            each = []
            for device in given.cluster.device_types:
                rank = Rank(
                    device=device, tp=tp, micro_batch_size=samples, precision=given.precision
                )
                each.append(
                    [
                        exposed_s(layer, rank, self.cp, path, given.traits, given.constants)
                        for layer in layers
                    ]
                )
            forward_s, backward_s = np.max(each, axis=0)[list(positions)].T
            self._exchanges[key] = forward_s, backward_s
        return self._exchanges[key]

    def estimate_from(self, costs: StageCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy whose stages' costs are known.

        Args:
            costs: Of the same options, shares and devices.
            strategy: Its bounds count.
        """
        breakdown = self._breakdown(costs, strategy)
        total_s = breakdown.total_s
        memory = costs.memory
        if strategy.token_slices:
            memory = memory.sliced(largest_share(strategy.token_slices))
        bounds = all_bounds(self.experiment.model, strategy)
        peaks, devices = zip(*memory.peaks(bounds), strict=True)
        verdict = self._judge.judge(bounds, total_s, peaks, devices)
        traits = self.experiment.traits
        launchable = strategy.is_uniform or traits.unequal_stages
        is_trained = self.experiment.is_trained
        runs_slices = traits.token_slices or not strategy.token_slices
        refusals = (
            traits.why_not([stage.options for stage in strategy.stages]),
            traits.why_no_zero(strategy.zero, strategy.pp),
            traits.why_no_grid(max(stage.options.tp for stage in strategy.stages), strategy.pp),
            traits.why_no_chunks(strategy.virtual_stages),
        )
        refused = [reason for reason in refusals if reason is not None]
        warnings = (
            *([EXTRAPOLATED] if costs.times.extrapolated else []),
            *([SLOW_LINK.format(slow)] if (slow := self.experiment.cluster.slow_links) else []),
            *([] if is_trained else [NO_PROGRAM]),
            *(f"not counted: {part}" for part in self.experiment.model.shape.not_counted),
            *([] if launchable else [NO_RUNTIME]),
            *([] if runs_slices else [NO_SLICES]),
            *refused,
        )
        return Estimate(
            strategy=strategy,
            iteration_time_s=total_s,
            breakdown=breakdown,
            peak_memory_bytes=peaks,
            memory_limit_bytes=tuple(float(device.memory_bytes) for device in devices),
            reasons=verdict.reasons,
            warnings=warnings,
            launchable=is_trained and launchable and runs_slices and not refused,
            failure_probability=verdict.failure_probability,
            cost=self._cost(costs.stages, bounds, total_s),
            tokens_per_s=costs.stages.num_samples * self._sequence_length / total_s or None,
            mfu=self._mfu(costs.stages, total_s),
        )

    def may_take(self, costs: StageCosts, bounds: tuple[int, ...], limit_s: float) -> bool:
        """Tell whether an iteration may take no longer than a limit, without judging all of it.

        Args:
            costs: Of stages of whole micro-batches.
            bounds: Their cuts.
            limit_s: Seconds of an iteration; what is next to it counts as within.
        """
        if costs.stages.virtual_stages > 1:
            return True
        limit_s = limit_s * (1 + ROUNDING) - self.experiment.constants.host_s_per_iteration
        passes_s, sends_s = self._whole_passes(costs, bounds)
        num_steps, traits = costs.stages.num_micro_batches, self.experiment.traits
        if num_steps * float((passes_s[0] + passes_s[1]).max()) > limit_s:
            return False
        pipeline_s = longest_pipeline_s(passes_s, sends_s, costs.stages.pp, num_steps, traits)
        if pipeline_s > limit_s:
            return False
        step_end = costs.step_ends.at(bounds)
        return pipeline_s + step_end.gradient_sync_s + step_end.optimizer_s <= limit_s

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return what the peak of each stage is made of, by `memory.PARTS`.

        Args:
            strategy: One that can be estimated; the parts add up to its peaks.

        Raises:
            ValueError: If its layers count operators.
        """
        if strategy.has_operators:
            raise ValueError("the memory of a plan of operators is that of `OperatorCostModel`")
        own, strategy = self.of_ranks(strategy)
        if own is not self:
            return own.memory_parts(strategy)
        memory = self.stage_costs(PlacedStages.of_strategy(strategy)).memory
        if strategy.token_slices:
            memory = memory.sliced(largest_share(strategy.token_slices))
        return memory.parts(all_bounds(self.experiment.model, strategy))

    def _mfu(self, stages: PlacedStages, total_s: float) -> float | None:
        """Return the model's own operations over what the devices could do in that time."""
        used = self._peak_flops[stages.devices].sum()
        flops = _PASSES * stages.num_samples * self.experiment.model.forward_flops
        return float(flops / (used * total_s)) or None

    @cached_property
    def _peak_flops(self) -> FloatArray:
        """Peak rate of every device of the cluster."""
        given = self.experiment
        nodes = (given.cluster.nodes[node] for node in given.cluster.node_of_device)
        return np.array([node.device.peak_flops(given.precision) for node in nodes])

    def _cost(self, stages: PlacedStages, bounds: tuple[int, ...], total_s: float) -> Cost | None:
        """Return what an iteration costs, where prices are known."""
        return self._prices.cost(stages, bounds, total_s) if self._prices else None

    @cached_property
    def _sequence_length(self) -> int:
        """Tokens of a sample; 0 for a model that has none."""
        return self.experiment.model.shape.num_tokens

    @cached_property
    def _prices(self) -> PriceModel | None:
        """What prices an iteration; None where some node has no price."""
        given = self.experiment
        if not given.cluster.has_prices:
            return None
        return PriceModel(
            cluster=given.cluster,
            traits=given.traits,
            precision=given.precision,
            weights=self.weights,
            sample_bytes=self.messages.sample_bytes,
            tokens_per_sample=self._sequence_length,
        )

    def weights(self, tp: int, expert_ranks: int = 0) -> Weights:
        """Return what a rank of a tensor-parallel group holds.

        Args:
            tp: Its size.
            expert_ranks: Ranks that hold the experts of a layer together; by default the group.
        """
        key = tp, expert_ranks or tp
        if key not in self._weights:
            model = self.experiment.model
            self._weights[key] = Weights(model=model, tp=tp, expert_ranks=key[1])
        return self._weights[key]

    def memory(self, candidate: Candidate) -> MemoryModel:
        """Return the memory of a candidate's stages."""
        if candidate not in self._memory:
            self._memory[candidate] = self._new_memory(candidate)
        return self._memory[candidate]

    def _new_memory(self, candidate: Candidate) -> MemoryModel:
        """Return the memory of a candidate's stages, from tables that others may share."""
        given, options = self.experiment, candidate.options
        weights = self.weights(options.tp, options.expert_ranks)
        rank = Rank(
            device=given.cluster.device_types[0],
            tp=candidate.options.tp,
            micro_batch_size=candidate.micro_batch_size,
            precision=given.precision,
            sequence_parallel=candidate.options.sequence_parallel,
        )
        return MemoryModel(
            layers=self._memory_rows(rank, options, options.recompute.kind),
            plain=self._memory_rows(rank, options, "none"),
            block_counts=np.array(given.model.block_counts),
            weights=weights,
            candidate=candidate,
            rank=rank,
            optimizer=self.step_end.optimizer,
            traits=given.traits,
            per=self.step_end.per_parameter,
            constants=given.constants,
        ).weighed()

    def network(self, num_samples: int) -> tuple[Topology, MessageModel]:
        """Return the links as activations of so many samples meet them, and messages over these.

        They are the cluster's own links unless the rate of some depends on the size of a message.
        """
        if not self.experiment.cluster.has_rates_by_size:
            return self.topology, self.messages
        if num_samples not in self._networks:
            num_bytes = num_samples * float(self.messages.sample_bytes(1).max())
            cluster = self.experiment.cluster.at(num_bytes)
            topology = replace(self.topology, cluster=cluster)
            self._networks[num_samples] = topology, replace(self.messages, topology=topology)
        return self._networks[num_samples]

    def _memory_rows(
        self, rank: Rank, options: StageOptions, recompute: RecomputeKind
    ) -> FloatArray:
        """Return what layers need on one kind of rank."""
        spread = options.ep, options.expert_tp
        key = (rank.tp, *spread, rank.sequence_parallel, rank.micro_batch_size, recompute)
        if key not in self._layer_memory:
            given = self.experiment
            layers = LayerMemory(
                model=self.time_tables.layouts.of(options),
                rank=rank,
                recompute=recompute,
                traits=given.traits,
            )
            self._layer_memory[key] = layers.rows(self.weights(options.tp, options.expert_ranks))
        return self._layer_memory[key]

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
    def time_tables(self) -> TimeTables:
        """Layer times of tensor-parallel groups."""
        return TimeTables(
            layer_costs=self.layer_costs,
            topology=self.topology,
            precision=self.experiment.precision,
        )

    @cached_property
    def messages(self) -> MessageModel:
        """Messages between stages."""
        given = self.experiment
        return MessageModel(
            model=given.model,
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
            precision=given.precision,
        )

    @cached_property
    def step_end(self) -> StepEndModel:
        """The end of an iteration."""
        given = self.experiment
        return StepEndModel(
            topology=self.topology,
            traits=given.traits,
            constants=given.constants,
            precision=given.precision,
            optimizer=find_optimizer(given.optimizer),
        )

    @cached_property
    def _judge(self) -> Judge:
        """What tells whether a strategy runs."""
        given = self.experiment
        return Judge(model=given.model, traits=given.traits, constants=given.constants)

    def _breakdown(self, costs: StageCosts, strategy: Strategy) -> Breakdown:
        """Put pipeline and step end together."""
        constants = self.experiment.constants
        bounds = all_bounds(self.experiment.model, strategy)
        passes_s, sends_s = self.passes(costs, strategy)
        stages, traits = costs.stages, self.experiment.traits
        pipeline = slowest_replica(passes_s, sends_s, stages.pp, stages.num_micro_batches, traits)
        step_end = costs.step_ends.at(bounds)
        return replace(
            pipeline,
            gradient_sync_s=step_end.gradient_sync_s,
            optimizer_s=step_end.optimizer_s,
            other_s=constants.host_s_per_iteration,
        )

    def passes(self, costs: StageCosts, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return what passes and messages of a micro-batch take, with the host.

        Returns:
            Forward, backward and the all-reduces within both, shape ``(3, num_chunks, num_parts,
            num_slices)``; activation and gradient across each cut, shape ``(2, num_chunks - 1,
            num_parts, num_slices)``.
        """
        if not strategy.token_slices:
            return self._whole_passes(costs, all_bounds(self.experiment.model, strategy))
        places = slice_places(strategy.token_slices)
        known = {
            place: self.slice_seconds(costs.stages, strategy.bounds, place)
            for place in dict.fromkeys(places)
        }
        passes_s, sends_s = zip(*(known[place] for place in places), strict=True)
        return np.stack(passes_s, axis=-1), np.stack(sends_s, axis=-1)

    def _whole_passes(
        self, costs: StageCosts, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return what `passes` does for micro-batches that are not cut into token slices."""
        passes_s, sends_s = costs.times.at(bounds), costs.messages.at(bounds)
        host_s = self.experiment.constants.host_s_per_micro_batch
        passes_s[0] += host_s / costs.stages.virtual_stages
        return passes_s[..., None], sends_s[..., None]

    def slice_seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...], place: tuple[int, int, int]
    ) -> tuple[FloatArray, FloatArray]:
        """Return what a slice takes: as it was measured, or else counted.

        Counted times are corrected by what was measured of whole sequences.

        Args:
            stages: With their devices.
            bounds: Their cuts.
            place: Sequences, tokens and tokens of context.

        Returns:
            Forward, backward and all-reduce seconds, shape ``(3, pp, num_parts)``, and those of
            activation and gradient across each cut, shape ``(2, pp - 1, num_parts)``.
        """
        profile = self.experiment.profile
        devices = [device.name for device in self.experiment.cluster.device_types]
        known = covers_slices(profile, devices, {options.tp for options in stages.options})
        times, messages = self._slice_costs(stages, place, measured=known)
        passes_s, sends_s = times.at(bounds), messages.at(bounds)
        if profile.is_measured and not known:
            whole = self._slice_model(self._sequence_length, 0)
            counted_s = np.maximum(whole.seconds(stages, bounds)[0], TINY_S)
            passes_s = passes_s * self.seconds(stages, bounds)[0] / counted_s
        passes_s[0] += self.experiment.constants.host_s_per_micro_batch
        return passes_s, sends_s

    def _slice_costs(
        self, stages: PlacedStages, place: tuple[int, int, int], *, measured: bool
    ) -> tuple[StageTimes, Messages]:
        """Price a slice as far as cuts do not matter; those of the last stages are kept."""
        if stages not in self._sliced:
            self._sliced.clear()
            rings = self.topology.rings(stages.tensor_groups)
            types = stages.types(self.experiment.cluster)
            self._sliced[stages] = _SlicedStages(
                kinds=self.time_tables.kinds(stages, types, rings),
                messages=self.messages.between(stages, rings),
            )
        sliced = self._sliced[stages]
        if place not in sliced.known:
            sequences, tokens, context = place
            shares = [(sequences,) * len(share) for share in stages.shares]
            model = self._slice_model(tokens, context, measured=measured)
            if shares == list(stages.shares) and not self.experiment.cluster.has_rates_by_size:
                sliced.known[place] = sliced.priced_by(model)
            else:
                sliced.known[place] = model.times_and_messages(replace(stages, shares=shares))
        return sliced.known[place]

    def times_and_messages(self, stages: PlacedStages) -> tuple[StageTimes, Messages]:
        """Price passes and messages of stages as far as cuts do not matter, without the host."""
        topology, messages = self.network(max(map(max, stages.shares)))
        rings = topology.rings(stages.tensor_groups)
        types = stages.types(self.experiment.cluster)
        return self._times(stages, types, rings), messages.between(stages, rings)

    def seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return passes and messages of stages with their cuts, without the host."""
        times, messages = self.times_and_messages(stages)
        return times.at(bounds), messages.at(bounds)

    def _slice_model(self, tokens: int, context: int, *, measured: bool = False) -> "CostModel":
        """Return the cost model of sequences as long as a slice, by data sheets if not measured."""
        key = tokens, context, measured
        if key not in self._slice_models:
            given, profile = self.experiment, ANALYTIC
            if measured:
                profile = slice_profile(given.profile, given.model, tokens=tokens, context=context)
            model = slice_model(given.model, given.traits, tokens=tokens, context=context)
            self._slice_models[key] = CostModel(
                experiment=replace(given, model=model, profile=profile)
            )
        return self._slice_models[key]

    def stage_memory(self, stages: PlacedStages) -> StageMemory:
        """Return the memory of stages; stages of equal options, shares and devices share theirs."""
        types = stages.types(self.experiment.cluster)
        groups = list(zip(stages.samples.tolist(), types, strict=True))
        if groups.count(groups[0]) == len(groups):
            groups = groups[:1]
        distinct, of_stage = stages.distinct_options
        known: dict[tuple[int, Groups], RankMemory] = {}
        needs = []
        for number, (first, end) in zip(of_stage, pairwise(stages.first_group), strict=True):
            key = number, frozenset(groups[first:end] or groups)
            if key not in known:
                known[key] = tuple(self._rank_memory(stages, distinct[number], key[1]))
            needs.append(known[key])
        return StageMemory(needs=tuple(needs))

    def _rank_memory(
        self, stages: PlacedStages, options: StageOptions, groups: Groups
    ) -> Iterator[tuple[MemoryModel, Device]]:
        """Give, per share of samples, the memory of a rank and the smallest device of those."""
        known = self.experiment.cluster.device_types
        for samples in sorted({samples for samples, _ in groups}):
            candidate = Candidate(
                micro_batch_size=samples,
                options=options,
                pp=stages.pp,
                num_micro_batches=stages.num_micro_batches,
                virtual_stages=stages.virtual_stages,
            )
            types = sorted({kind for share, own in groups if share == samples for kind in own})
            smallest = min((known[kind] for kind in types), key=lambda own: own.memory_bytes)
            yield self.memory(candidate), smallest

    def _check_devices(self, devices: IntArray) -> None:
        """Refuse a rank on a device that does not exist."""
        num_devices = self.experiment.cluster.num_devices
        if devices.max() >= num_devices:
            raise ValueError(
                f"the cluster has {num_devices} devices, numbered from 0; "
                f"found a rank on device {devices.max()}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SlicedStages:
    """What slices of all lengths share on some stages, and what was priced of them."""

    kinds: GroupKinds  # of the tensor-parallel groups
    messages: Messages  # of whole sequences, over links whose rates do not depend on the size
    known: dict[tuple[int, int, int], tuple[StageTimes, Messages]] = field(default_factory=dict)

    def priced_by(self, model: CostModel) -> tuple[StageTimes, Messages]:
        """Price a slice of whole shares by the cost model of its length."""
        times = model.time_tables.of_kinds(self.kinds)
        return times, replace(self.messages, model=model.messages)
