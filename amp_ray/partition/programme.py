"""What the kernels read and write: a partition problem as arrays.

The names here are tuples, because compiled functions take those.
"""

from typing import NamedTuple

from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray


class Programme(NamedTuple):
    """A partition problem laid out for the kernels: C classes, E options, R states, L layers.

    A class is what the cap looks at: a time row, a bottleneck row and an overhead. Options are in
    canonical order, which ascends by the state they lead to. Every table ends with a row that
    charges nothing; columns are layer counts ``0..L``.

    Attributes:
        time_prefix_s: Shape ``(T, L + 1)``.
        cut_time_s: Shape ``(K + 1, L + 1)``; column 0 is zero.
        bottleneck_start_s: Shape ``(B + 1, L + 1)``.
        bottleneck_end_s: Shape ``(B + 1, L + 1)``.
        earliest_start: Shape ``(M + 1, L + 1)``.
        latest_start: Shape ``(L + 1,)``.
        earliest_floor: Shape ``(M + 1, L + 1)``. Minimum of ``earliest_start`` from here on.
        class_time: Shape ``(C,)``. Time row.
        class_bottleneck: Shape ``(C,)``. Beat row.
        class_overhead_s: Shape ``(C,)``.
        class_start_s: Shape ``(C, L + 1)``. Non-decreasing upper bound of what a start takes off.
        class_end_s: Shape ``(C, L + 1)``. Non-decreasing lower bound of what an end brings.
        class_regular: Shape ``(C,)``. Both bounds are exact: a cap admits a window of starts.
        option_from: Shape ``(E,)``.
        option_to: Shape ``(E,)``.
        option_class: Shape ``(E,)``.
        option_cut: Shape ``(E,)``.
        option_memory: Shape ``(E,)``.
        option_fixed_s: Shape ``(E,)``.
        is_final: Shape ``(R,)``.
        fewest: Shape ``(R,)``. Fewest stages from state 0; ``R`` or more if there is no path.
        most: Shape ``(R,)``. Most layers that leave one for each stage to come; below 0 if there
            is no path to an end, or more stages than layers.
    """

    time_prefix_s: FloatArray
    cut_time_s: FloatArray
    bottleneck_start_s: FloatArray
    bottleneck_end_s: FloatArray
    earliest_start: IntArray
    latest_start: IntArray
    earliest_floor: IntArray
    class_time: IntArray
    class_bottleneck: IntArray
    class_overhead_s: FloatArray
    class_start_s: FloatArray
    class_end_s: FloatArray
    class_regular: BoolArray
    option_from: IntArray
    option_to: IntArray
    option_class: IntArray
    option_cut: IntArray
    option_memory: IntArray
    option_fixed_s: FloatArray
    is_final: BoolArray
    fewest: IntArray
    most: IntArray


class Scratch(NamedTuple):
    """What one evaluation writes; reused by the next one.

    Attributes:
        admissible: Shape ``(C, L + 1)``. First start that the cap admits, per class and end.
        first: Shape ``(R,)``. Fewest layers from which the end can be reached.
        low: Shape ``(R,)``. Fewest layers placed so far.
        high: Shape ``(R,)``. Most layers placed so far.
        cost_s: Shape ``(R, L + 1)``. Cheapest sum.
        start: Shape ``(R, L + 1)``. Where its last stage starts.
        option: Shape ``(R, L + 1)``. The option of its last stage.
        queue_start: Shape ``(L + 1,)``. Window minima: starts, ascending.
        queue_key_s: Shape ``(L + 1,)``. Their keys, not descending.
        path_start: Shape ``(R,)``. The chain found, last stage first: starts.
        path_option: Shape ``(R,)``. And options.
    """

    admissible: IntArray
    first: IntArray
    low: IntArray
    high: IntArray
    cost_s: FloatArray
    start: IntArray
    option: IntArray
    queue_start: IntArray
    queue_key_s: FloatArray
    path_start: IntArray
    path_option: IntArray


class StepEndArrays(NamedTuple):
    """Step-end terms for the kernels: B terms, E options in the programme's order, L layers.

    Attributes:
        weight_prefix: Shape ``(B, L + 1)``.
        s_per_weight: Shape ``(B, E)``.
        fixed_s: Shape ``(B, E)``.
        least_s: Shape ``(B,)``. No chain has a shorter one.
    """

    weight_prefix: FloatArray
    s_per_weight: FloatArray
    fixed_s: FloatArray
    least_s: FloatArray
