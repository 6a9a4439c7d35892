"""TeraPipe's search for token slices, for comparison.

It minimises ``sum t + (K - 1) max t`` over slices that take ``t`` forward and backward together.
For each bound on the slowest slice, a dynamic programme finds the smallest sum. The bounds are the
times of the table in ascending order, without those less than ten microseconds above the last bound
tried. So the search may miss the best slices, by more than ``K`` times ten microseconds, since the
next time in the table may be far away. TeraPipe's release requires all batch slices to have the
same token slices, but its search does not ensure that; here slices are reported as the search
returns them. The release also tries the times of slices that no sequence has; here they are left
out.

Its latency model fits the effect of context by least squares as ``a0 + a1 b s + a2 b c + a3 b s c``
and adds it to every slice. So slices without context do not have their measured times, and some
slices take less time with more context. Messages are looked up at ``(b - 1) L + s`` tokens instead
of ``b s``.

References:
    Li et al., TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models,
    ICML 2021, arXiv:2102.07988, sections 3.3, 3.4 and the released planner.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.inputs.slice_table import SliceTable
from amp_ray.jit import kept
from amp_ray.partition.slices import Slices, SliceSolution, SliceTables

LEAST_STEP_S: Final = 1e-5
"""Smallest distance between two bounds that are tried."""


def grid_of(tables: SliceTables) -> FloatArray:
    """Return forward plus backward seconds by sequences, granules and context, ``(B, n, n)``."""
    num_granules = tables.num_granules
    grid_s = np.full((tables.num_sequences, num_granules, num_granules), np.inf)
    first = 0
    for end in range(1, num_granules + 1):
        sizes = np.arange(1, end + 1)
        grid_s[:, sizes - 1, end - sizes] = tables.total_s[:, first : first + end]
        first += end
    return grid_s


def find_slices(
    grid_s: FloatArray, num_stages: int, *, least_step_s: float = LEAST_STEP_S
) -> SliceSolution | None:
    """Search for slices as TeraPipe does.

    Args:
        grid_s: Forward plus backward seconds, as `grid_of` returns them.
        num_stages: ``K``.
        least_step_s: Smallest distance between two bounds that are tried; 0 tries all times.

    Returns:
        The best slices of the search, with ``lower_bound_s`` 0, since nothing is proven; None if no
        slices can run.
    """
    num_sequences, num_granules, _ = grid_s.shape
    sizes = np.zeros((num_sequences, num_granules + 1), dtype=np.int64)
    batch_sizes = np.zeros(num_sequences + 1, dtype=np.int64)
    best_s, best_bound_s, last_s, num_tried = math.inf, math.inf, -math.inf, 0
    for bound_s in np.unique(grid_s[np.isfinite(grid_s)]).tolist():
        if bound_s - last_s < least_step_s:
            continue
        if bound_s * num_stages > best_s:
            break
        last_s = bound_s
        num_tried += 1
        sum_s, slowest_s = cheapest_under(bound_s, grid_s, sizes, batch_sizes)
        value_s = sum_s + (num_stages - 1) * slowest_s
        if value_s < best_s:
            best_s, best_bound_s = value_s, bound_s
    if best_s == math.inf:
        return None
    cheapest_under(best_bound_s, grid_s, sizes, batch_sizes)
    return SliceSolution(
        slices=_walk_back(sizes, batch_sizes),
        value_s=best_s,
        lower_bound_s=0.0,
        num_evaluations=num_tried,
    )


@kept(nogil=True)
def cheapest_under(
    bound_s: float, grid_s: FloatArray, sizes: IntArray, batch_sizes: IntArray
) -> tuple[float, float]:
    """Find the smallest sum of slices with none above a bound.

    Args:
        bound_s: Upper bound on the time of every slice.
        grid_s: Shape ``(B, n, n)``: sequences, granules and granules of context; the first two
            count from 1. Infinite where a slice cannot run.
        sizes: Shape ``(B, n + 1)``. Overwritten: granules of the last slice of each prefix.
        batch_sizes: Shape ``(B + 1,)``. Overwritten: sequences of the last batch slice.

    Returns:
        The smallest sum, and the slowest slice of slices with this sum; infinite if there are none.
    """
    num_sequences, num_granules = grid_s.shape[0], grid_s.shape[1]
    whole_s = np.full(num_sequences, np.inf)
    slowest_s = np.zeros(num_sequences)
    for row in range(num_sequences):
        sums_s = np.full(num_granules + 1, np.inf)
        most_s = np.zeros(num_granules + 1)
        sums_s[0] = 0.0
        for end in range(1, num_granules + 1):
            for size in range(1, end + 1):
                time_s = grid_s[row, size - 1, end - size]
                if time_s <= bound_s and sums_s[end - size] + time_s < sums_s[end]:
                    sums_s[end] = sums_s[end - size] + time_s
                    most_s[end] = max(most_s[end - size], time_s)
                    sizes[row, end] = size
        whole_s[row], slowest_s[row] = sums_s[num_granules], most_s[num_granules]
    batch_s = np.full(num_sequences + 1, np.inf)
    batch_slowest_s = np.zeros(num_sequences + 1)
    batch_s[0] = 0.0
    for total in range(1, num_sequences + 1):
        for size in range(1, total + 1):
            sum_s = batch_s[total - size] + whole_s[size - 1]
            if sum_s < batch_s[total]:
                batch_s[total] = sum_s
                batch_slowest_s[total] = max(batch_slowest_s[total - size], slowest_s[size - 1])
                batch_sizes[total] = size
    return float(batch_s[num_sequences]), float(batch_slowest_s[num_sequences])


def _walk_back(sizes: IntArray, batch_sizes: IntArray) -> Slices:
    """Return the slices of the last run of the dynamic programme."""
    slices, rest = [], len(batch_sizes) - 1
    while rest > 0:
        sequences = int(batch_sizes[rest])
        tokens: list[int] = []
        end = sizes.shape[1] - 1
        while end > 0:
            tokens.append(int(sizes[sequences - 1, end]))
            end -= tokens[-1]
        slices.append((sequences, tuple(tokens[::-1])))
        rest -= sequences
    return tuple(slices[::-1])


def terapipe_grid(table: SliceTable, *, repaired: bool = False) -> FloatArray:
    """Return seconds of both passes by sequences, granules and context, shape ``(B, n, n)``.

    Args:
        table: Points of one layer at multiples of the granularity, which divides the number of
            tokens.
        repaired: Whether to look up messages at ``b s`` tokens, unlike the release.
    """
    num_granules = table.tokens // table.granularity
    base_s = np.full((table.batch, num_granules), np.inf)
    places, total_s = table.points.places, table.points.times_s.sum(axis=1)
    alone = (places[:, 2] == 0) & (places[:, 0] <= table.batch) & (places[:, 1] <= table.tokens)
    base_s[places[alone, 0] - 1, places[alone, 1] // table.granularity - 1] = total_s[alone]
    sequences = np.arange(1, table.batch + 1)[:, None, None]
    size = table.granularity * np.arange(1, num_granules + 1)[None, :, None]
    context = table.granularity * np.arange(num_granules)[None, None, :]
    fit = _context_fit(table)
    added_s = fit[0] + sequences * (fit[1] * size + fit[2] * context + fit[3] * size * context)
    grid_s: FloatArray = table.num_layers * (base_s[:, :, None] + added_s)
    if table.message_s:
        looked_up = sequences * size if repaired else (sequences - 1) * table.tokens + size
        message_s = np.interp(looked_up, table.message_tokens, table.message_s)
        grid_s = grid_s + 2 * message_s
    grid_s[:, size[0] + context[0] > table.tokens] = np.inf
    return grid_s


def _context_fit(table: SliceTable) -> FloatArray:
    """Fit the time that context adds to a layer, on all points with context."""
    places, total_s = table.points.places, table.points.times_s.sum(axis=1)
    base = {
        tuple(place[:2]): time_s
        for place, time_s in zip(places.tolist(), total_s, strict=True)
        if not place[2]
    }
    rows, targets = [], []
    for (sequences, size, context), time_s in zip(places.tolist(), total_s, strict=True):
        if context and (sequences, size) in base:
            rows.append((1, sequences * size, sequences * context, sequences * size * context))
            targets.append(time_s - base[sequences, size])
    if not rows:
        return np.zeros(4)
    matrix = np.array(rows, dtype=np.float64)
    scale = np.abs(matrix).max(axis=0)
    fit, *_ = np.linalg.lstsq(matrix / scale, np.array(targets), rcond=None)
    per_context: FloatArray = fit / scale
    return per_context


# The published settings: tables 1 and 2 of the paper and configurations of its release, restated.
# All ran on up to 48 nodes of eight V100-16.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A GPT model whose feed-forward part is four times as wide as the residual stream."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    most_sequences: int  # largest measured batch slice


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetting:
    """One published setting: a model, its batch and its parallel degrees."""

    model: str
    batch: int  # sequences per replica and step
    tp: int
    pp: int
    dp: int
    num_nodes: int

    @property
    def layers_per_stage(self) -> int:
        """Whole layers of a stage, as the release counts them."""
        return MODELS[self.model].num_layers // self.pp


def _model(
    name: str, num_layers: int, hidden_size: int, num_heads: int, rest: tuple[int, int]
) -> PublishedModel:
    return PublishedModel(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        sequence_length=rest[0],
        most_sequences=rest[1],
    )


MODELS: Final = {
    model.name: model
    for model in (
        _model("gpt3-1b", 24, 2048, 16, (2048, 72)),
        _model("gpt3-13b", 40, 5120, 40, (2048, 32)),
        _model("gpt3-44b", 96, 6144, 48, (2048, 16)),
        _model("gpt3-175b", 96, 12288, 96, (2048, 2)),
        _model("gpt3-13b-4096", 40, 5120, 40, (4096, 8)),
        _model("gpt3-13b-6144", 40, 5120, 40, (6144, 4)),
        _model("gpt3-13b-8192", 40, 5120, 40, (8192, 2)),
    )
}

_DIVIDED: Final = {  # (batch, tp, pp, dp) by model and number of nodes
    ("gpt3-1b", 24): (
        (8, 1, 24, 8),
        (16, 1, 24, 8),
        (36, 8, 12, 2),
        (48, 8, 24, 1),
        (48, 8, 12, 2),
        (72, 8, 24, 1),
    ),
    ("gpt3-13b", 40): (
        (2, 1, 40, 8),
        (4, 1, 40, 8),
        (7, 1, 40, 8),
        (12, 8, 20, 2),
        (16, 8, 20, 2),
        (20, 8, 40, 1),
        (20, 8, 20, 2),
        (32, 8, 40, 1),
    ),
    ("gpt3-44b", 48): ((8, 8, 48, 1), (4, 8, 24, 2), (2, 1, 96, 4)),
    ("gpt3-175b", 48): ((2, 8, 48, 1), (2, 4, 96, 1)),
    ("gpt3-13b-4096", 40): ((8, 8, 40, 1),),
    ("gpt3-13b-6144", 40): ((4, 8, 40, 1),),
    ("gpt3-13b-8192", 40): ((2, 8, 40, 1),),
}

SETTINGS: Final = tuple(
    PublishedSetting(model=model, batch=batch, tp=tp, pp=pp, dp=dp, num_nodes=num_nodes)
    for (model, num_nodes), divided in _DIVIDED.items()
    for batch, tp, pp, dp in divided
)
