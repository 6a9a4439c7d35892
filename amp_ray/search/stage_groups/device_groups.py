"""Groups of devices that stages can take, before samples are assigned.

`DeviceGraph`: kinds of equal devices, and all ways in which stages can take them one after another.
`DeviceGroups`: these groups with every tensor-parallel degree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, permutations, product
from math import comb, prod

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import Path
from amp_ray.cost.model import CostModel
from amp_ray.partition.resources import ResourceGraph, limited_graph
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.strategies.candidate import StageOptions

Piece = tuple[int, int, int]
"""Kind, first device and end of a half-open range in the kind's row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGraph:
    """A graph whose edges are device groups of stages, from the last stage to the first."""

    # Devices of each kind, node after node, as the pipeline takes them
    rows: tuple[tuple[int, ...], ...]
    from_state: IntArray  # shape ``(E,)``
    to_state: IntArray  # shape ``(E,)``. Always above ``from_state``.
    pieces: tuple[tuple[Piece, ...], ...]  # pieces of each edge, in the order of the pipeline
    slots: tuple[int, ...]  # devices per node of each kind; 0 if its nodes differ
    nodes: tuple[int, ...]  # node of every device
    num_states: int  # in state 0 no device is taken; the first stage may lead to any other state
    is_small: bool  # whether there are few groups
    idle: bool = True  # whether devices may stay idle

    @property
    def final_states(self) -> tuple[int, ...]:
        """States after the first stage: any but 0 if remaining devices may stay idle."""
        return tuple(range(1 if self.idle else self.num_states - 1, self.num_states))

    def devices(self, edge: int) -> tuple[tuple[int, ...], ...]:
        """Return the devices of a group, piece by piece."""
        return tuple(self.rows[kind][first:end] for kind, first, end in self.pieces[edge])

    def signature(self, edge: int) -> tuple[Piece, ...]:
        """Return a key that is equal for interchangeable groups."""
        return tuple(
            (kind, first % slots if slots else first, end - first)
            for kind, first, end in self.pieces[edge]
            for slots in (self.slots[kind],)
        )

    def ends_at_nodes(self, edge: int) -> bool:
        """Return whether, in each kind, the next device is on another node than the group."""
        for kind, _, end in self.pieces[edge]:
            row = self.rows[kind]
            if end < len(row) and self.nodes[row[end - 1]] == self.nodes[row[end]]:
                return False
        return True

    def is_aligned(self, edge: int) -> bool:
        """Return whether each piece is whole nodes, or an equal part of one."""
        return all(
            (first % slots == 0 and size % slots == 0) or (slots % size == 0 and first % size == 0)
            for kind, first, size in self.signature(edge)
            for slots in (self.slots[kind] or size,)
        )

    @cached_property
    def at_node_ends(self) -> BoolArray:
        """Shape ``(E,)``. `ends_at_nodes` of every group."""
        return np.array([self.ends_at_nodes(edge) for edge in range(len(self.pieces))])

    @cached_property
    def aligned(self) -> BoolArray:
        """Shape ``(E,)``. `is_aligned` of every group."""
        return np.array([self.is_aligned(edge) for edge in range(len(self.pieces))])

    @cached_property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(map(len, self.rows))


