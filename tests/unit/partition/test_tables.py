import numpy as np
import pytest

from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables

PREFIX_S = np.array([[0.0, 1.0, 3.0], [0.0, 2.0, 2.0]])


def test_tables_left_out_have_no_rows() -> None:
    tables = StageTables(time_prefix_s=PREFIX_S)
    assert tables.num_layers == 2
    assert tables.cut_time_s.shape == tables.earliest_start.shape == (0, 3)


def test_a_missing_bottleneck_table_is_zero() -> None:
    tables = StageTables(time_prefix_s=PREFIX_S, bottleneck_end_s=np.ones((1, 3)))
    assert tables.bottleneck_start_s.tolist() == [[0.0, 0.0, 0.0]]
    tables = StageTables(time_prefix_s=PREFIX_S, bottleneck_start_s=np.ones((1, 3)))
    assert tables.bottleneck_end_s.tolist() == [[0.0, 0.0, 0.0]]


def test_refuses_bottleneck_tables_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="bottleneck_start_s has 1 rows and bottleneck_end_s 2"):
        StageTables(
            time_prefix_s=PREFIX_S,
            bottleneck_start_s=np.ones((1, 3)),
            bottleneck_end_s=np.ones((2, 3)),
        )


def test_refuses_layer_times_given_as_prefix_sums() -> None:
    with pytest.raises(ValueError, match=r"time_prefix_s\[0, 2\] is 1.0 after 3.0: layer 1"):
        StageTables(time_prefix_s=np.array([[0.0, 3.0, 1.0]]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 1)])
def test_refuses_a_chain_of_nothing(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected \(T, layers \+ 1\)"):
        StageTables(time_prefix_s=np.zeros(shape))


@pytest.mark.parametrize("name", ["cut_time_s", "bottleneck_start_s", "earliest_start"])
def test_refuses_a_table_of_another_width(name: str) -> None:
    tables = {name: np.zeros((1, 4), int)}
    with pytest.raises(ValueError, match=f"{name} has 4 columns, but time_prefix_s has 3"):
        StageTables(time_prefix_s=PREFIX_S, **tables)


def test_refuses_a_start_behind_its_end() -> None:
    with pytest.raises(ValueError, match=r"earliest_start\[0, 1\] is 2, expected at most 1"):
        StageTables(time_prefix_s=PREFIX_S, earliest_start=np.array([[0, 2, 0]]))


def test_options_without_states_are_a_row_of_stages() -> None:
    options = OptionTable(time_row=np.array([0, 1, 0]))
    assert options.from_state.tolist() == [0, 1, 2]
    assert options.to_state.tolist() == [1, 2, 3]
    assert options.num_states == 4


def test_columns_left_out_charge_nothing() -> None:
    options = OptionTable(time_row=np.array([0, 1]))
    assert options.memory_row.tolist() == [NO_ROW, NO_ROW]
    assert options.fixed_s.tolist() == [0.0, 0.0]


def test_refuses_an_option_that_leads_nowhere() -> None:
    with pytest.raises(ValueError, match="option 1 leads from state 2 to state 2"):
        OptionTable(
            time_row=np.array([0, 0]), from_state=np.array([0, 2]), to_state=np.array([2, 2])
        )


def test_refuses_no_options() -> None:
    with pytest.raises(ValueError, match="at least one option"):
        OptionTable(time_row=np.array([], int))


def test_refuses_columns_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="fixed_s has 1 values for 2 options"):
        OptionTable(time_row=np.array([0, 0]), fixed_s=np.array([1.0]))


def test_refuses_negative_states() -> None:
    with pytest.raises(ValueError, match=r"from_state\[0\] is -1, expected at least 0"):
        OptionTable(time_row=np.array([0]), from_state=np.array([-1]), to_state=np.array([1]))
