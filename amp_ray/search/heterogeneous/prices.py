"""What the cuts between stages cost, each pair of neighbours once."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.cost.collective import start_s
from amp_ray.cost.crossings import CrossingModel, gathers
from amp_ray.cost.kernels import crossings
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.partition.tails import distinct_rows
from amp_ray.search.heterogeneous.choices import Choices


@dataclass(frozen=True, kw_only=True, eq=False)
class CutPrices:
    """Prices the cuts between choices of one candidate.

    Args:
        choices: What may stand on both sides.
        model: Times messages.
    """

    choices: Choices
    model: CrossingModel

    def rows(self, before: IntArray, after: IntArray) -> tuple[FloatArray, IntArray]:
        """Price the cuts between choices and those that follow them in the pipeline.

        Args:
            before: Shape ``(N,)``. Choices whose stage is before a cut.
            after: Shape ``(N,)``. Those after it, on the devices next to it.

        Returns:
            Seconds of the different cuts at every boundary, first layer first, shape
            ``(num_rows, num_layers + 1)``; and the row of each cut.
        """
        option, count = self.choices.option, len(self.choices.options)
        _, first, pair = np.unique(
            option[before] * count + option[after], return_index=True, return_inverse=True
        )
        used, place = np.unique(np.concatenate((before[first], after[first])), return_inverse=True)
        pairs = np.ascontiguousarray(place.reshape(2, -1).T)
        ranks = self.choices.rank_table(self.model.topology, used)
        met = crossings(pairs, ranks, *self.model.links, 1)[:, 0]
        chosen = option[np.stack([before[first], after[first]], axis=1)]
        met[:, 3] *= self.model.traits.mask_bytes > 0
        keys = np.concatenate((self._tps[chosen], met, self._gathers[chosen].max(axis=1)), axis=1)
        columns = [np.unique(column, return_inverse=True)[1] for column in keys.T]
        distinct, row = distinct_rows([column for column in columns if column.any()] or columns[:1])
        return self._seconds(keys[distinct]), row[pair.reshape(-1)]

    def least_rows(self, before: IntArray) -> tuple[FloatArray, IntArray]:
        """Bound the price of a cut by the stage before it, whatever comes after it.

        What a rank has must leave it, and the gradient of all that must come back.

        Args:
            before: Shape ``(N,)``. Choices.

        Returns:
            As `rows`.
        """
        crossing = self.choices.ends_at_nodes[before]
        key, row = np.unique(self.choices.option[before] * 2 + crossing, return_inverse=True)
        prices = [self._least(*divmod(index, 2)) for index in key.tolist()]
        distinct, same = distinct_rows(
            [np.unique(column, return_inverse=True)[1] for column in np.array(prices).T]
        )
        seconds = [self._least_s(*prices[index]) for index in distinct.tolist()]
        return np.array(seconds), same[row.reshape(-1)]

    def _least(self, option: int, crossing: int) -> tuple[int, float]:
        """Return a group's tp, and seconds per byte of what it has to send or get of a sample."""
        own = self.choices.options[option]
        rates, _ = self.model.links
        nodes = self.model.topology.node_of_device[own.facts.devices[:, 0]].tolist()
        least = max(
            samples / rates[node, node] for node, samples in zip(nodes, own.shares, strict=True)
        )
        if crossing and not self._spans_nodes:
            held: Counter[int] = Counter()
            for node, samples in zip(nodes, own.shares, strict=True):
                held[node] += own.tp * samples
            least = max(least, *(held[node] / self._best_rates[node] for node in held))
        return own.tp, float(least)

    def _least_s(self, tp: int, s_per_sample: float) -> FloatArray:
        """Return the least time of both messages at every boundary."""
        model, traits = self.model, self.model.traits
        there = model.sample_bytes(1) / tp
        back = model.sample_bytes(tp) / (tp if traits.sliced_gradients else 1)
        start = start_s(model.constants, traits) + float(model.links[1].min())
        both = start + s_per_sample * np.array([there, back])
        least: FloatArray = both.max(axis=0) if traits.duplex_transfers else both.sum(axis=0)
        return least

    @cached_property
    def _best_rates(self) -> list[float]:
        """Rate of each node to the node that is nearest."""
        rates, _ = self.model.links
        best: list[float] = (
            np.where(np.eye(len(rates), dtype=np.bool_), 0.0, rates).max(axis=1).tolist()
        )
        return best

    @cached_property
    def _spans_nodes(self) -> bool:
        """Whether a tensor-parallel group may have devices on several nodes."""
        return any(
            len(set(row)) > 1
            for option in self.choices.options
            if option.tp > 1
            for row in self.model.topology.node_of_device[option.facts.devices].tolist()
        )

    def _seconds(self, keys: FloatArray) -> FloatArray:
        """Return the time of both messages at every boundary."""
        model = self.model
        seconds = np.zeros((2, len(keys), model.model.num_layers + 1))
        for tp, next_tp in np.unique(keys[:, :2].astype(np.int64), axis=0).tolist():
            own = (keys[:, 0] == tp) & (keys[:, 1] == next_tp)
            seconds[:, own] = model.seconds(keys[own, 2:6], tp, next_tp)
            if max(tp, next_tp) > 1:
                seconds[:, own] += model.gathered(keys[own, 6:], tp, next_tp)
        both: FloatArray = (
            seconds.max(axis=0) if model.traits.duplex_transfers else seconds.sum(axis=0)
        )
        return both

    @cached_property
    def _tps(self) -> IntArray:
        """Tensor-parallel degree of every option."""
        return np.array([option.tp for option in self.choices.options])

    @cached_property
    def _gathers(self) -> FloatArray:
        """Per option, latency and seconds per byte of a sample of its slowest gather."""
        if not (self.model.traits.sliced_activations or self.model.traits.sliced_gradients):
            return np.zeros((len(self.choices.options), 2))
        return np.array(
            [
                gathers(option.facts.group(option.shares), (0,) * option.dp)[0]
                for option in self.choices.options
            ]
        )
