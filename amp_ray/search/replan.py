"""Plan again after nodes were lost or added: find the plan that moves the least state.

State is the data that training needs to continue: weights on every rank, and the optimizer's master
weights and moments, which ZeRO shards over dp. A rank holds an interval of length ``1 / tp`` of
every sharded layer. So a device keeps the intersection of the interval that it holds and the
interval that it will need.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking, is_risky, speed
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import BYTES_PER_ELEMENT, BYTES_PER_FP32

Place = tuple[str, int]
"""Host and slot: identifies a device across clusters."""

_NOTHING: Final = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Bytes of state to move from one strategy to another."""

    needed_bytes: dict[str, float]  # state of the new strategy on each of its hosts
    moved_bytes: dict[str, float]  # the part that the host's devices do not hold yet
    lost_bytes: dict[str, float]  # the part of moved_bytes that only a checkpoint still holds
    transfer_s: float  # seconds until the slowest network interface has received its part

    @property
    def total_bytes(self) -> float:
        """Bytes to move, summed over hosts."""
        return sum(self.moved_bytes.values())

    def to_json(self) -> dict[str, Any]:
        """Return the ``moves`` object of a row."""
        return {
            "moved_bytes": round(self.total_bytes),
            "from_checkpoint_bytes": round(sum(self.lost_bytes.values())),
            "transfer_s": self.transfer_s,
            "hosts": [
                {
                    "host": host,
                    "state_bytes": round(self.needed_bytes[host]),
                    "moved_bytes": round(self.moved_bytes[host]),
                    "from_checkpoint_bytes": round(self.lost_bytes[host]),
                }
                for host in self.needed_bytes
            ],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """State on the devices of a strategy."""

    places: tuple[Place, ...]  # one per device
    # Shape ``(num_devices, 4, num_layers, 2)``. Begin and end of the interval that a device holds
    # of the sharded weights, the replicated weights and the optimizer state of both, per layer.
    intervals: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Replanner:
    """Orders strategies by the state to move from the strategy that ran before."""

    experiment: Experiment  # the nodes that remain
    before: Strategy  # the strategy that ran
    old_cluster: Cluster  # where it ran; ``before`` counts its devices

    def ranking(self, ranking: Ranking, score: Callable[[Strategy], Estimate]) -> Ranking:
        """Sort the strategies that tie with the best by the bytes they move, safe ones first.

        Equal nodes are swapped where that moves less, unless the strategy would take longer.
        """
        ties: list[Estimate] = []
        for tied in ranking.results[: ranking.num_tied]:
            assert isinstance(tied, Estimate)
            ties.append(self._moving_least(tied, score))
        ties.sort(key=lambda tie: (is_risky(tie), self.moves(tie.strategy).total_bytes))
        return replace(ranking, results=(*ties, *ranking.results[len(ties) :]), num_near=0)

    def moves(self, strategy: Strategy) -> Moves:
        """Return the state to move before a strategy can run."""
        state = self._state(strategy, self.experiment.cluster)
        old = self._surviving
        index = {place: number for number, place in enumerate(old.places)}
        none = np.zeros_like(state.intervals[0])
        needed: dict[str, float] = defaultdict(float)
        moved, lost = defaultdict(float, needed), defaultdict(float, needed)
        for (host, slot), intervals in zip(state.places, state.intervals, strict=True):
            number = index.get((host, slot))
            held = none if number is None else old.intervals[number]
            needed[host] += self._bytes(intervals)
            moved[host] += self._bytes(intervals) - self._bytes(_common(intervals, held))
            lost[host] += sum(self._bytes(_common(intervals, gap)) for gap in self._gaps)
        nodes = {host.name: host for host in self.experiment.cluster.hosts}
        share = self.experiment.constants.nic_efficiency
        rates = {host: nodes[host].inter.bandwidth_bytes_per_s * share for host in needed}
        return Moves(
            needed_bytes=dict(needed),
            moved_bytes=dict(moved),
            lost_bytes=dict(lost),
            transfer_s=max(moved[host] / rate for host, rate in rates.items()),
        )

    def _moving_least(self, tied: Estimate, score: Callable[[Strategy], Estimate]) -> Estimate:
        """Return the estimate with equal nodes swapped so that the least state moves."""
        cluster, strategy = self.experiment.cluster, tied.strategy
        if cluster.pair_links:
            return tied
        node_of, slot_of = cluster.node_of_device, cluster.slot_of_device
        first = np.cumsum([0, *(node.num_slots for node in cluster.nodes)])
        new_node = self._new_nodes(strategy)
        placement = tuple(
            int(first[new_node[node_of[device]]]) + slot_of[device] for device in strategy.placement
        )
        moved = score(replace(strategy, placement=placement))
        return moved if speed(moved) <= speed(tied) else tied

    def _new_nodes(self, strategy: Strategy) -> IntArray:
        """Return, for each node, the equal node that takes over its part."""
        cluster = self.experiment.cluster
        state = self._state(strategy, cluster)
        parts = dict(zip(state.places, state.intervals, strict=True))
        held = dict(zip(self._surviving.places, self._surviving.intervals, strict=True))
        new_node, places = np.arange(len(cluster.nodes)), cluster.places
        first = np.cumsum([0, *(node.num_slots for node in cluster.nodes)])
        for nodes in cluster.alike_nodes(lambda node: node.nameless):
            slots = range(cluster.nodes[nodes[0]].num_slots)
            none = np.zeros_like(state.intervals[0])
            required, present = (
                np.array([[of.get(places[first[n] + s], none) for s in slots] for n in nodes])
                for of in (parts, held)
            )
            kept = np.array([self._bytes_kept(part, present) for part in required])
            new_node[nodes] = np.array(nodes)[best_matching(kept)]
        return new_node

    def _bytes_kept(self, part: FloatArray, held: FloatArray) -> FloatArray:
        """Return the bytes of a part that each node already holds, shape ``(num_nodes,)``.

        ``part`` are the intervals that it needs, shape ``(num_slots, 4, num_layers, 2)``.
        """
        length = np.diff(_common(part[None], held)).squeeze(-1)
        kept: FloatArray = (length * self._layer_bytes).sum(axis=(1, 2, 3))
        return kept

    def _bytes(self, intervals: FloatArray) -> float:
        return float((np.diff(intervals).squeeze(-1) * self._layer_bytes).sum())

    @cached_property
    def _layer_bytes(self) -> FloatArray:
        """Shape ``(4, num_layers)``. Bytes, in the order of `State`."""
        experiment = self.experiment
        per = experiment.traits.bytes_per_parameter(experiment.precision)
        # Single-precision copies of gradients are no state: the next step recreates them.
        optimizer = (
            min(per.master, BYTES_PER_FP32)
            + experiment.traits.optimizer(experiment.optimizer).moment_bytes
        )
        counts = np.array(
            [
                [layer.sharded_parameters for layer in experiment.model.layers],
                [layer.replicated_parameters for layer in experiment.model.layers],
            ],
            dtype=np.float64,
        )
        return np.concatenate(
            [counts * BYTES_PER_ELEMENT[experiment.precision], counts * optimizer]
        )

    @cached_property
    def _surviving(self) -> State:
        """State that the remaining hosts held before."""
        state = self._state(self.before, self.old_cluster)
        hosts = {*self.experiment.cluster.host_names}
        alive = [index for index, (host, _) in enumerate(state.places) if host in hosts]
        return State(
            places=tuple(state.places[index] for index in alive),
            intervals=state.intervals[alive],
        )

    @cached_property
    def _gaps(self) -> list[FloatArray]:
        """Intervals that no surviving device holds; each entry of shape ``(4, num_layers, 2)``."""
        held = self._surviving.intervals
        num_layers = self.experiment.model.num_layers
        gaps_of_kind = [
            [_gaps_between(held[:, kind, layer]) for layer in range(num_layers)]
            for kind in range(len(self._layer_bytes))
        ]
        most = max(len(gaps) for row in gaps_of_kind for gaps in row)
        return [
            np.array(
                [[gaps[n] if n < len(gaps) else _NOTHING for gaps in row] for row in gaps_of_kind]
            )
            for n in range(most)
        ]

    def _state(self, strategy: Strategy, cluster: Cluster) -> State:
        num_layers = self.experiment.model.num_layers
        intervals = np.zeros((len(strategy.placement), 4, num_layers, 2))
        for stage, first in zip(strategy.stages, strategy.first_rank, strict=True):
            layers = slice(stage.first_layer, stage.end_layer)
            tp, dp = stage.options.tp, stage.options.dp
            shards = stage.options.num_shards
            for rank in range(tp * dp):
                replica, part = divmod(rank, tp)
                share = (replica % shards + np.array([0, 1])) / shards
                states = [(part + share) / tp, share]
                whole = [(part + np.array([0, 1])) / tp, np.array([0, 1])]
                weights = states if stage.options.shards_weights else whole
                rows = np.array([*weights, *states])
                intervals[first + rank, :, layers] = rows[:, None]
        places = tuple(cluster.places[device] for device in strategy.placement)
        return State(places=places, intervals=intervals)


def _common(one: FloatArray, other: FloatArray) -> FloatArray:
    begin = np.maximum(one[..., 0], other[..., 0])
    end = np.minimum(one[..., 1], other[..., 1])
    return np.stack([begin, np.maximum(begin, end)], axis=-1)


def _gaps_between(intervals: FloatArray) -> list[tuple[float, float]]:
    """Return the parts of [0, 1] that no interval covers; ``intervals`` is ``(n, 2)``."""
    held = sorted({(begin, end) for begin, end in intervals.tolist() if end > begin})
    gaps, reached = [], 0.0
    for begin, end in held:
        if begin > reached:
            gaps.append((reached, begin))
        reached = max(reached, end)
    return gaps if reached >= 1.0 else [*gaps, (reached, 1.0)]


def best_matching(gains: FloatArray) -> IntArray:
    """Match rows with columns so that the sum of gains is largest.

    Args:
        gains: Shape ``(n, n)``.

    Returns:
        Shape ``(n,)``. Column of each row; column ``i`` for row ``i`` where that is as good.

    References:
        Kuhn, The Hungarian method for the assignment problem, 1955, in the form with potentials
        and shortest augmenting paths, O(n^3).
    """
    size = len(gains)
    costs = gains.max() - gains
    # Among equal matchings prefer the one with fewer swaps: the bonus is far below one byte.
    costs = costs + (1.0 - np.eye(size)) * 1e-3
    row_price, column_price = np.zeros(size), np.zeros(size + 1)
    row_of = np.full(size + 1, -1)  # the last column is where a new row starts from
    for row in range(size):
        row_of[size] = row
        column, reached = size, np.zeros(size + 1, bool)
        least, before = np.full(size, np.inf), np.full(size, size)
        while row_of[column] >= 0:
            reached[column] = True
            current = row_of[column]
            reduced = costs[current] - row_price[current] - column_price[:size]
            better = ~reached[:size] & (reduced < least)
            least[better], before[better] = reduced[better], column
            open_least = np.where(reached[:size], np.inf, least)
            column = int(open_least.argmin())
            step = open_least[column]
            row_price[row_of[reached]] += step
            column_price[reached] -= step
            least[~reached[:size]] -= step
        while column != size:
            row_of[column] = row_of[before[column]]
            column = before[column]
    matching = np.empty(size, np.int64)
    matching[row_of[:size]] = np.arange(size)
    return matching
