"""The end of an iteration of stages that have their own devices, tp and dp."""

from collections.abc import Sequence

import numpy as np

from amp_ray.cost.kernels import num_lanes
from amp_ray.cost.tail import Tail, TailModel
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.cost.weights import Weights


def stages_tail(
    model: TailModel,
    grids: Sequence[IntArray],
    bounds: tuple[int, ...],
    weights: Sequence[Weights],
) -> Tail:
    """Return the tail of the slowest stage, as `TailModel.estimate` does for one grid.

    All gradient rings of all stages run at once.

    Args:
        model: Times rings and steps.
        grids: Per stage, shape ``(dp, tp)``. Device of each rank.
        bounds: Shape ``(pp + 1,)``.
        weights: Per stage, what a rank holds at its tp.
    """
    rings = model.topology.unequal_rings([row for grid in grids for row in grid.T.tolist()])
    sync, step, first = np.zeros(len(grids)), np.zeros(len(grids)), 0
    for stage, grid in enumerate(grids):
        dp, tp = grid.shape
        held = float(weights[stage].of_stages(bounds)[stage])
        device = model.slowest(grid[None])[0]
        paths = rings.among(first, first + tp)
        sync[stage] = max(model.sync_s(held, dp, path, device) for path in paths)
        step[stage] = model.optimizer_s(held, dp, device)
        first += tp
    _add_tied(model, sync, grids, bounds, weights[0])
    worst = int(np.argmax(sync + step))
    return Tail(gradient_sync_s=float(sync[worst]), optimizer_s=float(step[worst]))


def _add_tied(
    model: TailModel,
    sync: FloatArray,
    grids: Sequence[IntArray],
    bounds: tuple[int, ...],
    weights: Weights,
) -> None:
    """Add the all-reduce of a weight to the two stages that hold it, where they differ.

    Where one stage has more ranks than the other, several of them meet the same one.
    """
    if weights.tied is None:
        return
    first, last = weights.tied.stages(bounds)
    if first == last:
        return
    lanes = num_lanes(grids[first].shape[1], grids[last].shape[1])
    pairs = model.topology.unequal_rings(_pairs(grids[first], grids[last], lanes))
    parameters = weights.tied.parameters * weights.tp / lanes
    sync[[first, last]] += max(model.tied_s(parameters, path) for path in pairs.paths)


def _pairs(first: IntArray, last: IntArray, lanes: int) -> list[list[int]]:
    """Pair the ranks of two stages: every replica, every lane of the weight."""
    replicas = max(len(first), len(last))
    ends = []
    for grid in (first, last):
        dp, tp = grid.shape
        rows = np.arange(replicas) * dp // replicas
        ends.append(grid[rows][:, np.arange(lanes) * tp // lanes].ravel())
    paired: list[list[int]] = np.stack(ends, axis=1).tolist()
    return paired
