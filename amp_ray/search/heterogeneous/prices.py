"""What the cuts between stages cost, each pair of neighbours once."""

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
        key = self.choices.option[before] * 2 + crossing
        distinct, row = np.unique(key, return_inverse=True)
        seconds = [self._least_s(*divmod(index, 2)) for index in distinct.tolist()]
        return np.array(seconds), row.reshape(-1)

    def _least_s(self, option: int, crossing: int) -> FloatArray:
        """Return the least time of both messages at every boundary."""
        model, group = self.model, self.choices.options[option].group
        rates, steps = model.links
        nodes, tp = model.topology.node_of_device[group.devices], group.tp
        samples = np.repeat(group.shares, tp).astype(np.float64)
        own = nodes.ravel()
        s_per_sample = float((samples / rates[own, own]).max())
        step_s = float(steps.min())
        if crossing:
            best = np.where(np.eye(len(rates), dtype=np.bool_), 0.0, rates).max(axis=1)
            shared = np.bincount(own, weights=samples, minlength=len(rates))[own] / best[own]
            s_per_sample = max(s_per_sample, float(shared.max()))
        traits = model.traits
        there = model.sample_bytes(1) / tp
        back = model.sample_bytes(tp) / (tp if traits.sliced_gradients else 1)
        start = start_s(model.constants, traits) + step_s
        both = start + s_per_sample * np.array([there, back])
        if tp > 1:
            slower = gathers(group, (0,) * group.dp)
            both += model.gathered(slower, tp, tp)[:, 0]
        least: FloatArray = both.max(axis=0) if traits.duplex_transfers else both.sum(axis=0)
        return least

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
        return np.array([option.group.tp for option in self.choices.options])

    @cached_property
    def _gathers(self) -> FloatArray:
        """Per option, latency and seconds per byte of a sample of its slowest gather."""
        if not (self.model.traits.sliced_activations or self.model.traits.sliced_gradients):
            return np.zeros((len(self.choices.options), 2))
        return np.array(
            [gathers(option.group, (0,) * option.group.dp)[0] for option in self.choices.options]
        )
