import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.trials.steps import (
    LEAST_STEP_S,
    check_times,
    count_warmup_steps,
    same_length,
    slowest_of,
    summarise_steps,
)

times = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("step_time_s", "number"),
    [
        ([1.0], 0),
        ([1.0, 1.0], 0),
        ([9.0, 1.0], 1),
        ([9.0, 5.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 3),
        ([1.0, 1.04, 1.0, 1.0], 0),
        ([1.0, 9.0, 1.0, 1.0], 0),
        ([0.5, 1.0, 1.0, 1.0], 0),
    ],
)
def test_slow_first_steps_are_warmup(step_time_s: list[float], number: int) -> None:
    assert count_warmup_steps(step_time_s) == number


def test_noise_is_no_warmup() -> None:
    assert count_warmup_steps([1.2, 0.9, 1.1, 1.0, 0.9, 1.2, 1.0, 1.1]) == 0


@given(times)
def test_at_most_half_is_warmup(step_time_s: list[float]) -> None:
    assert 0 <= count_warmup_steps(step_time_s) <= len(step_time_s) // 2


@given(times, st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_every_step_scales_the_summary(step_time_s: list[float], factor: float) -> None:
    summary = summarise_steps(step_time_s)
    scaled = summarise_steps([time_s * factor for time_s in step_time_s])
    assert scaled[2] == summary[2]
    assert scaled[:2] == pytest.approx([time_s * factor for time_s in summary[:2]])


@given(times)
def test_the_median_lies_between_the_steps(step_time_s: list[float]) -> None:
    middle_s, _, _ = summarise_steps(step_time_s)
    assert min(step_time_s) <= middle_s <= max(step_time_s)


@pytest.mark.parametrize("step_time_s", [[], [1.0, 0.0], [-1.0]])
def test_steps_without_time_are_refused(step_time_s: list[float]) -> None:
    with pytest.raises(ValueError, match="positive times"):
        summarise_steps(step_time_s)


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
