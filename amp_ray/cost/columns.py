"""Columns of rows beside time and memory: money, tokens per second, MFU, warnings, launchability.

They are computed for the results of a planner, not for every strategy of its search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.device import CATALOGUE, is_cpu
from amp_ray.cost.estimate import Cost, Estimate
from amp_ray.cost.messages import MessageModel
from amp_ray.cost.roofline import ALIGNED, Rank, gemm_phases
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.step_end import tied_pairs
from amp_ray.cost.weights import Weights
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.strategy import Strategy, all_bounds
from amp_ray.units import GIGA, SECONDS_PER_HOUR

_PASSES: Final = 3
"""Work of both passes in units of a forward pass: a backward pass is twice a forward pass."""

_TIED_RANKS: Final = 2

_TILE: Final = 64
"""Elements of the smallest tile in which tensor cores reach most of their rate."""

_MANY_TOKENS: Final = 2**30
"""Tokens of a step from which a batch was most likely given in tokens: 17 times the 63 million of
DeepSeek-V3 (arXiv:2412.19437, section 4.2), one of the largest published."""

EXTRAPOLATED: Final = "micro-batch size outside the measured ones: layer times are extrapolated"
"""Warning: the profile has no measurement on one side of this micro-batch size."""

UNEXPLAINED: Final = "such pipelines took longer elsewhere than anything explains: after all others"
"""Warning of a strategy that is not ranked by its time alone."""

SLOW_LINK: Final = "{}: less than a quarter of what such boards reach; GB/s stated as Gbit/s?"
"""Warning of a link that is most likely stated in another unit."""

NO_PROGRAM: Final = "a model that only a program of your own (trials.program) can train"
"""Warning of a model that cannot be launched."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Computes the columns of estimates of one experiment."""

    experiment: Experiment

    def add(
        self, estimate: Estimate, messages: MessageModel, weights: Callable[[int], Weights]
    ) -> Estimate:
        """Return an estimate with its columns; messages and weights (by tp) are of its ranks."""
        strategy, time_s = estimate.strategy, estimate.iteration_time_s
        model, num_samples = self.experiment.model, strategy.global_batch_size
        peak_flops = self._peak_flops[list(strategy.placement)].sum()
        flops = _PASSES * num_samples * model.forward_flops
        refusals = self.experiment.traits.why_not_launched(strategy)
        heads = head_remarks(self.experiment, strategy.stages[-1].options.tp)
        return replace(
            estimate,
            warnings=(
                *estimate.warnings,
                *([UNEXPLAINED] if estimate.unexplained else []),
                *self._warnings,
                *heads,
                *refusals,
            ),
            launchable=self.experiment.is_trained and not refusals,
            cost=self._cost(strategy, time_s, messages, weights),
            tokens_per_s=num_samples * model.shape.num_tokens / time_s or None,
            mfu=float(flops / (peak_flops * time_s)) or None,
        )

    @cached_property
    def _warnings(self) -> tuple[str, ...]:
        experiment = self.experiment
        slow_links = experiment.cluster.slow_links
        return (
            *([SLOW_LINK.format(slow_links)] if slow_links else []),
            *([] if experiment.is_trained else [NO_PROGRAM]),
            *(f"not counted: {part}" for part in experiment.model.shape.not_counted),
            *experiment.model.shape.not_read,
            *experiment.model.shape.assumed,
            *remarks(experiment),
        )

    @cached_property
    def _peak_flops(self) -> FloatArray:
        cluster, precision = self.experiment.cluster, self.experiment.precision
        nodes = (cluster.nodes[node] for node in cluster.node_of_device)
        return np.array([node.device.peak_flops(precision) for node in nodes])

    def _cost(
        self,
        strategy: Strategy,
        time_s: float,
        messages: MessageModel,
        weights: Callable[[int], Weights],
    ) -> Cost | None:
        """Price an iteration: devices by the hour, and bytes that leave a zone.

        Returns:
            None if the price is unknown: a node has no price, or a tensor-parallel group spans
            zones (the cost of its all-reduces is not counted).
        """
        cluster = self.experiment.cluster
        if not cluster.has_prices:
            return None
        stages = PlacedStages.of_strategy(strategy)
        used = [cluster.nodes[cluster.node_of_device[device]] for device in strategy.placement]
        per_hour = sum(node.price_per_device_hour or 0.0 for node in used)
        egress = 0.0
        if self._prices.any():
            groups = [self._zone_of_device[np.array(group)] for group in stages.groups]
            if any(self._prices[np.ix_(group, group)].any() for group in groups):
                return None
            bounds = all_bounds(self.experiment.model, strategy)
            egress = sum(self._messages(stages, bounds, messages))
            egress += sum(self._gradients(stages, bounds, weights))
        return Cost(
            devices=per_hour * time_s / SECONDS_PER_HOUR,
            egress=egress,
            num_tokens=strategy.global_batch_size * self.experiment.model.shape.num_tokens,
        )

    @cached_property
    def _prices(self) -> FloatArray:
        """Money per byte between zones, shape ``(num_zones, num_zones)``."""
        number = {zone: index for index, zone in enumerate(self._zones)}
        prices = np.zeros((len(number), len(number)))
        for names, joined in self.experiment.cluster.zone_links.items():
            if number.keys() >= {*names}:
                one, other = (number[name] for name in names)
                prices[one, other] = prices[other, one] = joined.price_per_byte
        return prices

    @cached_property
    def _zones(self) -> list[str]:
        return list(dict.fromkeys(node.zone for node in self.experiment.cluster.nodes))

    @cached_property
    def _zone_of_device(self) -> IntArray:
        """Shape ``(num_devices,)``. Index of each device's zone."""
        zones: IntArray = self._zone_of_node[self._node_of_device]
        return zones

    @cached_property
    def _zone_of_node(self) -> IntArray:
        """Shape ``(num_nodes,)``. Index of each node's zone."""
        nodes = self.experiment.cluster.nodes
        return np.array([self._zones.index(node.zone) for node in nodes])

    @cached_property
    def _node_of_device(self) -> IntArray:
        return np.array(self.experiment.cluster.node_of_device)

    def _messages(
        self, stages: PlacedStages, bounds: Sequence[int], messages: MessageModel
    ) -> Iterator[float]:
        for cut, boundary in enumerate(bounds[1:-1]):
            before, after = cut % stages.pp, (cut + 1) % stages.pp
            per_byte = self._price_per_sample(stages, before, after)
            crossing = messages.crossing_bytes(stages.options[before], stages.options[after])
            for num_bytes in crossing:
                yield per_byte * float(num_bytes[boundary]) * stages.num_micro_batches

    def _price_per_sample(self, stages: PlacedStages, before: int, after: int) -> float:
        price = 0.0
        for senders, first, end in _spans(stages, before):
            for receivers, other_first, other_end in _spans(stages, after):
                num_samples = min(end, other_end) - max(first, other_first)
                if num_samples > 0:
                    price += num_samples * self._mean_price(senders, receivers)
        return price

    def _mean_price(self, senders: IntArray, receivers: IntArray) -> float:
        """Return the mean price per byte between the ranks of two groups, slice by slice."""
        num_slices = lcm(len(senders), len(receivers))
        index = np.arange(num_slices)
        one, other = (
            self._zone_of_device[group[index * len(group) // num_slices]]
            for group in (senders, receivers)
        )
        return float(self._prices[one, other].mean())

    def _gradients(
        self, stages: PlacedStages, bounds: tuple[int, ...], weights: Callable[[int], Weights]
    ) -> Iterator[float]:
        """Price the gradient rings of each stage, and the rings of a tied weight."""
        precision = self.experiment.precision
        per = self.experiment.traits.bytes_per_parameter(precision)
        gathered = per.gathered if stages.options[0].num_shards > 1 else 0
        for stage, grid in enumerate(stages.grids):
            dp, tp = grid.shape
            parameters = float(weights(tp).of_stages(bounds, stages.pp)[stage])
            num_bytes = (dp - 1) / dp * parameters * (2 * per.gradient + gathered)
            yield num_bytes * sum(self._price_around(ring) for ring in grid.T)
        tied = weights(1).tied
        ends = (0, 0) if tied is None else tied.stages(bounds, stages.pp)
        if tied is not None and ends[0] != ends[1]:
            grids = [stages.grids[end] for end in ends]
            parameters = tied.parameters / lcm(*(grid.shape[1] for grid in grids))
            num_bytes = (_TIED_RANKS - 1) / _TIED_RANKS * parameters * 2 * per.tied
            pairs = tied_pairs(*grids)
            yield num_bytes * sum(self._price_around(np.array(pair)) for pair in pairs)

    def _price_around(self, devices: IntArray) -> float:
        """Return the price of a byte that goes once around a ring, node after node."""
        zones = self._zone_of_node[np.unique(self._node_of_device[devices])]
        return float(self._prices[zones, np.roll(zones, -1)].sum())


def remarks(experiment: Experiment) -> Iterator[str]:
    """List facts on boards and sizes that make all times of an experiment less certain, or longer.

    Tensor cores read multiples of 16 bytes, 8 elements in half precision, and reach their rate in
    tiles of at least 64 elements (NVIDIA, Matrix Multiplication Background User's Guide).
    """
    traits, shape = experiment.traits, experiment.model.shape
    fuses = traits.fused_attention or RUNTIMES.get(traits.name, traits).fused_attention
    kernel = "PyTorch's memory-efficient kernel" if traits.fused_attention else "separate kernels"
    types = {device.name: device for device in experiment.cluster.device_types}
    for name, device in types.items():
        if fuses and not device.has_flash_attention:
            yield f"{name} has no FlashAttention-2 (compute capability below 8.0), but {kernel}"
        is_backed = device.is_measured or experiment.profile.is_measured or is_cpu(name)
        if name in CATALOGUE and not is_backed:
            yield f"{name}: figures of its data sheet, which no measurement here backs"
    if not shape.num_tokens:
        return
    batch, num_tokens = experiment.global_batch_size, shape.sequence_length
    if batch * num_tokens > _MANY_TOKENS:
        tokens = f"{batch * num_tokens / GIGA:,.1f} billion tokens a step"
        yield f"batch {batch:,}: {tokens}; global_batch_size counts sequences, not tokens"
    if shape.num_heads:
        head_size = shape.head_size or shape.hidden_size // shape.num_heads
        if head_size % ALIGNED:
            need = f"is no multiple of {ALIGNED}, which tensor cores need"
            yield f"{experiment.where('model')}: head size {head_size} {need}"
    if num_tokens % _TILE:
        cost = f"is no multiple of {_TILE}: the last tile of each product is computed whole"
        yield f"{experiment.where('model', 'sequence_length')}: {num_tokens} {cost}"


def head_remarks(experiment: Experiment, tp: int) -> Iterator[str]:
    """Say how much longer the head's products take where ``tp`` ranks have unaligned vocabularies.

    A vocabulary that is no multiple of 8 has one remark for all degrees, that of a single rank.
    Programs that pad the vocabulary have none: they pad it for their degree.
    """
    vocab_size = experiment.model.shape.vocab_size
    num_ranks = 1 if vocab_size % ALIGNED else tp
    heads = [gemm for gemm in experiment.model.layers[-1].gemms if gemm.columns == vocab_size]
    is_aligned = vocab_size % (ALIGNED * num_ranks) == 0
    if is_aligned or not heads or experiment.traits.vocabulary_multiple > 1:
        return
    tiles = _TILE * num_ranks
    wide = replace(heads[0], columns=-(-vocab_size // tiles) * tiles)
    slowdowns = {}
    for device in experiment.cluster.device_types:
        rank = replace(
            Rank(device=device, tp=num_ranks, micro_batch_size=1, precision=experiment.precision),
            has_unaligned_kernels=experiment.traits.has_unaligned_kernels,
        )
        one, other = (gemm_phases(gemm, rank, experiment.constants) for gemm in (heads[0], wide))
        slowdowns[device.name] = round(
            (one.forward_s + one.backward_s) / (other.forward_s + other.backward_s), 1
        )
    name = max(slowdowns, key=lambda name: slowdowns[name])
    if slowdowns[name] > 1:
        where = experiment.where("model", "vocab_size")
        part = f"{vocab_size} / tp {num_ranks}" if num_ranks > 1 else f"{vocab_size}"
        cost = f"take {slowdowns[name]} times as long as with {wide.columns}"
        yield f"{where}: {part} is no multiple of {ALIGNED}: on {name} the head's products {cost}"


def _spans(stages: PlacedStages, stage: int) -> Iterator[tuple[IntArray, int, int]]:
    """Return the devices of each group of a stage, and its half-open range of samples."""
    ends = accumulate(stages.shares[stage], initial=0)
    for devices, (first, end) in zip(stages.grids[stage], pairwise(ends), strict=True):
        yield devices, first, end
