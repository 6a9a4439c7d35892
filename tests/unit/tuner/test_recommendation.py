import math
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.recommendation import Recommendation, ranked, recommend, student_quantile
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from support.checked import required
from support.replaying import crashed, measured, out_of_memory, ran


def tried(state: TunerState, index: int, factor: float, spread_fraction: float = 0.0) -> TunerState:
    """A study after a trial that took so many times what was predicted."""
    time_s = factor * state.candidates[index].iteration_time_s
    return ran(state, index, measured(time_s, spread_fraction=spread_fraction))


def recommended(state: TunerState, predictor: BoundedPredictor) -> Recommendation:
    """What is recommended."""
    return required(recommend(state, learn(state, predictor)))


def test_nothing_is_recommended_before_anything_is_measured(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    for outcome in (None, out_of_memory(), crashed()):
        after = ran(state, 0, outcome) if outcome else state
        assert recommend(after, learn(after, predictor)) is None


def test_the_best_measured_is_recommended_where_predictions_are_close(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tried(tried(state, 2, 1.0), 1, 1.01)
    found = recommended(state, predictor)
    assert found.strategy == state.candidates[1].strategy
    assert found.number == 1
    assert found.measured_s == pytest.approx(1.01 * state.candidates[1].iteration_time_s)
    assert found.reason.startswith("the fastest of 2 measured strategies; ")
    assert found.reason.endswith(f"; {len(found.ties)} others are as good")


def test_the_interval_of_a_winner_that_ran_twice_has_the_width_that_two_runs_leave(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    once = tried(tried(state, 0, 1.0), 1, 1.3)
    time_s = state.candidates[0].iteration_time_s
    widths = []
    for factor in (1.0, 1.1):
        twice = ran(once, 0, measured(factor * time_s), repeats=0)
        low, high = recommended(twice, predictor).interval_s
        widths.append(math.log(high / low) / 2)
        assert low < math.sqrt(factor) * time_s < high
    assert widths[0] == pytest.approx(student_quantile(0.95, 2) * 0.02 / math.sqrt(2))
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30])
def test_students_quantile_holds_the_share_of_its_draws(freedom: int) -> None:
    draws = np.random.default_rng(0).standard_t(freedom, 200_000)
    inside = np.abs(draws) <= student_quantile(0.95, freedom)
    assert inside.mean() == pytest.approx(0.95, abs=0.002)


def test_one_that_nobody_has_run_is_recommended_if_its_gain_exceeds_the_error(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tried(tried(state, 15, 1.0), 14, 1.0)
    found = recommended(state, predictor)
    assert found.measured_s is None
    assert found.strategy == state.candidates[0].strategy
    assert "faster than the best measured" in found.reason
    assert "more than the prediction's error" in found.reason


def test_ties_are_what_is_closer_than_the_error(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tried(tried(tried(state, 0, 1.0), 1, 1.0), 10, 1.0)
    known = learn(state, predictor)
    found = required(recommend(state, known))
    assert found.measured_s is not None
    tied = {tie.strategy for tie in found.ties}
    chosen = [each.strategy for each in state.candidates].index(found.strategy)
    error = math.hypot(known.time_error, known.expected_sigma(chosen))
    for index in known.proposable():
        ratio = known.estimates[index].iteration_time_s / found.time_s
        close = abs(math.log(ratio)) <= error
        assert (state.candidates[index].strategy in tied) == close
    assert state.candidates[1].strategy in tied
    assert state.candidates[10].strategy not in tied
    assert [tie.time_s for tie in found.ties] == sorted(tie.time_s for tie in found.ties)


def test_an_unsteady_measurement_ties_with_more(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    steady = recommended(tried(tried(state, 0, 1.0), 1, 1.08), predictor)
    unsteady = recommended(tried(tried(state, 0, 1.0), 1, 1.08, 0.3), predictor)
    other = state.candidates[1].strategy
    assert other not in {tie.strategy for tie in steady.ties if tie.measured}
    assert other in {tie.strategy for tie in unsteady.ties if tie.measured}


def test_the_best_measured_is_recommended_when_everything_was_run(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = tried(begin(small, ranking.results[:1], TunerSettings(budget=3)), 0, 1.3)
    found = recommended(state, predictor)
    assert found.number == 0
    assert found.ties == ()
    assert found.reason == "the only strategy that was measured"


def test_nothing_is_recommended_where_nothing_can_run(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    why = (Reason(kind="out of memory", detail=""),)
    failing = [
        replace(each, reasons=why, failure_probability=1.0)
        for each in ranking.results
        if isinstance(each, Estimate)
    ]
    state = begin(small, failing, TunerSettings(budget=3))
    assert recommend(state, learn(state, predictor)) is None


def test_wide_steps_do_not_make_a_slower_strategy_as_good(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    first, second = (state.candidates[index].iteration_time_s for index in (0, 1))
    for times, tied in ((1.26, False), (1.03, True)):
        factor = times * first / second
        found = recommended(tried(tried(state, 0, 1.0, 0.3), 1, factor, 0.3), predictor)
        assert found.strategy == state.candidates[0].strategy
        assert (state.candidates[1].strategy in {tie.strategy for tie in found.ties}) == tied


def test_predictions_that_trials_refuted_recommend_nothing_that_nobody_has_run(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    refuted = tried(tried(tried(state, 15, 1.0), 14, 1.9), 13, 0.6)
    found = recommended(refuted, predictor)
    assert found.rests_on == "measured"
    assert found.measured_s is not None
    one = recommended(tried(state, 15, 1.0), predictor)
    assert one.number == 0
    assert "one that nobody has run is predicted" in one.reason
    assert one.reason.endswith("by constants that no trials have confirmed")


def test_noisy_trials_confirm_nothing(state: TunerState, predictor: BoundedPredictor) -> None:
    noisy = tried(tried(state, 15, 1.0, 1.5), 14, 1.0, 1.5)
    assert recommended(noisy, predictor).measured_s is not None


def test_an_unsteady_winner_rests_on_prediction_and_measurement(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    found = recommended(tried(state, 0, 4.0, 1.0), predictor)
    assert found.rests_on == "posterior"
    assert found.measured_s is not None
    low, high = sorted((found.measured_s, found.predicted_s))
    assert low < found.time_s < high
    assert found.interval_s[0] < found.time_s < found.interval_s[1]


def test_the_ranking_begins_with_the_recommended_one_and_ends_with_what_failed(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = tried(tried(state, 1, 1.0), 2, 1.3)
    state = ran(state, 0, out_of_memory())
    known = learn(state, predictor)
    found = recommend(state, known)
    rows = ranked(known, found)
    assert found is not None
    assert rows[0].strategy == found.strategy
    assert rows[0].iteration_time_s == found.time_s
    measured_row = next(row for row in rows if row.strategy == state.candidates[2].strategy)
    assert measured_row.iteration_time_s == pytest.approx(
        1.3 * state.candidates[2].iteration_time_s
    )
    assert measured_row.breakdown is not None
    assert measured_row.breakdown.total_s == pytest.approx(measured_row.iteration_time_s)
    [failed] = [row for row in rows if not row.feasible]
    assert failed is rows[-1]
    assert failed.strategy == state.candidates[0].strategy
