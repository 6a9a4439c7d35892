"""Convert a partition problem into arrays for the kernels."""

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.kernels import (
    Programme,
    ProgrammeViews,
    Scratch,
    ScratchViews,
    count_stages,
)
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.tables import Number


def laid_out(problem: PartitionProblem) -> Programme:
    """Lay out tables and options; option ``e`` is option ``options.order[e]`` of the problem."""
    tables, options = problem.tables, problem.options
    order, (members, classes) = options.order, options.classes
    cut_time_s = _cut_rows(tables.cut_time_s)
    bottleneck_start_s = _with_empty_row(tables.bottleneck_start_s)
    bottleneck_end_s = _with_empty_row(tables.bottleneck_end_s)
    class_time, class_bottleneck = (
        options.time_row[members],
        options.bottleneck_row[members] % len(bottleneck_end_s),
    )
    start_s, end_s, regular = _windows(
        tables.time_prefix_s[class_time],
        bottleneck_start_s[class_bottleneck],
        bottleneck_end_s[class_bottleneck],
    )
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
        class_start_s=start_s,
        class_end_s=end_s,
        class_regular=regular,
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


def laid_out_chain(
    times: tuple[FloatArray, IntArray],
    cuts: tuple[FloatArray, IntArray],
    bottlenecks: tuple[FloatArray, FloatArray, IntArray | None],
    earliest_start: IntArray,
    latest_start: IntArray,
) -> Programme:
    """Lay out the problem of `chain_problem` from arrays, which are not checked.

    Args:
        times: ``time_prefix_s``, and the row of each of the ``S`` stages.
        cuts: ``cut_time_s``, and the row of each of the ``S - 1`` cuts.
        bottlenecks: ``bottleneck_start_s`` and ``bottleneck_end_s``, and the row of each stage;
            None if transfers do not block.
        earliest_start: Shape ``(S, L + 1)``. By stage.
        latest_start: As in `StageTables`; empty if stages need no layers.
    """
    (prefix_s, time_row), (cut_time_s, cut_row) = times, cuts
    before_s, behind_s, bottleneck_row = bottlenecks
    num_stages, width = len(time_row), prefix_s.shape[1]
    if bottleneck_row is None:
        before_s = behind_s = np.empty((0, width))
        bottleneck_row = np.zeros(num_stages, np.int64)
    before_s, behind_s = _with_empty_row(before_s), _with_empty_row(behind_s)
    option_class, class_time, class_bottleneck = _classes(time_row, bottleneck_row)
    start_s, end_s, regular = _windows(
        prefix_s[class_time], before_s[class_bottleneck], behind_s[class_bottleneck]
    )
    cut_time_s = _cut_rows(cut_time_s.reshape(-1, width))
    stages = np.arange(num_stages + 1)
    laid = Programme(
        time_prefix_s=_read_only(prefix_s),
        cut_time_s=cut_time_s,
        bottleneck_start_s=before_s,
        bottleneck_end_s=behind_s,
        earliest_start=earliest_start,
        latest_start=_read_only(latest_start if latest_start.size else np.arange(width) - 1),
        earliest_floor=earliest_start,
        class_time=class_time,
        class_bottleneck=class_bottleneck,
        class_overhead_s=np.zeros(len(class_time)),
        class_start_s=start_s,
        class_end_s=end_s,
        class_regular=regular,
        option_from=stages[:-1],
        option_to=stages[1:],
        option_class=option_class,
        option_cut=np.concatenate(([len(cut_time_s) - 1], cut_row)),
        option_memory=stages[:-1],
        option_fixed_s=np.zeros(num_stages),
        is_final=stages == num_stages,
        fewest=stages,
        most=width - 1 - stages[::-1],
    )
    return limited(laid, earliest_start)


def _classes(time_row: IntArray, bottleneck_row: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return each stage's class, and of each class its rows of times and of bottlenecks."""
    number: dict[tuple[int, int], int] = {}
    pairs = zip(time_row.tolist(), bottleneck_row.tolist(), strict=True)
    stage_class = np.array([number.setdefault(pair, len(number)) for pair in pairs])
    class_time, class_bottleneck = np.array(list(number)).T.copy()
    return stage_class, class_time, class_bottleneck


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


def views_of(programme: Programme, scratch: Scratch) -> tuple[ProgrammeViews, ScratchViews]:
    """Return what the kernels take: made once, since that takes longer than a small evaluation."""
    return ProgrammeViews(**programme._asdict()), ScratchViews(**scratch._asdict())


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


def _windows(
    prefix_s: FloatArray, start_s: FloatArray, end_s: FloatArray
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Return ``class_start_s``, ``class_end_s`` and ``class_regular`` of a programme."""
    taken_off_s, brought_s = prefix_s - start_s, prefix_s + end_s
    class_start_s, class_end_s = np.maximum.accumulate(taken_off_s, axis=1), _suffix_min(brought_s)
    regular = ((class_start_s == taken_off_s) & (class_end_s == brought_s)).all(axis=1)
    return class_start_s, class_end_s, regular


def _read_only(array: NDArray[Number]) -> NDArray[Number]:
    """Return a view that the kernels take for the same type as a checked table."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _with_empty_row(table: NDArray[Number]) -> NDArray[Number]:
    """Append a row of zeros, so that row -1 reads zeros."""
    extended = np.zeros((len(table) + 1, table.shape[1]), table.dtype)
    extended[:-1] = table
    return extended


def _cut_rows(cut_time_s: FloatArray) -> FloatArray:
    """Append a row of zeros, and let the cut before the first layer take no time."""
    rows = _with_empty_row(cut_time_s)
    rows[:, 0] = 0.0
    return rows


def _suffix_min(table: NDArray[Number]) -> NDArray[Number]:
    """Return the minimum of each row over this and all later columns."""
    return np.ascontiguousarray(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1])
