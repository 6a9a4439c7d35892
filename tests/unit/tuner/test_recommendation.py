from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.search.ranking import Ranking
from amp_ray.spec.experiment import Experiment
from amp_ray.tuner.bounded_predictor import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.recommendation import Recommendation, recommend
from amp_ray.tuner.state import Trial, TunerSettings, TunerState, begin, record, start
from support.replaying import measured


@pytest.fixture
def state(small: Experiment, ranking: Ranking) -> TunerState:
    """A study without trials."""
    return begin(small, ranking.results, TunerSettings(budget=100))


def ran(state: TunerState, index: int, factor: float, spread_fraction: float = 0.0) -> TunerState:
    """A study after a trial that took so many times what was predicted."""
    estimate, number = state.candidates[index], len(state.trials)
    trial = Trial(
        number=number,
        strategy=estimate.strategy,
        predicted_s=estimate.iteration_time_s,
        sigma=0.1,
        repeats=None,
        reason="",
    )
    outcome = measured(factor * estimate.iteration_time_s, spread_fraction=spread_fraction)
    return record(start(state, trial), number, outcome)


def recommended(state: TunerState, predictor: BoundedPredictor) -> Recommendation:
    """What is recommended."""
    found = recommend(state, learn(state, predictor))
    assert found is not None
    return found


def test_before_any_trial_the_best_predicted_is_recommended(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    found = recommended(state, predictor)
    assert found.strategy == state.candidates[0].strategy
    assert (found.measured_s, found.number) == (None, None)
    assert found.reason == "the best predicted one: nothing was measured"


def test_the_best_measured_is_recommended_where_predictions_are_close(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = ran(ran(state, 2, 1.0), 1, 1.01)
    found = recommended(state, predictor)
    assert found.strategy == state.candidates[1].strategy
    assert found.number == 1
    assert found.measured_s == pytest.approx(1.01 * state.candidates[1].iteration_time_s)
    assert found.reason.startswith("the fastest of 2 measured strategies")


def test_one_that_nobody_has_run_is_recommended_if_its_gain_exceeds_the_error(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = ran(ran(state, 15, 1.0), 14, 1.0)
    found = recommended(state, predictor)
    assert found.measured_s is None
    assert found.strategy == state.candidates[0].strategy
    assert "faster than the best measured" in found.reason
    assert "more than the prediction's error" in found.reason


def test_ties_are_what_is_closer_than_the_error(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    state = ran(ran(ran(state, 0, 1.0), 1, 1.0), 10, 1.0)
    known = learn(state, predictor)
    found = recommend(state, known)
    assert found is not None
    assert found.measured_s is not None
    tied = {tie.strategy for tie in found.ties}
    for index in known.proposable():
        close = known.estimates[index].iteration_time_s <= found.measured_s * 2.718281828 ** (
            known.time_error
        )
        assert (state.candidates[index].strategy in tied) == close
    assert state.candidates[1].strategy in tied
    assert state.candidates[10].strategy not in tied
    assert [tie.time_s for tie in found.ties] == sorted(tie.time_s for tie in found.ties)


def test_an_unsteady_measurement_ties_with_more(
    state: TunerState, predictor: BoundedPredictor
) -> None:
    steady = recommended(ran(ran(state, 0, 1.0), 1, 1.08), predictor)
    unsteady = recommended(ran(ran(state, 0, 1.0), 1, 1.08, 0.3), predictor)
    other = state.candidates[1].strategy
    assert other not in {tie.strategy for tie in steady.ties if tie.measured}
    assert other in {tie.strategy for tie in unsteady.ties if tie.measured}


def test_the_best_measured_is_recommended_when_everything_was_run(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> None:
    state = ran(begin(small, ranking.results[:1], TunerSettings(budget=3)), 0, 1.3)
    found = recommended(state, predictor)
    assert found.number == 0
    assert found.ties == ()
    assert found.reason == "the fastest of 1 measured strategies"


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
