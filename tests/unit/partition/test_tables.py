import re
from collections.abc import Callable

import numpy as np
import pytest

from amp_ray.partition.problem import PartitionProblem, chain_problem, even_bounds
from amp_ray.partition.slices import SliceTables
from amp_ray.partition.step_end import StepEndTerm
from amp_ray.partition.tables import (
    NO_ROW,
    OptionTable,
    StageTables,
    frozen_integers,
    frozen_times,
)

PREFIX_S = np.array([[0.0, 1.0, 3.0], [0.0, 2.0, 2.0]])


def test_frozen_arrays_stay_apart_and_are_copied_once() -> None:
    given = np.array([1.0, 2.0])
    times = frozen_times("x", given, 1)
    with pytest.raises(ValueError, match="read-only"):
        times[0] = 3.0
    given[0] = 9.0
    assert times[0] == 1.0
    assert frozen_times("x", times, 1) is times
    assert frozen_integers("x", [], 1, smallest=3).size == 0


def test_tables_left_out_have_no_rows_and_columns_left_out_charge_nothing() -> None:
    tables = StageTables(time_prefix_s=PREFIX_S)
    assert tables.num_layers == 2
    assert tables.cut_time_s.shape == tables.earliest_start.shape == (0, 3)
    options = OptionTable(time_row=np.array([0, 1]))
    assert options.memory_row.tolist() == [NO_ROW, NO_ROW]
    assert options.fixed_s.tolist() == [0.0, 0.0]


def test_options_without_states_are_a_row_of_stages() -> None:
    options = OptionTable(time_row=np.array([0, 1, 0]))
    assert options.from_state.tolist() == [0, 1, 2]
    assert options.to_state.tolist() == [1, 2, 3]
    assert options.num_states == 4


def stages(**tables: object) -> StageTables:
    arrays = {name: np.array(table) for name, table in tables.items()}
    return StageTables(**{"time_prefix_s": PREFIX_S, **arrays})


def options(*time_row: int, **columns: list[float]) -> OptionTable:
    arrays = {name: np.array(column) for name, column in columns.items()}
    return OptionTable(time_row=np.array(time_row, np.int64), **arrays)


def problem(final_state: int) -> PartitionProblem:
    return PartitionProblem(
        tables=stages(), options=options(0, 0), num_micro_batches=1, final_states=(final_state,)
    )


def term(**values: list[float]) -> StepEndTerm:
    parts = {"weight_prefix": [0.0, 1.0, 2.0], "s_per_weight": [1.0], "fixed_s": [0.0]} | values
    return StepEndTerm(**{name: np.array(value) for name, value in parts.items()})


def slices(forward: np.ndarray, backward: np.ndarray) -> SliceTables:
    return SliceTables(forward_s=forward, backward_s=backward)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: frozen_times("x", [[1.0], [np.nan]], 2), "x[1, 0] is nan: times must be finite"),
        (lambda: frozen_times("x", [[1.0], [-1.0]], 2), "x[1, 0] is -1.0: times must be finite"),
        (lambda: frozen_times("x", [[1.0], [np.inf]], 2), "x[1, 0] is inf: times must be finite"),
        (lambda: frozen_times("x", [1.0, 2.0], 2), "x has shape (2,), expected 2 dimension"),
        (lambda: frozen_integers("x", [1.5], 1, smallest=0), "x holds values of type float64"),
        (lambda: frozen_integers("x", [-1, -2], 1, smallest=-1), "x[1] is -2, expected at least"),
        (
            lambda: stages(bottleneck_start_s=[[1.0] * 3], bottleneck_end_s=[[1.0] * 3] * 2),
            "bottleneck_start_s has 1 rows and bottleneck_end_s 2",
        ),
        (
            lambda: stages(time_prefix_s=[[0.0, 3.0, 1.0]]),
            "time_prefix_s[0, 2] is 1.0 after 3.0: layer 1",
        ),
        (lambda: stages(time_prefix_s=np.zeros((0, 3))), "expected (T, layers + 1)"),
        (lambda: stages(time_prefix_s=np.zeros((2, 1))), "expected (T, layers + 1)"),
        (lambda: stages(cut_time_s=[[0.0] * 4]), "cut_time_s has 4 columns, but time_prefix_s ha"),
        (lambda: stages(bottleneck_end_s=[[0.0] * 4]), "bottleneck_end_s has 4 columns"),
        (lambda: stages(earliest_start=[[0] * 4]), "earliest_start has 4 columns"),
        (lambda: stages(earliest_start=[[0, 2, 0]]), "earliest_start[0, 1] is 2, expected at most"),
        (lambda: stages(latest_start=[-1, 0, -1]), "expected not descending and at most [-1  0"),
        (
            lambda: options(0, 0, from_state=[0, 2], to_state=[2, 2]),
            "option 1 leads from state 2",
        ),
        (options, "at least one option"),
        (lambda: options(0, 0, fixed_s=[1.0]), "fixed_s has 1 values for 2 options"),
        (lambda: options(0, from_state=[-1], to_state=[1]), "from_state[0] is -1, expected at le"),
        (lambda: problem(0), "final_states are (0,), expected from 1 to 2"),
        (lambda: problem(3), "final_states are (3,), expected from 1 to 2"),
        (
            lambda: chain_problem(stages(), 0, time_row=np.array([0])),
            "num_micro_batches is 0, expected at least 1",
        ),
        (
            lambda: chain_problem(stages(), 1, time_row=np.array([0, 2])),
            "time_row[1] is 2, but time_prefix_s has 2 rows",
        ),
        (lambda: even_bounds(5, 0), "num_stages is 0, but the chain has 5 layers"),
        (lambda: even_bounds(5, -1), "num_stages is -1, but the chain has 5 layers"),
        (lambda: even_bounds(5, 6), "num_stages is 6, but the chain has 5 layers"),
        (lambda: term(weight_prefix=[0.0, 2.0, 1.0]), "not descending"),
        (lambda: term(s_per_weight=[-1.0]), "s_per_weight[0] is -1.0: times must be finite"),
        (lambda: term(fixed_s=[np.inf]), "fixed_s[0] is inf: times must be finite"),
        (lambda: slices(np.ones((1, 3)), np.ones((1, 1))), "forward_s has shape"),
        (lambda: slices(np.ones((1, 4)), np.ones((1, 4))), "forward_s has 4 columns, expected n"),
        (lambda: slices(np.ones((0, 3)), np.ones((0, 3))), "expected n"),
        (lambda: slices(np.ones(3), np.ones(3)), "expected 2 dimensions"),
        (lambda: slices(-np.ones((1, 3)), np.ones((1, 3))), "forward_s[0, 0] is -1.0: times must"),
        (lambda: slices(np.ones((1, 3)), np.full((1, 3), np.nan)), "backward_s[0, 0] is nan"),
    ],
)
def test_what_is_no_problem_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
