"""The partition problem that all planners share, its objective and its results."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.partition.tables import OptionTable, StageTables

TABLE_OF_ROW: Final = {
    "time_row": "time_prefix_s",
    "cut_row": "cut_time_s",
    "bottleneck_row": "bottleneck_start_s",
    "memory_row": "earliest_start",
}
"""Columns of `OptionTable`, and the tables of `StageTables` whose rows they name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Cut a chain of layers into stages and choose an option for each, to minimise time.

    A partition is a path of options from state 0 to a final state. Its stages take all layers in
    order, at least one each. With ``m`` micro-batches it costs::

        sum over stages of (time + cut + fixed) + (m - 1) * bottleneck

    Raises:
        ValueError: If an option names a row that its table lacks, a final state does not exist,
            or ``num_micro_batches < 1``.
    """

    tables: StageTables
    options: OptionTable  # possible stages
    num_micro_batches: int  # ``m``
    # States at which a partition may end, ascending; the highest state if left out. Several if
    # devices may stay idle.
    final_states: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check tables and options against each other."""
        if self.num_micro_batches < 1:
            msg = f"num_micro_batches is {self.num_micro_batches}, expected at least 1"
            raise ValueError(msg)
        options = self.options
        for column, table in TABLE_OF_ROW.items():
            rows, num_rows = getattr(options, column), len(getattr(self.tables, table))
            if rows.max() >= num_rows:
                option = int(rows.argmax())
                msg = f"{column}[{option}] is {rows[option]}, but {table} has {num_rows} rows"
                raise ValueError(msg)
        final_states = tuple(sorted(set(self.final_states))) or (options.num_states - 1,)
        if final_states[0] < 1 or final_states[-1] >= options.num_states:
            msg = f"final_states are {final_states}, expected from 1 to {options.num_states - 1}"
            raise ValueError(msg)
        object.__setattr__(self, "final_states", final_states)

    @property
    def num_layers(self) -> int:
        """``L``."""
        return self.tables.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The cost of a partition, in seconds."""

    sum_s: float  # times, cuts and fixed costs of all stages
    slowest_s: float
    value_s: float  # ``sum_s + (num_micro_batches - 1) * slowest_s``


def chain_problem(
    tables: StageTables,
    num_micro_batches: int,
    *,
    time_row: IntArray,
    cut_row: IntArray | None = None,
    bottleneck_row: IntArray | None = None,
    memory_row: IntArray | None = None,
) -> PartitionProblem:
    """Build the problem of ``S`` stages in a row on fixed devices: option ``s`` is stage ``s``.

    Args:
        tables: Costs of stages.
        num_micro_batches: ``m``.
        time_row: Shape ``(S,)``. Row of ``time_prefix_s`` for each stage, by its device type.
        cut_row: Shape ``(S - 1,)``. Row of ``cut_time_s`` between stages ``s`` and ``s + 1``.
        bottleneck_row: Shape ``(S,)``. Row of ``bottleneck_start_s`` and ``bottleneck_end_s``.
        memory_row: Shape ``(S,)``. Row of ``earliest_start``.

    Raises:
        ValueError: If shapes disagree or a row does not exist.

    Example:
        >>> tables = StageTables(time_prefix_s=np.array([[0.0, 1.0, 3.0, 6.0]]))
        >>> chain_problem(tables, 4, time_row=np.array([0, 0])).final_states
        (2,)
    """
    nothing = np.empty(0, np.int64)
    cuts = nothing if cut_row is None else np.concatenate((nothing, [-1], cut_row))
    options = OptionTable(
        time_row=time_row,
        cut_row=cuts.astype(np.int64),
        bottleneck_row=nothing if bottleneck_row is None else bottleneck_row,
        memory_row=nothing if memory_row is None else memory_row,
    )
    return PartitionProblem(tables=tables, options=options, num_micro_batches=num_micro_batches)


def objective(
    problem: PartitionProblem, bounds: tuple[int, ...], options: tuple[int, ...]
) -> Objective:
    """Compute the objective of a partition, bit for bit as the solver does.

    The solver extends sums stage by stage, so a stage adds its terms one by one, ``- prefix[a] +
    cut[a] + prefix[b] + overhead + fixed``. Memory is no part of the objective.

    Raises:
        ValueError: If the stages do not take all layers in order, or the options are no path
            from state 0 to a final state.
    """
    _check_partition(problem, bounds, options)
    sum_s, slowest_s = 0.0, 0.0
    for (start, end), option in zip(pairwise(bounds), options, strict=True):
        sum_s = extended_sum_s(problem, sum_s, start, end, option)
        slowest_s = max(slowest_s, bottleneck_s(problem, start, end, option))
    value_s = sum_s + (problem.num_micro_batches - 1) * slowest_s
    return Objective(sum_s=sum_s, slowest_s=slowest_s, value_s=value_s)


def extended_sum_s(
    problem: PartitionProblem, sum_s: float, start: int, end: int, option: int
) -> float:
    """Add a stage ``[start, end)`` to the sum of a chain of stages."""
    options, tables = problem.options, problem.tables
    prefix_s = tables.time_prefix_s[options.time_row[option]]
    cut_row = options.cut_row[option]
    cut_s = tables.cut_time_s[cut_row, start] if cut_row >= 0 and start > 0 else 0.0
    started_s = (sum_s - prefix_s[start]) + cut_s
    return float(
        ((started_s + prefix_s[end]) + options.overhead_s[option]) + options.fixed_s[option]
    )


def bottleneck_s(problem: PartitionProblem, start: int, end: int, option: int) -> float:
    """Return a stage's bottleneck time: its own time plus blocking transfers at its ends."""
    options, tables = problem.options, problem.tables
    prefix_s = tables.time_prefix_s[options.time_row[option]]
    bottleneck_row = options.bottleneck_row[option]
    end_s = prefix_s[end] + (
        tables.bottleneck_end_s[bottleneck_row, end] if bottleneck_row >= 0 else 0.0
    )
    start_s = prefix_s[start] - (
        tables.bottleneck_start_s[bottleneck_row, start] if bottleneck_row >= 0 else 0.0
    )
    return float((end_s - start_s) + options.overhead_s[option])


