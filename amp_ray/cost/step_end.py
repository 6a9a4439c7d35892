"""The end of an iteration, after the pipeline: gradient sync, tied weights, optimizer.

The module also times collectives of weights and gradients that run during the passes of every
micro-batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import (
    NO_RING,
    Path,
    all_gather_s,
    all_reduce_s,
    in_buckets_s,
    start_s,
    taken_share,
)
from amp_ray.cost.roofline import stream_s
from amp_ray.cost.stages import PlacedStages, StageTimes
from amp_ray.cost.topology import Rings, Topology
from amp_ray.cost.weights import Weights, by_stage
from amp_ray.memo import memoised
from amp_ray.runtimes.traits import Optimizer, ParameterBytes, RuntimeTraits
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.zero import MOST_ZERO_STAGE, SHARDED_GRADIENTS
from amp_ray.units import Precision


def exposed_s(
    passes_s: FloatArray,
    gathers_s: FloatArray,
    again_s: FloatArray,
    scatters_s: FloatArray,
    taken: float = 0.0,
) -> float:
    """Return the time that gathers and reduce-scatters add to a micro-batch's passes.

    While a layer runs forward, the weights of the next one are gathered. While it runs backward,
    those of the previous one are gathered and the gradients of the next one reduced, over the same
    links. A layer waits for its gather, and computes at a lower rate during collectives. No
    computation hides the first gather and the last reduce-scatter. ``passes_s`` has shape ``(2,
    num_layers)``, the others ``(num_layers,)``: ``gathers_s`` are before the forward pass,
    ``again_s`` before the backward pass (0 if weights were kept), ``scatters_s`` after it. A
    running collective uses the fraction ``taken`` of the compute rate.

    References:
        Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.3: prefetching in both passes.

    Example:
        >>> passes = np.array([[1.0, 1.0], [2.0, 2.0]])
        >>> exposed_s(passes, np.array([0.5, 1.5]), np.array([3.0, 0.0]), np.array([0.5, 0.5]))
        2.5
    """
    forward_s, backward_s = passes_s
    first_s = gathers_s[0] + left_s(gathers_s[1:], forward_s[:-1], taken).sum()
    beside_s = np.zeros_like(backward_s)
    beside_s[1:] += again_s[:-1]
    beside_s[:-1] += scatters_s[1:]
    later_s = left_s(beside_s, backward_s, taken).sum() + again_s[-1] + scatters_s[0]
    return float(first_s + later_s)


def left_s(collective_s: FloatArray, compute_s: FloatArray, taken: float) -> FloatArray:
    """Return the time that collectives add to simultaneous computation.

    Either the computation ends first, or it is slowed down while the collectives run.
    """
    added_s: FloatArray = np.maximum(collective_s - compute_s, taken * collective_s)
    return added_s


MANY_PARAMETERS: Final = 1e9
"""`StepEndModel.line` goes through two points: no parameters, and this number of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds after the last backward pass, on the slowest stage."""

    gradient_sync_s: float  # all-reduces of gradients, and ZeRO-1's gather after the step
    optimizer_s: float  # the optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPaths:
    """Rates and latencies of a stage's data-parallel rings."""

    shards: Sequence[Path]  # rings of its shard groups
    copies: Sequence[Path]  # rings of the ranks that hold the same shard
    device: Device  # the device of the stage whose memory is slowest; of those the smallest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharers:
    """Data-parallel ranks of one or more stages; all these stages have the same options and paths.

    Equality is identity, which makes a cheap key.
    """

    options: StageOptions
    paths: DataPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Passes that run while gradients are reduced or weights are gathered."""

    pp: int  # number of stages
    # The first forward pass of the stage, and those of earlier stages before it; infinite if all
    # communication counts as hidden
    forward_s: float = 0.0
    # The last backward pass of the stage, and those of earlier stages after it; infinite in the
    # same case
    backward_s: float = 0.0
    # With ZeRO-3, share of its parameters in the largest layer, which is reduced after all passes
    largest_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Seconds of a stage's exchanges once per step, if no passes hide them."""

    reduce_s: float  # gradients
    gather_s: float  # updated weights

    def left_of(self, beside: Beside) -> Beside:
        """Return the passes that remain to hide further exchanges after these."""
        return Beside(
            pp=beside.pp,
            forward_s=max(0.0, beside.forward_s - self.gather_s),
            backward_s=max(0.0, beside.backward_s - self.reduce_s),
            largest_share=beside.largest_share,
        )


