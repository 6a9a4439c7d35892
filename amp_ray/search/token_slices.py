"""Token slices of a candidate, chosen together with its cuts.

With ``M`` micro-batches of slices that the slowest stage runs in ``f`` and ``w``, 1F1B takes
about::

    M (sum f + sum w) + (sum over stages / slowest stage - 1) (max f + max w)

The solver minimises this over slices whose activations fit into memory; all slices of a micro-batch
are in flight at once. Cuts are then chosen for the slices, and slices for the cuts, in turn. The
event simulation estimates the result.

Slice times come from the cost model, or from a file of measured latencies: a slice of ``b``
sequences and ``s`` tokens with ``c`` tokens of context before it takes::

    t(b, s, c) = l * (t(b, s, 0) + x * b c + y * b s c) + message(b s)

``t(b, s, 0)`` is the measured time. The term of ``x`` reads the keys and values of the context once
per slice, the term of ``y`` computes the scores of all pairs of tokens. ``x`` and ``y`` are fitted
to the measurements with context by non-negative least squares, for each pass separately.

References:
    Li et al., TeraPipe, arXiv:2102.07988, section 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.samples import PASSES, context_costs, largest_share
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.slice_table import SlicePoints, SliceTable
from amp_ray.partition.slices import (
    Slices,
    SliceSolution,
    SliceTables,
    packed_index,
    solve_slices,
)
from amp_ray.search.cuts import best_bounds
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, TokenSlices


@dataclass(frozen=True, kw_only=True, eq=False)
class Granules:
    """Positions at which sequences may be cut."""

    tokens: int  # length of a sequence
    # Slices begin at multiples of this; the last granule may be shorter
    granularity: int

    @property
    def count(self) -> int:
        """Number of granules, ``n``."""
        return -(-self.tokens // self.granularity)

    @cached_property
    def cells(self) -> tuple[IntArray, IntArray]:
        """Tokens and context of every slice, shape ``(n (n + 1) / 2,)``, by end, then size."""
        ends = np.repeat(np.arange(1, self.count + 1), np.arange(1, self.count + 1))
        sizes = np.concatenate([np.arange(1, end + 1) for end in range(1, self.count + 1)])
        context = (ends - sizes) * self.granularity
        return np.minimum(ends * self.granularity, self.tokens) - context, context

    def in_tokens(self, slices: Slices) -> TokenSlices:
        """Convert slices from granules to tokens.

        Example:
            >>> Granules(tokens=10, granularity=4).in_tokens(((2, (1, 2)),))
            ((2, (4, 6)),)
        """
        return tuple((sequences, self._tokens(sizes)) for sequences, sizes in slices)

    def _tokens(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        bounds = np.minimum(np.cumsum((0, *sizes)) * self.granularity, self.tokens)
        return tuple(np.diff(bounds).tolist())


def slice_tables(table: SliceTable) -> SliceTables:
    """Build the solver's tables from measured latencies; slices without one cannot run."""
    granules = Granules(tokens=table.tokens, granularity=table.granularity)
    fill = _fitted if table.fitted else _dense
    times_s = table.num_layers * fill(table, granules)
    if table.message_s:
        size = np.arange(1, table.batch + 1)[:, None] * granules.cells[0]
        times_s = times_s + np.interp(size, table.message_tokens, table.message_s)
    return SliceTables(forward_s=times_s[0], backward_s=times_s[1])


