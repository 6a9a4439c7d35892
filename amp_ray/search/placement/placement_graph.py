"""Graph of all orders in which stages can take the nodes of a cluster, up to equal nodes.

A vertex describes the state before a stage: the units that all stages so far have taken, the units
of that stage, and the price of the cut before it. An option runs the stage and chooses the units of
the next one, so it depends on the cuts on both sides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, IntArray
from amp_ray.partition.rows import MOST_CODES, distinct_rows, first_of_each, radix, repeated
from amp_ray.partition.tables import NO_ROW
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.node_moves import ClassMoves, Pairs, Scope
from amp_ray.search.placement.placement_prices import CutRow

MOST_PAIRS: Final = 100_000
"""Most (vertex, way to share a stage) pairs that are expanded at once, to limit memory."""

CutRows = Callable[[Sequence[tuple[Pairs, ...]]], list[tuple[CutRow, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The vertices before one stage, and the options that lead to them."""

    # Shape ``(num_vertices, num_classes)``. State of each class, including that stage's units.
    states: IntArray
    # Shape ``(num_vertices,)``. Price row of the cut before the stage; -1 for the first stage.
    cut_row: IntArray
    source: IntArray  # shape ``(num_options,)``. Vertex in the level before; 0 for the first stage.
    target: IntArray  # shape ``(num_options,)``. Vertex in this level.
    steps: IntArray  # shape ``(num_options, num_classes)``. The step of each class.


