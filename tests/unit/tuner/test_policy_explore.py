import math
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.belief import Belief
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.policy import expected_gain, explore, next_trials
from amp_ray.tuner.state import TunerSettings, TunerState, begin, record, start
from support.replaying import measured, out_of_memory
from support.worlds import error_model


def belief(means_s: list[float], sigmas: list[float], finishes: list[float]) -> Belief:
    """Independent candidates."""
    return Belief(
        indices=tuple(range(len(means_s))),
        log_mean=np.log(means_s),
        covariance=np.diag(np.square(sigmas)),
        finishes=np.array(finishes),
    )


def test_the_expected_gain_is_the_mean_of_what_is_faster() -> None:
    (gain,) = expected_gain(belief([1.1], [0.2], [1.0]), [0], 1.0, error_model())
    draws = np.random.default_rng(0).normal(math.log(1.1), 0.2, 400_000)
    assert gain == pytest.approx(np.maximum(0.0, -draws).mean(), rel=0.02)


def test_a_faster_expectation_gains_more() -> None:
    gains = expected_gain(belief([1.0, 1.1], [0.1, 0.1], [1.0, 1.0]), [0, 1], 1.0, error_model())
    assert gains[0] > gains[1]


def test_an_uncertain_expectation_gains_more() -> None:
    gains = expected_gain(belief([1.2, 1.2], [0.05, 0.2], [1.0, 1.0]), [0, 1], 1.0, error_model())
    assert gains[1] > gains[0]


def test_a_chance_to_fail_gains_less() -> None:
    gains = expected_gain(belief([1.0, 1.0], [0.1, 0.1], [1.0, 0.5]), [0, 1], 1.0, error_model())
    assert gains[1] == pytest.approx(gains[0] / 2)


def test_errors_that_proved_too_small_gain_more() -> None:
    one = belief([1.2], [0.1], [1.0])
    plain, wide = (expected_gain(one, [0], 1.0, error_model(scale)) for scale in (1.0, 2.0))
    assert wide > plain


def test_a_share_of_surprises_gains_more() -> None:
    far = belief([2.0], [0.05], [1.0])
    (plain,), (more,) = (
        expected_gain(far, [0], 1.0, error_model(share=share)) for share in (0.0, 0.1)
    )
    draws = np.random.default_rng(0).normal(math.log(2.0), math.hypot(0.35, 0.05), 400_000)
    assert plain < 1e-9
    assert more == pytest.approx(0.1 * np.maximum(0.0, -draws).mean(), rel=0.05)


def test_the_second_of_two_is_chosen_as_if_the_first_took_what_is_predicted(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    known = learn(state, predictor)
    (first, _), (_, second), *_ = explore(known, state.settings)
    predicted_s = known.estimates[first].iteration_time_s
    assert f"chance to be faster than {predicted_s:.4g} s" in second


def test_nothing_more_is_launched_when_what_runs_may_end_the_study(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    fast, slow = ranking.results[0], ranking.results[15]
    state = begin(small, [fast, slow], TunerSettings(budget=100))
    (trial,) = next_trials(state, 4, predictor)
    running = start(state, trial)
    assert next_trials(running, 3, predictor) == ()
    (other,) = next_trials(record(running, 0, out_of_memory()), 3, predictor)
    assert other.strategy == state.candidates[1].strategy


def test_a_repeat_that_runs_is_no_question_asked_already(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    (trial,) = next_trials(state, 1, predictor)
    state = record(start(state, trial), 0, measured(trial.predicted_s))
    again = start(state, replace(trial, number=1, repeats=0))
    here, there = (
        [index for index, _ in explore(learn(each, predictor), each.settings)]
        for each in (state, again)
    )
    assert here == there


def test_after_those_whose_errors_were_worked_out_the_far_ones_follow(
    state: TunerState, predictor: BoundedPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_ray.tuner.knowledge.MOST_JUDGED_AT_FIRST", 2)
    promises = list(explore(learn(state, predictor), state.settings))
    assert sorted(index for index, _ in promises) == list(range(16))
    assert [index for index, _ in promises[2:]] == list(range(2, 16))
    assert promises[-1][1] == "the next prediction, far behind the leaders"