def _left(seconds: float, beside_s: float, last_share: float) -> float:
    """Return the seconds of communication that simultaneous passes do not hide."""
    return 0.0 if beside_s == math.inf else max(seconds - beside_s, last_share * seconds)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEndModel:
    """Cost model of the end of an iteration on one rank."""

    topology: Topology
    traits: RuntimeTraits  # communication and memory accesses of the runtime
    constants: Constants
    precision: Precision
    optimizer: Optimizer  # memory accesses of the update

    def sync_s(
        self, parameters: float, options: StageOptions, paths: DataPaths, beside: Beside
    ) -> float:
        """Return the seconds of a stage's data-parallel communication that happens once per step.

        Each shard group reduces the gradients, equal shards of several groups are summed, and
        updated weights are gathered unless every micro-batch gathers them. If the runtime overlaps
        this with passes, the result is the part that they cannot hide, plus the last bucket.

        ``parameters`` are those of a rank.
        """
        exchanges = self.exchanges(parameters, options, paths)
        return self.exposed_sync_s(parameters, options, paths, beside, exchanges)

    @memoised
    def sharers(
        self,
        options: StageOptions,
        shards: tuple[Path, ...],
        copies: tuple[Path, ...],
        types: frozenset[int],
    ) -> Sharers:
        """Return the ranks on these paths and device types: for equal ones the same object."""
        paths = DataPaths(shards=shards, copies=copies, device=self.slowest(types))
        return Sharers(options=options, paths=paths)

    @memoised
    def alone(self, parameters: float, ranks: Sharers) -> tuple[Exchanges, float]:
        """Return exchanges and optimizer seconds of so many parameters of a rank."""
        options, paths = ranks.options, ranks.paths
        shards = options.zero.shards(options.dp)
        return (
            self.exchanges(parameters, options, paths),
            self.optimizer_s(parameters, shards, paths.device),
        )

    def exchanges(self, parameters: float, options: StageOptions, paths: DataPaths) -> Exchanges:
        """Return the seconds of the exchanges of so many parameters of a rank."""
        return Exchanges(
            reduce_s=self.reduce_s(parameters, options, paths),
            gather_s=self.gather_s(parameters, options, paths),
        )

    def exposed_sync_s(
        self,
        parameters: float,
        options: StageOptions,
        paths: DataPaths,
        beside: Beside,
        exchanges: Exchanges,
    ) -> float:
        """Return `sync_s` from the seconds of its exchanges."""
        traits = self.traits
        buckets_s = 0.0
        if options.dp > 1 or traits.buckets_alone:
            per_bucket = self.per_parameter.bucket_traffic
            buckets_s = stream_s(parameters * per_bucket, 0, paths.device, self.constants)
        reduce_s = 0.0 if self.per_micro_batch(options, beside.pp) else exchanges.reduce_s
        gather_s = 0.0 if self.gathers(options, beside.pp) else exchanges.gather_s
        last = min(1.0, max(traits.bucket_elements, 1.0) / max(parameters, 1.0))
        if options.zero.stage == MOST_ZERO_STAGE:
            last = beside.largest_share
        last = max(last, taken_share(paths.device))
        if traits.overlaps_gradient_sync and not self._reduces_at_once(options):
            reduce_s = _left(reduce_s, beside.backward_s, last)
        if traits.overlaps_weight_gather:
            gather_s = _left(gather_s, beside.forward_s, last)
        return reduce_s + gather_s + buckets_s

    def _reduces_at_once(self, options: StageOptions) -> bool:
        """Return whether gradients are reduced all at once after the passes, not in buckets."""
        return options.zero.stage == 1 and self.traits.reduces_sharded_at_once

    def per_micro_batch(self, options: StageOptions, pp: int) -> bool:
        """Return whether gradients are reduced for every micro-batch, not once per step."""
        return options.zero.stage >= SHARDED_GRADIENTS and pp == 1

    def gathers(self, options: StageOptions, pp: int) -> bool:
        """Return whether weights are gathered for every micro-batch, not once per step."""
        first = SHARDED_GRADIENTS if self.traits.gathers_every_pass else MOST_ZERO_STAGE
        return options.zero.stage >= first and pp == 1

    def reduce_s(self, parameters: float, options: StageOptions, paths: DataPaths) -> float:
        """Return the seconds to reduce gradients: in each shard group, then between the groups."""
        num_bytes, start = parameters * self.per_parameter.gradient, self._start_s
        shards = options.zero.shards(options.dp)
        copies = options.dp // shards
        reduce = all_gather_s  # a reduce-scatter takes the same time as an all-gather
        if options.zero.stage == 1 and copies == 1 and not self.traits.scatters_gradients:
            reduce = all_reduce_s
        elements = math.inf if self._reduces_at_once(options) else self.traits.bucket_elements
        bucket = max(elements, 1.0) * self.per_parameter.gradient
        within_s = max(
            in_buckets_s(reduce, num_bytes, shards, path, start, bucket) for path in paths.shards
        )
        return within_s + max(
            in_buckets_s(all_reduce_s, num_bytes / shards, copies, path, start, bucket / shards)
            for path in paths.copies
        )

    def gather_s(self, parameters: float, options: StageOptions, paths: DataPaths) -> float:
        """Return the seconds to gather weights within each shard group."""
        num_bytes = parameters * self.per_parameter.gathered
        shards = options.zero.shards(options.dp)
        return max(
            in_buckets_s(all_gather_s, num_bytes, shards, path, self._start_s)
            for path in paths.shards
        )

    def optimizer_s(self, parameters: float, shards: int, device: Device) -> float:
        """Return the seconds of an optimizer step that ``shards`` ranks share, by its traffic."""
        num_bytes = self.per_parameter.step_traffic + self.optimizer.update_traffic_bytes
        return stream_s(parameters / shards * num_bytes, 0, device, self.constants)

    def tied_s(self, parameters: float, ring: Path) -> float:
        """Return the seconds to all-reduce a tied weight between its two ranks."""
        return all_reduce_s(parameters * self.per_parameter.tied, 2, ring, self._start_s)

    def replicated_s(self, parameters: float, tp: int, ring: Path) -> float:
        """Return the seconds to sum gradients of replicated weights over tensor-parallel ranks."""
        return all_reduce_s(parameters * self.per_parameter.gradient, tp, ring, self._start_s)

    def line(
        self, options: StageOptions, pp: int, paths: Iterable[Path], device: Device
    ) -> tuple[float, float]:
        """Return sync plus optimizer time without tied weights: seconds, seconds per parameter.

        This is a lower bound: communication that passes may hide, and communication within shard
        groups, take no time. The device is the stage's with the slowest memory.
        """
        paths_of = self.whole_rings(options, tuple(paths), device)
        beside = Beside(pp=pp, forward_s=math.inf, backward_s=math.inf)
        shards = options.zero.shards(options.dp)
        none, many = (
            self.sync_s(parameters, options, paths_of, beside)
            + self.optimizer_s(parameters, shards, device)
            for parameters in (0.0, MANY_PARAMETERS)
        )
        return none, (many - none) / MANY_PARAMETERS

    def whole_rings(
        self, options: StageOptions, rings: Sequence[Path], device: Device
    ) -> DataPaths:
        """Return the paths of a stage from the rings over all its replicas only.

        Rings within shard groups then take no time.
        """
        shards = options.zero.shards(options.dp)
        share = options.dp == shards > 1
        alone = (NO_RING,)
        return DataPaths(
            shards=rings if share else alone, copies=alone if share else rings, device=device
        )

    def slowest(self, types: Iterable[int]) -> Device:
        """Return the device with the slowest memory among device types."""
        device_types = self.topology.cluster.device_types
        return min(
            (device_types[index] for index in types),
            key=lambda device: (device.memory_bytes_per_s, device.num_multiprocessors),
        )

    @cached_property
    def _start_s(self) -> float:
        return start_s(self.constants, self.traits)

    @cached_property
    def per_parameter(self) -> ParameterBytes:
        """Bytes of a parameter in this precision."""
        return self.traits.bytes_per_parameter(self.precision)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEnds:
    """The end of an iteration for all stages, as a function of the bounds.

    All gradient rings of all stages run at once; before that, the two stages with a tied weight sum
    its gradients.
    """

    model: StepEndModel
    stages: PlacedStages
    times: StageTimes  # layer times; passes hide simultaneous communication
    types: Sequence[frozenset[int]]  # device types of each stage
    # Returns the weights of a rank by tp and number of ranks with experts
    weights: Callable[..., Weights]

    def at(self, bounds: tuple[int, ...]) -> StepEnd:
        """Return the seconds of the slowest stage; bounds are of all chunks."""
        sync_s, step_s = max(self.of_stages(bounds), key=sum)
        return StepEnd(gradient_sync_s=sync_s, optimizer_s=step_s)

    def of_stages(self, bounds: tuple[int, ...]) -> list[tuple[float, float]]:
        """Return the seconds of gradient sync and optimizer of each stage."""
        tps = [options.tp for options in self.stages.options]
        held = {tp: self.weights(tp).of_stages(bounds, len(tps)).tolist() for tp in set(tps)}
        experts = self._experts(bounds)
        sync, step, besides = [], [], self._besides(bounds)
        for stage, tp in enumerate(tps):
            beside, sync_s, step_s = besides[stage], 0.0, 0.0
            for parameters, ranks in self._shared(stage, held[tp][stage], experts):
                options, paths = ranks.options, ranks.paths
                exchanges, update_s = self.model.alone(parameters, ranks)
                sync_s += self.model.exposed_sync_s(parameters, options, paths, beside, exchanges)
                step_s += update_s
                if self.stages.options[stage].spreads_experts:
                    beside = exchanges.left_of(beside)
            sync.append(sync_s)
            step.append(step_s)
        if self.model.per_micro_batch(self.stages.options[0], self.stages.pp):
            sync[0] += self._exposed_s
        self._add_tied(sync, bounds)
        self._add_replicated(sync, bounds)
        self._add_slices(sync, bounds)
        return list(zip(sync, step, strict=True))

    def _besides(self, bounds: tuple[int, ...]) -> list[Beside]:
        """Return the passes that hide the exchanges of each stage, if the runtime overlaps them."""
        traits, pp = self.model.traits, self.stages.pp
        if not (traits.overlaps_gradient_sync or traits.overlaps_weight_gather):
            return [Beside(pp=pp)] * pp
        passes_s = self.times.at(bounds)[:2].max(axis=-1)
        chunks, besides = [*pairwise(bounds)], []
        for stage, options in enumerate(self.stages.options):
            beside_s = passes_s[:, stage::pp].sum(axis=1) + passes_s[:, :stage].sum(axis=1)
            forward_s, backward_s = beside_s.tolist()
            largest_share = 1.0
            if options.zero.stage == MOST_ZERO_STAGE:
                held = self.weights(options.tp).by_layer
                of_layers = np.concatenate([held[first:end] for first, end in chunks[stage::pp]])
                largest_share = float(of_layers.max(initial=0.0) / max(of_layers.sum(), 1.0))
            besides.append(
                Beside(
                    pp=pp,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    largest_share=largest_share,
                )
            )
        return besides

    def _add_replicated(self, sync: list[float], bounds: tuple[int, ...]) -> None:
        """Add the tensor-parallel all-reduce of gradients that are partial sums over tokens.

        With sequence parallelism these are the gradients of norms, which every rank replicates.
        """
        held: dict[int, list[float]] = {}
        for stage, options in enumerate(self.stages.options):
            if options.sequence_parallel:
                if options.tp not in held:
                    prefix = self.weights(options.tp).replicated_prefix
                    held[options.tp] = by_stage(prefix, bounds, self.stages.pp).tolist()
                sync[stage] += max(
                    self.model.replicated_s(held[options.tp][stage], options.tp, path)
                    for path in self._tensor_paths[stage]
                )

    def _add_slices(self, sync: list[float], bounds: tuple[int, ...]) -> None:
        """Add the host's time to copy gathered weights, each in as many slices as a shard group."""
        slice_s = self.model.traits.gather_slice_s * self.model.constants.host_scale
        if not slice_s:
            return
        held = by_stage(self.weights(1).tensor_prefix, bounds, self.stages.pp)
        for stage, options in enumerate(self.stages.options):
            shards = options.zero.shards(options.dp)
            if options.zero.stage == 1 and shards > 1:
                sync[stage] += float(held[stage]) * shards * slice_s

    @cached_property
    def _tensor_paths(self) -> list[list[Path]]:
        rings = self.model.topology.rings(self.stages.tensor_groups)
        return [rings.among(first, end) for first, end in pairwise(self.stages.first_group)]

    def _experts(self, bounds: tuple[int, ...]) -> dict[StageOptions, list[float]]:
        """Return a rank's parameters of experts in each stage, by options that spread experts."""
        distinct, _ = self.stages.distinct_options
        prefixes = {
            options: self.weights(options.tp, options.expert_ranks).expert_prefix
            for options in distinct
            if options.spreads_experts
        }
        pp = self.stages.pp
        return {options: by_stage(held, bounds, pp).tolist() for options, held in prefixes.items()}

    def _shared(
        self, stage: int, parameters: float, experts_of: Mapping[StageOptions, Sequence[float]]
    ) -> Iterator[tuple[float, Sharers]]:
        """Yield a rank's parameters in groups, one per set of ranks that hold the same parameters.

        ``parameters`` are those of a rank if tp divided experts like other weights.
        """
        options = self.stages.options[stage]
        if not options.spreads_experts:
            yield parameters, self._sharers[stage]
            return
        experts = experts_of[options][stage]
        shared = parameters - experts * options.expert_ranks / options.tp
        yield shared, self._sharers[stage]
        yield experts, self._expert_sharers[stage]

    @cached_property
    def _expert_sharers(self) -> list[Sharers]:
        grids = [self.stages.expert_grid(stage) for stage in range(self.stages.pp)]
        rows = [grid.reshape(len(grid), -1).T for grid in grids]
        distinct, _ = self.stages.distinct_options
        return self._sharing([options.of_experts for options in distinct], rows)

    @cached_property
    def _exposed_s(self) -> float:
        """Time that all micro-batches wait for gathers and reduce-scatters of all layers.

        Where gradients are deferred, only the last micro-batch reduces them.
        """
        more = self.stages.num_micro_batches - 1
        reduces = not self.model.traits.defers_gradient_sync
        last_s = self._exposed_once_s(reduces=True)
        return last_s + more * (last_s if reduces else self._exposed_once_s(reduces=False))

    def _exposed_once_s(self, *, reduces: bool) -> float:
        """Return the time that one micro-batch waits for gathers, and for reduce-scatters if any.

        A tied weight is gathered with the first layer, and reduced with it at the end.
        """
        options = self.stages.options[0]
        weights = self.weights(options.tp)
        held = np.diff(weights.prefix)
        if weights.tied is not None:
            held[weights.tied.last] -= weights.tied.parameters
        if options.spreads_experts:
            held -= np.diff(weights.expert_prefix)
        gathers_s, scatters_s = self._by_layer(held, self._sharers[0])
        if options.spreads_experts:
            spread = np.diff(self.weights(options.tp, options.expert_ranks).expert_prefix)
            more = self._by_layer(spread, self._expert_sharers[0])
            gathers_s, scatters_s = gathers_s + more[0], scatters_s + more[1]
        again_s = gathers_s * (options.zero.stage == MOST_ZERO_STAGE)
        again_s[-1] = 0.0  # its backward pass follows its forward pass: weights are kept
        if options.zero.keeps_weights:
            again_s[:] = 0.0
        scatters_s = scatters_s * reduces
        passes_s = self.times.layers()[:2]
        taken = taken_share(self._sharers[0].paths.device)
        return exposed_s(passes_s, gathers_s, again_s, scatters_s, taken)

    def _by_layer(self, held: FloatArray, ranks: Sharers) -> tuple[FloatArray, FloatArray]:
        """Return the time to gather each layer and to reduce its gradients.

        A rank has ``held`` parameters of each layer.
        """
        model, options, paths = self.model, ranks.options, ranks.paths
        layers, position = np.unique(held, return_inverse=True)
        gathers_s, scatters_s = np.zeros((2, len(layers)))
        for index, parameters in enumerate(layers.tolist()):
            if parameters > 0:
                scatters_s[index] = model.reduce_s(parameters, options, paths)
                if model.gathers(options, pp=1):
                    gathers_s[index] = model.gather_s(parameters, options, paths)
        return gathers_s[position], scatters_s[position]

    @cached_property
    def _sharers(self) -> list[Sharers]:
        """Ranks of each stage that hold the same weights, except experts."""
        distinct, _ = self.stages.distinct_options
        return self._sharing(distinct, [grid.T for grid in self.stages.grids])

    def _sharing(self, options: Sequence[StageOptions], rows: Sequence[IntArray]) -> list[Sharers]:
        """Return the ranks of each stage that hold equal parameters, if all rings run at once.

        Args:
            options: Distinct options of the stages, with their dp.
            rows: For each stage, the devices of every ring, shape ``(num_rings, dp)``.
        """
        _, numbers = self.stages.distinct_options
        shards, copies = list[IntArray](), list[IntArray]()
        for number, rings in zip(numbers, rows, strict=True):
            size = options[number].zero.shards(options[number].dp)
            shards.append(rings.reshape(-1, size))
            apart = rings.reshape(len(rings), -1, size).swapaxes(1, 2)
            copies.append(apart.reshape(len(rings) * size, -1))
        (within, within_of), (across, across_of) = map(self._at_once, (shards, copies))
        distinct: dict[object, Sharers] = {}
        sharers = []
        for key in zip(numbers, within_of, across_of, self.types, strict=True):
            if key not in distinct:
                number, shard_rings, copy_rings, types = key
                distinct[key] = self.model.sharers(
                    options[number],
                    tuple([within.paths[ring] for ring in shard_rings]),
                    tuple([across.paths[ring] for ring in copy_rings]),
                    types,
                )
            sharers.append(distinct[key])
        return sharers

    def _at_once(self, rings: Sequence[IntArray]) -> tuple[Rings, list[frozenset[int]]]:
        """Return all rings if they run at once, and the numbers of each stage's paths."""
        groups: IntArray | list[list[int]]
        if len({of_stage.shape[1] for of_stage in rings}) == 1:
            groups = np.concatenate(rings)
        else:
            groups = [ring for of_stage in rings for ring in of_stage.tolist()]
        all_rings = self.model.topology.rings(groups)
        ends = accumulate(map(len, rings), initial=0)
        return all_rings, [frozenset(all_rings.index[first:end]) for first, end in pairwise(ends)]

    def _add_tied(self, sync: list[float], bounds: tuple[int, ...]) -> None:
        """Add the all-reduce of a tied weight to its two stages, if they differ.

        If one stage has more ranks than the other, several of its ranks share a partner.
        """
        tied = self.weights(1).tied
        if tied is None:
            return
        first, last = ends = tied.stages(bounds, self.stages.pp)
        if first == last:
            return
        seconds = self._tied_s(tied.parameters, *ends)
        for stage in ends:
            sync[stage] += seconds

    @memoised
    def _tied_s(self, whole: float, first: int, last: int) -> float:
        parameters = whole / lcm(*(self.stages.options[end].tp for end in (first, last)))
        pairs = tied_pairs(self.stages.grids[first], self.stages.grids[last])
        paths = self.model.topology.rings(pairs).paths
        return max(self.model.tied_s(parameters, path) for path in paths)


def tied_pairs(first: IntArray, last: IntArray) -> IntArray:
    """Pair ranks of two stages that hold the same slice of a tied weight: ``(num_pairs, 2)``."""
    if first.shape == last.shape:
        return np.stack([first.ravel(), last.ravel()], axis=1)
    replicas, slices = max(len(first), len(last)), lcm(first.shape[1], last.shape[1])
    ends = []
    for grid in (first, last):
        dp, tp = grid.shape
        rows = np.arange(replicas) * dp // replicas
        ends.append(grid[rows][:, np.arange(slices) * tp // slices].ravel())
    return np.stack(ends, axis=1)
