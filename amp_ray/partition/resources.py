"""Graph of all ways in which stages can take units of several kinds, one kind after the other.

Units of a kind form a row. A pipeline takes them from its last stage to its first: each stage takes
the next units of the current kind, and may then continue with all or some units of another kind.
Every order of the kinds is a path of the graph, and common parts of paths are stored once. A state
is the number of units taken of each kind.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.arrays import IntArray, SmallIntArray

NO_KIND = -1  # fills the columns of a group with fewer kinds

State = tuple[int, int, int]  # bit mask of used-up kinds; current kind; units taken of it
Piece = tuple[int, int]  # kind, units


@dataclass(frozen=True, kw_only=True, eq=False)
class ResourceGraph:
    """A graph whose edges are groups of units that one stage can take."""

    counts: IntArray  # shape ``(K,)``. Units of each kind.
    # States, ascending by the units taken; state 0 has taken none
    states: tuple[State, ...]
    from_state: IntArray  # shape ``(E,)``
    to_state: IntArray  # shape ``(E,)``
    # Shape ``(E, K)``. The kinds of each group, in the order of the pipeline, then -1.
    kinds: SmallIntArray
    sizes: SmallIntArray  # shape ``(E, K)``. Units of each of them, then 0.
    taken: IntArray  # shape ``(E,)``. Units of the group's last kind that later stages have taken.
    full: bool  # whether the only final states are those in which every unit is taken

    @cached_property
    def final_states(self) -> tuple[int, ...]:
        """States after the first stage: all units taken, or any state if units may stay idle."""
        first = len(self.states) - 1 if self.full else 1
        return tuple(range(first, len(self.states)))

    @cached_property
    def size(self) -> IntArray:
        """Shape ``(E,)``. Units of each group."""
        total: IntArray = self.sizes.sum(axis=1)
        return total

    @cached_property
    def num_kinds(self) -> IntArray:
        """Shape ``(E,)``. Kinds of each group."""
        count: IntArray = (self.kinds != NO_KIND).sum(axis=1)
        return count

    def units(self, edge: int) -> tuple[tuple[int, int, int], ...]:
        """Return each piece of a group as (kind, first, end): units ``[first, end)`` of its row."""
        pieces = []
        last = int(self.num_kinds[edge]) - 1
        for column in range(last + 1):
            kind, size = int(self.kinds[edge, column]), int(self.sizes[edge, column])
            taken = int(self.taken[edge]) if column == last else 0
            end = int(self.counts[kind]) - taken
            pieces.append((kind, end - size, end))
        return tuple(pieces)


def resource_graph(
    counts: Sequence[int], *, most_kinds: int | None = None, idle: bool = False
) -> ResourceGraph:
    """Enumerate all groups that stages can take.

    Args:
        counts: Units of each kind, at least one.
        most_kinds: Most kinds in one group; None for any number.
        idle: Whether units may stay idle: the rest of a row when the next kind begins, and whole
            kinds.

    Returns:
        A graph with each group once per state that it starts from.

    Example:
        >>> graph = resource_graph((2, 1), most_kinds=1)
        >>> [graph.units(edge) for edge in range(3)]
        [((0, 1, 2),), ((0, 0, 2),), ((1, 0, 1),)]
    """
    graph = limited_graph(
        counts, (1,) * len(counts), most_kinds=most_kinds or len(counts), idle=idle
    )
    assert graph is not None
    return graph


def limited_graph(
    counts: Sequence[int],
    grains: Sequence[int],
    *,
    most_kinds: int,
    idle: bool,
    most_groups: float = math.inf,
) -> ResourceGraph | None:
    """Enumerate groups of whole grains, or of an equal part of one; None if there are too many.

    ``grains`` are the units per grain of each kind; grains start at the begin of its row.
    """
    grower = _Grower(counts=tuple(counts), grains=tuple(grains), most=most_kinds, idle=idle)
    begin: State = (0, NO_KIND, 0)
    numbers, waiting, width = {begin: 0}, [begin], 3 + 2 * len(counts)
    edges = array("i")  # flat, since millions of tuples would take gigabytes
    while waiting:
        state = waiting.pop()
        for taken, to_state, pieces in grower.groups(state):
            if to_state not in numbers:
                numbers[to_state] = len(numbers)
                waiting.append(to_state)
            unused = len(counts) - len(pieces)
            edges.extend((numbers[state], numbers[to_state], taken))
            edges.extend([kind for kind, _ in reversed(pieces)] + [NO_KIND] * unused)
            edges.extend([size for _, size in reversed(pieces)] + [0] * unused)
        if len(edges) > most_groups * width:
            return None
    return _graph(grower, numbers, np.frombuffer(edges, np.int32).reshape(-1, width))


def _graph(grower: "_Grower", numbers: dict[State, int], edges: SmallIntArray) -> ResourceGraph:
    """Build the graph from numbered states and a flat list of groups."""
    states = sorted(numbers, key=lambda state: (grower.taken(state), state))
    number = np.empty(len(states), np.int64)
    number[[numbers[state] for state in states]] = np.arange(len(states))
    edges, width = edges[np.argsort(number[edges[:, 0]], kind="stable")], len(grower.counts)
    return ResourceGraph(
        counts=np.array(grower.counts, np.int64),
        states=tuple(states),
        from_state=number[edges[:, 0]],
        to_state=number[edges[:, 1]],
        kinds=edges[:, 3 : 3 + width].copy(),
        sizes=edges[:, 3 + width :].copy(),
        taken=edges[:, 2].astype(np.int64),
        full=not grower.idle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grower:
    """Enumerates the groups that a stage can take from a state."""

    counts: tuple[int, ...]
    grains: tuple[int, ...]
    most: int
    idle: bool

    def taken(self, state: State) -> int:
        """Count the units that are taken or idle in a state."""
        closed, _, used = state
        return used + sum(count for kind, count in enumerate(self.counts) if closed >> kind & 1)

    def groups(self, state: State) -> Iterator[tuple[int, State, tuple[Piece, ...]]]:
        """Yield each group: units taken before of its last kind, next state, and pieces."""
        closed, kind, used = state
        if kind == NO_KIND:
            yield from ((0, *group) for group in self._begun(closed, ()))
            return
        yield from ((used, *group) for group in self._grown(closed, kind, used, ()))
        if self.idle:
            yield from ((0, *group) for group in self._begun(closed | 1 << kind, ()))

    def _begun(
        self, closed: int, pieces: tuple[Piece, ...]
    ) -> Iterator[tuple[State, tuple[Piece, ...]]]:
        """Continue the group with any unused kind."""
        if len(pieces) < self.most:
            for kind in range(len(self.counts)):
                if not closed >> kind & 1:
                    yield from self._grown(closed, kind, 0, pieces)

    def _grown(
        self, closed: int, kind: int, used: int, pieces: tuple[Piece, ...]
    ) -> Iterator[tuple[State, tuple[Piece, ...]]]:
        """Add units of a kind to the group; if they are used up, also other kinds."""
        rest = self.counts[kind] - used
        for size in range(1, rest):
            if self._allows(kind, rest - size, size):
                yield (closed, kind, used + size), (*pieces, (kind, size))
        if self._allows(kind, 0, rest):
            closed |= 1 << kind
            whole = (*pieces, (kind, rest))
            yield (closed, NO_KIND, 0), whole
            yield from self._begun(closed, whole)

    def _allows(self, kind: int, first: int, size: int) -> bool:
        """Return whether the units are whole grains, or an equal part of one."""
        grain = self.grains[kind]
        return first % min(grain, size) == 0 and (size % grain == 0 or grain % size == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledGraph:
    """A graph whose states also include the label of the last group."""

    edge: IntArray  # shape ``(O,)``. Edge of the graph without labels.
    from_state: IntArray  # shape ``(O,)``
    to_state: IntArray  # shape ``(O,)``
    label: IntArray  # shape ``(O,)``. Label of the group before; -1 for none.
    final_states: tuple[int, ...]  # ascending


def labelled(
    from_state: IntArray, to_state: IntArray, labels: IntArray, final_states: Sequence[int]
) -> LabelledGraph:
    """Split states by the label of the group that leads to them.

    Args:
        from_state: Shape ``(E,)``. Edges lead to higher states; 0 is the start.
        to_state: Shape ``(E,)``.
        labels: Shape ``(E,)``. Not negative.
        final_states: Final states of the graph.

    Returns:
        One edge for each label that its source state can have, and the final states that an edge
        leads to.
    """
    span = int(labels.max(initial=0)) + 1
    codes = np.unique(np.concatenate(([-1], to_state * span + labels)))
    states = codes // span
    first, end = (np.searchsorted(states, from_state, side=side) for side in ("left", "right"))
    first, end = (np.where(from_state == 0, at, limit) for at, limit in ((0, first), (1, end)))
    count = end - first
    edge = np.repeat(np.arange(len(from_state)), count)
    begins = np.repeat(first - np.concatenate(([0], np.cumsum(count)[:-1])), count)
    source = np.arange(len(edge)) + begins
    target = np.searchsorted(codes, to_state[edge] * span + labels[edge])
    reached = np.unique(target)
    return LabelledGraph(
        edge=edge,
        from_state=source,
        to_state=target,
        label=np.where(source == 0, -1, codes[source] % span),
        final_states=tuple(reached[np.isin(states[reached], final_states)].tolist()),
    )
