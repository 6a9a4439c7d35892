import numpy as np
import pytest

from amp_ray.partition.problem import (
    PartitionProblem,
    bottleneck_s,
    chain_problem,
    even_bounds,
    objective,
)
from amp_ray.partition.tables import OptionTable, StageTables

TABLES = StageTables(
    time_prefix_s=np.array([[0.0, 1.0, 3.0, 6.0], [0.0, 2.0, 6.0, 12.0]]),
    cut_time_s=np.array([[100.0, 0.5, 0.25, 100.0]]),
    bottleneck_start_s=np.array([[0.0, 4.0, 1.0, 0.0]]),
    bottleneck_end_s=np.array([[0.0, 2.0, 8.0, 0.0]]),
    earliest_start=np.array([[0, 0, 1, 2]]),
)


def test_objective_adds_times_cuts_and_the_slowest_stage() -> None:
    problem = chain_problem(TABLES, 4, time_row=np.array([0, 1]), cut_row=np.array([0]))
    cost = objective(problem, (0, 2, 3), (0, 1))
    assert cost.sum_s == 3.0 + 0.25 + 6.0
    assert cost.slowest_s == 6.0
    assert cost.value_s == 9.25 + 3 * 6.0


def test_a_stage_from_the_first_layer_on_pays_no_cut() -> None:
    options = OptionTable(time_row=np.array([0]), cut_row=np.array([0]))
    problem = PartitionProblem(tables=TABLES, options=options, num_micro_batches=1)
    assert objective(problem, (0, 3), (0,)).sum_s == 6.0


def test_fixed_costs_count_once_and_overheads_also_for_the_slowest() -> None:
    options = OptionTable(
        time_row=np.array([0]), overhead_s=np.array([0.5]), fixed_s=np.array([7.0])
    )
    problem = PartitionProblem(tables=TABLES, options=options, num_micro_batches=3)
    assert objective(problem, (0, 3), (0,)).value_s == (6.5 + 7.0) + 2 * 6.5


def test_bottlenecks_add_both_ends_to_the_slowest_stage_only() -> None:
    problem = chain_problem(
        TABLES, 2, time_row=np.array([0, 0, 0]), bottleneck_row=np.array([-1, 0, -1])
    )
    assert bottleneck_s(problem, 1, 2, 1) == 2.0 + 4.0 + 8.0
    cost = objective(problem, (0, 1, 2, 3), (0, 1, 2))
    assert (cost.sum_s, cost.slowest_s) == (6.0, 14.0)


def test_final_states_are_sorted_and_named_once() -> None:
    options = OptionTable(time_row=np.array([0, 0]))
    problem = PartitionProblem(
        tables=TABLES, options=options, num_micro_batches=1, final_states=(2, 1, 2)
    )
    assert problem.final_states == (1, 2)


@pytest.mark.parametrize(
    ("bounds", "options", "message"),
    [
        ((0, 2), (0,), r"bounds \(0, 2\) do not ascend from 0 to 3"),
        ((0, 2, 2, 3), (0, 1, 2), "do not ascend"),
        ((), (), "do not ascend"),
        ((0, 2, 3), (0,), "1 options for 2 stages"),
        ((0, 2, 3), (0, 9), "option 9 of stage 1 does not exist"),
        ((0, 2, 3), (0, 2), "option 2 of stage 1 starts from state 2, but .* end in 1"),
        ((0, 3), (0,), r"end in state 1, not in one of \(3,\)"),
    ],
)
def test_refuses_what_is_no_partition(
    bounds: tuple[int, ...], options: tuple[int, ...], message: str
) -> None:
    problem = chain_problem(TABLES, 1, time_row=np.array([0, 0, 0]))
    with pytest.raises(ValueError, match=message):
        objective(problem, bounds, options)


@pytest.mark.parametrize(
    ("num_layers", "bounds"),
    [(30, (0, 8, 16, 23, 30)), (12, (0, 3, 6, 9, 12)), (7, (0, 7)), (3, (0, 1, 2, 3))],
)
def test_even_stages_differ_by_a_layer_and_the_first_are_larger(
    num_layers: int, bounds: tuple[int, ...]
) -> None:
    assert even_bounds(num_layers, len(bounds) - 1) == bounds
