"""Where the planner published as AMP (2022) cuts a chain of layers.

With one micro-batch it splits the transformer layers evenly; with more it runs
a dynamic programme over (first layers, cuts, slowest stage to the right). That
programme is *not* an exact solver: it keeps the value of an alternative
without the cost of its last cut, and compares the next alternative, which does
include its own, with that. The rule is reproduced here as it was published, because
the published partitions follow from it; plans of our own never use it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_ray.arrays import FloatArray

IntArray = npt.NDArray[np.intp]


def even_bounds(
    num_layers: int, num_stages: int, first_extra: int, last_extra: int
) -> tuple[int, ...]:
    """Split the transformer layers evenly: the rule for a single micro-batch.

    The first ``num_layers % num_stages`` stages get one layer more; then the
    layers outside the transformer go to the first and to the last stage.

    Args:
        num_layers: Transformer layers, without what precedes and follows them.
        num_stages: Stages to cut them into, at most ``num_layers``.
        first_extra: Layers of the chain put before the transformer.
        last_extra: Layers of the chain put after it.

    Returns:
        Half-open bounds of length ``num_stages + 1``.

    Raises:
        ValueError: If there are more stages than transformer layers.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.

    Example:
        >>> even_bounds(24, 4, 2, 4)
        (0, 8, 14, 20, 30)
    """
    if not 1 <= num_stages <= num_layers:
        msg = (
            f"num_stages={num_stages} does not fit num_layers={num_layers}: "
            "choose between 1 and num_layers stages"
        )
        raise ValueError(msg)
    share, rest = divmod(num_layers, num_stages)
    inner = (first_extra + stage * share + min(stage, rest) for stage in range(1, num_stages))
    return (0, *inner, first_extra + num_layers + last_extra)


def published_bounds(
    layer_time_s: FloatArray, boundary_time_s: FloatArray, num_micro_batches: int
) -> tuple[int, ...]:
    """Cut a chain by the published dynamic programme: the rule for several micro-batches.

    With ``i`` the layers to the left, ``j`` their cuts and ``m`` the slowest
    stage to their right (0 or the time of any run of layers)::

        value(i, 0, m) = (B - 1) * max(0, time[0:i] - m)
        for k = j, ..., i - 1:             # the last cut, ascending
            kept = value(k, j - 1, max(time[k:i], m)) + (B - 1) * max(0, time[k:i] - m)
            if kept + boundary(k, j) < value(i, j, m):
                value(i, j, m) = kept      # without the boundary: the published quirk

    Only the states that the answer ``(num_layers, num_stages - 1, 0)`` can reach
    are computed, all ``m`` and all ``i`` of one ``(j, k)`` together.

    Args:
        layer_time_s: Shape ``(num_layers,)``. Forward plus backward of one micro-batch.
        boundary_time_s: Shape ``(num_layers, num_stages - 1)``. Entry ``[l, j]`` is the
            time across a cut after layer ``l`` that ends stage ``j``.
        num_micro_batches: ``B``, per data-parallel replica.

    Returns:
        Half-open bounds of length ``num_stages + 1``.

    Raises:
        ValueError: If there are more stages than layers or the shapes disagree.

    References:
        Li et al., AMP, arXiv:2210.07297, and its public artifact.

    Example:
        Cuts after layer 1 and after layer 2 keep the same value 4, so the first one
        stays, although its boundary makes it 10 s slower.

        >>> boundary = np.array([[10.0], [0.0], [0.0]])
        >>> published_bounds(np.array([2.0, 2.0, 2.0]), boundary, 2)
        (0, 1, 3)
    """
    num_layers, num_stages = _checked_shape(layer_time_s, boundary_time_s)
    if num_stages == 1:
        return (0, num_layers)
    tables = _Tables.build(layer_time_s, num_stages, num_micro_batches)
    values = tables.first_level()
    chosen: list[IntArray] = []
    for level in range(1, num_stages - 1):
        values, cuts = _next_level(tables, level, values, boundary_time_s[:, level - 1])
        chosen.append(cuts)
    last_cut = _last_cut(tables, values, boundary_time_s[:, num_stages - 2])
    return _trace_back(tables, chosen, last_cut)


def _checked_shape(layer_time_s: FloatArray, boundary_time_s: FloatArray) -> tuple[int, int]:
    """Return the numbers of layers and stages, or refuse shapes that do not fit."""
    num_layers = layer_time_s.shape[0]
    if boundary_time_s.shape[:-1] != (num_layers,):
        msg = (
            f"boundary_time_s has shape {boundary_time_s.shape}, expected "
            f"(num_layers, num_stages - 1) with num_layers={num_layers}"
        )
        raise ValueError(msg)
    num_stages = boundary_time_s.shape[1] + 1
    if num_stages > num_layers:
        msg = (
            f"num_stages={num_stages} is more than num_layers={num_layers}: "
            "every stage needs a layer"
        )
        raise ValueError(msg)
    return num_layers, num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """What every level of the programme looks up."""

    num_stages: int  # stages of the answer
    slack: int  # layers beyond one per stage; level ``j`` holds ``i = j + 1 ... j + 1 + slack``.
    num_waits: int  # ``num_micro_batches - 1``
    # Shape ``(num_layers + 1, num_layers + 1)``. Time of layers ``[k, i)``, else 0.
    run_s: FloatArray
    slowest_s: FloatArray  # shape ``(n,)``. Sorted distinct times of all runs, and 0.
    index: IntArray  # like ``run_s``: where each run stands in ``slowest_s``

    @classmethod
    def build(cls, layer_time_s: FloatArray, num_stages: int, num_micro_batches: int) -> "_Tables":
        """Sum every run of layers once."""
        num_layers = layer_time_s.shape[0]
        run_s = np.zeros((num_layers + 1, num_layers + 1))
        for first in range(num_layers):
            np.cumsum(layer_time_s[first:], out=run_s[first, first + 1 :])
        slowest_s, index = np.unique(run_s, return_inverse=True)
        return cls(
            num_stages=num_stages,
            slack=num_layers - num_stages,
            num_waits=num_micro_batches - 1,
            run_s=run_s,
            slowest_s=slowest_s,
            index=index.reshape(run_s.shape),
        )

    def first_level(self) -> FloatArray:
        """Value of one stage ``[0, i)`` for each ``i`` of level 0 and each slowest stage."""
        first_stage_s = self.run_s[0, 1 : self.slack + 2, None]
        return self.num_waits * np.maximum(first_stage_s - self.slowest_s, 0.0)

    def num_slowest(self, level: int) -> int:
        """How many of ``slowest_s`` can stand to the right of this level's layers."""
        return int(self.index[level + 1 :].max()) + 1


