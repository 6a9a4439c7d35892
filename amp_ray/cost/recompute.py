"""Stages that compute part of their blocks again: up to where, at what time and memory."""

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.strategies.recompute import Recompute


def split_after(
    block_counts: IntArray,
    start: IntArray | int,
    end: IntArray | int,
    recompute: Recompute,
    before: IntArray | int = 0,
) -> IntArray:
    """Return the boundary up to which the blocks of stages are computed again.

    Args:
        block_counts: Shape ``(num_layers + 1,)``. Blocks before each boundary, ascending.
        start: First layer of each stage.
        end: Layer after its last.
        recompute: Of these stages.
        before: Blocks of each stage in chunks before this one.

    Returns:
        Of the shape of ``start``; the end itself where all blocks are treated alike.

    Example:
        >>> counts = np.array([0, 0, 1, 2, 3, 3])
        >>> split_after(counts, 0, 5, Recompute(kind="full", layers=2)).item()
        3
    """
    if recompute.layers is None:
        return np.asarray(end)
    wanted = block_counts[start] + np.maximum(recompute.layers - before, 0)
    last = np.maximum(np.searchsorted(block_counts, wanted), start)
    return np.where(block_counts[end] <= wanted, end, last)
