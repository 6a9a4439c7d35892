"""Classes of equal nodes, and everything that the nodes of one class can give to stages in turn."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.search.placement.node_picks import (
    AWAITS_FIRST,
    Groups,
    NodeState,
    Pick,
    any_picks,
    even_picks,
    row_picks,
)

Parts = Literal["any", "even", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which placements the search covers, and what distinguishes them."""

    # How equal nodes are taken: in any parts; in equal parts, all that have given something being
    # alike; or in a row, one node after the other, by a common divisor of dp and the node
    parts: Parts = "any"
    # Whether a stage takes a part of one class's units at most, and else all that is left
    pure: bool = False
    pairs: bool = True  # whether links of single pairs of nodes count
    ends: bool = False  # whether it counts which nodes the first and the last stage share
    max_options: int  # give up beyond so many options of all stages

    @property
    def is_whole(self) -> bool:
        """Whether all placements are covered, at their true costs."""
        return self.pairs and self.parts == "any" and not self.pure


Pairs = tuple[tuple[int, int], ...]
"""Per node, largest first: units that a stage has there, and another figure of that node."""

Picker = Callable[[Groups, int, int, int], Iterator[tuple[Pick, ...]]]
PICKS: Final[Mapping[Parts, Picker]] = {
    "any": any_picks,
    "even": even_picks,
    "row": row_picks,
}

MOST_STEPS: Final = 6_000
"""Ways to give units that are explored for one class: about a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Nodes that differ only in their names."""

    nodes: tuple[int, ...]
    num_units: int  # tensor-parallel groups that each of them holds


