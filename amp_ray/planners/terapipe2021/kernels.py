"""TeraPipe's dynamic programme, compiled."""

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.jit import kept


@kept(nogil=True)
def cheapest_under(
    bound_s: float, grid_s: FloatArray, sizes: IntArray, batch_sizes: IntArray
) -> tuple[float, float]:
    """Find the smallest sum of slices with none above a bound.

    Args:
        bound_s: On every slice.
        grid_s: Shape ``(B, n, n)``: sequences, granules and granules of context; the first two
            count from 1. Infinite where a slice cannot run.
        sizes: Shape ``(B, n + 1)``. Overwritten: granules of the last slice of each prefix.
        batch_sizes: Shape ``(B + 1,)``. Overwritten: sequences of the last batch slice.

    Returns:
        The sum and the slowest slice of one with this sum; infinite without any.
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