def _next_level(
    tables: _Tables, level: int, left: FloatArray, cut_time_s: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Add one cut: values of level ``level - 1`` in, values and last cuts of ``level`` out."""
    width = tables.slack + 1
    slowest_s = tables.slowest_s[: tables.num_slowest(level)]
    columns = np.arange(slowest_s.size)
    values = np.full((width, slowest_s.size), np.inf)
    cuts = np.zeros((width, slowest_s.size), dtype=np.intp)
    for row in range(width):
        cut = level + row
        ends = slice(cut + 1, level + 1 + width)
        stage_s = tables.run_s[cut, ends, None]
        kept = left[row][np.maximum(tables.index[cut, ends, None], columns)]
        kept += tables.num_waits * np.maximum(stage_s - slowest_s, 0.0)
        better = kept + cut_time_s[cut - 1] < values[row:]
        np.copyto(values[row:], kept, where=better)
        np.copyto(cuts[row:], cut, where=better)
    return values, cuts


def _last_cut(tables: _Tables, left: FloatArray, cut_time_s: FloatArray) -> int:
    """Choose the cut before the last stage, which has nothing to its right."""
    num_layers = cut_time_s.shape[0]
    value, chosen = np.inf, 0
    for row in range(tables.slack + 1):
        cut = tables.num_stages - 1 + row
        kept = left[row, tables.index[cut, num_layers]]
        kept += tables.num_waits * tables.run_s[cut, num_layers]
        if kept + cut_time_s[cut - 1] < value:
            value, chosen = kept, cut
    return chosen


def _trace_back(tables: _Tables, chosen: list[IntArray], last_cut: int) -> tuple[int, ...]:
    num_layers = tables.run_s.shape[0] - 1
    bounds = [num_layers, last_cut]
    slowest = tables.index[last_cut, num_layers]
    for level in range(tables.num_stages - 2, 0, -1):
        end = bounds[-1]
        cut = int(chosen[level - 1][end - level - 1, slowest])
        slowest = max(slowest, tables.index[cut, end])
        bounds.append(cut)
    return (0, *reversed(bounds))
