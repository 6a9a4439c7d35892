import numpy as np

from amp_ray.partition.layout import laid_out, scratch_for
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.tables import OptionTable, StageTables

TABLES = StageTables(
    time_prefix_s=np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 6.0]]),
    cut_time_s=np.array([[9.0, 1.0, 1.0]]),
    bottleneck_start_s=np.array([[0.0, 2.0, 0.0]]),
    bottleneck_end_s=np.zeros((1, 3)),
    earliest_start=np.array([[0, 1, 0]]),
)
OPTIONS = OptionTable(
    from_state=np.array([1, 0, 0, 0]),
    to_state=np.array([2, 2, 1, 1]),
    time_row=np.array([1, 1, 1, 0]),
    cut_row=np.array([0, -1, -1, -1]),
    bottleneck_row=np.array([-1, -1, -1, 0]),
    memory_row=np.array([-1, -1, -1, 0]),
)
PROBLEM = PartitionProblem(tables=TABLES, options=OPTIONS, num_micro_batches=2)
ORDER = OPTIONS.order
PROGRAMME = laid_out(PROBLEM)


def test_options_ascend_by_target_then_source_then_rows() -> None:
    assert ORDER.tolist() == [3, 2, 1, 0]


def test_options_of_equal_time_bottleneck_and_overhead_share_a_class() -> None:
    assert PROGRAMME.option_class.tolist() == [0, 1, 1, 1]
    assert PROGRAMME.class_time.tolist() == [0, 1]


def test_no_row_becomes_a_row_that_charges_nothing() -> None:
    assert PROGRAMME.cut_time_s[PROGRAMME.option_cut].tolist()[:3] == [[0.0] * 3] * 3
    assert PROGRAMME.earliest_start[PROGRAMME.option_memory].tolist()[1:] == [[0] * 3] * 3


def test_nothing_is_cut_before_the_first_layer() -> None:
    assert PROGRAMME.cut_time_s[0].tolist() == [0.0, 1.0, 1.0]


def test_a_class_whose_bottlenecks_are_not_monotone_is_bounded_and_marked() -> None:
    assert PROGRAMME.class_regular.tolist() == [False, True]
    assert PROGRAMME.class_start_s[0].tolist() == [0.0, 0.0, 2.0]


def test_memory_floors_look_ahead() -> None:
    assert PROGRAMME.earliest_floor[0].tolist() == [0, 0, 0]


def test_states_know_the_stages_before_and_the_layers_left_for_those_after() -> None:
    assert PROGRAMME.fewest.tolist() == [0, 1, 1]
    assert PROGRAMME.most.tolist() == [1, 1, 2]


def test_scratch_has_room_for_every_state_and_boundary() -> None:
    scratch = scratch_for(PROGRAMME)
    assert scratch.cost_s.shape == scratch.start.shape == (3, 3)
    assert scratch.admissible.shape == (2, 3)
