"""The graph's levels laid end to end: options and places numbered through all stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_ray.cost.topology import IntArray
from amp_ray.partition import NO_ROW
from amp_ray.search.placement.graph import Level


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGraph:
    """All options, stage by stage.

    An option runs a stage in one place and leads to a place of the next stage; each place of the
    last stage has one option, which ends the pipeline.

    Args:
        levels: The places of every stage.
    """

    levels: tuple[Level, ...]

    @cached_property
    def source(self) -> IntArray:
        """Place of each option's stage within its level."""
        last = np.arange(len(self.levels[-1].states))
        return np.concatenate([*(level.source for level in self.levels[1:]), last])

    @cached_property
    def depth(self) -> IntArray:
        """Stage of each option."""
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.repeat(np.arange(len(self.levels)), [*sizes, len(self.levels[-1].states)])

    @cached_property
    def place(self) -> IntArray:
        """Place of each option's stage among all places."""
        return self._first_place[self.depth] + self.source

    @cached_property
    def ends(self) -> tuple[IntArray, IntArray]:
        """States that options lead from and to.

        All places of the first stage are state 0; the highest state is the end of the pipeline.
        """
        shift = len(self.levels[0].states) - 1
        from_state = np.maximum(self.place - shift, 0)
        targets = [
            self._first_place[depth] + level.target - shift
            for depth, level in enumerate(self.levels)
            if depth
        ]
        end = int(self._first_place[-1]) - shift
        to_state = np.concatenate([*targets, np.full(len(self.levels[-1].states), end)])
        return from_state, to_state

    @cached_property
    def cut_rows(self) -> tuple[IntArray, IntArray]:
        """Row of the cut before and after each option's stage; none is -1."""
        of_place = np.concatenate([level.cut_row for level in self.levels])
        after = [level.cut_row[level.target] for level in self.levels[1:]]
        none = np.full(len(self.levels[-1].states), NO_ROW)
        return of_place[self.place], np.concatenate([*after, none])

    def path(self, options: Sequence[int]) -> tuple[IntArray, list[int]]:
        """Lead options back to steps.

        Args:
            options: Of a solution.

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
        """First option of each stage."""
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    @cached_property
    def _first_place(self) -> IntArray:
        """Number of each level's first place among all places; at last that of all."""
        sizes = [len(level.states) for level in self.levels]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
