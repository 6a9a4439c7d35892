"""Classes of equal nodes, and all ways in which one class can give units to successive stages.

A unit is a tensor-parallel group within a node. A stage with units on several nodes runs its
gradient rings between them, and the rings of all stages share a node's network interface. The cost
of a stage must not depend on later stages. So a node *promises*, when it first joins such a stage,
the number of such stages it will join; it may not join more.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.clusters.cluster import Cluster

AWAITS_FIRST: Final = -1
"""Marks that the next stage is the first one, and that its nodes must be recorded."""


MOST_IN_A_ROW: Final = 2
"""Most stages across nodes that one node joins if nodes are used up in a row: first and last."""


class NodeState(NamedTuple):
    """Units that a node has given to stages."""

    used: int = 0  # units that stages have taken
    last: int = 0  # units that the last stage has taken
    promised: int = 0  # stages across nodes that it may join; 0 before the first one
    joined: int = 0  # stages across nodes that it has joined
    # Units that the first stage has taken, if recorded; `AWAITS_FIRST` before the first stage
    home: int = 0


class Pick(NamedTuple):
    """The state of one node before and after it gives units to the next stage."""

    before: NodeState
    after: NodeState


Groups = Sequence[tuple[NodeState, int]]
"""States of a class's nodes, with the number of nodes in each state."""


def any_picks(groups: Groups, num_units: int, units: int, dp: int) -> Iterator[tuple[Pick, ...]]:
    """Yield every way to take units from nodes, up to swaps of equal nodes.

    Nodes of other classes give what ``units`` lacks of the ``dp`` units of a stage.

    Yields:
        The picks, with every promise that can be kept.
    """
    for taken in _distributions(groups, num_units, units):
        across = not (len(taken) == 1 and units == dp)
        for promises in _promises(taken, num_units, across=across):
            yield _picks(taken, promises)


