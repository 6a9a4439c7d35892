"""Ways to take units for one stage from the nodes of one class.

A unit is a tensor-parallel group within a node. A stage whose units sit on several nodes runs its
gradient rings between them, and the rings of all stages share a node's network interface. So that
a stage's cost never depends on stages to come, a node *promises*, when it first joins such a
stage, in how many of them it will be; more it may not join.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

AWAITS_FIRST: Final = -1
"""The next stage is the first one, and its nodes are to be remembered."""


MOST_IN_A_ROW: Final = 2
"""Stages across nodes that a node in a row is in: one that begins it and one that finishes it."""


class NodeState(NamedTuple):
    """Units that a node has given to stages."""

    used: int = 0  # units that stages have taken
    last: int = 0  # those among them that the last stage has taken
    promised: int = 0  # stages across nodes in which it may be; 0 before the first one
    joined: int = 0  # those in which it is
    # Units that the first stage has taken, where that is to be remembered; `AWAITS_FIRST` as long
    # as there is no first stage
    home: int = 0


class Pick(NamedTuple):
    """One node gives units to the next stage: its state before and after."""

    before: NodeState
    after: NodeState


Groups = Sequence[tuple[NodeState, int]]
"""States of a class's nodes, each with the number of nodes that are in it."""


def any_picks(groups: Groups, num_units: int, units: int, dp: int) -> Iterator[tuple[Pick, ...]]:
    """Give every way to take units from nodes, equal nodes being interchangeable.

    Args:
        groups: The nodes.
        num_units: Of each node.
        units: To take.
        dp: Units of the whole stage; it takes the others from nodes of other classes.

    Yields:
        The picks, with every promise that can be kept.
    """
    for taken in _distributions(groups, num_units, units):
        across = not (len(taken) == 1 and units == dp)
        for promises in _promises(taken, num_units, across=across):
            yield _picks(taken, promises)


def even_picks(groups: Groups, num_units: int, units: int, dp: int) -> Iterator[tuple[Pick, ...]]:
    """Give the ways after which all nodes that are partly taken are in one state.

    Nodes on which a stage takes a part are then taken by equal parts until they are full, so
    that there are far fewer states. Parameters as in `any_picks`.

    Yields:
        The picks; promises are what equal parts amount to.
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
    """Take the nodes in a row: one is finished before the next one is begun.

    Stages take multiples of what ``dp`` and a node can both be divided by, so that nodes are not
    left with parts that suit no stage. Parameters as in `any_picks`.

    Yields:
        The picks; a node that is not finished promises this stage alone, or the next one too.
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
    """Turn taken units into picks; a promise of 0 keeps the node's promise."""
    return tuple(
        Pick(
            before=state,
            after=NodeState(
                used=state.used + part,
                last=part,
                promised=promise or state.promised,
                joined=state.joined + (promise > 0),
                home=part if state.home == AWAITS_FIRST else state.home,
            ),
        )
        for (state, part), promise in zip(taken, promises, strict=True)
    )


def _distributions(
    groups: Groups, num_units: int, units: int
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Give every way to take units: per node that gives some, its state and their number."""
    if not groups:
        if not units:
            yield ()
        return
    (state, count), rest = groups[0], groups[1:]
    for parts in _parts(count, num_units - state.used, units):
        for others in _distributions(rest, num_units, units - sum(parts)):
            yield (*((state, part) for part in parts), *others)


def _parts(count: int, largest: int, units: int) -> Iterator[tuple[int, ...]]:
    """Give every choice of at most ``count`` parts up to ``largest`` that need ``units`` or less.

    Parts do not ascend.
    """
    yield ()
    if count:
        for part in range(min(largest, units), 0, -1):
            for others in _parts(count - 1, part, units - part):
                yield (part, *others)


def _promises(
    taken: Sequence[tuple[NodeState, int]],
    num_units: int,
    *,
    across: bool,
    most: int | None = None,
) -> Iterator[tuple[int, ...]]:
    """Give every promise that nodes can make, and those made before that they can still keep.

    A node can be in one more stage per unit that is left. ``most`` is what new promises are up to.
    """
    if not across:
        yield (0,) * len(taken)
        return
    if not taken:
        yield ()
        return
    (state, part), rest = taken[0], taken[1:]
    if state.promised:
        own = [state.promised] if state.joined < state.promised else []
    else:
        possible = num_units - state.used - part + 1
        own = list(range(1, min(possible, most or possible) + 1))
    for promise in own:
        for others in _promises(rest, num_units, across=True, most=most):
            yield (promise, *others)


def _even_distributions(
    groups: Groups, num_units: int, units: int
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Take equal parts of all nodes that have given a part; then whole nodes, then parts anew."""
    begun = [entry for entry in groups if 0 < entry[0].used < num_units]
    unused = [entry for entry in groups if not entry[0].used]
    yield from _from_unused(unused, num_units, units, whole=bool(begun))
    if not begun:
        return
    nodes = [state for state, count in begun for _ in range(count)]
    left = num_units - nodes[0].used
    for part in range(1, left + 1):
        rest = units - part * len(nodes)
        if rest < 0:
            return
        of_begun = tuple((state, part) for state in nodes)
        for others in _from_unused(unused, num_units, rest, whole=part < left):
            yield (*of_begun, *others)


def _from_unused(
    unused: Groups, num_units: int, units: int, *, whole: bool
) -> Iterator[tuple[tuple[NodeState, int], ...]]:
    """Take whole nodes, and equal parts of some more unless ``whole``."""
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
