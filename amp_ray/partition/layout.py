"""Convert a partition problem into arrays for the kernels."""

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray, IntArray
from amp_ray.partition.kernels import Programme, Scratch, count_stages
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.tables import Number


def laid_out(problem: PartitionProblem) -> Programme:
    """Lay out tables and options; option ``e`` is option ``options.order[e]`` of the problem."""
    tables, options = problem.tables, problem.options
    order, (members, classes) = options.order, options.classes
    cut_time_s = _with_empty_row(tables.cut_time_s)
    cut_time_s[:, 0] = 0.0
    bottleneck_start_s = _with_empty_row(tables.bottleneck_start_s)
    bottleneck_end_s = _with_empty_row(tables.bottleneck_end_s)
    class_time, class_bottleneck = (
        options.time_row[members],
        options.bottleneck_row[members] % len(bottleneck_end_s),
    )
    taken_off_s = tables.time_prefix_s[class_time] - bottleneck_start_s[class_bottleneck]
    brought_s = tables.time_prefix_s[class_time] + bottleneck_end_s[class_bottleneck]
    class_start_s, class_end_s = np.maximum.accumulate(taken_off_s, axis=1), _suffix_min(brought_s)
    option_from, option_to = options.from_state[order], options.to_state[order]
    is_final, fewest, most = _states(problem)
    count_stages(option_from, option_to, fewest, most)
    laid = Programme(
        time_prefix_s=tables.time_prefix_s,
        cut_time_s=cut_time_s,
        bottleneck_start_s=bottleneck_start_s,
        bottleneck_end_s=bottleneck_end_s,
        earliest_start=tables.earliest_start,
        latest_start=tables.latest_start,
        earliest_floor=tables.earliest_start,
        class_time=class_time,
        class_bottleneck=class_bottleneck,
        class_overhead_s=options.overhead_s[members],
        class_start_s=class_start_s,
        class_end_s=class_end_s,
        class_regular=((class_start_s == taken_off_s) & (class_end_s == brought_s)).all(axis=1),
        option_from=option_from,
        option_to=option_to,
        option_class=classes[order],
        option_cut=options.cut_row[order] % len(cut_time_s),
        option_memory=options.memory_row[order] % (len(tables.earliest_start) + 1),
        option_fixed_s=options.fixed_s[order],
        is_final=is_final,
        fewest=fewest,
        most=most,
    )
    return limited(laid, tables.earliest_start)


def limited(programme: Programme, earliest_start: IntArray) -> Programme:
    """Return a programme with other memory limits, without laying out the rest again."""
    starts = _with_empty_row(earliest_start)
    return programme._replace(earliest_start=starts, earliest_floor=_suffix_min(starts))


def scratch_for(programme: Programme) -> Scratch:
    """Allocate the arrays that an evaluation writes."""
    num_states, (num_classes, width) = programme.is_final.size, programme.class_start_s.shape
    return Scratch(
        admissible=np.empty((num_classes, width), np.int64),
        first=np.empty(num_states, np.int64),
        low=np.empty(num_states, np.int64),
        high=np.empty(num_states, np.int64),
        cost_s=np.empty((num_states, width)),
        start=np.empty((num_states, width), np.int64),
        option=np.empty((num_states, width), np.int64),
        queue_start=np.empty(width, np.int64),
        queue_key_s=np.empty(width),
        path_start=np.empty(num_states, np.int64),
        path_option=np.empty(num_states, np.int64),
    )


def _states(problem: PartitionProblem) -> tuple[BoolArray, IntArray, IntArray]:
    """Return the mask of final states, and the initial arrays for `count_stages`."""
    num_states, final_states = problem.options.num_states, list(problem.final_states)
    is_final = np.zeros(num_states, np.bool_)
    is_final[final_states] = True
    fewest = np.full(num_states, num_states)
    fewest[0] = 0
    most = np.full(num_states, -num_states)
    most[final_states] = problem.num_layers
    return is_final, fewest, most


def _with_empty_row(table: NDArray[Number]) -> NDArray[Number]:
    """Append a row of zeros, so that row -1 reads zeros."""
    extended = np.zeros((len(table) + 1, table.shape[1]), table.dtype)
    extended[:-1] = table
    return extended


def _suffix_min(table: NDArray[Number]) -> NDArray[Number]:
    """Return the minimum of each row over this and all later columns."""
    return np.ascontiguousarray(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1])