def _dense(table: SliceTable, granules: Granules) -> FloatArray:
    """Return the measured times as an array of shape ``(2, B, cells)``."""
    size, context = granules.cells
    times_s = np.full((len(PASSES), table.batch, len(size)), np.inf)
    points = table.points
    runs = _within(points, table.memory_cap_mb)
    sequences, tokens, before = points.places[runs].T
    end = before + tokens
    number = -(-end // table.granularity)  # granules up to the end
    first = before // table.granularity
    cell = number * (number - 1) // 2 + number - first - 1
    fits = (sequences <= table.batch) & (end <= table.tokens)
    cell = np.where(fits, cell, 0)
    fits &= (size[cell] == tokens) & (context[cell] == before)
    times_s[:, sequences[fits] - 1, cell[fits]] = points.times_s[runs][fits].T
    return times_s


def _within(points: SlicePoints, cap_mb: float | None) -> NDArray[np.bool_]:
    """Return which points meet the memory cap, as a mask."""
    if cap_mb is None:
        return np.ones(len(points.places), dtype=bool)
    within: NDArray[np.bool_] = points.memory_mb <= cap_mb
    return within


def _fitted(table: SliceTable, granules: Granules) -> FloatArray:
    """Return the times measured without context, plus the fitted cost of context."""
    size, context = granules.cells
    points = table.points
    runs = _within(points, table.memory_cap_mb)
    alone = runs & (points.places[:, 2] == 0)
    times_s = np.full((len(PASSES), table.batch, len(size)), np.inf)
    for sequences in range(1, table.batch + 1):
        measured = alone & (points.places[:, 0] == sequences)
        if measured.any():
            tokens, order = np.unique(points.places[measured, 1], return_index=True)
            for way in range(len(PASSES)):
                measured_s = points.times_s[measured, way][order]
                times_s[way, sequences - 1] = _between(size, tokens, measured_s, granules)
    many = np.arange(1, table.batch + 1)[:, None]
    for way in range(len(PASSES)):
        read, scored = context_costs(points, way)
        times_s[way] += read * many * context + scored * many * size * context
    times_s[:, _beyond(table, runs, size, context)] = np.inf
    return times_s


def _between(
    size: IntArray, tokens: IntArray, measured_s: FloatArray, granules: Granules
) -> FloatArray:
    """Interpolate the times of the shorter last slices; sizes in a gap cannot run."""
    times_s = np.interp(size, tokens, measured_s, left=np.inf, right=np.inf)
    below = np.maximum(np.searchsorted(tokens, size, side="right") - 1, 0)
    above = np.minimum(np.searchsorted(tokens, size), len(tokens) - 1)
    apart = tokens[above] - tokens[below] > granules.granularity
    return np.where(apart, np.inf, times_s)


def _beyond(
    table: SliceTable, runs: NDArray[np.bool_], size: IntArray, context: IntArray
) -> NDArray[np.bool_]:
    """Return which slices are at least as large as one that ran out of memory, as a mask.

    Measurements with context cover a grid of sequences, tokens and contexts; a point missing from
    the grid ran out of memory. The mask has shape ``(B, cells)``.
    """
    places = table.points.places
    measured = places[places[:, 2] > 0]
    there = set(map(tuple, places[runs].tolist()))
    axes = [np.unique(measured[:, axis]).tolist() for axis in range(3)]
    missing = [
        (sequences, tokens, before)
        for sequences in axes[0]
        for tokens in axes[1]
        for before in axes[2]
        if tokens + before <= table.tokens and (sequences, tokens, before) not in there
    ]
    many = np.arange(1, table.batch + 1)[:, None]
    beyond = np.zeros((table.batch, len(size)), dtype=bool)
    for sequences, tokens, before in missing:
        beyond |= (many >= sequences) & (size >= tokens) & (context >= before)
    return beyond


def plan_slices(
    cost_model: CostModel,
    candidate: Candidate,
    costs: StageCosts,
    bounds: tuple[int, ...],
    effort: SearchEffort = EFFORT,
) -> Estimate | None:
    """Return the best plan of a candidate with token slices.

    ``bounds`` are the first cuts: the best for whole micro-batches. The result is None if no slices
    beat whole micro-batches by the closed form.
    """
    search = _Search(cost_model=cost_model, candidate=candidate, costs=costs, effort=effort)
    if candidate.pp == 1 or search.granules.count == 1:
        return None
    token_slices = search.slices(bounds)
    for _ in range(effort.slice_rounds - 1):
        if token_slices is None:
            return None
        again = search.bounds(token_slices)
        if again == bounds:
            break
        bounds, token_slices = again, search.slices(again)
    if token_slices is None:
        return None
    strategy = replace(Strategy.uniform(candidate, bounds), token_slices=token_slices)
    return cost_model.estimate_from(costs, strategy)


def granules_of(experiment: Experiment, effort: SearchEffort = EFFORT) -> Granules:
    """Return the granules of an experiment's sequences."""
    tokens = experiment.model.shape.sequence_length
    granularity = experiment.limits.slice_granularity or -(-tokens // effort.slice_granules)
    return Granules(tokens=tokens, granularity=granularity)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    cost_model: CostModel
    candidate: Candidate
    costs: StageCosts
    effort: SearchEffort

    @property
    def granules(self) -> Granules:
        return granules_of(self.cost_model.experiment, self.effort)

    def slices(self, bounds: tuple[int, ...]) -> TokenSlices | None:
        """Return the best slices for these cuts; None if the whole micro-batch is best."""
        whole_s = self.costs.times.at(bounds)[:2].sum(axis=0).max(axis=1)
        tables = self._tables(bounds)
        later = float(whole_s.sum() / whole_s.max()) - 1
        solution = solve_slices(tables, (float(self.candidate.num_micro_batches), later))
        if not isinstance(solution, SliceSolution):
            return None
        ((_, tokens),) = self.granules.in_tokens(solution.slices)
        return None if len(tokens) == 1 else ((self.candidate.micro_batch_size, tokens),)

    def bounds(self, token_slices: TokenSlices) -> tuple[int, ...]:
        """Return the best cuts for these slices; each slice counts as a micro-batch."""
        stages = self.costs.stages
        number = stages.num_micro_batches * len(token_slices[0][1])
        costs = replace(
            self.costs,
            stages=replace(stages, num_micro_batches=number),
            chosen_memory=self.costs.memory.sliced(largest_share(token_slices)),
        )
        return best_bounds(self.cost_model.experiment, costs)

    def _tables(self, bounds: tuple[int, ...]) -> SliceTables:
        """Return the times of the micro-batch's slices on the slowest stage.

        The cost of context per token is that of a slice at the end of the sequence, computed for a
        few lengths of slices and interpolated between them.
        """
        granules = self.granules
        size, context = granules.cells
        last = [packed_index(granules.count, number) for number in range(1, granules.count + 1)]
        alone = [packed_index(number, number) for number in range(1, granules.count + 1)]
        lengths = np.union1d(size[last], size[alone])
        alone_s = self._seconds(bounds, [(tokens, 0) for tokens in lengths.tolist()])
        some = np.unique(
            np.linspace(0, len(lengths) - 1, self.effort.slice_contexts).round().astype(np.int64)
        )
        before = (granules.tokens - lengths[some]) // granules.granularity * granules.granularity
        places = zip(lengths[some].tolist(), before.tolist(), strict=True)
        with_s = self._seconds(bounds, list(places))
        added_s = np.maximum(0.0, with_s - alone_s[:, some]) / np.maximum(before, 1)
        # The longest slice is a whole sequence, which has no context.
        tokens = lengths[some][before > 0]
        per_token_s = np.array([np.interp(lengths, tokens, way[before > 0]) for way in added_s])
        of_cell = np.searchsorted(lengths, size)
        times_s = alone_s[:, of_cell] + per_token_s[:, of_cell] * context
        times_s[:, size > self._most_tokens(bounds)] = np.inf
        return SliceTables(forward_s=times_s[:1], backward_s=times_s[1:])

    def _seconds(self, bounds: tuple[int, ...], places: Sequence[tuple[int, int]]) -> FloatArray:
        """Return forward and backward seconds on the slowest stage, messages included."""
        seconds = np.empty((2, len(places)))
        for index, (tokens, context) in enumerate(places):
            place = self.candidate.micro_batch_size, tokens, context
            passes_s, sends_s = self.costs.slices.seconds(bounds, place)
            seconds[:, index] = passes_s[:2].max(axis=(1, 2)) + sends_s.max(axis=(1, 2))
        return seconds

    def _most_tokens(self, bounds: tuple[int, ...]) -> int:
        """Return the largest slice, in tokens, with which all stages fit their memory.

        If none fits, allow all: the estimate then shows how much memory is missing.
        """
        granules = self.granules
        low, high = 0, granules.count
        while low < high:
            middle = (low + high + 1) // 2
            share = min(1.0, middle * granules.granularity / granules.tokens)
            peaks = self.costs.memory.sliced(share).peaks(bounds)
            if all(peak <= device.memory_bytes for peak, device in peaks):
                low = middle
            else:
                high = middle - 1
        return low * granules.granularity or granules.tokens
