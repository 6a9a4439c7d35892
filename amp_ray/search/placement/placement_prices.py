"""Prices of the devices of stages and of the cuts between them, for one candidate.

Equal nodes cost the same, so the cost model prices any nodes of the right classes as stand-ins. The
order of a stage's data-parallel replicas is free, so a cut has a price for every matching of the
units on both sides. Messages within a node are fast; messages between nodes share their network
interfaces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.messages import MessageModel
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import Topology
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.node_moves import NodeClass, Pairs
from amp_ray.strategies.candidate import Candidate

Matching = tuple[tuple[int, int, int], ...]
"""Units that node ``i`` of the one stage sends to node ``j`` of the next: ``(i, j, number)``."""


@lru_cache(maxsize=4096)
def matchings(pairs: tuple[tuple[int, int], ...], small: int, most: int) -> tuple[Matching, ...]:
    """Return ways to match the units of two stages.

    Args:
        pairs: Per node, its units in a stage and in the next one; both columns have the same sum.
        small: Most units of a stage for which every matching is returned. In larger stages, as many
            messages as possible stay within nodes.
        most: Most matchings of the other messages of a larger stage.

    Returns:
        Matchings; the first one keeps as many messages as possible within nodes.

    Example:
        >>> matchings(((2, 1), (0, 1)), 4, 8)
        (((0, 0, 1), (0, 1, 1)),)
    """
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if sum(before) <= small:
        return tuple(tuple(sorted(table)) for table in _tables(before, after))
    inside = [min(pair) for pair in pairs]
    kept = [(node, node, units) for node, units in enumerate(inside) if units]
    over = [units - same for units, same in zip(before, inside, strict=True)]
    lack = [units - same for units, same in zip(after, inside, strict=True)]
    between = islice(_tables(over, lack), most)
    return tuple(tuple(sorted((*kept, *table))) for table in between)


def _tables(before: Sequence[int], after: Sequence[int]) -> Iterator[Matching]:
    """Yield every table with these row and column sums, largest diagonals first."""
    row = next((node for node, units in enumerate(before) if units), None)
    if row is None:
        yield ()
        return
    below = [0 if node == row else units for node, units in enumerate(before)]
    for shares in _shares(before[row], after, prefer=row):
        still = [units - share for units, share in zip(after, shares, strict=True)]
        cells = tuple((row, node, share) for node, share in enumerate(shares) if share)
        for later in _tables(below, still):
            yield (*cells, *later)


def _shares(units: int, room: Sequence[int], *, prefer: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to spread units over nodes with room, most on the preferred node first."""
    order = sorted(range(len(room)), key=lambda node: (node != prefer, node))

    def spread(remaining: int, nodes: Sequence[int]) -> Iterator[dict[int, int]]:
        if not nodes:
            if not remaining:
                yield {}
            return
        for share in range(min(remaining, room[nodes[0]]), -1, -1):
            for later in spread(remaining - share, nodes[1:]):
                yield {nodes[0]: share, **later}

    for shares in spread(units, order):
        yield tuple(shares[node] for node in range(len(room)))