def even_picks(groups: Groups, num_units: int, units: int, dp: int) -> Iterator[tuple[Pick, ...]]:
    """Yield the ways to take units that leave all partly used nodes in the same state.

    Stages then take equal parts of such nodes until they are full, so there are far fewer states.
    Parameters as in `any_picks`.

    Yields:
        The picks; promises follow from equal parts.
    """
    seen = set()
    for taken in _even_distributions(groups, num_units, units):
        key = tuple(sorted(taken))
        if key in seen:
            continue
        seen.add(key)
        across = not (len(taken) == 1 and units == dp)
        promises = [
            state.promised or -(-(num_units - state.used) // part) if across else 0
            for state, part in taken
        ]
        if not across or all(
            state.joined < promise for (state, _), promise in zip(taken, promises, strict=True)
        ):
            yield _picks(taken, promises)


def row_picks(groups: Groups, num_units: int, units: int, dp: int) -> Iterator[tuple[Pick, ...]]:
    """Yield the ways to take units that use up each node before the next one.

    Stages take multiples of a common divisor of ``dp`` and the node's units, so that no remainder
    is too small for a stage. Parameters as in `any_picks`.

    Yields:
        The picks; a node with units left promises to join only this stage, or also the next one.
    """
    if units % math.gcd(num_units, dp):
        return
    nodes = sorted((state for state, count in groups for _ in range(count)), reverse=True)
    taken: list[tuple[NodeState, int]] = []
    for state in nodes:
        part = min(num_units - state.used, units - sum(part for _, part in taken))
        if part:
            taken.append((state, part))
    if sum(part for _, part in taken) < units:
        return
    across = not (len(taken) == 1 and units == dp)
    for promises in _promises(taken, num_units, across=across, most=MOST_IN_A_ROW):
        yield _picks(taken, promises)


def _picks(taken: Sequence[tuple[NodeState, int]], promises: Sequence[int]) -> tuple[Pick, ...]:
    """Turn taken units into picks; a promise of 0 leaves the node's earlier promise unchanged."""
    picks = []
    for (state, part), promise in zip(taken, promises, strict=True):
        used, _, promised, joined, home = state
        home = part if home == AWAITS_FIRST else home
        after = NodeState(used + part, part, promise or promised, joined + (promise > 0), home)
        picks.append(Pick(state, after))
    return tuple(picks)


def _distributions(
    groups: Groups, num_units: int, units: int
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Yield every way to take units, as a (state, units) pair for each node that gives some."""
    if not groups:
        if not units:
            yield ()
        return
    (state, count), rest = groups[0], groups[1:]
    for parts in _parts(count, num_units - state.used, units):
        for later in _distributions(rest, num_units, units - sum(parts)):
            yield (*((state, part) for part in parts), *later)


def _parts(count: int, largest: int, units: int) -> Iterator[tuple[int, ...]]:
    """Yield all lists of at most ``count`` parts up to ``largest`` whose sum is at most ``units``.

    Parts are in descending order.
    """
    yield ()
    if count:
        for part in range(min(largest, units), 0, -1):
            for smaller in _parts(count - 1, part, units - part):
                yield (part, *smaller)


def _promises(
    taken: Sequence[tuple[NodeState, int]],
    num_units: int,
    *,
    across: bool,
    most: int | None = None,
) -> Iterator[tuple[int, ...]]:
    """Yield the combinations of one promise per node; earlier promises must stay possible.

    A node can join at most one stage per remaining unit. ``most`` limits new promises.
    """
    if not across:
        yield (0,) * len(taken)
        return
    if not taken:
        yield ()
        return
    (state, part), rest = taken[0], taken[1:]
    if state.promised:
        choices = [state.promised] if state.joined < state.promised else []
    else:
        possible = num_units - state.used - part + 1
        choices = list(range(1, min(possible, most or possible) + 1))
    for promise in choices:
        for later in _promises(rest, num_units, across=True, most=most):
            yield (promise, *later)


def _even_distributions(
    groups: Groups, num_units: int, units: int
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Yield equal parts of all partly used nodes; then whole nodes, then parts of new ones."""
    begun = [entry for entry in groups if 0 < entry[0].used < num_units]
    unused = [entry for entry in groups if not entry[0].used]
    yield from _from_unused(unused, num_units, units, whole=bool(begun))
    if not begun:
        return
    nodes = [state for state, count in begun for _ in range(count)]
    remaining = num_units - nodes[0].used
    for part in range(1, remaining + 1):
        rest = units - part * len(nodes)
        if rest < 0:
            return
        of_begun = tuple((state, part) for state in nodes)
        for of_unused in _from_unused(unused, num_units, rest, whole=part < remaining):
            yield (*of_begun, *of_unused)


def _from_unused(
    unused: Groups, num_units: int, units: int, *, whole: bool
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Yield whole unused nodes and, unless ``whole``, equal parts of some more."""
    count = sum(number for _, number in unused)
    if not units:
        yield ()
        return
    if not count:
        return
    state = unused[0][0]
    for full in range(min(count, units // num_units), -1, -1):
        rest = units - full * num_units
        taken = ((state, num_units),) * full
        if not rest:
            yield taken
        elif not whole:
            for part in range(min(rest, num_units - 1), 0, -1):
                if rest % part == 0 and full + rest // part <= count:
                    yield (*taken, *(((state, part),) * (rest // part)))


Parts = Literal["any", "even", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The placements that the search covers, and the properties that distinguish them."""

    # How equal nodes are taken: in any parts; in equal parts, with all partly used nodes in one
    # state; or one node after the other, by a common divisor of dp and the node's units
    parts: Parts = "any"
    # Whether a stage must take all remaining units of the classes that it uses, except for one
    # class
    pure: bool = False
    pairs: bool = True  # whether links between single pairs of nodes matter
    ends: bool = False  # whether states record the nodes that the first and last stage share
    max_options: int  # limit on the options of all stages

    @property
    def is_whole(self) -> bool:
        """Whether all placements are covered, at their true costs."""
        return self.pairs and self.parts == "any" and not self.pure


Pairs = tuple[tuple[int, int], ...]
"""A pair per node, largest first: units of a stage on the node, and a second number."""

Picker = Callable[[Groups, int, int, int], Iterator[tuple[Pick, ...]]]
PICKS: Final[Mapping[Parts, Picker]] = {
    "any": any_picks,
    "even": even_picks,
    "row": row_picks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Nodes that differ only in their names."""

    nodes: tuple[int, ...]
    num_units: int  # tensor-parallel groups that each of them holds


def node_classes(cluster: Cluster, tp: int, *, pairs_matter: bool) -> tuple[NodeClass, ...]:
    """Group equal nodes of a cluster, in an order independent of the hostfile.

    Nodes too small for a tensor-parallel group are left out. If ``pairs_matter``, a node with a
    special link to another node forms a separate class.
    """
    members: dict[tuple[str, int], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if node.num_slots >= tp:
            key = repr(node.nameless), cluster.link_keys[index] if pairs_matter else -1
            members.setdefault(key, []).append(index)
    return tuple(
        NodeClass(nodes=tuple(nodes), num_units=cluster.nodes[nodes[0]].num_slots // tp)
        for _, nodes in sorted(members.items())
    )


class Step(NamedTuple):
    """One way in which the nodes of a class give units to the next stage."""

    to_state: int
    relation: int  # index into `ClassMoves.relations`
    picks: tuple[Pick, ...]  # one per node that gives units


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassMoves:
    """All states of one class's nodes, and the steps between them.

    In state 0 no unit has been taken. Steps are sorted by the units that they give and by their
    state, so steps with the same state and number are adjacent.
    """

    num_units: int
    states: tuple[tuple[NodeState, ...], ...]  # per state, the sorted states of the nodes
    steps: tuple[Step, ...]
    first: IntArray  # shape ``(dp + 1, num_states)``. First step by units given and state.
    count: IntArray  # shape ``(dp + 1, num_states)``. Number of such steps.
    relations: tuple[Pairs, ...]  # per node in the last or the next stage: its units in both
    # Per node in the last stage: units, and the number of stages across nodes that share it
    stage_devices: tuple[Pairs, ...]
    devices_of_state: IntArray  # shape ``(num_states,)``. Index into ``stage_devices``.
    ends: tuple[Pairs, ...]  # per node in the first or the last stage: its units in both
    ends_of_state: IntArray  # shape ``(num_states,)``. Index into ``ends``.
    free: IntArray  # shape ``(num_states,)``. Remaining units.
    to_state: IntArray = field(init=False)
    relation: IntArray = field(init=False)

    def __post_init__(self) -> None:
        """Lay the steps out as arrays."""
        to_state = np.array([step.to_state for step in self.steps], dtype=np.int64)
        relation = np.array([step.relation for step in self.steps], dtype=np.int64)
        object.__setattr__(self, "to_state", to_state)
        object.__setattr__(self, "relation", relation)


def class_moves(node_class: NodeClass, dp: int, scope: Scope, most_steps: int) -> ClassMoves | None:
    """Enumerate the states and steps of a class's nodes; None if there are too many."""
    start = NodeState(home=AWAITS_FIRST if scope.ends else 0)
    fresh = (start,) * len(node_class.nodes)
    return _explored(fresh, node_class.num_units, dp, scope.parts, most_steps)


@lru_cache(maxsize=256)
def _explored(
    fresh: tuple[NodeState, ...],
    num_units: int,
    dp: int,
    parts: Parts,
    most_steps: int,
) -> ClassMoves | None:
    """Enumerate moves from one state; cached, as other micro-batch sizes need the same."""
    if parts == "any" and _least_steps(len(fresh), num_units, dp, most_steps) > most_steps:
        return None
    number_of: dict[tuple[NodeState, ...], int] = {fresh: 0}
    relations: dict[Pairs, int] = {}
    steps: list[tuple[int, int, Step]] = []
    states = [fresh]
    for index, state in enumerate(states):  # the list grows during the loop
        for units, picks in _moves(state, num_units, dp, PICKS[parts]):
            after = _after(state, picks, num_units)
            to_state = number_of.setdefault(after, len(number_of))
            if to_state == len(states):
                states.append(after)
            pairs = _relation(state, picks)
            relation = relations.setdefault(pairs, len(relations))
            steps.append((units, index, Step(to_state=to_state, relation=relation, picks=picks)))
            if len(steps) > most_steps:
                return None
    return _laid_out(num_units, dp, states, steps, tuple(relations))


def _least_steps(num_nodes: int, num_units: int, dp: int, most_steps: int) -> float:
    """Return a lower bound on the steps of equal nodes that give any parts.

    Units may have been taken from the nodes in any order. With two nodes, one may rest in any state
    while the other takes any step that it could take alone.
    """
    least = math.comb(num_nodes + num_units, num_units)
    if num_nodes == 1 or least > most_steps:
        return least
    alone = _explored((NodeState(),), num_units, dp, "any", most_steps)
    if alone is None:
        return math.inf
    resting = {cleared(state, num_units) for (state,) in alone.states}
    num_given = len(alone.steps) - len(alone.states)  # one step of each state gives nothing
    return max(least, len(resting) * num_given)


def _laid_out(
    num_units: int,
    dp: int,
    states: list[tuple[NodeState, ...]],
    steps: list[tuple[int, int, Step]],
    relations: tuple[Pairs, ...],
) -> ClassMoves:
    """Sort steps by units and state, and number the devices of stages."""
    steps.sort(key=lambda entry: entry[:2])
    count = np.zeros((dp + 1, len(states)), np.int64)
    for units, index, _ in steps:
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
        steps=tuple(step for _, _, step in steps),
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
    """Return a node's state after another stage has become the last one."""
    used, last, promised, joined, home = state
    if used == num_units:
        return NodeState(used=num_units, home=max(home, 0))
    return NodeState(used, 0, promised, joined, max(home, 0)) if last or home < 0 else state


def _moves(
    state: tuple[NodeState, ...], num_units: int, dp: int, picks: Picker
) -> Iterator[tuple[int, tuple[Pick, ...]]]:
    """Yield every way to take up to ``dp`` units, with the number of units."""
    groups = tuple(sorted(Counter(state).items()))
    free = sum(num_units - node.used for node in state)
    for units in range(min(dp, free) + 1):
        for picked in picks(groups, num_units, units, dp):
            yield units, picked


def _after(
    state: tuple[NodeState, ...], picks: tuple[Pick, ...], num_units: int
) -> tuple[NodeState, ...]:
    resting = list(state)
    for pick in picks:
        resting.remove(pick.before)
    after = [cleared(node, num_units) for node in resting] + [pick.after for pick in picks]
    return tuple(sorted(after))


def _relation(state: tuple[NodeState, ...], picks: tuple[Pick, ...]) -> Pairs:
    """Return the units in the last and in the next stage of every node that has any."""
    resting = list(state)
    for pick in picks:
        resting.remove(pick.before)
    pairs = [(pick.before.last, pick.after.last) for pick in picks]
    pairs += [(node.last, 0) for node in resting if node.last]
    return tuple(sorted(pairs, reverse=True))


def _stage_devices(state: tuple[NodeState, ...]) -> Pairs:
    """Return units and promise of every node in the last stage."""
    pairs = [(node.last, node.promised) for node in state if node.last]
    return tuple(sorted(pairs, reverse=True))


def _ends(state: tuple[NodeState, ...]) -> Pairs:
    """Return the units in the first and the last stage of every node in one of them."""
    pairs = [(node.home, node.last) for node in state if node.home > 0 or node.last]
    return tuple(sorted(pairs, reverse=True))
