"""The kinds of layers of a chain, and the relaxed choice of what to recompute in them."""

from dataclasses import dataclass

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.recompute.kernels import fill_levels, fill_relaxation

MOST_PEAKS = 16
MOST_LEVELS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerKinds:
    """Layers that are alike are of one kind."""

    kind: IntArray  # shape ``(Y,)``. Of each layer.
    begin: IntArray  # shape ``(K + 1,)``. Where the operators of each kind begin, all in a row.
    member: IntArray  # shape ``(O,)``. An operator of the chain that each of them stands for.
    layer_of: IntArray  # shape ``(L,)``
    place: IntArray  # shape ``(L,)``. Index of each operator among those of the kinds.


def layer_kinds(problem: OperatorProblem) -> LayerKinds:
    """Find layers whose operators are alike in all that recompute depends on."""
    columns = np.vstack([problem.recompute_s, problem.held_bytes, problem.free_end[None, :]])
    ends = np.append(problem.layer_begin[1:], problem.num_operators)
    known: dict[bytes, int] = {}
    kind: list[int] = []
    members: list[int] = []
    sizes: list[int] = []
    for start, end in zip(problem.layer_begin.tolist(), ends.tolist(), strict=True):
        number = known.setdefault(columns[:, start:end].tobytes(), len(known))
        kind.append(number)
        if number == len(sizes):
            sizes.append(end - start)
            members.extend(range(start, end))
    begin = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    layer_of = np.repeat(np.arange(len(kind)), ends - problem.layer_begin)
    offset = np.arange(problem.num_operators) - problem.layer_begin[layer_of]
    return LayerKinds(
        kind=np.array(kind),
        begin=begin,
        member=np.array(members),
        layer_of=layer_of,
        place=begin[np.array(kind)[layer_of]] + offset,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """Tables of `recompute.kernels.relaxed_s`."""

    row: IntArray  # shape ``(V,)``. Of each option in the tables.
    charged: FloatArray
    levels: FloatArray
    rest: FloatArray
    layers: FloatArray
    head: FloatArray


def relaxation(problem: OperatorProblem, kinds: LayerKinds) -> Relaxation:
    """Fill the tables; options that recompute and hold the same share a row."""
    costs = [problem.recompute_s[:, kinds.member], problem.held_bytes[:, kinds.member]]
    both, row = np.unique(np.stack(costs, axis=1), axis=0, return_inverse=True)
    num_places, num_layers = len(kinds.member), len(kinds.kind)
    peaks = [_peaks(held, kinds.begin) for _, held in both]
    charged = np.full((len(both), MOST_PEAKS), np.inf)
    levels = np.full((len(both), MOST_PEAKS, MOST_LEVELS), np.inf)
    for number, ((cost_s, held), (smallest, largest)) in enumerate(zip(both, peaks, strict=True)):
        charged[number, : len(smallest)] = smallest
        fill_levels(cost_s, held, kinds.begin, largest, levels[number, : len(largest)])
    # All of them but an infinite one at the end.
    levels = levels[:, :, : np.isfinite(levels).sum(axis=2).max() + 1].copy()
    rest = np.zeros((*levels.shape, num_places, 2))
    layers = np.zeros((*levels.shape, num_layers + 1, 2))
    head = np.zeros_like(rest)
    free_end = problem.free_end[kinds.member]
    for number, ((cost_s, held), (_, largest)) in enumerate(zip(both, peaks, strict=True)):
        fill_relaxation(
            cost_s,
            held,
            kinds.begin,
            free_end,
            largest,
            levels[number],
            rest[number],
            head[number],
        )
        whole = rest[number][:, :, kinds.begin[kinds.kind]]
        np.cumsum(whole, axis=2, out=layers[number][:, :, 1:])
    return Relaxation(
        row=row.reshape(-1), charged=charged, levels=levels, rest=rest, layers=layers, head=head
    )


def _peaks(held: FloatArray, begin: IntArray) -> tuple[FloatArray, FloatArray]:
    """Divide all peaks that runs may have into groups of similar ones.

    Returns:
        The smallest and the largest of each group, ascending.
    """
    sums = [np.zeros(1)]
    for start, end in zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True):
        prefix = np.concatenate(([0.0], np.cumsum(held[start : end - 1])))
        sums.append((prefix[None, :] - prefix[:, None])[np.triu_indices(len(prefix), 1)])
    peaks = np.unique(np.concatenate(sums))
    if len(peaks) <= MOST_PEAKS:
        return peaks, peaks
    # Zero alone; then cut where neighbours differ most.
    gaps = np.argsort(-np.diff(peaks[1:]), kind="stable")[: MOST_PEAKS - 2] + 2
    cuts = np.concatenate(([0, 1], np.sort(gaps)))
    return peaks[cuts], peaks[np.append(cuts[1:], len(peaks)) - 1]
