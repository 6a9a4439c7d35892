"""The best slices for stages of unequal speed.

The time is the critical path ``C(k, i) = max(C(k - 1, i), C(k, i - 1)) + f_i v_k`` of the forward
passes plus that of the backward passes. Every pair of stages ``a <= b`` bounds it from below: a
path may stay on stage ``a`` until the slowest slice, go to ``b`` with it and stay: this is
at least ``min(v_a, v_b) (sum - max) + (v_a + ... + v_b) max``. The slices with the least bound are
found by the search for equal stages. Then all slices are tried in every order, as far as their
bound is below the best time. Where that takes too many steps, the answer is the best that was
found, with the bound.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices.exact import SliceSearch, Weights, infeasible
from amp_ray.partition.slices.kernels import PathArrays, shortest_path
from amp_ray.partition.slices.slice_tables import (
    Slices,
    SliceSolution,
    SliceTables,
    critical_path_s,
    packed_index,
)


def solve_unequal(
    tables: SliceTables,
    factors: Sequence[float],
    *,
    most_steps: int = 2**62,
    most_cells: int = 2**62,
) -> SliceSolution | InfeasiblePartition:
    """Find the slices with the shortest forward and backward passes through unequal stages.

    Args:
        tables: Of a stage with factor 1.
        factors: What the times of each stage are multiplied by.
        most_steps: Slices tried times stages, before the bound has to do.
        most_cells: Sequences twice times granules, above which not all slices are tried at all.

    Returns:
        Slices in the order in which they run; ``lower_bound_s`` is below ``value_s`` where too many
        would have to be tried.
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
        arrays = _path_arrays(tables, factors, pairs)
        steps = most_steps // len(factors)
        found_s, num_slices, taken = shortest_path(value_s, steps, arrays)
        if num_slices:
            value_s, slices = found_s, _batch_slices(arrays.best[:num_slices], tables)
        bound_s = value_s if taken < steps else min(bound_s, value_s)
    return SliceSolution(
        slices=slices,
        value_s=value_s,
        lower_bound_s=bound_s,
        num_evaluations=relaxed.num_evaluations + pessimistic.num_evaluations,
    )


def path_s(tables: SliceTables, slices: Slices, factors: Sequence[float]) -> float:
    """Return the critical path of both passes."""
    forward_s, backward_s = tables.times_s(slices)
    return critical_path_s(forward_s, factors) + critical_path_s(backward_s, factors)


def _bounds(factors: Sequence[float]) -> tuple[Weights, ...]:
    """Return weights of sum and slowest pass, no pair below another."""
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
    """Return slices with small or large batch slices first."""
    both = {order for slices in seen for order in slices}
    return {
        tuple(sorted(order, reverse=turned)) for order in both for turned in (False, True)
    } | both


def _path_arrays(
    tables: SliceTables, factors: Sequence[float], pairs: Sequence[Weights]
) -> PathArrays:
    """Lay out the search through all slices."""
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
        best=np.zeros((most, 2), dtype=np.int64),
    )


def _rest(times_s: FloatArray, join: np.ufunc) -> FloatArray:
    """Return the least that joins all slices still to come, as `PathArrays.rest_sum_s` has it."""
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
    """Gather slices by the sequences that they belong to."""
    batches: list[tuple[int, tuple[int, ...]]] = []
    sizes: list[int] = []
    for sequences, size in path.tolist():
        sizes.append(size)
        if sum(sizes) == tables.num_granules:
            batches.append((sequences, tuple(sizes)))
            sizes = []
    return tuple(batches)
