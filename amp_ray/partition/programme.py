"""Arrays of a partition problem, which the kernels read and write.

The classes here are named tuples, because compiled functions accept these.
"""

from typing import NamedTuple

from amp_ray.arrays import BoolArray, FloatArray, IntArray


class Programme(NamedTuple):
    """A partition problem laid out for the kernels: C classes, E options, R states, L layers.

    A class is the part of an option that a cap depends on: time row, bottleneck row and overhead.
    Options are in canonical order, ascending by target state. Every table ends with a row of
    zeros; columns are layer counts ``0..L``.
    """

    time_prefix_s: FloatArray  # shape ``(T, L + 1)``
    cut_time_s: FloatArray  # shape ``(K + 1, L + 1)``; column 0 holds 0
    bottleneck_start_s: FloatArray  # shape ``(B + 1, L + 1)``
    bottleneck_end_s: FloatArray  # shape ``(B + 1, L + 1)``
    earliest_start: IntArray  # shape ``(M + 1, L + 1)``
    latest_start: IntArray  # shape ``(L + 1,)``
    # Shape ``(M + 1, L + 1)``. Minimum of ``earliest_start`` over this and later columns.
    earliest_floor: IntArray
    class_time: IntArray  # shape ``(C,)``. Time row.
    class_bottleneck: IntArray  # shape ``(C,)``. Bottleneck row.
    class_overhead_s: FloatArray  # shape ``(C,)``
    # Shape ``(C, L + 1)``. Non-decreasing upper bound of the time that a start subtracts.
    class_start_s: FloatArray
    # Shape ``(C, L + 1)``. Non-decreasing lower bound of the time that an end adds.
    class_end_s: FloatArray
    # Shape ``(C,)``. Whether both bounds are exact: then a cap admits a window of starts.
    class_regular: BoolArray
    option_from: IntArray  # shape ``(E,)``
    option_to: IntArray  # shape ``(E,)``
    option_class: IntArray  # shape ``(E,)``
    option_cut: IntArray  # shape ``(E,)``
    option_memory: IntArray  # shape ``(E,)``
    option_fixed_s: FloatArray  # shape ``(E,)``
    is_final: BoolArray  # shape ``(R,)``
    # Shape ``(R,)``. Fewest stages from state 0; ``R`` or more if there is no path.
    fewest: IntArray
    # Shape ``(R,)``. Most layers that still leave one per later stage; below 0 if there is no path
    # to a final state, or more stages than layers.
    most: IntArray


class Scratch(NamedTuple):
    """Arrays that one evaluation writes; the next one reuses them."""

    # Shape ``(C, L + 1)``. First start that the cap admits, per class and end.
    admissible: IntArray
    first: IntArray  # shape ``(R,)``. Fewest layers from which the end can be reached.
    low: IntArray  # shape ``(R,)``. Fewest layers placed so far.
    high: IntArray  # shape ``(R,)``. Most layers placed so far.
    cost_s: FloatArray  # shape ``(R, L + 1)``. Cheapest sum.
    start: IntArray  # shape ``(R, L + 1)``. Start of the last stage of that sum.
    option: IntArray  # shape ``(R, L + 1)``. Option of that stage.
    queue_start: IntArray  # shape ``(L + 1,)``. Window minima: starts, ascending.
    queue_key_s: FloatArray  # shape ``(L + 1,)``. Their keys, not descending.
    path_start: IntArray  # shape ``(R,)``. Starts of the chain, last stage first.
    path_option: IntArray  # shape ``(R,)``. Options of the chain, last stage first.


class StepEndArrays(NamedTuple):
    """Step-end terms for the kernels: B terms, E options in the programme's order, L layers."""

    weight_prefix: FloatArray  # shape ``(B, L + 1)``
    s_per_weight: FloatArray  # shape ``(B, E)``
    fixed_s: FloatArray  # shape ``(B, E)``
    least_s: FloatArray  # shape ``(B,)``. Lower bound of the term in any chain.
