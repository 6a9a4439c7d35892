import math

import numpy as np
import pytest

from amp_ray.partition.exact import best_chain, solve
from amp_ray.partition.layout import laid_out_chain
from amp_ray.partition.problem import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionProblem,
    PartitionSolution,
    chain_problem,
)
from amp_ray.partition.tables import OptionTable, StageTables


def prefix_s(*rows: list[float]) -> np.ndarray:
    return np.array([np.concatenate(([0.0], np.cumsum(row))) for row in rows])


def row_of(num_stages: int, layer_time_s: list[float], num_micro_batches: int) -> PartitionProblem:
    tables = StageTables(time_prefix_s=prefix_s(layer_time_s))
    return chain_problem(tables, num_micro_batches, time_row=np.zeros(num_stages, int))


def solved(problem: PartitionProblem) -> PartitionSolution:
    solution = solve(problem)
    assert isinstance(solution, PartitionSolution)
    assert solution.lower_bound_s == solution.value_s
    return solution


def test_equal_sums_are_decided_by_the_slowest_stage() -> None:
    assert solved(row_of(2, [1.0, 2.0, 3.0, 1.0], 1)).bounds == (0, 2, 4)


def test_equal_partitions_are_decided_by_the_earliest_last_stage() -> None:
    assert solved(row_of(2, [1.0, 0.0, 0.0, 1.0], 5)).bounds == (0, 1, 4)


def test_layers_of_no_time_need_no_search() -> None:
    solution = solved(row_of(3, [0.0] * 5, 1000))
    assert (solution.value_s, solution.num_evaluations) == (0.0, 1)


def test_more_stages_than_layers_is_infeasible() -> None:
    infeasible = solve(row_of(3, [1.0, 1.0], 4))
    assert infeasible == InfeasiblePartition(
        reason=InfeasibleReason.TOO_FEW_LAYERS,
        detail="3 stages or more cannot share 2 layers",
    )


def test_states_without_a_path_are_infeasible() -> None:
    options = OptionTable(
        time_row=np.array([0, 0]), from_state=np.array([0, 2]), to_state=np.array([1, 3])
    )
    problem = PartitionProblem(
        tables=StageTables(time_prefix_s=prefix_s([1.0, 1.0])),
        options=options,
        num_micro_batches=2,
    )
    infeasible = solve(problem)
    assert isinstance(infeasible, InfeasiblePartition)
    assert infeasible.reason is InfeasibleReason.NO_PATH
    assert "(3,)" in infeasible.detail


def test_a_layer_that_fits_nowhere_is_named() -> None:
    tables = StageTables(time_prefix_s=prefix_s([1.0] * 3), earliest_start=np.array([[0, 0, 2, 2]]))
    problem = chain_problem(tables, 2, time_row=np.array([0]), memory_row=np.array([0]))
    assert solve(problem) == InfeasiblePartition(
        reason=InfeasibleReason.MEMORY,
        detail="layer 1 fits no option's memory, not even alone",
    )


def test_too_many_layers_for_the_memory_of_all_stages_is_infeasible() -> None:
    tables = StageTables(time_prefix_s=prefix_s([1.0] * 3), earliest_start=np.array([[0, 0, 1, 2]]))
    problem = chain_problem(tables, 2, time_row=np.array([0, 0]), memory_row=np.array([0, 0]))
    infeasible = solve(problem)
    assert isinstance(infeasible, InfeasiblePartition)
    assert infeasible.reason is InfeasibleReason.MEMORY
    assert "all 3 layers" in infeasible.detail


def test_refuses_a_budget_of_nothing() -> None:
    with pytest.raises(ValueError, match="max_evaluations is 0, expected at least 1"):
        solve(row_of(1, [1.0], 1), max_evaluations=0)


def test_refuses_an_upper_bound_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="upper_bound_s is not a number"):
        solve(row_of(1, [1.0], 1), upper_bound_s=math.nan)


def test_a_chain_from_plain_arrays_is_cut_as_the_checked_problem_is() -> None:
    rng = np.random.default_rng(5)
    infeasible = 0
    for _ in range(200):
        layers, stages, num_micro_batches = (int(rng.integers(1, most)) for most in (9, 6, 12))
        times, cuts = prefix_s(*rng.random((3, layers))), rng.random((2, layers + 1))
        ends = np.arange(layers + 1)
        time_row, cut_row = rng.integers(0, 3, stages), rng.integers(0, 2, stages - 1)
        row = rng.integers(0, 2, stages) if rng.random() < 0.5 else None
        starts = rng.integers(0, ends + 1, (stages, layers + 1))
        latest = ends - 1 if rng.random() < 0.5 else np.maximum((ends - 1) // 2 * 2, -1)
        tables = StageTables(
            time_prefix_s=times,
            cut_time_s=cuts,
            bottleneck_start_s=cuts,
            bottleneck_end_s=cuts[::-1],
            earliest_start=starts,
            latest_start=latest,
        )
        problem = chain_problem(
            tables,
            num_micro_batches,
            time_row=time_row,
            cut_row=cut_row,
            bottleneck_row=row,
            memory_row=np.arange(stages),
        )
        programme = laid_out_chain(
            (times, time_row), (cuts, cut_row), (cuts, cuts[::-1], row), starts, latest
        )
        solution = solve(problem)
        bounds = solution.bounds if isinstance(solution, PartitionSolution) else None
        infeasible += bounds is None
        assert best_chain(programme, num_micro_batches) == bounds
    assert 20 < infeasible < 180
