"""Cut a batch and its sequences into slices for a pipeline: the problem and its exact solver.

This package knows arrays, not devices. Planners fill `SliceTables`. A sequence has ``n`` granules;
a slice takes ``s`` of them, from ``b`` sequences at once. Its time depends on the ``c`` granules of
context before it. Tables are packed by ``(b, end, s)``, with ``end = c + s``, so that slices with
the same end are adjacent.

Equally fast stages take, with slices ``i`` of forward time ``f_i`` and backward time ``w_i``::

    sum_weight * (sum f + sum w) + max_weight * (max f + max w)

with weights 1 and ``K - 1`` for one batch on ``K`` stages. Let ``S(F, W)`` be the smallest sum with
no pass above ``F`` and ``W``. Slices whose slowest passes lie in a box cost at least
``S(top) + max_weight * (bottom)``, so the search takes the box with the least bound next. Each
evaluation at two caps finds slices with slowest passes below them, and settles the passes between.
As in `partition.exact`, evaluations alternate between the top of the most promising box and its
middle, until the middle finds no better slices; then only the top is used. Bounds move by single
floating-point numbers: there is no tolerance.

Through stages of unequal speed the time is the critical path of the forward passes, ``C(k, i) =
max(C(k - 1, i), C(k, i - 1)) + f_i v_k``, plus that of the backward passes. Every pair of stages
``a <= b`` gives a lower bound: a path can stay on stage ``a`` until the slowest slice, follow it to
``b`` and stay there. It takes at least ``min(v_a, v_b) (sum - max) + (v_a + ... + v_b) max``. The
search for equal stages finds the slices with the least bound. Then a branch and bound tries slices
in every order whose bound is below the best time. If that takes too many steps, the result is the
best so far, with the bound.

References:
    Li et al., TeraPipe, arXiv:2102.07988, minimise sum + (K - 1) max of forward and backward
    together, for bounds in ascending order at fixed distances.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.caps import BestFirst
from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason
from amp_ray.partition.slices.kernels import (
    PathArrays,
    SliceArrays,
    cheapest_slices,
    shortest_path,
    tightened,
)
from amp_ray.partition.tables import element

PATIENCE: Final = 12
"""Evaluations without better slices after which the search only raises its bound."""

Weights = tuple[float, float]
"""Weights of the sum and of the two slowest passes."""

Box = tuple[float, tuple[float, float], tuple[float, float], float, bool]
"""Bound of the value, least and largest slowest passes, smallest sum, whether tightened."""

Evaluation = tuple[float, float, float, float, float]
"""Result of `cheapest_slices`."""

Slices = tuple[tuple[int, tuple[int, ...]], ...]
"""Batch slices: sequences, and the granules of each of their token slices."""


def packed_index(end: int, size: int) -> int:
    """Return the column of a slice of ``size`` granules that ends after ``end`` of them.

    Example:
        >>> [packed_index(end, size) for end in (1, 2, 3) for size in range(1, end + 1)]
        [0, 1, 2, 3, 4, 5]
    """
    return end * (end - 1) // 2 + size - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceTables:
    """Times of every possible slice on one stage.

    Raises:
        ValueError: If shapes differ or fit no ``n``, or a time is negative or not a number.
    """

    # Shape ``(B, n (n + 1) / 2)``. Row ``b - 1``, column `packed_index`; infinite for a slice that
    # cannot run.
    forward_s: FloatArray
    backward_s: FloatArray  # the same shape, infinite in the same places

    def __post_init__(self) -> None:
        """Check and freeze; a slice that cannot run in one direction cannot run at all."""
        forward_s, backward_s = (
            _checked(name, getattr(self, name)) for name in ("forward_s", "backward_s")
        )
        if forward_s.shape != backward_s.shape:
            msg = f"forward_s has shape {forward_s.shape}, backward_s {backward_s.shape}"
            raise ValueError(msg)
        num_cells = forward_s.shape[1]
        if not forward_s.size or self.num_granules * (self.num_granules + 1) // 2 != num_cells:
            msg = f"forward_s has {num_cells} columns, expected n (n + 1) / 2 for some n"
            raise ValueError(msg)
        for array in (forward_s, backward_s):
            array[~np.isfinite(forward_s + backward_s)] = np.inf
            array.flags.writeable = False
        object.__setattr__(self, "forward_s", forward_s)
        object.__setattr__(self, "backward_s", backward_s)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, ``B``."""
        return len(self.forward_s)

    @property
    def num_granules(self) -> int:
        """Number of granules, ``n``."""
        return int((2 * np.shape(self.forward_s)[1]) ** 0.5)

    @cached_property
    def total_s(self) -> FloatArray:
        """Sum of forward and backward seconds, shaped like the tables."""
        return self.forward_s + self.backward_s

    @cached_property
    def regular(self) -> BoolArray:
        """Whether times never fall as slices with one end grow, shape ``(B, n)`` by end."""
        first = np.zeros(self.forward_s.shape[1], dtype=bool)
        ends = np.arange(1, self.num_granules + 1)
        first[ends * (ends - 1) // 2] = True
        falls = np.zeros(self.forward_s.shape, dtype=bool)
        for times_s in (self.forward_s, self.backward_s):
            falls[:, 1:] |= times_s[:, 1:] < times_s[:, :-1]
        falls[:, first] = False
        starts = np.flatnonzero(first)
        return ~np.logical_or.reduceat(falls, starts, axis=1)

    @cached_property
    def least_s(self) -> FloatArray:
        """Lower bounds on the slowest forward and backward pass, shape ``(B, 2)``, by sequences.

        Some slice begins a sequence, and some slice ends it.
        """
        ends = np.arange(1, self.num_granules + 1)
        begins, closes = ends * (ends + 1) // 2 - 1, slice(-self.num_granules, None)
        ways = (self.forward_s, self.backward_s)
        least = [np.maximum(way[:, begins].min(1), way[:, closes].min(1)) for way in ways]
        return np.stack(least, axis=1)

    def times_s(self, slices: Slices) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward seconds of every slice, in order."""
        cells = list(_cells(slices))
        rows, columns = [row for row, _ in cells], [column for _, column in cells]
        return self.forward_s[rows, columns], self.backward_s[rows, columns]


def _checked(name: str, values: ArrayLike) -> FloatArray:
    """Return a copy of a table of times, or raise if it is invalid."""
    array = np.array(values, dtype=np.float64, order="C")
    if array.ndim != 2:  # noqa: PLR2004 - batch and cell
        msg = f"{name} has shape {array.shape}, expected 2 dimensions"
        raise ValueError(msg)
    if not (array >= 0.0).all():
        index = np.argwhere(~(array >= 0.0))[0]
        msg = f"{element(name, *index)} is {array[tuple(index)]}: times must not be negative"
        raise ValueError(msg)
    return array


def _cells(slices: Slices) -> Iterator[tuple[int, int]]:
    for sequences, sizes in slices:
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            yield sequences - 1, packed_index(end, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSolution:
    """The best slices, or the best so far with a lower bound."""

    slices: Slices  # in the order in which they run
    value_s: float  # their objective
    lower_bound_s: float  # no slices cost less; equals ``value_s`` once proven
    num_evaluations: int  # pairs of caps that were tried


def critical_path_s(times_s: FloatArray, factors: Sequence[float]) -> float:
    """Return the end time of the last stage, if every stage takes all slices in order.

    ``C(k, i) = max(C(k - 1, i), C(k, i - 1)) + times[i] factors[k]``. Run backwards, with stages
    and slices in reverse, it takes as long.

    Example:
        >>> critical_path_s(np.array([1.0, 2.0]), (1.0, 3.0))
        10.0
    """
    done_s = np.zeros(len(times_s))
    for factor in factors:
        # C(k, i) is the largest of C(k - 1, j) + the times from j to i.
        before_s = np.concatenate(([0.0], (factor * times_s).cumsum()))
        done_s = np.maximum.accumulate(done_s - before_s[:-1]) + before_s[1:]
    return float(done_s[-1])


def solve_slices(tables: SliceTables, weights: Weights) -> SliceSolution | InfeasiblePartition:
    """Find the slices with the smallest objective, for equally fast stages.

    Ties depend on the tables alone. Batch slices are in descending order; the objective does not
    depend on their order.

    Example:
        >>> times_s = np.array([[1.0, 1.5, 2.0]])  # the first granule, the second alone, both
        >>> tables = SliceTables(forward_s=times_s, backward_s=2 * times_s)
        >>> solve_slices(tables, (1.0, 3.0)).slices
        ((1, (1, 1)),)
        >>> solve_slices(tables, (1.0, 0.0)).slices
        ((1, (2,)),)
    """
    search = SliceSearch(tables=tables, weights=(weights,))
    search.run()
    if search.best is None:
        return infeasible(tables)
    return SliceSolution(
        slices=tuple(sorted(search.best, reverse=True)),
        value_s=search.value_s,
        lower_bound_s=search.lower_bound_s,
        num_evaluations=search.num_evaluations,
    )


def infeasible(tables: SliceTables) -> InfeasiblePartition:
    """Return the result for a batch that cannot be cut into feasible slices."""
    return InfeasiblePartition(
        reason=InfeasibleReason.MEMORY,
        detail=(
            f"no slices that can run make up {tables.num_sequences} sequence(s) of "
            f"{tables.num_granules} granule(s)"
        ),
    )


@dataclass(slots=True, kw_only=True)
class SliceSearch(BestFirst[Box]):
    """Open boxes of slowest passes, and the best slices so far."""

    tables: SliceTables
    weights: Sequence[Weights]  # the objective is the maximum over these pairs
    best: Slices | None = None  # the best slices
    num_evaluations: int = 0  # pairs of caps that were tried
    num_stale: int = 0
    seen: list[Slices] = field(default_factory=list)
    arrays: SliceArrays = field(init=False)
    batch_slice: IntArray = field(init=False)  # of the last evaluation, as in `SliceArrays`
    path: IntArray = field(init=False)  # the same
    is_merged: bool = field(init=False)

    def __post_init__(self) -> None:
        """Lay the tables out for the kernels."""
        tables, width = self.tables, self.tables.num_granules
        self.is_merged = not np.isfinite(tables.backward_s[tables.backward_s > 0]).any()
        self.batch_slice = np.zeros(tables.num_sequences + 1, dtype=np.int64)
        self.path = np.zeros((tables.num_sequences, width), dtype=np.int64)
        self.arrays = SliceArrays(
            forward_s=tables.forward_s,
            backward_s=tables.backward_s,
            total_s=tables.total_s,
            regular=tables.regular,
            least_s=tables.least_s,
            cost_s=np.empty((tables.num_sequences, width + 1)),
            batch_s=np.empty(tables.num_sequences + 1),
            batch_slice=self.batch_slice,
            path=self.path,
        )

    def run(self) -> None:
        """Evaluate caps until the best slices are proven."""
        self._at_top((0.0, 0.0), (math.inf, math.inf))
        while self.open and self.open[0][0] < self.value_s:
            _, lows_s, highs_s, sum_s, is_tight = heappop(self.open)
            if not is_tight and not self.is_merged:
                raised_s = tightened(lows_s, highs_s, self.arrays)
                self._open(raised_s, highs_s, sum_s, is_tight=True)
                continue
            highs_s = self._useful(lows_s, highs_s, sum_s)
            if self.num_stale > PATIENCE or self.num_evaluations % 2:
                self._at_top(lows_s, highs_s)
            else:
                self._at_middle(lows_s, highs_s, sum_s)

    def value(self, sum_s: float, slowest_s: float) -> float:
        """Return the objective for a sum and the sum of both slowest passes."""
        return max(total * sum_s + largest * slowest_s for total, largest in self.weights)

    def _useful(
        self, lows_s: tuple[float, float], highs_s: tuple[float, float], sum_s: float
    ) -> tuple[float, float]:
        """Lower the top of a box to the passes with which slices may still be best."""
        slowest_s = min(
            (self.value_s - total * sum_s + 4 * math.ulp(self.value_s)) / largest
            if largest
            else math.inf
            for total, largest in self.weights
        )
        return (min(highs_s[0], slowest_s - lows_s[1]), min(highs_s[1], slowest_s - lows_s[0]))

    def _at_top(self, lows_s: tuple[float, float], highs_s: tuple[float, float]) -> None:
        """Evaluate the top of a box, and open the parts below the resulting slices."""
        sum_s, forward_s, backward_s, *_ = self._evaluate(highs_s)
        if sum_s < math.inf:
            self._below(lows_s, highs_s, (forward_s, backward_s), sum_s)

    def _at_middle(
        self, lows_s: tuple[float, float], highs_s: tuple[float, float], sum_s: float
    ) -> None:
        """Evaluate the lower half of a box, and open the parts that remain."""
        side = int(highs_s[1] - lows_s[1] > highs_s[0] - lows_s[0])
        cap_s = lows_s[side] + (highs_s[side] - lows_s[side]) / 2
        caps_s = (cap_s, highs_s[1]) if side == 0 else (highs_s[0], cap_s)
        lower_s, forward_s, backward_s, *next_s = self._evaluate(caps_s)
        above_s = (next_s[0], lows_s[1]) if side == 0 else (lows_s[0], next_s[1])
        self._open(above_s, highs_s, sum_s)
        if lower_s < math.inf:
            self._below(lows_s, caps_s, (forward_s, backward_s), lower_s)

    def _below(
        self,
        lows_s: tuple[float, float],
        highs_s: tuple[float, float],
        slowest_s: tuple[float, float],
        sum_s: float,
    ) -> None:
        """Open the parts of a box in which one pass is faster than in the slices of its top.

        The rest of the box costs at least as much as these slices.
        """
        below_s = [math.nextafter(time_s, -math.inf) for time_s in slowest_s]
        self._open(lows_s, (min(below_s[0], highs_s[0]), highs_s[1]), sum_s)
        lows_s = (max(lows_s[0], slowest_s[0]), lows_s[1])
        self._open(lows_s, (highs_s[0], min(below_s[1], highs_s[1])), sum_s)

    def _open(
        self,
        lows_s: tuple[float, float],
        highs_s: tuple[float, float],
        sum_s: float,
        *,
        is_tight: bool = False,
    ) -> None:
        if lows_s[0] <= highs_s[0] and lows_s[1] <= highs_s[1] and max(lows_s) < math.inf:
            bound_s = self.value(sum_s, lows_s[0] + lows_s[1])
            self.offer((bound_s, lows_s, highs_s, sum_s, is_tight))

    def _evaluate(self, caps_s: tuple[float, float]) -> Evaluation:
        """Find the cheapest slices under two caps, and keep them if they are the best so far."""
        self.num_evaluations += 1
        self.num_stale += 1
        evaluated: Evaluation = cheapest_slices(caps_s[0], caps_s[1], self.arrays)
        sum_s, forward_s, backward_s = evaluated[:3]
        if sum_s < math.inf:
            value_s = self.value(sum_s, forward_s + backward_s)
            if value_s < self.value_s:
                self.value_s, self.best = value_s, self._slices()
                self.num_stale = 0
                self.seen.append(self.best)
        return evaluated

    def _slices(self) -> Slices:
        batches, remaining = [], self.tables.num_sequences
        while remaining > 0:
            size = int(self.batch_slice[remaining])
            path = self.path[size - 1]
            (ends,) = np.nonzero(path == 0)
            used = path[: ends[0]] if len(ends) else path
            batches.append((size, tuple(used[::-1].tolist())))
            remaining -= size
        return tuple(batches[::-1])


def solve_unequal(
    tables: SliceTables,
    factors: Sequence[float],
    *,
    most_steps: int = 2**62,
    most_cells: int = 2**62,
) -> SliceSolution | InfeasiblePartition:
    """Find the slices with the shortest forward and backward passes through unequal stages.

    ``times`` and ``factors`` are as in `critical_path_s`. Above ``most_steps`` slices tried times
    stages the search stops unproven; if the table is larger than ``most_cells``, not all slices are
    tried. The result has slices in the order in which they run; ``lower_bound_s`` is below
    ``value_s`` if a limit was reached.
    """
    pairs = _bounds(factors)
    relaxed = SliceSearch(tables=tables, weights=pairs)
    relaxed.run()
    if relaxed.best is None:
        return infeasible(tables)
    slowest = max(factors)
    pessimistic = SliceSearch(tables=tables, weights=((slowest, sum(factors) - slowest),))
    pessimistic.run()
    value_s, slices = min(
        (path_s(tables, order, factors), order) for order in _orders(relaxed.seen, pessimistic.seen)
    )
    # The bound and the critical path add the same times in different orders.
    bound_s = min(value_s, relaxed.lower_bound_s * (1 - 1e-14))
    num_cells = (tables.num_sequences + 1) ** 2 * (tables.num_granules + 1)
    if bound_s < value_s and num_cells <= most_cells:
        best = np.zeros((tables.num_sequences * tables.num_granules, 2), dtype=np.int64)
        arrays = _path_arrays(tables, factors, pairs, best)
        steps = most_steps // len(factors)
        shortest_s, num_slices, taken = shortest_path(value_s, steps, arrays)
        if num_slices:
            value_s, slices = shortest_s, _batch_slices(best[:num_slices], tables)
        bound_s = value_s if taken < steps else min(bound_s, value_s)
    return SliceSolution(
        slices=slices,
        value_s=value_s,
        lower_bound_s=bound_s,
        num_evaluations=relaxed.num_evaluations + pessimistic.num_evaluations,
    )


def path_s(tables: SliceTables, slices: Slices, factors: Sequence[float]) -> float:
    """Return the sum of the critical paths of forward and backward passes."""
    forward_s, backward_s = tables.times_s(slices)
    return critical_path_s(forward_s, factors) + critical_path_s(backward_s, factors)


def _bounds(factors: Sequence[float]) -> tuple[Weights, ...]:
    """Return the weights of sum and slowest pass per pair of stages, without dominated weights."""
    before = [0.0, *accumulate(factors)]
    largest: dict[float, float] = {max(factors): 0.0}
    for first, factor in enumerate(factors):
        for last in range(first, len(factors)):
            least = min(factor, factors[last])
            rest = before[last + 1] - before[first] - least
            largest[least] = max(largest.get(least, 0.0), rest)
    pairs: list[Weights] = []
    for least, rest in sorted(largest.items(), reverse=True):
        if not pairs or least + rest > sum(pairs[-1]):
            pairs.append((least, rest))
    return tuple(pairs)


def _orders(*seen: Iterable[Slices]) -> set[Slices]:
    """Return all slices, also sorted with small and with large batch slices first."""
    both = {order for slices in seen for order in slices}
    return {
        tuple(sorted(order, reverse=turned)) for order in both for turned in (False, True)
    } | both


def _path_arrays(
    tables: SliceTables, factors: Sequence[float], pairs: Sequence[Weights], best: IntArray
) -> PathArrays:
    """Build the arrays of the search through all slices, which writes to ``best``."""
    num_sequences, num_granules = tables.num_sequences, tables.num_granules
    most = num_sequences * num_granules
    sums_s = _rest(tables.total_s, np.add)
    slowest_s = [_rest(times_s, np.maximum) for times_s in (tables.forward_s, tables.backward_s)]
    ends = [packed_index(num_granules, size) for size in range(1, num_granules + 1)]
    return PathArrays(
        forward_s=tables.forward_s,
        backward_s=tables.backward_s,
        factors=np.array(factors, dtype=np.float64),
        bounds=np.array(pairs),
        rest_sum_s=sums_s,
        rest_slowest_s=np.array(slowest_s),
        last_s=float(tables.total_s[:, ends].min()),
        done_s=np.zeros((2, most + 1, len(factors))),
        slices=np.zeros((most, 2), dtype=np.int64),
        best=best,
    )


def _rest(times_s: FloatArray, join: np.ufunc) -> FloatArray:
    """Return the least sum (or maximum, by ``join``) of remaining slices, by cell."""
    num_sequences, num_cells = times_s.shape
    num_granules = int((2 * num_cells) ** 0.5)
    within = np.full((num_sequences, num_granules + 1), math.inf)
    within[:, num_granules] = 0.0
    for done in range(num_granules - 1, -1, -1):
        cells = [packed_index(end, end - done) for end in range(done + 1, num_granules + 1)]
        within[:, done] = join(times_s[:, cells], within[:, done + 1 :]).min(axis=1)
    batch = np.zeros(num_sequences + 1)
    for remaining in range(1, num_sequences + 1):
        batch[remaining] = min(
            join(within[size - 1, 0], batch[remaining - size]) for size in range(1, remaining + 1)
        )
    rest = np.full((num_sequences + 1, num_sequences + 1, num_granules + 1), math.inf)
    rest[:, 1:, :] = join(within[None, :, :], batch[:, None, None])
    return rest


def _batch_slices(path: np.ndarray, tables: SliceTables) -> Slices:
    batches: list[tuple[int, tuple[int, ...]]] = []
    sizes: list[int] = []
    for sequences, size in path.tolist():
        sizes.append(size)
        if sum(sizes) == tables.num_granules:
            batches.append((sequences, tuple(sizes)))
            sizes = []
    return tuple(batches)
