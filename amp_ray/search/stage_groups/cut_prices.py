"""What the cuts between stages cost: for a pair of neighbours, or at least for one of the two."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.collective import start_s
from amp_ray.cost.kernels import slowest_messages
from amp_ray.cost.messages import MessageModel
from amp_ray.partition.rows import distinct_rows
from amp_ray.search.stage_groups.device_group import DeviceGroup
from amp_ray.search.stage_groups.options import Choices, placed
from amp_ray.search.stage_groups.shares import Shares


@dataclass(frozen=True, kw_only=True, eq=False)
class CutPrices:
    """Prices the cuts between choices of one candidate."""

    choices: Choices  # what may stand on both sides
    model: MessageModel  # times messages

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
        used, index = np.unique(np.concatenate((before[first], after[first])), return_inverse=True)
        pairs = np.ascontiguousarray(index.reshape(2, -1).T)
        ranks = self.choices.rank_table(self.model.topology, used)
        met = slowest_messages(pairs, ranks, *self.model.links, 1)[:, 0]
        chosen = option[np.stack([before[first], after[first]], axis=1)]
        met[:, 3] *= self.model.traits.mask_bytes > 0
        keys = np.concatenate((self._tps[chosen], met, self._gathers[chosen].max(axis=1)), axis=1)
        columns = [np.unique(column, return_inverse=True)[1] for column in keys.T]
        distinct, row = distinct_rows([column for column in columns if column.any()] or columns[:1])
        keys = keys[distinct]
        gathers = keys[:, None, 6:] if self.model.slices else None
        messages = self.model.messages(keys[:, :2].astype(np.int64), keys[:, None, 2:6], gathers)
        return messages.everywhere(), row[pair.reshape(-1)]

    def least_rows(self, chosen: IntArray, *, behind: bool) -> tuple[FloatArray, IntArray]:
        """Bound the price of cuts by the stages on one side.

        Args:
            chosen: Shape ``(N,)``. Choices.
            behind: Whether the cuts are behind them in the pipeline; else before them.

        Returns:
            As `rows`.
        """
        at_nodes = self.choices.ends_at_nodes if behind else self.choices.begins_at_nodes
        key, row = np.unique(
            self.choices.option[chosen] * 2 + at_nodes[chosen], return_inverse=True
        )
        bounds = CutBounds(model=self.model)
        index: dict[CutBound, int] = {}
        rows = []
        for option, other_nodes in (divmod(value, 2) for value in key.tolist()):
            own = self.choices.options[option]
            bound = bounds.bound(own.device_group, own.shares, other_nodes=bool(other_nodes))
            rows.append(index.setdefault(bound, len(index)))
        seconds = np.array([bounds.seconds(bound, behind=behind) for bound in index])
        return seconds, np.array(rows)[row.reshape(-1)]

    @cached_property
    def _tps(self) -> IntArray:
        """Tensor-parallel degree of every option."""
        return np.array([option.tp for option in self.choices.options])

    @cached_property
    def _gathers(self) -> FloatArray:
        """Per option, latency and seconds per byte of a sample of its slowest gather."""
        if not self.model.slices:
            return np.zeros((len(self.choices.options), 2))
        return self.model.gathers(*placed(self.choices.options))[:, 0]


CutBound = tuple[int, float]
"""tp of a stage, and seconds per byte of what its ranks send or get of a sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutBounds:
    """Bounds the messages of a stage to or from any other one.

    What a rank has must leave it, and the gradient of all that must come back; or the other way
    round.
    """

    model: MessageModel  # times messages

    def bound(self, group: DeviceGroup, shares: Shares, *, other_nodes: bool) -> CutBound:
        """Return what the price of a stage's cut depends on.

        Args:
            group: Of the stage.
            shares: Samples per dp index.
            other_nodes: Whether the other stage is on other nodes for sure.
        """
        rates, _ = self.model.links
        grid = self.model.topology.node_of_device[group.devices]
        nodes, tp = grid[:, 0].tolist(), grid.shape[1]
        least = max(
            samples / float(rates[node, node]) for node, samples in zip(nodes, shares, strict=True)
        )
        if other_nodes and (grid == grid[:, :1]).all():
            held: Counter[int] = Counter()
            for node, samples in zip(nodes, shares, strict=True):
                held[node] += tp * samples
            least = max(least, *(held[node] / self._best_rates[node] for node in held))
        return tp, least

    def seconds(self, bound: CutBound, *, behind: bool) -> FloatArray:
        """Return the least time of both messages at every boundary, shape ``(num_layers + 1,)``.

        Args:
            bound: Of a stage.
            behind: Whether the cut is behind the stage in the pipeline; else it is before it.
        """
        tp, s_per_sample = bound
        model, traits = self.model, self.model.traits
        sliced = traits.sliced_gradients if behind else traits.sliced_activations
        own = model.sample_bytes(1) / tp
        other = model.sample_bytes(tp) / (tp if sliced else 1)
        start = start_s(model.constants, traits) + float(model.links[1].min())
        both = start + s_per_sample * np.array([own, other])
        least: FloatArray = both.max(axis=0) if traits.duplex_transfers else both.sum(axis=0)
        return least

    @cached_property
    def _best_rates(self) -> list[float]:
        """Rate of each node to the node that is nearest; infinite where there is no other one."""
        rates, _ = self.model.links
        if len(rates) == 1:
            return [float("inf")]
        others = np.where(np.eye(len(rates), dtype=np.bool_), 0.0, rates)
        best: list[float] = others.max(axis=1).tolist()
        return best
