"""TeraPipe's latency model of a slice, with its faults, for comparison.

Context is fitted by least squares as ``a0 + a1 b s + a2 b c + a3 b s c`` and added to every slice,
so that slices without context are not as they were measured and some take less for more context.
Messages are looked up at ``(b - 1) L + s`` tokens instead of ``b s``.

References:
    Li et al., TeraPipe, arXiv:2102.07988, section 3.3 and the released planner.
"""

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.inputs.slice_table import SliceTable


def terapipe_grid(table: SliceTable, *, repaired: bool = False) -> FloatArray:
    """Return seconds of both passes by sequences, granules and context, shape ``(B, n, n)``.

    Args:
        table: Points of one layer that are multiples of the granularity, which divides the tokens.
        repaired: Whether messages are looked up where they belong.
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
    grid_s = table.num_layers * (base_s[:, :, None] + added_s)
    if table.message_s:
        looked_up = sequences * size if repaired else (sequences - 1) * table.tokens + size
        message_s = np.interp(looked_up, table.message_tokens, table.message_s)
        grid_s = grid_s + 2 * message_s
    grid_s[:, size[0] + context[0] > table.tokens] = np.inf
    found: FloatArray = grid_s
    return found


def _context_fit(table: SliceTable) -> FloatArray:
    """Fit what context adds to a layer, on all points that have some."""
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
    found: FloatArray = fit / scale
    return found
