"""Cut a batch and its sequences into slices: the tables, the objective and the results.

A sequence has ``n`` granules; a slice takes ``s`` of them, from ``b`` sequences at once. Its time
depends on the ``c`` granules of context before it. Tables are packed by ``(b, end, s)``, with
``end = c + s``, so that slices with the same end are adjacent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.partition.arrays import element

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

    def merged(self) -> "SliceTables":
        """Return tables with the sum of both passes as forward, and no backward times."""
        return SliceTables(forward_s=self.total_s, backward_s=np.zeros_like(self.total_s))

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
    """Yield the row and column of every slice."""
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

    Args:
        times_s: Time of every slice on a stage with factor 1.
        factors: Factor on the times, per stage.

    Example:
        >>> critical_path_s(np.array([1.0, 2.0]), (1.0, 3.0))
        10.0
    """
    done_s = np.zeros(len(times_s))
    for factor in factors:
        # C(k, i) is the largest of C(k - 1, j) + the times from j to i.
        own_s = factor * times_s
        before_s = np.concatenate(([0.0], own_s.cumsum()))
        done_s = np.maximum.accumulate(done_s - before_s[:-1]) + before_s[1:]
    return float(done_s[-1])
