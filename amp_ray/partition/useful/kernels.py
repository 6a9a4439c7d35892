"""Compiled loops that bound what an option can be part of: arrays in, arrays out."""

import numpy as np
from numba import njit

from amp_ray.partition.arrays import FloatArray
from amp_ray.partition.kernels import INNER
from amp_ray.partition.programme import Programme, TailArrays


@njit(cache=True, nogil=True)
def least_values(
    beats_s: FloatArray, num_later: int, programme: Programme, tails: TailArrays
) -> FloatArray:
    """Bound the value, tails included, of every chain with an option.

    Args:
        beats_s: Shape ``(3,)``. Of chains of interest: the least and the most that the slowest
            beat is, and the most that a stage takes.
        num_later: Micro-batches after the first.
        programme: The problem.
        tails: Of its options.

    Returns:
        Shape ``(E,)``, in the order of the programme's options; infinite where there is no chain
        of interest.
    """
    before_s = _cheapest_before(beats_s, programme)
    num_states, width = programme.is_final.size, programme.time_prefix_s.shape[1]
    behind_s = np.full((num_states, width), np.inf)
    behind_s[programme.is_final, width - 1] = 0.0
    least_s = np.full(programme.option_to.size, np.inf)
    for option in range(programme.option_to.size - 1, -1, -1):
        own_s, to_state = before_s[programme.option_from[option]], programme.option_to[option]
        for end in range(1, width):
            if behind_s[to_state, end] == np.inf:
                continue
            for start in range(end - 1, -1, -1):
                sum_s, beat_s = _stage_s(option, start, end, beats_s[2], programme)
                if beat_s < 0.0:
                    break
                if beat_s > beats_s[1] or own_s[start] == np.inf:
                    continue
                sum_s += behind_s[to_state, end]
                behind = behind_s[programme.option_from[option]]
                behind[start] = min(behind[start], sum_s)
                sum_s += own_s[start] + num_later * max(beat_s, beats_s[0])
                if sum_s < least_s[option]:
                    sum_s += _tails_s(option, start, end, tails)
                    least_s[option] = min(least_s[option], sum_s)
    return least_s


@njit(**INNER)
def _cheapest_before(beats_s: FloatArray, programme: Programme) -> FloatArray:
    """Return the smallest sum of every state and layer count with no beat above the most."""
    num_states, width = programme.is_final.size, programme.time_prefix_s.shape[1]
    before_s = np.full((num_states, width), np.inf)
    before_s[0, 0] = 0.0
    for option in range(programme.option_to.size):
        state, to_state = programme.option_from[option], programme.option_to[option]
        for end in range(1, programme.most[to_state] + 1):
            for start in range(end - 1, -1, -1):
                sum_s, beat_s = _stage_s(option, start, end, beats_s[2], programme)
                if beat_s < 0.0:
                    break
                if beat_s <= beats_s[1]:
                    known_s = before_s[state, start] + sum_s
                    before_s[to_state, end] = min(before_s[to_state, end], known_s)
    return before_s


@njit(**INNER)
def _stage_s(
    option: int, start: int, end: int, most_s: float, programme: Programme
) -> tuple[float, float]:
    """Return what a stage adds to the sum, and its beat; below 0 if no longer one is of use."""
    row = programme.option_class[option]
    prefix_s = programme.time_prefix_s[programme.class_time[row]]
    took_s = prefix_s[end] - prefix_s[start] + programme.class_overhead_s[row]
    earliest = programme.earliest_start[programme.option_memory[option], end]
    if start < earliest or took_s > most_s:
        return 0.0, -1.0
    if start > programme.latest_start[end]:
        return np.inf, np.inf
    cut_s = programme.cut_time_s[programme.option_cut[option], start]
    # The same operations as `amp_ray.partition.problem.beat_s`.
    beat = programme.class_beat[row]
    end_s = prefix_s[end] + programme.beat_end_s[beat, end]
    start_s = prefix_s[start] - programme.beat_start_s[beat, start]
    beat_s = (end_s - start_s) + programme.class_overhead_s[row]
    return took_s + cut_s + programme.option_fixed_s[option], beat_s


@njit(**INNER)
def _tails_s(option: int, start: int, end: int, tails: TailArrays) -> float:
    """Return what the tails take at least in a chain with this stage."""
    sum_s = 0.0
    for tail in range(tails.least_s.size):
        weight = tails.weight_prefix[tail, end] - tails.weight_prefix[tail, start]
        own_s = tails.fixed_s[tail, option] + tails.s_per_weight[tail, option] * weight
        sum_s += max(own_s, tails.least_s[tail])
    return sum_s
