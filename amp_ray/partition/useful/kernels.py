"""Compiled loops that bound what an option can be part of: arrays in, arrays out."""

import numpy as np
from numba import njit

from amp_ray.partition.arrays import BoolArray, FloatArray
from amp_ray.partition.kernels import INNER
from amp_ray.partition.programme import Programme, TailArrays


@njit(cache=True, nogil=True)
def mark_useful(
    beats_s: FloatArray, limit_s: float, num_later: int, programme: Programme, tails: TailArrays
) -> BoolArray:
    """Mark the options that can be part of a chain whose value and tails stay within a limit.

    Args:
        beats_s: Shape ``(2,)``. No chain of interest has a slowest beat below or above these.
        limit_s: Of the sum, the slowest beats of later micro-batches, and the tails.
        num_later: Micro-batches after the first.
        programme: The problem.
        tails: Of its options.

    Returns:
        Shape ``(E,)``, in the order of the programme's options.
    """
    before_s = _cheapest_before(beats_s[1], programme)
    num_states, width = programme.is_final.size, programme.time_prefix_s.shape[1]
    behind_s = np.full((num_states, width), np.inf)
    for state in range(num_states):
        if programme.is_final[state]:
            behind_s[state, width - 1] = 0.0
    useful = np.zeros(programme.option_to.size, np.bool_)
    for option in range(programme.option_to.size - 1, -1, -1):
        state, to_state = programme.option_from[option], programme.option_to[option]
        for end in range(1, width):
            if behind_s[to_state, end] == np.inf:
                continue
            for start in range(end - 1, -1, -1):
                sum_s, beat_s = _stage_s(option, start, end, programme)
                if beat_s < 0.0:
                    break
                if beat_s <= beats_s[1]:
                    sum_s += behind_s[to_state, end]
                    behind_s[state, start] = min(behind_s[state, start], sum_s)
                    sum_s += before_s[state, start] + num_later * max(beat_s, beats_s[0])
                    for tail in range(tails.least_s.size):
                        sum_s += _tail_s(tail, option, start, end, tails)
                    useful[option] |= sum_s <= limit_s
    return useful


@njit(**INNER)
def _cheapest_before(highest_s: float, programme: Programme) -> FloatArray:
    """Return the smallest sum of every state and layer count with no beat above a cap."""
    num_states, width = programme.is_final.size, programme.time_prefix_s.shape[1]
    before_s = np.full((num_states, width), np.inf)
    before_s[0, 0] = 0.0
    for option in range(programme.option_to.size):
        state, to_state = programme.option_from[option], programme.option_to[option]
        for end in range(1, width):
            for start in range(end - 1, -1, -1):
                sum_s, beat_s = _stage_s(option, start, end, programme)
                if beat_s < 0.0:
                    break
                if beat_s <= highest_s:
                    known_s = before_s[state, start] + sum_s
                    before_s[to_state, end] = min(before_s[to_state, end], known_s)
    return before_s


@njit(**INNER)
def _stage_s(option: int, start: int, end: int, programme: Programme) -> tuple[float, float]:
    """Return what a stage adds to the sum, and its beat; below 0 if no longer one fits either."""
    if start < programme.earliest_start[programme.option_memory[option], end]:
        return 0.0, -1.0
    if start > programme.latest_start[end]:
        return np.inf, np.inf
    row = programme.option_class[option]
    prefix_s = programme.time_prefix_s[programme.class_time[row]]
    took_s = prefix_s[end] - prefix_s[start] + programme.class_overhead_s[row]
    cut_s = programme.cut_time_s[programme.option_cut[option], start]
    sum_s = took_s + cut_s + programme.option_fixed_s[option]
    # The same operations as `amp_ray.partition.problem.beat_s`.
    beat = programme.class_beat[row]
    end_s = prefix_s[end] + programme.beat_end_s[beat, end]
    start_s = prefix_s[start] - programme.beat_start_s[beat, start]
    return sum_s, (end_s - start_s) + programme.class_overhead_s[row]


@njit(**INNER)
def _tail_s(tail: int, option: int, start: int, end: int, tails: TailArrays) -> float:
    """Return what a tail takes at least in a chain with this stage."""
    weight = tails.weight_prefix[tail, end] - tails.weight_prefix[tail, start]
    own_s = tails.fixed_s[tail, option] + tails.s_per_weight[tail, option] * weight
    return float(max(own_s, tails.least_s[tail]))