def node_classes(cluster: Cluster, tp: int, *, pairs_matter: bool) -> tuple[NodeClass, ...]:
    """Group the nodes of a cluster, in an order that does not depend on how they are listed.

    Args:
        cluster: Nodes; those that hold no tensor-parallel group are left out.
        tp: Tensor parallel degree.
        pairs_matter: Whether a node with a link of its own to another is a class of its own.
    """
    own = {node for pair in cluster.pair_links for node in pair} if pairs_matter else set[int]()
    members: dict[tuple[str, int], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if node.num_slots >= tp:
            key = repr(node.nameless), index if index in own else -1
            members.setdefault(key, []).append(index)
    return tuple(
        NodeClass(nodes=tuple(nodes), num_units=cluster.nodes[nodes[0]].num_slots // tp)
        for _, nodes in sorted(members.items())
    )


class Step(NamedTuple):
    """One way in which the nodes of a class give units to the next stage."""

    to_state: int
    relation: int  # index into `ClassMoves.relations`
    picks: tuple[Pick, ...]  # of each node that gives something


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassMoves:
    """All states of one class's nodes, and the steps between them.

    State 0 has given nothing. Steps are sorted by the units that they give and by their state, so
    that those of one state and number stand together.
    """

    num_units: int
    states: tuple[tuple[NodeState, ...], ...]  # per state, that of each node, sorted
    steps: tuple[Step, ...]
    first: IntArray  # shape ``(dp + 1, num_states)``. First step that gives so many units.
    count: IntArray  # shape ``(dp + 1, num_states)``. And how many such steps there are.
    relations: tuple[Pairs, ...]  # per node in the stage before or the next one: its units in both
    # Per node in the last stage: units, and how many stages across nodes share it
    stage_devices: tuple[Pairs, ...]
    devices_of_state: IntArray  # shape ``(num_states,)``. Index into ``stage_devices``.
    ends: tuple[Pairs, ...]  # per node in the first or the last stage: its units in both
    ends_of_state: IntArray  # shape ``(num_states,)``. Index into ``ends``.
    free: IntArray  # shape ``(num_states,)``. Units that are left.
    to_state: IntArray = field(init=False)
    relation: IntArray = field(init=False)

    def __post_init__(self) -> None:
        """Lay the steps out as arrays."""
        to_state = np.array([step.to_state for step in self.steps], dtype=np.int64)
        relation = np.array([step.relation for step in self.steps], dtype=np.int64)
        object.__setattr__(self, "to_state", to_state)
        object.__setattr__(self, "relation", relation)


def class_moves(node_class: NodeClass, dp: int, scope: Scope) -> ClassMoves | None:
    """Explore what the nodes of a class can give.

    Returns:
        The moves; None where there are too many.
    """
    start = NodeState(home=AWAITS_FIRST if scope.ends else 0)
    fresh = (start,) * len(node_class.nodes)
    return _explored(fresh, node_class.num_units, dp, scope.parts)


@lru_cache(maxsize=256)
def _explored(
    fresh: tuple[NodeState, ...],
    num_units: int,
    dp: int,
    parts: Parts,
) -> ClassMoves | None:
    """Explore from one state; candidates of other micro-batch sizes ask again."""
    if parts == "any" and math.comb(len(fresh) + num_units, num_units) > MOST_STEPS:
        return None  # so many states at least: what each node has given, in any order
    known: dict[tuple[NodeState, ...], int] = {fresh: 0}
    relations: dict[Pairs, int] = {}
    found: list[tuple[int, int, Step]] = []
    states = [fresh]
    for index, state in enumerate(states):  # grows while it is walked
        for units, picks in _moves(state, num_units, dp, PICKS[parts]):
            after = _after(state, picks, num_units)
            to_state = known.setdefault(after, len(known))
            if to_state == len(states):
                states.append(after)
            pairs = _relation(state, picks)
            relation = relations.setdefault(pairs, len(relations))
            found.append((units, index, Step(to_state=to_state, relation=relation, picks=picks)))
            if len(found) > MOST_STEPS:
                return None
    return _laid_out(num_units, dp, states, found, tuple(relations))


def _laid_out(
    num_units: int,
    dp: int,
    states: list[tuple[NodeState, ...]],
    found: list[tuple[int, int, Step]],
    relations: tuple[Pairs, ...],
) -> ClassMoves:
    """Sort steps by units and state, and number the devices of stages."""
    found.sort(key=lambda entry: entry[:2])
    count = np.zeros((dp + 1, len(states)), np.int64)
    for units, index, _ in found:
        count[units, index] += 1
    first = np.concatenate(([0], np.cumsum(count.ravel())[:-1])).reshape(count.shape)
    stage_devices: dict[Pairs, int] = {}
    of_state = [
        stage_devices.setdefault(_stage_devices(state), len(stage_devices)) for state in states
    ]
    ends: dict[Pairs, int] = {}
    ends_of_state = [ends.setdefault(_ends(state), len(ends)) for state in states]
    free = [sum(num_units - node.used for node in state) for state in states]
    return ClassMoves(
        num_units=num_units,
        states=tuple(states),
        steps=tuple(step for _, _, step in found),
        first=first,
        count=count,
        relations=relations,
        stage_devices=tuple(stage_devices),
        devices_of_state=np.array(of_state),
        ends=tuple(ends),
        ends_of_state=np.array(ends_of_state),
        free=np.array(free),
    )


def cleared(state: NodeState, num_units: int) -> NodeState:
    """Return a node's state when the last stage is no longer the last one."""
    used, last, promised, joined, home = state
    if used == num_units:
        return NodeState(used=num_units, home=max(home, 0))
    return NodeState(used, 0, promised, joined, max(home, 0)) if last or home < 0 else state


def sorted_pairs(pairs: list[tuple[int, int]]) -> Pairs:
    """Put pairs of figures of several nodes in order, largest first."""
    return tuple(sorted(pairs, reverse=True))


def _moves(
    state: tuple[NodeState, ...], num_units: int, dp: int, picks: Picker
) -> Iterator[tuple[int, tuple[Pick, ...]]]:
    """Give every way to take up to ``dp`` units, with their number."""
    groups = tuple(sorted(Counter(state).items()))
    free = sum(num_units - node.used for node in state)
    for units in range(min(dp, free) + 1):
        for picked in picks(groups, num_units, units, dp):
            yield units, picked


def _after(
    state: tuple[NodeState, ...], picks: tuple[Pick, ...], num_units: int
) -> tuple[NodeState, ...]:
    """Return the state after a step."""
    left = list(state)
    for pick in picks:
        left.remove(pick.before)
    after = [cleared(node, num_units) for node in left] + [pick.after for pick in picks]
    return tuple(sorted(after))


def _relation(state: tuple[NodeState, ...], picks: tuple[Pick, ...]) -> Pairs:
    """Return the units in the last and in the next stage of every node that has any."""
    left = list(state)
    for pick in picks:
        left.remove(pick.before)
    pairs = [(pick.before.last, pick.after.last) for pick in picks]
    return sorted_pairs(pairs + [(node.last, 0) for node in left if node.last])


def _stage_devices(state: tuple[NodeState, ...]) -> Pairs:
    """Return units and promise of every node in the last stage."""
    return sorted_pairs([(node.last, node.promised) for node in state if node.last])


def _ends(state: tuple[NodeState, ...]) -> Pairs:
    """Return the units in the first and the last stage of every node in one of them."""
    pairs = [(node.home, node.last) for node in state if node.home > 0 or node.last]
    return sorted_pairs(pairs)
