"""What an iteration costs in money: devices by the hour, and bytes that leave a zone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.step_end import tied_pairs
from amp_ray.cost.weights import Weights
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.units import BYTES_PER_ELEMENT, MEGA, SECONDS_PER_HOUR, Precision

_TIED_RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Money for one iteration, in the currency of the cluster's prices."""

    devices: float  # for the time of the devices that the strategy uses
    egress: float  # for bytes that leave a zone for another
    num_tokens: int = 0  # tokens of an iteration; 0 for a model that has none

    @property
    def per_iteration(self) -> float:
        """Both together."""
        return self.devices + self.egress

    def to_json(self) -> dict[str, Any]:
        """Return the ``cost`` object of a row."""
        per_token = self.per_iteration / self.num_tokens if self.num_tokens else None
        return {
            "per_iteration": self.per_iteration,
            "devices": self.devices,
            "egress": self.egress,
            "per_million_tokens": None if per_token is None else per_token * MEGA,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class PriceModel:
    """Prices iterations on a cluster whose nodes all have a price."""

    cluster: Cluster
    traits: RuntimeTraits
    precision: Precision
    weights: Callable[[int], Weights]  # what a rank holds at some tp
    # Per tp, what a rank holds of a sample at each boundary, shape ``(num_layers + 1,)``
    sample_bytes: Callable[[int], FloatArray]
    tokens_per_sample: int  # 0 for a model that has none

    def cost(self, stages: PlacedStages, bounds: Sequence[int], time_s: float) -> Cost | None:
        """Price one iteration.

        Args:
            stages: With their devices.
            bounds: Of all chunks.
            time_s: Seconds of the iteration.

        Returns:
            None where it is not known: the all-reduces of a tensor-parallel group that spans zones
            are not counted.
        """
        nodes = self.cluster.nodes
        used = [nodes[self.cluster.node_of_device[device]] for device in stages.devices.tolist()]
        per_hour = sum(node.price_per_device_hour or 0.0 for node in used)
        egress = 0.0
        if self._prices.any():
            groups = [self._node_of_device[np.array(group)] for group in stages.groups]
            if any(self._prices[np.ix_(group, group)].any() for group in groups):
                return None
            egress = sum(self._messages(stages, bounds)) + sum(self._gradients(stages, bounds))
        return Cost(
            devices=per_hour * time_s / SECONDS_PER_HOUR,
            egress=egress,
            num_tokens=stages.num_samples * self.tokens_per_sample,
        )

    @cached_property
    def _prices(self) -> FloatArray:
        """Money per byte between nodes, shape ``(num_nodes, num_nodes)``."""
        zones = np.array([node.zone for node in self.cluster.nodes])
        prices = np.zeros((len(zones), len(zones)))
        for names, joined in self.cluster.zone_links.items():
            one, other = (np.flatnonzero(zones == name) for name in names)
            prices[np.ix_(one, other)] = joined.price_per_byte
            prices[np.ix_(other, one)] = joined.price_per_byte
        return prices

    @cached_property
    def _node_of_device(self) -> IntArray:
        """Shape ``(num_devices,)``."""
        return np.array(self.cluster.node_of_device)

    def _messages(self, stages: PlacedStages, bounds: Sequence[int]) -> Iterator[float]:
        """Price the activations and gradients across each cut."""
        kinds = (self.traits.sliced_activations, self.traits.sliced_gradients)
        for before, boundary in enumerate(bounds[1:-1]):
            ends = (before % stages.pp, (before + 1) % stages.pp)
            tps = [stages.options[stage].tp for stage in ends]
            divided = any(stages.options[stage].sequence_parallel for stage in ends)
            per_byte = self._price_per_sample(stages, *ends)
            for is_sliced, tp in zip(kinds, reversed(tps), strict=True):
                held = float(self.sample_bytes(tp)[boundary]) * (1 if is_sliced or divided else tp)
                yield per_byte * held * stages.num_micro_batches

    def _price_per_sample(self, stages: PlacedStages, before: int, after: int) -> float:
        """Return the price of one byte for each sample of a micro-batch that crosses a cut."""
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
            self._node_of_device[group[index * len(group) // num_slices]]
            for group in (senders, receivers)
        )
        return float(self._prices[one, other].mean())

    def _gradients(self, stages: PlacedStages, bounds: Sequence[int]) -> Iterator[float]:
        """Price the gradient rings of each stage, and those of a tied weight."""
        per = self.traits.bytes_per_parameter(self.precision)
        zero = stages.options[0].zero
        gathered = BYTES_PER_ELEMENT[self.precision] if zero.stage else 0
        for stage, grid in enumerate(stages.grids):
            dp, tp = grid.shape
            parameters = float(self.weights(tp).of_stages(tuple(bounds), stages.pp)[stage])
            num_bytes = (dp - 1) / dp * parameters * (2 * per.gradient + gathered)
            yield num_bytes * sum(self._price_around(ring) for ring in grid.T)
        tied = self.weights(1).tied
        ends = (0, 0) if tied is None else tied.stages(tuple(bounds), stages.pp)
        if tied is not None and ends[0] != ends[1]:
            grids = [stages.grids[end] for end in ends]
            parameters = tied.parameters / lcm(*(grid.shape[1] for grid in grids))
            num_bytes = (_TIED_RANKS - 1) / _TIED_RANKS * parameters * 2 * per.tied
            pairs = tied_pairs(*grids)
            yield num_bytes * sum(self._price_around(np.array(pair)) for pair in pairs)

    def _price_around(self, devices: IntArray) -> float:
        """Return the price of a byte that goes once around a ring, node after node."""
        nodes = np.unique(self._node_of_device[devices])
        return float(self._prices[nodes, np.roll(nodes, -1)].sum())


def _spans(stages: PlacedStages, stage: int) -> Iterator[tuple[IntArray, int, int]]:
    """Give the devices of each group of a stage and the samples that it has, half-open."""
    ends = accumulate(stages.shares[stage], initial=0)
    for devices, (first, end) in zip(stages.grids[stage], pairwise(ends), strict=True):
        yield devices, first, end