def _check_partition(
    problem: PartitionProblem, bounds: tuple[int, ...], options: tuple[int, ...]
) -> None:
    """Raise if stages leave gaps, or options are no path to a final state."""
    covers = bounds[:1] == (0,) and bounds[-1] == problem.num_layers
    if not covers or any(end <= start for start, end in pairwise(bounds)):
        msg = f"bounds {bounds} do not ascend from 0 to {problem.num_layers}, the layers"
        raise ValueError(msg)
    if len(options) != len(bounds) - 1:
        msg = f"{len(options)} options for {len(bounds) - 1} stages, expected one for each"
        raise ValueError(msg)
    state = 0
    for stage, option in enumerate(options):
        if not 0 <= option < problem.options.num_options:
            msg = f"option {option} of stage {stage} does not exist"
            raise ValueError(msg)
        if problem.options.from_state[option] != state:
            msg = (
                f"option {option} of stage {stage} starts from state "
                f"{problem.options.from_state[option]}, but the stages before it end in {state}"
            )
            raise ValueError(msg)
        state = int(problem.options.to_state[option])
    if state not in problem.final_states:
        msg = f"options {options} end in state {state}, not in one of {problem.final_states}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSolution:
    """The best partition, or the best within a budget of evaluations."""

    # ``(0, ..., num_layers)``; stage ``s`` takes layers ``[bounds[s], bounds[s + 1])``
    bounds: tuple[int, ...]
    options: tuple[int, ...]  # the option of each stage, by its index in `OptionTable`
    value_s: float
    slowest_s: float
    lower_bound_s: float  # no partition has a smaller objective; equals ``value_s`` once proven
    num_evaluations: int  # caps on the slowest stage that were tried


class InfeasibleReason(StrEnum):
    """Why no partition exists."""

    NO_PATH = "no path"
    TOO_FEW_LAYERS = "too few layers"
    MEMORY = "memory"
    NEEDED_LAYERS = "needed layers"
    NOT_SEARCHED = "not searched"  # no examined partition fits, but not all were examined


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasiblePartition:
    """Result of a problem without partition."""

    reason: InfeasibleReason
    detail: str  # for people: one sentence with the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPartition:
    """Result if every partition costs more than the caller's upper bound."""

    lower_bound_s: float  # no partition has a smaller objective
    num_evaluations: int  # caps on the slowest stage that were tried


def even_bounds(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers evenly by number: the first ``num_layers % num_stages`` stages get one more.

    Raises:
        ValueError: If there are no stages, or more stages than layers.

    Example:
        >>> even_bounds(10, 4)
        (0, 3, 6, 8, 10)
    """
    if not 1 <= num_stages <= num_layers:
        msg = (
            f"num_stages is {num_stages}, but the chain has {num_layers} layers: "
            f"expected 1 to {num_layers} stages"
        )
        raise ValueError(msg)
    size, longer = divmod(num_layers, num_stages)
    return tuple(stage * size + min(stage, longer) for stage in range(num_stages + 1))
