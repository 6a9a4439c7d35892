import math

import pytest

from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.knowledge import forecast_errors
from amp_ray.tuner.state import TunerState
from support.replaying import measured, out_of_memory, ran

SIGMA = 0.1


def told(state: TunerState, outcome: Outcome, *, repeats: int | None = None) -> TunerState:
    """A study after one more trial that was predicted to take 1 s."""
    index = len(state.trials) % 16
    return ran(state, index, outcome, predicted_s=1.0, sigma=SIGMA, repeats=repeats)


def off_by(sigmas: float) -> Outcome:
    """A measurement so many sigmas above its prediction."""
    return measured(math.exp(sigmas * SIGMA))


def test_before_any_trial_errors_are_as_large_as_the_model_says(state: TunerState) -> None:
    assert forecast_errors(state).scale == pytest.approx(1.0, rel=0.01)


def test_forecasts_that_come_true_make_surprises_unlikely(state: TunerState) -> None:
    before = forecast_errors(state).surprise_fraction
    for _ in range(8):
        state = told(state, off_by(0.5))
    assert forecast_errors(state).surprise_fraction < before / 2


def test_forecasts_that_all_fail_widen_the_errors(state: TunerState) -> None:
    for sigmas in (2.0, -2.5, 2.2, -1.8, 2.4, -2.2):
        state = told(state, off_by(sigmas))
    assert 1.5 < forecast_errors(state).scale < 2.5


def test_one_forecast_far_off_is_a_surprise_and_no_wider_error(state: TunerState) -> None:
    for sigmas in (0.5, -1.0, 0.8, -0.3, 1.1, -0.6):
        state = told(state, off_by(sigmas))
    before, after = forecast_errors(state), forecast_errors(told(state, off_by(-6.0)))
    assert after.scale < 1.2 * before.scale
    assert after.surprise_fraction > 3 * before.surprise_fraction
    assert after.surprised
    assert not before.surprised


def test_the_width_of_surprises_is_learnt(state: TunerState) -> None:
    near, far = (forecast_errors(told(state, off_by(sigmas))) for sigmas in (-5.0, -15.0))
    assert near.surprise_sigma < far.surprise_sigma


def test_a_common_factor_that_nobody_could_know_is_no_error_of_later_predictions(
    state: TunerState,
) -> None:
    slow = ran(state, 0, measured(2.0 * state.candidates[0].iteration_time_s), sigma=SIGMA)
    assert forecast_errors(slow).surprised
    assert not forecast_errors(slow, 2.0).surprised
    assert forecast_errors(told(slow, off_by(9.0)), 2.0).surprised


def test_repeats_and_failures_play_no_part(state: TunerState) -> None:
    before = forecast_errors(state)
    state = told(state, out_of_memory())
    after = forecast_errors(told(state, off_by(9.0), repeats=0))
    assert after.weights.tolist() == before.weights.tolist()


def test_a_forecast_without_error_is_left_out(state: TunerState) -> None:
    sure = ran(state, 0, measured(2.0), predicted_s=1.0, sigma=0.0)
    assert not forecast_errors(sure).surprised


def test_forecasts_beyond_all_bounds_still_give_probabilities(state: TunerState) -> None:
    for sigmas in (200.0, -200.0, 0.0):
        state = told(state, off_by(sigmas))
    errors = forecast_errors(state)
    assert errors.weights.sum() == pytest.approx(1.0)
    assert ((errors.shares > 0.0) & (errors.shares < 1.0)).all()