@dataclass(frozen=True, kw_only=True, eq=False)
class Grower:
    """Grows the graph level by level."""

    moves: tuple[ClassMoves, ...]
    dp: int  # units of a stage
    cut_rows: CutRows
    scope: Scope  # which placements to cover
    effort: SearchEffort = EFFORT

    def levels(self, num_stages: int) -> tuple[Level, ...] | None:
        """Return a level per stage; None if there are too many options."""
        if not self._fits:
            return None
        key = self.moves, self.dp, replace(self.scope, max_options=0), self.effort
        if growth_of(*key).exceeds(num_stages, self.scope.max_options):
            return None
        levels = [self.first()]
        num_options = len(levels[0].source)
        if self._num_device_sets(levels[0]) > self.effort.max_device_sets:
            return None
        for _ in range(num_stages - 1):
            level = self._next(levels[-1], self.scope.max_options - num_options)
            if level is None or self._num_device_sets(level) > self.effort.max_device_sets:
                return None
            levels.append(level)
            num_options += len(level.source)
        return tuple(levels)

    @cached_property
    def _state_radix(self) -> IntArray:
        """Place value of each class's state in the mixed-radix number of a vertex."""
        return radix([len(moves.states) for moves in self.moves])

    @cached_property
    def _relation_radix(self) -> IntArray:
        """Place value of each class's relation in the mixed-radix number of a cut."""
        return radix([len(moves.relations) for moves in self.moves])

    @property
    def _fits(self) -> bool:
        states, relations = 1, 1
        for moves in self.moves:
            states *= len(moves.states)
            relations *= len(moves.relations)
        return states * 2**20 < MOST_CODES and relations < MOST_CODES

    def _num_device_sets(self, level: Level) -> int:
        columns = [moves.devices_of_state[level.states[:, c]] for c, moves in enumerate(self.moves)]
        return len(distinct_rows(columns)[0])

    def first(self) -> Level:
        """Return the vertices of the first stage."""
        start = np.zeros((1, len(self.moves)), np.int64)
        expanded = self.expanded(start, math.inf)
        assert expanded is not None, "the candidate has no more units than there are"
        _, steps = expanded
        states = self._after(steps)
        _, first, target = np.unique(
            states @ self._state_radix, return_index=True, return_inverse=True
        )
        return Level(
            states=states[first],
            cut_row=np.full(len(first), -1),
            source=np.zeros(len(target), np.int64),
            target=target.reshape(-1),
            steps=steps,
        )

    def _next(self, level: Level, max_options: int) -> Level | None:
        expanded = self.expanded(level.states, max_options)
        return None if expanded is None else self.joined(len(level.states), *expanded)

    def joined(self, num_vertices: int, source: IntArray, steps: IntArray) -> Level | None:
        """Return the vertices that options of a level lead to; None if cuts are too many."""
        priced = self._priced(steps)
        if priced is None:
            return None
        option, cut_row = priced
        source, steps = source[option], steps[option]
        states = self._after(steps)
        code = (states @ self._state_radix) * (int(cut_row.max(initial=0)) + 1) + cut_row
        _, first, target = np.unique(code, return_index=True, return_inverse=True)
        target = target.reshape(-1)
        kept = first_of_each(source * len(first) + target, num_vertices * len(first))
        return Level(
            states=states[first],
            cut_row=cut_row[first],
            source=source[kept],
            target=target[kept],
            steps=steps[kept],
        )

    def _after(self, steps: IntArray) -> IntArray:
        columns = [moves.to_state[steps[:, c]] for c, moves in enumerate(self.moves)]
        return np.stack(columns, axis=1)

    def _priced(self, steps: IntArray) -> tuple[IntArray, IntArray] | None:
        """Return each option once per price of its cut, and the price; None if too many."""
        relation = np.stack(
            [moves.relation[steps[:, c]] for c, moves in enumerate(self.moves)], axis=1
        )
        _, first, kind = np.unique(
            relation @ self._relation_radix, return_index=True, return_inverse=True
        )
        if len(first) > self.effort.max_distinct_cuts:
            return None
        keys = [
            tuple(moves.relations[index] for moves, index in zip(self.moves, row, strict=True))
            for row in relation[first].tolist()
        ]
        prices = self.cut_rows(keys)
        count = np.array([len(price) for price in prices], dtype=np.int64)
        begin = np.cumsum(count) - count
        rows = np.array([entry.row for price in prices for entry in price], dtype=np.int64)
        kind = kind.reshape(-1)
        option, offset = repeated(count[kind])
        return option, rows[begin[kind[option]] + offset]

    def expanded(self, states: IntArray, most: float) -> tuple[IntArray, IntArray] | None:
        """Return sources and steps of all options; None if there are none, or too many."""
        expanded: list[tuple[IntArray, IntArray]] = []
        at_once = max(1, MOST_PAIRS // len(states))
        for first in range(0, len(self._shares), at_once):
            shares = self._shares[first : first + at_once]
            share, source = np.nonzero(self._allowed(states, shares))
            pairs = [(shares[:, c][share], states[:, c][source]) for c in range(len(self.moves))]
            counts = [moves.count[pair] for moves, pair in zip(self.moves, pairs, strict=True)]
            total = np.prod(counts, axis=0)
            most -= int(total.sum())
            if most < 0:
                return None
            place, rest = repeated(total)
            steps = np.empty((len(place), len(pairs)), np.int64)
            for c, (moves, pair) in reversed(list(enumerate(zip(self.moves, pairs, strict=True)))):
                steps[:, c] = moves.first[pair][place]
                if counts[c].max(initial=1) > 1:
                    rest, offset = np.divmod(rest, counts[c][place])
                    steps[:, c] += offset
            expanded.append((source[place], steps))
        if not sum(len(source) for source, _ in expanded):
            return None
        source, steps = (np.concatenate(parts) for parts in zip(*expanded, strict=True))
        return source, steps

    @cached_property
    def _shares(self) -> IntArray:
        """Ways to share a stage's units among classes, by the numbers that each class can give.

        Shape ``(num_ways, num_classes)``.
        """
        numbers = [np.flatnonzero(moves.count.any(axis=1)).tolist() for moves in self.moves]
        ways = list(_compositions(self.dp, numbers))
        return np.array(ways, dtype=np.int64).reshape(-1, len(self.moves))

    def _allowed(self, states: IntArray, shares: IntArray) -> BoolArray:
        """Return the vertices at which each way to share a stage is possible, as a mask."""
        enough = np.ones((len(shares), len(states)), np.bool_)
        parts = np.zeros((len(shares), len(states)), np.int64)
        for c, moves in enumerate(self.moves):
            free, units = moves.free[states[:, c]], shares[:, c, None]
            enough &= free >= units
            parts += (free > units) & (units > 0)
        return enough & (parts <= 1) if self.scope.pure else enough


@dataclass(slots=True, kw_only=True)
class Growth:
    """Options of the graph if all cuts cost the same: no more than of any graph with prices.

    So what is too large here is too large for every size of the micro-batch, and every graph is the
    begin of those with more stages.
    """

    grower: Grower
    _states: IntArray = field(init=False)  # vertices of the last level, as in `Level`
    _size: int = field(init=False)  # options up to it
    # Options up to each level, before equal ones are joined
    _needed: list[int] = field(init=False)
    _too_few: int = -1  # a limit that the next level exceeds

    def __post_init__(self) -> None:
        """Begin with the first stage."""
        first = self.grower.first()
        self._states, self._size, self._needed = first.states, len(first.source), [0]

    def exceeds(self, num_stages: int, max_options: int) -> bool:
        """Return whether a graph of so many stages certainly has more options than a limit."""
        while len(self._needed) < num_stages and max(self._needed) <= max_options:
            if max_options <= self._too_few:
                return True
            options = self.grower.expanded(self._states, max_options - self._size)
            level = options and self.grower.joined(len(self._states), *options)
            if not options or not level:
                self._too_few = max_options
                return True
            self._needed.append(self._size + len(options[0]))
            self._states, self._size = level.states, self._size + len(level.source)
        return max(self._needed[:num_stages]) > max_options


@lru_cache(maxsize=16)
def growth_of(moves: tuple[ClassMoves, ...], dp: int, scope: Scope, effort: SearchEffort) -> Growth:
    """Return the growth of a graph; candidates with the same tp and dp share it."""

    def same(relations: Sequence[tuple[Pairs, ...]]) -> list[tuple[CutRow, ...]]:
        return [(CutRow(row=0, matching=()),)] * len(relations)

    return Growth(grower=Grower(moves=moves, dp=dp, cut_rows=same, scope=scope, effort=effort))


def _compositions(units: int, numbers: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield every way to add up ``units`` from one number per class."""
    if not numbers:
        if not units:
            yield ()
        return
    for share in numbers[0]:
        if share <= units:
            for later in _compositions(units - share, numbers[1:]):
                yield (share, *later)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGraph:
    """All options, stage by stage.

    An option runs a stage at one vertex and leads to a vertex of the next stage; each vertex of the
    last stage has one option, which ends the pipeline.
    """

    levels: tuple[Level, ...]  # the vertices of every stage

    @cached_property
    def source(self) -> IntArray:
        """Vertex of each option's stage within its level."""
        last = np.arange(len(self.levels[-1].states))
        return np.concatenate([*(level.source for level in self.levels[1:]), last])

    @cached_property
    def depth(self) -> IntArray:
        """Stage of each option."""
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.repeat(np.arange(len(self.levels)), [*sizes, len(self.levels[-1].states)])

    @cached_property
    def vertex(self) -> IntArray:
        """Vertex of each option's stage among all vertices."""
        return self._first_vertex[self.depth] + self.source

    @cached_property
    def ends(self) -> tuple[IntArray, IntArray]:
        """States that options lead from and to.

        All vertices of the first stage are state 0; the highest state is the end of the pipeline.
        """
        shift = len(self.levels[0].states) - 1
        from_state = np.maximum(self.vertex - shift, 0)
        targets = [
            self._first_vertex[depth] + level.target - shift
            for depth, level in enumerate(self.levels)
            if depth
        ]
        end = int(self._first_vertex[-1]) - shift
        to_state = np.concatenate([*targets, np.full(len(self.levels[-1].states), end)])
        return from_state, to_state

    @cached_property
    def cut_rows(self) -> tuple[IntArray, IntArray]:
        """Rows of the cuts before and after each option's stage; -1 where there is no cut."""
        of_vertex = np.concatenate([level.cut_row for level in self.levels])
        after = [level.cut_row[level.target] for level in self.levels[1:]]
        none = np.full(len(self.levels[-1].states), NO_ROW)
        return of_vertex[self.vertex], np.concatenate([*after, none])

    def path(self, options: Sequence[int]) -> tuple[IntArray, list[int]]:
        """Return the steps and cut rows of a chain of options.

        Returns:
            Steps of shape ``(pp, num_classes)``, and the row of the cut before each stage but
            the first.
        """
        first = int(self.source[options[0]])
        steps = [self.levels[0].steps[int(np.argmax(self.levels[0].target == first))]]
        rows = []
        for depth, option in enumerate(options[:-1], start=1):
            within = option - int(self._first_option[depth - 1])
            level = self.levels[depth]
            steps.append(level.steps[within])
            rows.append(int(level.cut_row[level.target[within]]))
        return np.array(steps), rows

    @cached_property
    def _first_option(self) -> IntArray:
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    @cached_property
    def _first_vertex(self) -> IntArray:
        """Index of each level's first vertex among all vertices; then the number of vertices."""
        sizes = [len(level.states) for level in self.levels]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
