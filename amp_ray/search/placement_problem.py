"""Orders of nodes over stages, posed as the one partition problem; and the tail as a cap on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.partition import NO_ROW, PartitionProblem, StageOptions, StageTables
from amp_ray.search.placement_graph import Level
from amp_ray.search.placement_nodes import ClassMoves
from amp_ray.search.placement_numbers import numbered
from amp_ray.search.placement_prices import BlockPrices, Prices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageNeeds:
    """What the stages of a candidate need, wherever they run.

    Args:
        earliest_start: Per size of a device's memory, shape ``(pp, num_layers + 1)``. The
            smallest start of each stage that fits.
        latest_start: Shape ``(num_layers + 1,)``. Last start of a stage with all it must have;
            empty where it needs nothing.
        parameters: Shape ``(num_layers + 1,)``. Prefix sums over the layers, of one rank.
        tied_counts: Whether the time of tied weights is to be told by the stages at both ends.
    """

    earliest_start: dict[float, IntArray]
    latest_start: IntArray
    parameters: FloatArray
    tied_counts: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """All placements of one candidate, as a partition problem.

    Args:
        levels: The places of every stage.
        moves: Steps of every class.
        prices: Of blocks and cuts.
        needs: Memory and parameters.
        blocking: Whether transfers block their stages.
    """

    levels: tuple[Level, ...]
    moves: tuple[ClassMoves, ...]
    prices: Prices
    needs: StageNeeds
    blocking: bool

    @property
    def work(self) -> int:
        """Options times layers that their stages can end at: what a cap on the beat takes."""
        return len(self._option_source) * (self.problem.num_layers + 1 - len(self.levels))

    def capped(self, cap_s: float, tied_s: float) -> PartitionProblem:
        """Return the problem in which no stage's tail takes longer than a cap.

        Args:
            cap_s: Seconds; may be infinite.
            tied_s: One of `tied_times_s`. Only placements whose tied weights take no longer are
                left, and the ends of the pipeline are charged as much.
        """
        _, _, tails, ends = self._memory_keys[0].T
        tied = np.concatenate((self.tied_times_s, (0.0, 0.0)))
        middle, charged = (self._tail_starts(cap_s, extra_s) for extra_s in (0.0, tied_s))
        limits = np.where(
            (ends == len(self.tied_times_s) + 1)[:, None], middle[tails], charged[tails]
        )
        nowhere = np.arange(limits.shape[1])
        limits = np.where((tied[ends] > tied_s)[:, None], nowhere, limits)
        starts = np.maximum(self._memory_rows, limits)
        return replace(self.problem, tables=replace(self.problem.tables, earliest_start=starts))

    @cached_property
    def problem(self) -> PartitionProblem:
        """The problem without a cap on the tail."""
        blocks, cuts = self._blocks[0], self.prices.cut_time_s
        num_layers = blocks.time_prefix_s.shape[1] - 1
        cuts = cuts if len(cuts) else np.zeros((0, num_layers + 1))
        before, after = self._cut_rows
        pairs, beat_row = self._beats(before, after)
        padded = np.vstack([cuts, np.zeros((1, num_layers + 1))])
        from_state, to_state = self._states
        return PartitionProblem(
            tables=StageTables(
                time_prefix_s=blocks.time_prefix_s,
                cut_time_s=cuts,
                beat_start_s=padded[pairs[:, 0]],
                beat_end_s=padded[pairs[:, 1]],
                earliest_start=self._memory_rows,
                latest_start=self.needs.latest_start,
            ),
            options=StageOptions(
                time_row=blocks.time_row[self._block_of_option],
                from_state=from_state,
                to_state=to_state,
                cut_row=before,
                beat_row=beat_row,
                memory_row=self._memory_row_of_option,
            ),
            num_micro_batches=self.prices.candidate.num_micro_batches,
        )

    def tail_s(self, bounds: Sequence[int], options: Sequence[int], tied_s: float) -> float:
        """Return what the slowest stage's tail takes.

        Args:
            bounds: Of the stages.
            options: Of the stages.
            tied_s: Charged to the ends.
        """
        kinds = self._tail_of_block[self._block_of_option[list(options)]]
        tails = self._tail_table[kinds, bounds[:-1], bounds[1:]]
        return float(max(tails.max(), tails[[0, -1]].max() + tied_s))

    @cached_property
    def tied_times_s(self) -> FloatArray:
        """The different times that tied weights can take, ascending; 0 where it does not count."""
        return np.unique(self._tied_of_place)

    @cached_property
    def least_tail_s(self) -> float:
        """No stage that holds an even share, or the largest layer, has a shorter tail."""
        held = self.needs.parameters
        most = max(float(np.diff(held).max()), float(held[-1]) / len(self.levels))
        kinds = self._tail_kinds
        return float((kinds[:, 0] + kinds[:, 1] * most).min())

    def path(self, options: Sequence[int]) -> tuple[IntArray, list[int]]:
        """Lead options back to steps.

        Args:
            options: Of a solution.

        Returns:
            Steps of shape ``(pp, num_classes)``, and the row of the cut before each stage but
            the first.
        """
        first = int(self._option_source[options[0]])
        steps = [self.levels[0].steps[int(np.argmax(self.levels[0].target == first))]]
        rows = []
        for depth, option in enumerate(options[:-1], start=1):
            within = option - int(self._offsets[depth - 1])
            level = self.levels[depth]
            steps.append(level.steps[within])
            rows.append(int(level.cut_row[level.target[within]]))
        return np.array(steps), rows

    @cached_property
    def _tied_of_place(self) -> FloatArray:
        """Time of the tied weights by the last stage's place."""
        places = self.levels[-1].states
        if not self.needs.tied_counts:
            return np.zeros(len(places))
        columns = [moves.ends_of_state[places[:, c]] for c, moves in enumerate(self.moves)]
        kinds, kind = numbered(*columns)
        times_s = [
            self.prices.tied_s(
                tuple(moves.ends[index] for moves, index in zip(self.moves, row, strict=True))
            )
            for row in kinds.tolist()
        ]
        return np.array(times_s)[kind]

    @cached_property
    def _offsets(self) -> IntArray:
        """First option of each stage."""
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    @cached_property
    def _option_source(self) -> IntArray:
        """Place of each option's stage within its level."""
        last = np.arange(len(self.levels[-1].states))
        return np.concatenate([*(level.source for level in self.levels[1:]), last])

    @cached_property
    def _option_depth(self) -> IntArray:
        """Stage of each option."""
        sizes = [len(level.source) for level in self.levels[1:]]
        return np.repeat(np.arange(len(self.levels)), [*sizes, len(self.levels[-1].states)])

    @cached_property
    def _place_offsets(self) -> IntArray:
        """Number of each level's first place among all places."""
        sizes = [len(level.states) for level in self.levels]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    @cached_property
    def _option_place(self) -> IntArray:
        """Place of each option's stage among all places."""
        return self._place_offsets[self._option_depth] + self._option_source

    @cached_property
    def _states(self) -> tuple[IntArray, IntArray]:
        """States of the problem: all places of the first stage are state 0, the end is last."""
        shift = len(self.levels[0].states) - 1
        from_state = np.maximum(self._option_place - shift, 0)
        targets = [
            self._place_offsets[depth] + level.target - shift
            for depth, level in enumerate(self.levels)
            if depth
        ]
        end = int(self._place_offsets[-1]) - shift
        to_state = np.concatenate([*targets, np.full(len(self.levels[-1].states), end)])
        return from_state, to_state

    @cached_property
    def _cut_rows(self) -> tuple[IntArray, IntArray]:
        """Row of the cut before and after each option's stage; none is -1."""
        of_place = np.concatenate([level.cut_row for level in self.levels])
        after = [level.cut_row[level.target] for level in self.levels[1:]]
        none = np.full(len(self.levels[-1].states), NO_ROW)
        return of_place[self._option_place], np.concatenate([*after, none])

    def _beats(self, before: IntArray, after: IntArray) -> tuple[IntArray, IntArray]:
        """Return the different pairs of cuts around a stage, and each option's pair."""
        if not self.blocking:
            return np.empty((0, 2), np.int64), np.full(len(before), NO_ROW)
        pairs, row = numbered(before + 1, after + 1)
        return pairs - 1, row

    @cached_property
    def _blocks(self) -> tuple[BlockPrices, IntArray]:
        """Prices of the different blocks, and the block of each place."""
        places = np.concatenate([level.states for level in self.levels])
        columns = [moves.block_of_state[places[:, c]] for c, moves in enumerate(self.moves)]
        kinds, kind = numbered(*columns)
        blocks = [
            tuple(moves.blocks[index] for moves, index in zip(self.moves, row, strict=True))
            for row in kinds.tolist()
        ]
        return self.prices.blocks(blocks), kind

    @cached_property
    def _block_of_option(self) -> IntArray:
        """Block of each option's stage."""
        return self._blocks[1][self._option_place]

    @cached_property
    def _tail_kinds(self) -> FloatArray:
        """The different tails, shape ``(num_tails, 2)``."""
        return np.unique(self._blocks[0].tails, axis=0)

    @cached_property
    def _tail_of_block(self) -> IntArray:
        """Tail of each block."""
        _, kind = np.unique(self._blocks[0].tails, axis=0, return_inverse=True)
        return kind.reshape(-1).astype(np.int64)

    @cached_property
    def _tail_table(self) -> FloatArray:
        """Seconds by tail, first layer and end, shape ``(num_tails, L + 1, L + 1)``."""
        held = self.needs.parameters
        inside = np.maximum(held[None, :] - held[:, None], 0.0)
        kinds = self._tail_kinds
        return kinds[:, 0, None, None] + kinds[:, 1, None, None] * inside

    def _tail_starts(self, cap_s: float, extra_s: float) -> IntArray:
        """Return per tail and end the first start under the cap; the end itself where none is."""
        within = self._tail_table + extra_s <= cap_s
        ends = np.arange(within.shape[1])
        within |= ends[:, None] >= ends
        starts: IntArray = within.argmax(axis=1)
        return starts

    @cached_property
    def _memory_keys(self) -> tuple[IntArray, IntArray]:
        """The different (stage, memory, tail, end) of options, and each option's."""
        blocks = self._blocks[0]
        sizes = np.array(sorted(self.needs.earliest_start))
        size = np.searchsorted(sizes, blocks.memory_bytes)[self._block_of_option]
        tail = self._tail_of_block[self._block_of_option]
        ends = np.full(len(size), len(self.tied_times_s) + 1)
        if len(self.levels) > 1:
            ends[self._option_depth == 0] = len(self.tied_times_s)
        last = len(self.levels[-1].states)
        ends[-last:] = np.searchsorted(self.tied_times_s, self._tied_of_place)
        return numbered(self._option_depth, size, tail, ends)

    @property
    def _memory_row_of_option(self) -> IntArray:
        """Row of each option's limits."""
        return self._memory_keys[1]

    @cached_property
    def _memory_rows(self) -> IntArray:
        """Earliest starts by memory alone, a row per (stage, memory, tail, end)."""
        starts = [self.needs.earliest_start[size] for size in sorted(self.needs.earliest_start)]
        keys = self._memory_keys[0]
        return np.array(starts)[keys[:, 1], keys[:, 0]]
