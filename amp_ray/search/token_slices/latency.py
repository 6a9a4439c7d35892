"""What slices of a sequence take on one stage, as tables for the solver.

A slice of ``b`` sequences and ``s`` tokens with ``c`` tokens of context before it takes::

    t(b, s, c) = l * (t(b, s, 0) + x * b c + y * b s c) + message(b s)

``t(b, s, 0)`` is kept as it was measured. Context costs what its keys and values are read for, once
per slice, and for the scores of all pairs of tokens; neither can be negative, so ``x`` and ``y``
are the non-negative least squares of what was measured with context, for each pass of its own.

References:
    Li et al., TeraPipe, arXiv:2102.07988, section 3.3.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.samples import PASSES, context_costs
from amp_ray.inputs.slice_table import SlicePoints, SliceTable
from amp_ray.partition.slices.problem import Slices, SliceTables
from amp_ray.strategies.strategy import TokenSlices


@dataclass(frozen=True, kw_only=True, eq=False)
class Granules:
    """Where sequences may be cut."""

    tokens: int  # of a sequence
    # Slices begin at its multiples; what it does not divide is left to the last one
    granularity: int

    @property
    def count(self) -> int:
        """``n``."""
        return -(-self.tokens // self.granularity)

    @cached_property
    def cells(self) -> tuple[IntArray, IntArray]:
        """Tokens and context of every slice, shape ``(n (n + 1) / 2,)``, by end, then size."""
        ends = np.repeat(np.arange(1, self.count + 1), np.arange(1, self.count + 1))
        sizes = np.concatenate([np.arange(1, end + 1) for end in range(1, self.count + 1)])
        context = (ends - sizes) * self.granularity
        return np.minimum(ends * self.granularity, self.tokens) - context, context

    def in_tokens(self, slices: Slices) -> TokenSlices:
        """Return slices that are counted in granules, in tokens.

        Example:
            >>> Granules(tokens=10, granularity=4).in_tokens(((2, (1, 2)),))
            ((2, (4, 6)),)
        """
        return tuple((sequences, self._tokens(sizes)) for sequences, sizes in slices)

    def _tokens(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of the slices of one sequence."""
        bounds = np.minimum(np.cumsum((0, *sizes)) * self.granularity, self.tokens)
        return tuple(np.diff(bounds).tolist())


def slice_tables(table: SliceTable) -> SliceTables:
    """Return the solver's tables of a file of latencies; what is not in it cannot run."""
    granules = Granules(tokens=table.tokens, granularity=table.granularity)
    fill = _fitted if table.fitted else _dense
    times_s = table.num_layers * fill(table, granules)
    if table.message_s:
        size = np.arange(1, table.batch + 1)[:, None] * granules.cells[0]
        times_s = times_s + np.interp(size, table.message_tokens, table.message_s)
    return SliceTables(forward_s=times_s[0], backward_s=times_s[1])


def _dense(table: SliceTable, granules: Granules) -> FloatArray:
    """Return points at their places, shape ``(2, B, cells)``."""
    size, context = granules.cells
    times_s = np.full((len(PASSES), table.batch, len(size)), np.inf)
    points = table.points
    runs = _within(points, table.memory_cap_mb)
    sequences, tokens, before = points.places[runs].T
    end = before + tokens
    number = -(-end // table.granularity)  # of granules up to the end
    first = before // table.granularity
    cell = number * (number - 1) // 2 + number - first - 1
    fits = (sequences <= table.batch) & (end <= table.tokens)
    cell = np.where(fits, cell, 0)
    fits &= (size[cell] == tokens) & (context[cell] == before)
    times_s[:, sequences[fits] - 1, cell[fits]] = points.times_s[runs][fits].T
    return times_s


def _within(points: SlicePoints, cap_mb: float | None) -> NDArray[np.bool_]:
    """Tell which points meet the memory cap."""
    if cap_mb is None:
        return np.ones(len(points.places), dtype=bool)
    within: NDArray[np.bool_] = points.memory_mb <= cap_mb
    return within


def _fitted(table: SliceTable, granules: Granules) -> FloatArray:
    """Return what was measured without context, and context by its fit."""
    size, context = granules.cells
    points = table.points
    runs = _within(points, table.memory_cap_mb)
    alone = runs & (points.places[:, 2] == 0)
    times_s = np.full((len(PASSES), table.batch, len(size)), np.inf)
    for sequences in range(1, table.batch + 1):
        own = alone & (points.places[:, 0] == sequences)
        if own.any():
            tokens, order = np.unique(points.places[own, 1], return_index=True)
            for way in range(len(PASSES)):
                measured_s = points.times_s[own, way][order]
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
    """Interpolate the remainder of a sequence; a size that was not measured cannot run."""
    found = np.interp(size, tokens, measured_s, left=np.inf, right=np.inf)
    below = np.maximum(np.searchsorted(tokens, size, side="right") - 1, 0)
    above = np.minimum(np.searchsorted(tokens, size), len(tokens) - 1)
    apart = tokens[above] - tokens[below] > granules.granularity
    return np.where(apart, np.inf, found)


def _beyond(
    table: SliceTable, runs: NDArray[np.bool_], size: IntArray, context: IntArray
) -> NDArray[np.bool_]:
    """Tell which slices are as large as one that was tried with context and ran out of memory.

    A measurement with context covers a grid of sequences, tokens and contexts; what is missing of
    it had no room.

    Returns:
        Shape ``(B, cells)``.
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
