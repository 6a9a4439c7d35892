"""All stages that there may be for one candidate: every group with every way to use it."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from amp_ray.cost.kernels import RankTable
from amp_ray.cost.topology import IntArray, Topology
from amp_ray.search.stage_groups.kinds import DeviceGraph
from amp_ray.search.stage_groups.options import GroupCosts, GroupOption

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """Edges of the graph of devices, once for every way to use the group.

    Args:
        graph: Groups of devices.
        options: The different ways; equal groups on other devices share them.
        edge: Shape ``(C,)``. Group of each choice.
        option: Shape ``(C,)``. Index into ``options``.
    """

    graph: DeviceGraph
    options: tuple[GroupOption, ...]
    edge: IntArray
    option: IntArray

    @cached_property
    def from_state(self) -> IntArray:
        """Shape ``(C,)``."""
        return self.graph.from_state[self.edge]

    @cached_property
    def to_state(self) -> IntArray:
        """Shape ``(C,)``."""
        return self.graph.to_state[self.edge]

    @cached_property
    def num_neighbours(self) -> int:
        """Pairs of choices that can follow each other."""
        leading = np.bincount(self.to_state, minlength=self.graph.num_states)
        return int(leading[self.from_state].sum())

    @cached_property
    def ends_at_nodes(self) -> BoolArray:
        """Shape ``(C,)``. Whether the next stage has to be on other nodes."""
        at_end = np.array(
            [self.graph.ends_at_nodes(edge) for edge in range(len(self.graph.pieces))]
        )
        return at_end[self.edge]

    @cached_property
    def is_aligned(self) -> BoolArray:
        """Shape ``(C,)``. Whether the group is whole nodes, or an equal part of one."""
        aligned = np.array([self.graph.is_aligned(edge) for edge in range(len(self.graph.pieces))])
        return aligned[self.edge]

    @cached_property
    def begins_at_nodes(self) -> BoolArray:
        """Shape ``(C,)``. Whether the stage before has to be on other nodes."""
        at_begin = np.array([option.device_group.begins_nodes for option in self.options])
        return at_begin[self.option]

    def among(self, chosen: IntArray) -> "Choices":
        """Return some of the choices."""
        return replace(self, edge=self.edge[chosen], option=self.option[chosen])

    def devices(self, choice: int) -> tuple[int, ...]:
        """Return the devices of a choice, in the order of its ranks."""
        return tuple(chain.from_iterable(self.graph.devices(int(self.edge[choice]))))

    def rank_table(self, topology: Topology, choices: IntArray) -> RankTable:
        """Lay the ranks of some choices out for the kernel, their samples being one part."""
        options = [self.options[index] for index in self.option[choices].tolist()]
        devices = [self.devices(choice) for choice in choices.tolist()]
        ends = np.array([end for option in options for end in (0, *accumulate(option.shares))])
        return RankTable(
            nodes=topology.node_of_device[np.array(list(chain.from_iterable(devices)))],
            first_node=np.cumsum([0, *map(len, devices)], dtype=np.int64),
            ends=ends,
            parts=np.zeros_like(ends),
            first_end=np.cumsum([0, *(option.dp + 1 for option in options)], dtype=np.int64),
        )


def all_choices(graph: DeviceGraph, costs: GroupCosts) -> Choices:
    """Enumerate the choices of a candidate.

    Args:
        graph: Groups of devices.
        costs: Of the candidate.
    """
    options: list[GroupOption] = []
    known: dict[object, range] = {}
    edges: list[int] = []
    chosen: list[int] = []
    for edge in range(len(graph.pieces)):
        key = graph.signature(edge)
        if key not in known:
            found = costs.options(graph, edge)
            known[key] = range(len(options), len(options) + len(found))
            options += found
        edges += [edge] * len(known[key])
        chosen += known[key]
    return Choices(
        graph=graph,
        options=tuple(options),
        edge=np.array(edges, dtype=np.int64),
        option=np.array(chosen, dtype=np.int64),
    )
