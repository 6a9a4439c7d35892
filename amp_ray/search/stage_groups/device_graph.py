"""Kinds of equal devices, and all ways in which stages can take them one after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import comb, prod

import numpy as np

from amp_ray.arrays import BoolArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.partition.resources import ResourceGraph, limited_graph
from amp_ray.search.effort import EFFORT, SearchEffort

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
    num_states: int  # in state 0 no device is taken; the first stage may lead to any other
    is_small: bool  # whether there are few groups

    @property
    def final_states(self) -> tuple[int, ...]:
        """All states but 0: remaining devices stay idle."""
        return tuple(range(1, self.num_states))

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


def device_graph(cluster: Cluster, effort: SearchEffort = EFFORT) -> DeviceGraph:
    """Enumerate the groups of devices that stages can take, fewer in large clusters.

    Args:
        cluster: Its nodes.
        effort: Limits of the search.
    """
    rows = device_kinds(cluster, by_links=True)
    slots = tuple(cluster.nodes[cluster.node_of_device[row[0]]].num_slots for row in rows)
    if prod(comb(len(row) + 2, 2) for row in rows) <= effort.max_groups_in_any_order:
        return _any_order(cluster, rows, slots, effort)
    if len(rows) <= effort.max_kinds:
        for most_kinds in dict.fromkeys((len(rows), 2)):
            mixed = limited_graph(
                [len(row) for row in rows],
                [1] * len(rows),
                most_kinds=most_kinds,
                idle=True,
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
            idle=True,
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
    linked = {node for pair in cluster.pair_links for node in pair}
    rows: dict[object, list[int]] = {}
    first = 0
    for index, node in enumerate(cluster.nodes):
        link_key = index if index in linked else -1
        key = (node.kind, link_key) if by_links else node.device
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
    )


def _any_order(
    cluster: Cluster,
    rows: tuple[tuple[int, ...], ...],
    slots: tuple[int, ...],
    effort: SearchEffort,
) -> DeviceGraph:
    """Build a graph whose groups take any number of the next devices of every kind."""
    states = list(product(*(range(len(row) + 1) for row in rows)))
    edges = [
        (index, other, _between(rows, state, states[other]))
        for index, state in enumerate(states)
        for other in range(index + 1, len(states))
        if all(after >= before for before, after in zip(state, states[other], strict=True))
    ]
    return DeviceGraph(
        rows=rows,
        from_state=np.array([edge[0] for edge in edges]),
        to_state=np.array([edge[1] for edge in edges]),
        pieces=tuple(edge[2] for edge in edges),
        slots=slots,
        nodes=cluster.node_of_device,
        num_states=len(states),
        is_small=len(edges) <= effort.max_groups_in_any_order,
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
