import math
from dataclasses import replace

import pytest

from amp_ray.search.ranking import Ranking
from amp_ray.spec.experiment import Experiment
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.knowledge import NUM_LATEST, widening
from amp_ray.tuner.state import Trial, TunerSettings, TunerState, begin, record, start
from support.replaying import measured, out_of_memory

SIGMA = 0.1


def told(state: TunerState, outcome: Outcome, *, repeats: int | None = None) -> TunerState:
    """A study after one more trial that was predicted to take 1 s."""
    number = len(state.trials)
    trial = Trial(
        number=number,
        strategy=state.candidates[number % 16].strategy,
        predicted_s=1.0,
        sigma=SIGMA,
        repeats=repeats,
        reason="",
    )
    return record(start(state, trial), number, outcome)


def off_by(sigmas: float) -> Outcome:
    """A measurement so many sigmas above its prediction."""
    return measured(math.exp(sigmas * SIGMA))


@pytest.fixture
def state(small: Experiment, ranking: Ranking) -> TunerState:
    """A study without trials."""
    return begin(small, ranking.results, TunerSettings(budget=100))


def test_errors_are_believed_before_any_trial(state: TunerState) -> None:
    assert widening(state) == 1.0


def test_forecasts_that_come_true_do_not_make_the_model_sure_of_itself(state: TunerState) -> None:
    for _ in range(5):
        state = told(state, off_by(0.1))
    assert widening(state) == 1.0


def test_forecasts_that_fail_widen_the_errors(state: TunerState) -> None:
    assert widening(told(told(state, off_by(3.0)), off_by(-3.0))) == pytest.approx(
        math.sqrt((4 + 9 + 9) / (4 + 2))
    )


def test_a_common_factor_that_nobody_could_know_is_no_error_of_later_predictions(
    state: TunerState,
) -> None:
    first = state.candidates[0]
    trial = Trial(
        number=0,
        strategy=first.strategy,
        predicted_s=first.iteration_time_s,
        sigma=SIGMA,
        repeats=None,
        reason="",
    )
    slow = record(start(state, trial), 0, measured(2.0 * first.iteration_time_s))
    assert widening(slow) > 3.0
    assert widening(slow, 2.0) == 1.0
    assert widening(told(slow, off_by(9.0)), 2.0) > 3.0


def test_old_forecasts_are_forgotten(state: TunerState) -> None:
    state = told(state, off_by(10.0))
    for _ in range(NUM_LATEST):
        state = told(state, off_by(0.5))
    assert widening(state) == 1.0


def test_repeats_and_failures_play_no_part(state: TunerState) -> None:
    state = told(state, out_of_memory())
    assert widening(told(state, off_by(9.0), repeats=0)) == 1.0


def test_a_forecast_without_error_is_left_out(state: TunerState) -> None:
    trial = Trial(
        number=0,
        strategy=state.candidates[0].strategy,
        predicted_s=1.0,
        sigma=0.0,
        repeats=None,
        reason="",
    )
    state = start(replace(state), trial)
    assert widening(record(state, 0, measured(2.0))) == 1.0
