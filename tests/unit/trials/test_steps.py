from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.trials.steps import (
    LEAST_STEP_S,
    StepSummary,
    check_times,
    count_warmup_steps,
    has_trend,
    num_more_steps,
    same_length,
    slowest_of,
    standard_error,
    step_warnings,
    summarise_steps,
    tells_time,
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
    assert scaled.num_warmup_steps == summary.num_warmup_steps
    assert scaled.warnings == summary.warnings
    assert (scaled.measured_s, scaled.mean_s, scaled.spread_s) == pytest.approx(
        (summary.measured_s * factor, summary.mean_s * factor, summary.spread_s * factor)
    )


@given(times)
def test_the_median_lies_between_the_steps(step_time_s: list[float]) -> None:
    summary = summarise_steps(step_time_s)
    assert min(step_time_s) <= summary.measured_s <= max(step_time_s)


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


# ------------------------------------------------------------- what a trial takes in the long run

ASKED = 20
MOST = 16 * ASKED
Level = Callable[[int], float]  # what a step takes without noise


def slow_every(period: int, phase: int) -> Level:
    return lambda step: 3.0 if step % period == phase else 1.0


def decaying(height: float, steps: float) -> Level:
    return lambda step: 1.0 + height * float(np.exp(-step / steps))


def noisy(level: Level, sigma: float, number: int, seed: int) -> list[float]:
    noise = np.exp(np.random.default_rng(seed).normal(0.0, sigma, number))
    return [level(step) * float(noise[step]) for step in range(number)]


def run(level: Level, sigma: float, seed: int) -> list[float]:
    """Steps of a trial that was asked for 20 and goes on as long as they leave its time open."""
    steps, number = noisy(level, sigma, MOST, seed), ASKED
    while more := num_more_steps(steps[:number], most=MOST, left_s=1e9):
        number += more
    return steps[:number]


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("number", [10, 20, 40, 320])
def test_steady_noise_has_hardly_ever_a_trend(sigma: float, number: int) -> None:
    series = (noisy(lambda _: 1.0, sigma, number, seed) for seed in range(500))
    assert sum(map(has_trend, series)) <= 10


@pytest.mark.parametrize("phase", range(10))
def test_every_tenth_step_that_takes_three_times_as_long_is_in_the_mean(phase: int) -> None:
    summary = summarise_steps(run(slow_every(10, phase), 0.02, phase))
    assert summary.mean_s == pytest.approx(1.2, rel=0.05)
    assert summary.measured_s == pytest.approx(1.0, rel=0.02)
    assert summary.warnings == ("periodic",)
    assert tells_time(summary.mean_s, summary.spread_s)


@pytest.mark.parametrize(("height", "time_constant"), [(0.25, 20), (0.64, 20), (0.64, 60)])
def test_a_warm_up_that_decays_slowly_is_waited_for_or_told(
    height: float, time_constant: float
) -> None:
    short = noisy(decaying(height, time_constant), 0.01, ASKED, 1)
    assert "trend" in summarise_steps(short).warnings
    steps = run(decaying(height, time_constant), 0.01, 1)
    summary = summarise_steps(steps)
    assert summary.mean_s == pytest.approx(1.0, abs=0.025)
    assert ("trend" in summary.warnings) == (time_constant == 60)
    assert len(steps) == MOST or time_constant == 20


@pytest.mark.parametrize("number", [8, 10, 15])
def test_steps_too_few_to_show_that_a_trend_has_ended_still_have_it(number: int) -> None:
    steps = noisy(decaying(0.5, 10), 0.005, number, 1)
    assert summarise_steps(steps).warnings[0] == "trend"
    assert num_more_steps(steps, most=MOST, left_s=1e9) == number


@pytest.mark.parametrize("first", [0, 12])
def test_a_drift_is_told(first: int) -> None:
    steps = noisy(lambda step: 1.0 + 0.03 * max(0, step - first), 0.01, ASKED, 5)
    assert "trend" in summarise_steps(steps).warnings


# ----------------------------------------------------- steps of known worlds, in trials of 20 steps

NOISES = [0.005, 0.02, 0.06]
SLOW = 1.5


def summaries(level: Level, sigma: float, number: int = ASKED) -> list[StepSummary]:
    """Summaries of twenty trials of one world."""
    return [summarise_steps(noisy(level, sigma, number, seed)) for seed in range(20)]


@given(times)
def test_dropped_steps_are_slower_and_many_are_a_warning(step_time_s: list[float]) -> None:
    summary = summarise_steps(step_time_s)
    number = summary.num_warmup_steps
    if number:
        assert median(step_time_s[:number]) >= median(step_time_s[number:])
    assert "warm_up" in summary.warnings or number <= len(step_time_s) / 4


@pytest.mark.parametrize("sigma", NOISES)
@pytest.mark.parametrize("first", range(2, 17))
def test_a_slow_down_during_a_trial_is_warned_of_and_drops_no_step(
    sigma: float, first: int
) -> None:
    world = summaries(lambda step: SLOW if step >= first else 1.0, sigma)
    assert sum(not summary.warnings for summary in world) <= 1
    assert all(summary.num_warmup_steps == 0 for summary in world)


@pytest.mark.parametrize("sigma", NOISES)
@pytest.mark.parametrize("factor", [SLOW, 4.0])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_warm_up_is_dropped_and_a_long_one_is_warned_of(
    sigma: float, factor: float, number: int
) -> None:
    world = summaries(lambda step: factor if step < number else 1.0, sigma)
    for summary in world:
        assert summary.mean_s == pytest.approx(1.0, abs=0.01 + 1.2 * sigma)
        assert summary.num_warmup_steps >= number - 1
    if 4 * number > ASKED:
        assert all("warm_up" in summary.warnings for summary in world)
    elif sigma < 0.01:
        assert not any(summary.warnings for summary in world)


@pytest.mark.parametrize("sigma", NOISES)
@pytest.mark.parametrize("number", [3, 5, 8, 10, 20, 40])
def test_steady_steps_are_hardly_ever_warned_of(sigma: float, number: int) -> None:
    warned = [summary for summary in summaries(lambda _: 1.0, sigma, number) if summary.warnings]
    assert len(warned) <= (2 if number >= 8 else 6)


@pytest.mark.parametrize("sigma", NOISES)
def test_a_fast_outlier_changes_nothing_and_a_fast_start_is_warned_of(sigma: float) -> None:
    outlier = summaries(lambda step: 0.7 if step == 7 else 1.0, sigma)
    assert sum(bool(summary.warnings) for summary in outlier) <= 1
    start = summaries(lambda step: 0.7 if step < 4 else 1.0, sigma)
    assert sum("warm_up" in s.warnings or "unsteady" in s.warnings for s in start) >= 18


def test_a_warm_up_too_long_for_its_steps_is_waited_for() -> None:
    steps = run(lambda step: SLOW if step < 8 else 1.0, 0.01, 1)
    assert (len(steps), summarise_steps(steps).warnings) == (2 * ASKED, ())


def test_a_slow_down_is_waited_for_until_its_fast_steps_do_not_matter() -> None:
    summary = summarise_steps(run(lambda step: SLOW if step >= 10 else 1.0, 0.01, 1))
    assert summary.mean_s == pytest.approx(SLOW, rel=0.03)
    assert (summary.warnings, summary.num_warmup_steps) == ((), 0)


def test_a_drift_that_never_ends_is_bounded() -> None:
    steps = run(lambda step: 1.0 + 0.01 * step, 0.01, 3)
    assert len(steps) == MOST
    assert "trend" in summarise_steps(steps).warnings


def test_a_single_pause_takes_more_steps_until_it_does_not_matter() -> None:
    steps = run(lambda step: 4.0 if step == 12 else 1.0, 0.01, 2)
    assert len(steps) == 80
    summary = summarise_steps(steps)
    assert summary.warnings == ()
    assert 1.0 < summary.mean_s < 1.05


def test_disturbances_that_last_make_a_mean_less_certain() -> None:
    """Four quick steps and four slow ones, twice: neighbours correlate by 9/16."""
    mixed, lasting = [0.9, 1.1] * 8, ([0.9] * 4 + [1.1] * 4) * 2
    once, more = (standard_error(steps, 1.0, 0.2) for steps in (mixed, lasting))
    assert more == pytest.approx(once * ((1 + 9 / 16) / (1 - 9 / 16)) ** 0.5)


def test_steady_steps_need_no_more() -> None:
    assert len(run(lambda _: 1.0, 0.02, 4)) == ASKED


def test_a_decay_that_noise_hides_at_first_is_found() -> None:
    short = noisy(decaying(0.25, 20), 0.05, ASKED, 3)
    assert summarise_steps(short).warnings == ()
    assert summarise_steps(run(decaying(0.25, 20), 0.05, 3)).mean_s == pytest.approx(1.0, abs=0.02)


def test_steps_of_two_kinds_are_told_by_their_mean() -> None:
    summary = summarise_steps(run(lambda step: 1.3 if step % 2 else 1.0, 0.01, 1))
    assert summary.mean_s == pytest.approx(1.15, rel=0.01)
    assert summary.warnings == ("unsteady",)


def test_more_steps_fit_into_the_time_that_is_left() -> None:
    steps = [1.0 + 0.05 * (ASKED - step) for step in range(ASKED)]
    half_s = sum(steps[ASKED // 2 :]) / (ASKED // 2)
    assert num_more_steps(steps, most=MOST, left_s=7.5 * half_s) == 7
    assert num_more_steps(steps, most=MOST, left_s=-1.0) == 0
    assert num_more_steps(steps, most=ASKED + 3, left_s=1e9) == 3


def test_few_steps_tell_no_trend_and_are_not_continued() -> None:
    steps = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert num_more_steps(steps, most=MOST, left_s=1e9) == 0


@pytest.mark.parametrize(
    ("steps", "spread_s", "warnings"),
    [
        ([1.0] * 10, 0.0, ()),
        ([1.0] * 10, 0.25, ()),
        ([1.0] * 10, 0.26, ("unsteady",)),
        ([*[1.0] * 9, 1.49], 0.0, ()),
        ([*[1.0] * 9, 1.51], 0.0, ("periodic",)),
        ([*[1.0] * 6, 1.2, 1.2, 1.2], 0.0, ("unsteady",)),
        ([1.0, 1.0, 1.2], 0.1, ("periodic",)),
    ],
)
def test_each_warning_has_its_limit(
    steps: list[float], spread_s: float, warnings: tuple[str, ...]
) -> None:
    found = step_warnings(steps, spread_s, has_trend=False)
    assert [str(warning) for warning in found] == list(warnings)
    assert set(step_warnings(steps, spread_s, has_trend=True)) == {*warnings, "trend"}
