import pytest

from amp_ray.trials.own_program.step_times import LEAST_STEP_S, check_times, same_length, slowest_of


def test_equal_lengths_are_returned() -> None:
    assert same_length({"a": [1.0, 2.0], "b": [3.0, 4.0]}) == 2


def test_unequal_lengths_are_refused_with_all_counts() -> None:
    with pytest.raises(ValueError, match=r"\(a: 1, b: 2, c: 1\)"):
        same_length({"a": [1.0], "b": [1.0, 2.0], "c": [1.0]})


def test_the_slowest_counts_at_every_step() -> None:
    assert slowest_of([[1.0, 5.0], [2.0, 4.0], [0.5, 6.0]]) == (2.0, 6.0)


def test_the_shortest_time_that_a_step_can_take_is_allowed() -> None:
    check_times([LEAST_STEP_S], source="x")


@pytest.mark.parametrize("seconds", [0.0, -1.0, LEAST_STEP_S / 2, float("nan"), float("inf")])
def test_what_no_step_takes_is_refused_with_its_place(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"entry 1 of rank-0\.log says that a step took"):
        check_times([1.0, seconds], source="rank-0.log")