Lane = tuple[int, int]
"""A node that sends and the node that receives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePrices:
    """Costs of a stage on several sets of devices."""

    time_prefix_s: FloatArray  # shape ``(num_rows, num_layers + 1)``
    time_row: IntArray  # shape ``(num_sets,)``
    memory_bytes: FloatArray  # shape ``(num_sets,)``. Memory of the smallest device.
    # Shape ``(num_sets, 2)``. Seconds of the step end: fixed, and per parameter.
    step_ends: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRow:
    """One price of a relation between two stages."""

    row: int  # index into `Prices.cut_time_s`
    matching: Matching  # by the nodes' order in the relation


@dataclass(frozen=True, kw_only=True, eq=False)
class Prices:
    """Computes prices with the cost model, and caches the prices of cuts."""

    cost_model: CostModel  # times stages and cuts
    candidate: Candidate
    classes: tuple[NodeClass, ...]  # the classes of nodes
    effort: SearchEffort = EFFORT
    _rows: dict[bytes, int] = field(init=False, default_factory=dict)
    _seconds: list[FloatArray] = field(init=False, default_factory=list)
    _cut_rows: dict[tuple[Pairs, ...], tuple[CutRow, ...]] = field(init=False, default_factory=dict)

    @property
    def cut_time_s(self) -> FloatArray:
        """Seconds of the different cuts so far, shape ``(num_rows, num_layers + 1)``."""
        return np.array(self._seconds)

    def cut_rows(self, relations: Sequence[tuple[Pairs, ...]]) -> list[tuple[CutRow, ...]]:
        """Price cuts by the nodes on both sides.

        ``relations`` has per cut and class the units of each node before and after the cut.

        Returns:
            Per cut, its prices without those that are dominated at every boundary; usually one.
        """
        unknown = [key for key in dict.fromkeys(relations) if key not in self._cut_rows]
        if unknown:
            self._price(unknown)
        return [self._cut_rows[key] for key in relations]

    def stage_devices(self, sets: Sequence[tuple[Pairs, ...]]) -> DevicePrices:
        """Price the devices of stages.

        Args:
            sets: Per stage and class, units and promise of each node.
        """
        nodes = [self.stand_ins(devices) for devices in sets]
        stage_nodes = [
            [node for node, (units, _) in placed for _ in range(units)] for placed in nodes
        ]
        stages, cluster = self._stages(stage_nodes), self.cost_model.experiment.cluster
        topology, _ = self._network
        rings, types = topology.rings(stages.tensor_groups), stages.types(cluster)
        time_prefix_s, time_row = self.cost_model.time_tables.times(stages, types, rings).rows()
        return DevicePrices(
            time_prefix_s=time_prefix_s,
            time_row=time_row,
            memory_bytes=np.array(
                [
                    min(float(cluster.nodes[node].device.memory_bytes) for node, _ in placed)
                    for placed in nodes
                ]
            ),
            step_ends=np.array([self._step_end(placed) for placed in nodes]),
        )

    def tied_s(self, ends: tuple[Pairs, ...]) -> float:
        """Return the least time of the all-reduce of a tied weight, over all matchings of replicas.

        ``ends`` has per class the units of each node in the first and in the last stage.
        """
        tp = self.candidate.options.tp
        tied = self.cost_model.weights(tp).tied
        if tied is None:
            return 0.0
        placed, step_end = self.stand_ins(ends), self.cost_model.step_end
        first = _first_devices(self.cost_model.topology)
        times_s = []
        for matching in self._matchings(placed):
            stage_nodes = np.array(_matched_nodes(matching, [node for node, _ in placed]))
            rings = self.cost_model.topology.rings(
                np.repeat(first[stage_nodes], tp, axis=0).tolist()
            )
            times_s.append(max(step_end.tied_s(tied.parameters, path) for path in rings.paths))
        return min(times_s)

    def stand_ins(self, pairs: tuple[Pairs, ...]) -> list[tuple[int, tuple[int, int]]]:
        """Return each pair with a node of its class; the nodes are distinct."""
        return [
            (node_class.nodes[index], entry)
            for node_class, entries in zip(self.classes, pairs, strict=True)
            for index, entry in enumerate(entries)
        ]

    def _matchings(self, placed: Sequence[tuple[int, tuple[int, int]]]) -> tuple[Matching, ...]:
        pairs = tuple(units for _, units in placed)
        return matchings(pairs, self.effort.max_matched_units, self.effort.max_matchings)

    def _price(self, relations: list[tuple[Pairs, ...]]) -> None:
        tried: list[tuple[int, Matching]] = []
        stage_nodes: list[list[int]] = []
        for index, relation in enumerate(relations):
            placed = self.stand_ins(relation)
            for matching in self._matchings(placed):
                tried.append((index, matching))
                ends = _matched_nodes(matching, [node for node, _ in placed])
                stage_nodes += [[before for before, _ in ends], [after for _, after in ends]]
        stages, pairs = self._stages(stage_nodes), np.arange(len(stage_nodes)).reshape(-1, 2)
        topology, messages = self._network
        rings = topology.rings(stages.tensor_groups)
        seconds, rows = messages.between(stages, rings, pairs).rows()
        prices: list[list[tuple[FloatArray, Matching]]] = [[] for _ in relations]
        for (index, matching), row in zip(tried, rows.tolist(), strict=True):
            prices[index].append((seconds[row], matching))
        for relation, priced in zip(relations, prices, strict=True):
            self._cut_rows[relation] = tuple(
                CutRow(row=self._row(price), matching=matching)
                for price, matching in _lowest(priced)
            )

    @property
    def _network(self) -> tuple[Topology, MessageModel]:
        return self.cost_model.network(self.candidate.micro_batch_size)

    def _row(self, seconds: FloatArray) -> int:
        """Return the index of a row of seconds, and store the row if it is new."""
        row = self._rows.setdefault(seconds.tobytes(), len(self._rows))
        if row == len(self._seconds):
            self._seconds.append(seconds)
        return row

    def _stages(self, stage_nodes: list[list[int]]) -> PlacedStages:
        """Return stages in a row on the first devices of nodes."""
        first = _first_devices(self.cost_model.topology)
        grid = np.repeat(first[np.array(stage_nodes)], self.candidate.options.tp)
        candidate = replace(self.candidate, pp=len(stage_nodes), virtual_stages=1)
        return PlacedStages.of_candidate(candidate, grid)

    def _step_end(self, placed: list[tuple[int, tuple[int, int]]]) -> tuple[float, float]:
        """Return the seconds of the step end on some nodes: fixed, and per parameter."""
        topology, dp = self.cost_model.topology, self.candidate.options.dp
        sharers = {node: self.candidate.options.tp * promise for node, (_, promise) in placed}
        ring = topology.ring(tuple(sorted(sharers)), dp, sharers)
        devices = (topology.cluster.nodes[node].device for node in sharers)
        device = min(devices, key=lambda device: device.memory_bytes_per_s)
        return self.cost_model.step_end.line(
            self.candidate.options, self.candidate.pp, (ring,), device
        )


def _matched_nodes(matching: Matching, nodes: Sequence[int]) -> list[Lane]:
    """Return sender and receiver node of every message."""
    return [(nodes[i], nodes[j]) for i, j, units in matching for _ in range(units)]


def _lowest(priced: list[tuple[FloatArray, Matching]]) -> list[tuple[FloatArray, Matching]]:
    """Drop prices that are dominated at every boundary; of equal prices keep the first."""
    kept: list[tuple[FloatArray, Matching]] = []
    for price, matching in priced:
        if any((other <= price).all() for other, _ in kept):
            continue
        kept = [entry for entry in kept if not (price <= entry[0]).all()]
        kept.append((price, matching))
    return kept


def _first_devices(topology: Topology) -> IntArray:
    slots = [node.num_slots for node in topology.cluster.nodes]
    return np.concatenate(([0], np.cumsum(slots)[:-1])).astype(np.int64)