def device_graph(
    cluster: Cluster, effort: SearchEffort = EFFORT, *, idle: bool = True
) -> DeviceGraph:
    """Enumerate the groups of devices that stages can take, fewer in large clusters."""
    rows = device_kinds(cluster, by_links=True)
    slots = tuple(cluster.nodes[cluster.node_of_device[row[0]]].num_slots for row in rows)
    if prod(comb(len(row) + 2, 2) for row in rows) <= effort.max_groups_in_any_order:
        return replace(_any_order(cluster, rows, slots, effort), idle=idle)
    if len(rows) <= effort.max_kinds:
        for most_kinds in dict.fromkeys((len(rows), 2)):
            mixed = limited_graph(
                [len(row) for row in rows],
                [1] * len(rows),
                most_kinds=most_kinds,
                idle=idle,
                most_groups=effort.max_mixed_groups,
            )
            if mixed is not None:
                return _in_runs(cluster, rows, slots, mixed, effort)
    else:
        rows = device_kinds(cluster, by_links=False, effort=effort)
        slots = (0,) * len(rows)
    for share in (8, 4, 2, 1):
        pure = limited_graph(
            [len(row) for row in rows],
            [max(1, (node_slots or 8) // share) for node_slots in slots],
            most_kinds=1,
            idle=idle,
            most_groups=effort.max_groups if share > 1 else math.inf,
        )
        if pure is not None:
            return _in_runs(cluster, rows, slots, pure, effort)
    raise AssertionError


def one_node_graphs(cluster: Cluster, effort: SearchEffort = EFFORT) -> list[DeviceGraph]:
    """Enumerate the groups of devices inside a node, for one node of every kind."""
    kinds = device_kinds(cluster, by_links=True)
    nodes = [cluster.nodes[cluster.node_of_device[row[0]]] for row in kinds]
    return [
        _any_order(cluster, (row[: node.num_slots],), (node.num_slots,), effort)
        for row, node in zip(kinds, nodes, strict=True)
    ]


def device_kinds(
    cluster: Cluster, *, by_links: bool, effort: SearchEffort = EFFORT
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each kind, node after node.

    Args:
        cluster: Its nodes.
        by_links: Whether nodes of one kind also have equal links and slots. Else only their
            devices are equal; if that still gives too many kinds, all nodes form one.
        effort: Limits of the search.
    """
    rows: dict[object, list[int]] = {}
    first = 0
    for index, node in enumerate(cluster.nodes):
        key = (node.kind, cluster.link_keys[index]) if by_links else node.device
        rows.setdefault(key, []).extend(range(first, first + node.num_slots))
        first += node.num_slots
    if not by_links and len(rows) > effort.max_kinds:
        return (tuple(device for row in rows.values() for device in row),)
    return tuple(tuple(row) for row in rows.values())


def _in_runs(
    cluster: Cluster,
    rows: tuple[tuple[int, ...], ...],
    slots: tuple[int, ...],
    graph: ResourceGraph,
    effort: SearchEffort,
) -> DeviceGraph:
    """Build a graph that takes kind after kind, each row in the order of the pipeline."""
    return DeviceGraph(
        rows=rows,
        from_state=graph.from_state,
        to_state=graph.to_state,
        pieces=tuple(graph.units(edge) for edge in range(len(graph.from_state))),
        slots=slots,
        nodes=cluster.node_of_device,
        num_states=len(graph.states),
        is_small=len(graph.from_state) <= effort.max_groups_in_any_order,
        idle=not graph.full,
    )


def _any_order(
    cluster: Cluster,
    rows: tuple[tuple[int, ...], ...],
    slots: tuple[int, ...],
    effort: SearchEffort,
) -> DeviceGraph:
    """Build a graph whose groups take any number of the next devices of every kind.

    The pieces of a group come in every order: a replica passes its samples on to the replica at the
    same place in the next stage, so the order decides which links they cross.
    """
    states = list(product(*(range(len(row) + 1) for row in rows)))
    edges = [
        (index, other, pieces)
        for index, state in enumerate(states)
        for other in range(index + 1, len(states))
        if all(after >= before for before, after in zip(state, states[other], strict=True))
        for pieces in permutations(_between(rows, state, states[other]))
    ]
    return DeviceGraph(
        rows=rows,
        from_state=np.array([edge[0] for edge in edges]),
        to_state=np.array([edge[1] for edge in edges]),
        pieces=tuple(edge[2] for edge in edges),
        slots=slots,
        nodes=cluster.node_of_device,
        num_states=len(states),
        is_small=len({edge[:2] for edge in edges}) <= effort.max_groups_in_any_order,
    )


def _between(
    rows: Sequence[Sequence[int]], state: Sequence[int], other: Sequence[int]
) -> tuple[Piece, ...]:
    """Return the pieces that are taken in ``other``, but not in ``state``."""
    return tuple(
        (kind, len(row) - after, len(row) - before)
        for kind, (row, before, after) in enumerate(zip(rows, state, other, strict=True))
        if after > before
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRanks:
    """Equal data-parallel ranks of a device group."""

    types: tuple[int, ...]  # device types of each rank's tensor-parallel group, ascending
    ring: Path  # path of their tensor-parallel all-reduces
    count: int  # number of ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceGroup:
    """A group of devices with a tensor-parallel degree."""

    devices: IntArray  # shape ``(dp, tp)``
    rings: tuple[Path, ...]  # path of the tensor-parallel group of each dp index
    ranks: tuple[EqualRanks, ...]  # its ranks, kind after kind
    sync_paths: tuple[Path, ...]  # paths of its gradient rings
    slowest: Device  # device with the slowest memory
    # Time to synchronise tied weights, added at both ends of the pipeline. First: all stages are in
    # one node; second: they are not.
    tied_s: tuple[float, float]
    begins_nodes: bool  # whether no earlier device of its rows is on one of its nodes

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return int(self.devices.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroups:
    """Enumerates and caches the device groups of an experiment, for all its candidates."""

    cost_model: CostModel  # of the experiment
    effort: SearchEffort = EFFORT
    _groups: dict[object, DeviceGroup | None] = field(init=False, default_factory=dict)
    _graphs: dict[DeviceGraph, tuple[list[list[DeviceGroup]], IntArray]] = field(
        init=False, default_factory=dict
    )
    _step_ends: dict[tuple[bytes, StageOptions], tuple[float, float]] = field(
        init=False, default_factory=dict
    )

    def of_graph(self, graph: DeviceGraph) -> tuple[list[list[DeviceGroup]], IntArray]:
        """Return the distinct groups of a graph, and the index of each edge's group.

        Returns:
            Per distinct group its devices with every tp; and the index by edge, shape ``(E,)``.
        """
        if graph not in self._graphs:
            signatures = [graph.signature(edge) for edge in range(len(graph.pieces))]
            first = {signature: edge for edge, signature in reversed(list(enumerate(signatures)))}
            edges = sorted(first.values())
            index = {signatures[edge]: number for number, edge in enumerate(edges)}
            self._graphs[graph] = (
                [self.of_edge(graph, edge) for edge in edges],
                np.array([index[signature] for signature in signatures], dtype=np.int64),
            )
        return self._graphs[graph]

    def of_edge(self, graph: DeviceGraph, edge: int) -> list[DeviceGroup]:
        """Return an edge's group with every tp that it allows, without duplicates."""
        signature = graph.signature(edge)
        groups = []
        for tp in self.tps:
            key = (graph.rows, signature, tp)
            if key not in self._groups:
                self._groups[key] = self._allowed(graph.devices(edge), tp)
            group = self._groups[key]
            groups += [] if group is None else [group]
        return groups

    def of_devices(self, devices: IntArray) -> DeviceGroup:
        """Return the group of any stage, whose devices have shape ``(dp, tp)``."""
        topology = self.cost_model.topology
        slots, members = topology.cluster.slot_of_device, set(devices.ravel().tolist())
        paths = topology.rings(devices.tolist()).of_groups
        types = [tuple(sorted(set(row))) for row in topology.type_of_device[devices].tolist()]
        kinds = [self._kind_of_device[device] for device in devices[:, 0].tolist()]
        runs = [
            (key, len(list(run))) for key, run in groupby(zip(kinds, types, paths, strict=True))
        ]
        step_end = self.cost_model.step_end
        return DeviceGroup(
            devices=devices,
            rings=paths,
            ranks=tuple(
                EqualRanks(types=ranks, ring=path, count=count) for (_, ranks, path), count in runs
            ),
            sync_paths=topology.rings(devices.T.tolist()).paths,
            slowest=step_end.slowest(set(topology.type_of_device[devices.ravel()].tolist())),
            tied_s=(self._tied_s(devices, one_node=True), self._tied_s(devices, one_node=False)),
            begins_nodes=all(slots[device] == 0 or device - 1 in members for device in members),
        )

    def step_end(self, group: DeviceGroup, options: StageOptions) -> tuple[float, float]:
        """Return the seconds of gradient sync and optimizer: fixed, and per parameter of a rank."""
        key = group.devices.tobytes(), options
        if key not in self._step_ends:
            self._step_ends[key] = self.cost_model.step_end.line(
                options, 2, group.sync_paths, group.slowest
            )
        return self._step_ends[key]

    @cached_property
    def graphs(self) -> tuple[tuple[DeviceGraph, bool], ...]:
        """Device graphs, and whether plans with them stay inside one node.

        If tied weights synchronise faster inside a node, graphs of single nodes come first.
        """
        cluster = self.cost_model.experiment.cluster
        is_one = len(cluster.nodes) == 1
        whole = self._whole, is_one
        if is_one or not self.tied_parameters or not self._idle:
            return (whole,)
        return (*((inside, True) for inside in one_node_graphs(cluster, self.effort)), whole)

    @cached_property
    def _whole(self) -> DeviceGraph:
        return device_graph(self.cost_model.experiment.cluster, self.effort, idle=self._idle)

    @property
    def _idle(self) -> bool:
        return self.cost_model.experiment.limits.idle_devices is not False

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the limits, the nodes and the model allow."""
        experiment = self.cost_model.experiment
        limits, shape = experiment.limits, experiment.model.shape
        slots = [node.num_slots for node in experiment.cluster.nodes]
        most = sum(slots) if limits.tp_across_nodes else max(slots)
        most = most if limits.max_tp is None else min(most, limits.max_tp)
        heads = (shape.num_heads, shape.num_key_value_heads)
        return tuple(
            tp
            for tp in range(limits.min_tp, most + 1)
            if not experiment.traits.shards_heads or not any(count % tp for count in heads)
        )

    @cached_property
    def parameters(self) -> FloatArray:
        """Parameters of every layer; a weight that two layers share counts in the first one.

        All parts count as if tensor parallelism divided them.
        """
        weights = self.cost_model.weights(1)
        held: FloatArray = np.diff(weights.prefix)
        if weights.tied is not None:
            held[weights.tied.last] -= weights.tied.parameters
        return held

    @cached_property
    def tied_parameters(self) -> float:
        """Parameters of the weight that both ends of the model hold; 0 if there is none."""
        tied = self.cost_model.weights(1).tied
        return 0.0 if tied is None else tied.parameters

    def _allowed(self, pieces: Sequence[Sequence[int]], tp: int) -> DeviceGroup | None:
        """Return a group; None if nodes, limits or profile forbid this tp."""
        experiment, topology = self.cost_model.experiment, self.cost_model.topology
        devices = list(chain.from_iterable(pieces))
        if len(devices) % tp:
            return None
        grid = np.array(devices).reshape(-1, tp)
        nodes = topology.node_of_device[grid]
        if not experiment.limits.tp_across_nodes and (nodes != nodes[:, :1]).any():
            return None
        held = sorted(set(topology.type_of_device[devices].tolist()))
        device_types = [experiment.cluster.device_types[index] for index in held]
        return (
            None if experiment.profile.gap(device_types, tp) is not None else self.of_devices(grid)
        )

    @cached_property
    def _kind_of_device(self) -> dict[int, int]:
        rows = self._whole.rows
        return {device: kind for kind, row in enumerate(rows) for device in row}

    def _tied_s(self, devices: IntArray, *, one_node: bool) -> float:
        """Return the time to all-reduce tied gradients between the first and the last stage.

        The other rank is inside the same node with ``one_node``, else on the nearest other node.
        """
        if not self.tied_parameters:
            return 0.0
        step_end, topology = self.cost_model.step_end, self.cost_model.topology
        ranks = Counter(topology.node_of_device[devices].ravel().tolist())
        parameters = self.tied_parameters / devices.shape[1]
        times_s = []
        for node, count in ranks.items():
            end_nodes: list[tuple[int, ...]] = [(node,)]
            if not one_node:
                end_nodes.append(tuple(sorted((node, self._nearest[node]))))
            for ends in end_nodes:
                path = topology.ring(ends, 2, dict.fromkeys(ends, count))
                times_s.append(step_end.tied_s(parameters, path))
        return max(times_s)

    @cached_property
    def _nearest(self) -> list[int]:
        """Per node the other node with the fastest link; itself if it is the only node."""
        topology = self.cost_model.topology
        kinds, links = topology.kind_of_node, topology.links
        rates = np.where(topology.has_pair, links.inter_bytes_per_s, 0.0)
        best = rates.max(axis=1, keepdims=True)
        steps = np.where(rates == best, links.inter_step_s, np.inf)
        is_best = steps == steps.min(axis=1, keepdims=True)
        first = [np.flatnonzero(row[kinds])[:2].tolist() for row in is_best]
        return [
            next((other for other in first[kind] if other != node), node)
            for node, kind in enumerate(kinds.tolist())
        ]
