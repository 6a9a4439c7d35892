"""The cost model: time and memory of a strategy."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.device import Device
from amp_ray.cost.columns import EXTRAPOLATED, Columns
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.memory import MemoryModel, RankMemory, StageMemory
from amp_ray.cost.messages import Messages
from amp_ray.cost.samples import (
    context_experiment,
    covers_slices,
    largest_share,
    slice_experiment,
    slice_places,
)
from amp_ray.cost.stages import GroupKinds, PlacedStages, StageTimes
from amp_ray.cost.step_end import StepEnds
from amp_ray.cost.tables import Tables
from amp_ray.cost.timer import longest_pipeline_s, slowest_replica
from amp_ray.cost.verdict import Judge
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy, all_bounds

TINY_S: Final = 1e-12
"""Stands for a counted time of 0, where nothing can be corrected."""

ROUNDING: Final = 1e-9
"""Share by which times may differ that were added up in another order."""

Groups = frozenset[tuple[int, frozenset[int]]]
"""Samples and device types of different tensor-parallel groups."""

Piece = tuple[int, int, int, bool]
"""What samples are: cp, tokens of a slice (0 for whole sequences), tokens of its context, and
whether slices are timed by their own measurements."""

WHOLE: Final[Piece] = (1, 0, 0, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Everything about stages in a row that does not depend on their cuts."""

    stages: PlacedStages
    times: StageTimes  # layer times of their ranks
    messages: Messages
    memory: StageMemory  # peak bytes
    step_ends: StepEnds  # what follows the pipeline


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel(Tables):
    """Estimates strategies of one experiment; its fields are the tables of whole samples."""

    _tables: dict[Piece, Tables] = field(init=False, default_factory=dict)
    _sliced: dict[PlacedStages, "_SlicedStages"] = field(init=False, default_factory=dict)

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
        return self.estimate_from(self.stage_costs(PlacedStages.of_strategy(strategy)), strategy)

    def estimate_from(self, costs: StageCosts, strategy: Strategy) -> Estimate:
        """Estimate a strategy whose stages' costs are known, without `with_columns`.

        Args:
            costs: Of stages with the same options, shares and devices.
            strategy: Its bounds are used.
        """
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
        )

    def with_columns(self, estimate: Estimate) -> Estimate:
        """Add money, tokens per second, MFU, warnings, and whether the runtime can launch it."""
        return self._columns.add(estimate, self.tables_of(estimate.strategy.stages[0].options))

    def costs(self, candidate: Candidate, placement: tuple[int, ...] | None = None) -> StageCosts:
        """Compute the costs of a candidate that do not depend on its cuts.

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
        """Compute the costs of stages that do not depend on their cuts.

        Raises:
            ValueError: If a device does not exist, or the profile is measured, but not for a
                stage's tp on its devices.
        """
        self._check_devices(stages.devices)
        tables, types = self.tables(stages.cp), stages.types(self.experiment.cluster)
        topology, messages = tables.network(max(map(max, stages.shares)))
        rings = topology.rings(stages.tensor_groups)
        if stages.pp > 1 and (host_s := self.experiment.traits.piped_collective_s):
            rings = rings.started_in(host_s) if stages.leaves_nodes(topology) else rings
        times = tables.times(stages, types, rings)
        return StageCosts(
            stages=stages,
            times=times,
            messages=messages.between(stages, rings),
            memory=self.stage_memory(stages),
            step_ends=StepEnds(
                model=tables.step_end,
                stages=stages,
                times=times,
                types=[
                    frozenset().union(*types[first:end])
                    for first, end in pairwise(stages.first_group)
                ],
                weights=tables.weights,
            ),
        )

    def tables_of(self, options: StageOptions) -> Tables:
        """Return the tables of the samples of ranks with these options."""
        return self.tables(options.cp)

    def tables(
        self, cp: int = 1, *, tokens: int = 0, context: int = 0, measured: bool = False
    ) -> Tables:
        """Return the tables of samples that ``cp`` ranks divide, or of token slices.

        Args:
            cp: Context parallel degree.
            tokens: Of a slice; 0 for whole sequences.
            context: Tokens before the slice.
            measured: Whether slices are timed by measured slices instead of data sheets.
        """
        piece = cp, tokens, context, measured
        if piece == WHOLE:
            return self
        if piece not in self._tables:
            experiment = (
                slice_experiment(self.experiment, tokens, context, measured=measured)
                if tokens
                else context_experiment(self.experiment, cp)
            )
            self._tables[piece] = Tables(experiment=experiment, cp=cp)
        return self._tables[piece]

    def may_take(self, costs: StageCosts, bounds: tuple[int, ...], limit_s: float) -> bool:
        """Tell whether an iteration may stay within a limit, without a full estimate.

        Args:
            costs: Of stages of whole micro-batches.
            bounds: Their cuts.
            limit_s: Seconds of an iteration; times that differ from it by rounding count as within.
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
        """Return the parts of each stage's peak, by `memory.PARTS`.

        Args:
            strategy: One that can be estimated; the parts add up to its peaks.

        Raises:
            ValueError: If its layers count operators.
        """
        if strategy.has_operators:
            raise ValueError("the memory of a plan of operators is that of `OperatorCostModel`")
        costs = self.stage_costs(PlacedStages.of_strategy(strategy))
        return _memory(costs, strategy).parts(all_bounds(self.experiment.model, strategy))

    @cached_property
    def _columns(self) -> Columns:
        return Columns(experiment=self.experiment)

    @cached_property
    def _judge(self) -> Judge:
        experiment = self.experiment
        return Judge(
            model=experiment.model, traits=experiment.traits, constants=experiment.constants
        )

    def passes(self, costs: StageCosts, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of passes and messages of a micro-batch, with the host's time.

        Returns:
            Forward, backward and the all-reduces within both, shape ``(3, num_chunks, num_parts,
            num_slices)``; activation and gradient across each cut, shape ``(2, num_chunks - 1,
            num_parts, num_slices)``.
        """
        if not strategy.is_sliced:
            return self._whole_passes(costs, all_bounds(self.experiment.model, strategy))
        places = slice_places(strategy.token_slices)
        seconds = {
            place: self.slice_seconds(costs.stages, strategy.bounds, place)
            for place in dict.fromkeys(places)
        }
        passes_s, sends_s = zip(*(seconds[place] for place in places), strict=True)
        return np.stack(passes_s, axis=-1), np.stack(sends_s, axis=-1)

    def _whole_passes(
        self, costs: StageCosts, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return `passes` for micro-batches that are not cut into token slices."""
        passes_s, sends_s = costs.times.at(bounds), costs.messages.at(bounds)
        host_s = self.experiment.constants.host_s_per_micro_batch
        passes_s[0] += host_s / costs.stages.virtual_stages
        return passes_s[..., None], sends_s[..., None]

    def slice_seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...], place: tuple[int, int, int]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of a slice: measured if possible, otherwise counted.

        Counted times are corrected by measurements of whole sequences.

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
        measured = covers_slices(profile, devices, {options.tp for options in stages.options})
        times, messages = self._slice_costs(stages, place, measured=measured)
        passes_s, sends_s = times.at(bounds), messages.at(bounds)
        if profile.is_measured and not measured:
            whole = self.tables(tokens=self.experiment.model.shape.num_tokens)
            counted_s = np.maximum(whole.times_and_messages(stages)[0].at(bounds), TINY_S)
            passes_s = passes_s * self.times_and_messages(stages)[0].at(bounds) / counted_s
        passes_s[0] += self.experiment.constants.host_s_per_micro_batch
        return passes_s, sends_s

    def _slice_costs(
        self, stages: PlacedStages, place: tuple[int, int, int], *, measured: bool
    ) -> tuple[StageTimes, Messages]:
        """Compute the costs of a slice that do not depend on cuts; cached for the last stages."""
        if stages not in self._sliced:
            self._sliced.clear()
            rings = self.topology.rings(stages.tensor_groups)
            types = stages.types(self.experiment.cluster)
            self._sliced[stages] = _SlicedStages(
                kinds=self.time_tables.kinds(stages, types, rings),
                messages=self.messages.between(stages, rings),
            )
        sliced = self._sliced[stages]
        if place not in sliced.costs:
            sequences, tokens, context = place
            shares = [(sequences,) * len(share) for share in stages.shares]
            tables = self.tables(tokens=tokens, context=context, measured=measured)
            if shares == list(stages.shares) and not self.experiment.cluster.has_rates_by_size:
                times = tables.time_tables.of_kinds(sliced.kinds)
                sliced.costs[place] = times, replace(sliced.messages, model=tables.messages)
            else:
                sliced.costs[place] = tables.times_and_messages(replace(stages, shares=shares))
        return sliced.costs[place]

    def seconds(
        self, stages: PlacedStages, bounds: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray]:
        """Return seconds of passes and messages for given cuts, without the host's time."""
        times, messages = self.tables(stages.cp).times_and_messages(stages)
        return times.at(bounds), messages.at(bounds)

    def stage_memory(self, stages: PlacedStages) -> StageMemory:
        """Return the memory of stages; equal options, shares and devices are computed once."""
        types = stages.types(self.experiment.cluster)
        groups = list(zip(stages.samples.tolist(), types, strict=True))
        if groups.count(groups[0]) == len(groups):
            groups = groups[:1]
        distinct, of_stage = stages.distinct_options
        memory: dict[tuple[int, Groups], RankMemory] = {}
        needs = []
        for number, (first, end) in zip(of_stage, pairwise(stages.first_group), strict=True):
            key = number, frozenset(groups[first:end] or groups)
            if key not in memory:
                memory[key] = tuple(self._rank_memory(stages, distinct[number], key[1]))
            needs.append(memory[key])
        return StageMemory(needs=tuple(needs))

    def _rank_memory(
        self, stages: PlacedStages, options: StageOptions, groups: Groups
    ) -> Iterator[tuple[MemoryModel, Device]]:
        """Return, per share of samples, the memory of a rank and the smallest device."""
        devices, tables = self.experiment.cluster.device_types, self.tables(stages.cp)
        for samples in sorted({samples for samples, _ in groups}):
            candidate = Candidate(
                micro_batch_size=samples,
                options=options,
                pp=stages.pp,
                num_micro_batches=stages.num_micro_batches,
                virtual_stages=stages.virtual_stages,
            )
            types = sorted({kind for share, kinds in groups if share == samples for kind in kinds})
            smallest = min((devices[kind] for kind in types), key=lambda one: one.memory_bytes)
            yield tables.memory(candidate), smallest

    def _check_devices(self, devices: IntArray) -> None:
        num_devices = self.experiment.cluster.num_devices
        if devices.max() >= num_devices:
            raise ValueError(
                f"the cluster has {num_devices} devices, numbered from 0; "
                f"found a rank on device {devices.max()}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SlicedStages:
    """Values that slices of all lengths share on some stages, and a cache of slice costs."""

    kinds: GroupKinds  # of the tensor-parallel groups
    messages: Messages  # of whole sequences, over links whose rates do not depend on the size
    costs: dict[tuple[int, int, int], tuple[StageTimes, Messages]] = field(default_factory=dict)


def _memory(costs: StageCosts, strategy: Strategy) -> StageMemory:
    """Return the memory of a strategy's stages, where token slices may divide its micro-batches."""
    if not strategy.is_sliced:
        return costs.memory
    return costs.memory.sliced(largest_share(strategy.token_slices))
