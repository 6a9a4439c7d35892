import numpy as np
import pytest

from amp_ray.calibration.calibrate import calibrate
from amp_ray.calibration.linear import LinearProblem
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.calibrated_predictions import (
    MOST_CALIBRATIONS,
    BoundedPredictor,
    Evidence,
    Predictions,
    influences,
    limit_influences,
    predict,
)
from amp_ray.tuner.state import TunerSettings, begin
from support.planted import planted_observations, small_strategies


@pytest.fixture
def predictions(small: Experiment, ranking: Ranking, predictor: BoundedPredictor) -> Predictions:
    """What six trials of a cluster with slow hosts say."""
    candidates = begin(small, ranking.results, TunerSettings(budget=1)).candidates
    strategies = [each.strategy for each in candidates[:6]]
    trials = planted_observations(small, strategies, {"host_scale": 1.5})
    evidence = Evidence(
        experiment=small,
        candidates=candidates,
        calibration=calibrate(small, trials, predictor=predictor, thorough=False),
        observed=tuple(range(6)),
        unrun=tuple(range(6, 16)),
        predictor=predictor,
    )
    return predict(evidence)


def test_what_all_trials_say_together_is_the_cost_models_prediction(
    predictions: Predictions,
) -> None:
    model = CostModel(experiment=predictions.experiment)
    for estimate in predictions.estimates:
        expected = model.estimate(estimate.strategy)
        assert estimate.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-3)
        assert estimate.peak_memory_bytes == expected.peak_memory_bytes


def test_predictions_come_near_the_planted_truth(
    predictions: Predictions, small: Experiment
) -> None:
    strategies = [estimate.strategy for estimate in predictions.estimates]
    for estimate, truth in zip(
        predictions.estimates,
        planted_observations(small, strategies, {"host_scale": 1.5}),
        strict=True,
    ):
        assert estimate.iteration_time_s == pytest.approx(truth.measured_s, rel=0.1)


def test_the_belief_expects_what_the_estimates_say(predictions: Predictions) -> None:
    belief = predictions.belief
    assert belief.indices == tuple(range(16))
    for row, index in enumerate(belief.indices):
        expected_s = predictions.estimates[index].iteration_time_s
        assert 2.718281828459045 ** belief.log_mean[row] == pytest.approx(expected_s)


ERROR = 0.06


def problem(*offset: float, slopes: list[float]) -> LinearProblem:
    """Trials of one constant."""
    return LinearProblem(
        offset=np.array(offset),
        slopes=np.array(slopes).reshape(-1, 1),
        prior_sigma=np.array([0.3]),
        prior_error=ERROR,
        noise=np.zeros(len(offset)),
    )


def test_the_only_trial_has_made_all_the_change() -> None:
    (change,) = influences(problem(0.2, slopes=[1.0]), np.array([[1.0], [0.0]]))
    assert change[0] < -0.1
    assert change[1] == 0.0


def test_trials_that_agree_have_little_influence_each() -> None:
    alone = influences(problem(0.2, slopes=[1.0]), np.array([[1.0]]))
    agreeing = influences(problem(*[0.2] * 5, slopes=[1.0] * 5), np.array([[1.0]]))
    assert np.abs(agreeing).max() < 0.1 * np.abs(alone).max()


def test_a_turned_order_is_taken_back_as_far_as_needed() -> None:
    before = np.log([1.0, 1.2])
    change = np.array([0.3, 0.0])
    limited = limit_influences(before + change, change.reshape(1, -1), ERROR)
    assert limited[0] < limited[1]
    assert limited[0] == pytest.approx(limited[1], abs=1e-6)


def test_a_change_that_makes_certain_plans_equal_is_taken_back_too() -> None:
    limited = limit_influences(np.array([0.25, 0.25]), np.array([[0.25, 0.0]]), ERROR)
    assert limited[0] < limited[1]


@pytest.mark.parametrize(
    ("before_s", "change"),
    [
        pytest.param([1.0, 1.05], [0.3, 0.0], id="ties may change their order"),
        pytest.param([1.0, 1.2, 3.0], [0.9, 0.9, 0.9], id="all plans share the change"),
        pytest.param([1.0, 2.0], [0.5, 0.0], id="plans stay in their order"),
    ],
)
def test_a_change_that_turns_no_certain_order_is_kept(
    before_s: list[float], change: list[float]
) -> None:
    after = np.log(before_s) + change
    assert limit_influences(after, np.array([change]), ERROR) == pytest.approx(after)


def test_what_all_plans_share_is_kept_where_the_rest_is_taken_back() -> None:
    before = np.log([1.0, 1.2, 3.0])
    change = np.array([1.2, 0.9, 0.9])
    limited = limit_influences(before + change, change.reshape(1, -1), ERROR)
    assert limited[1:] == pytest.approx(before[1:] + 0.9)
    assert before[0] + 0.9 < limited[0] < limited[1]


def test_no_plans_are_no_trouble() -> None:
    assert limit_influences(np.array([]), np.zeros((2, 0)), ERROR).shape == (0,)


# ------------------------------------------------------------------------- the cache of predictions


def test_it_calibrates_like_calibrate(small: Experiment) -> None:
    trials = planted_observations(small, small_strategies(small)[:5], {"host_scale": 1.3})
    assert BoundedPredictor().calibrated(small, trials) == calibrate(small, trials, thorough=False)


def test_the_same_trials_are_not_calibrated_with_twice(small: Experiment) -> None:
    trials = planted_observations(small, small_strategies(small)[:3], {})
    predictor = BoundedPredictor()
    assert predictor.calibrated(small, trials) is predictor.calibrated(small, list(trials))


def test_memory_does_not_grow_with_the_number_of_calibrations(
    small: Experiment, ranking: Ranking
) -> None:
    strategies = small_strategies(small)
    predictor, sizes = BoundedPredictor(), []
    for step in range(12):
        ratios = {"host_scale": 1.0 + 0.02 * step, "nic_efficiency": 0.7}
        predictor.calibrated(small, planted_observations(small, strategies, ratios))
        sizes.append(len(predictor._memo))  # noqa: SLF001 - nothing else tells its memory
    assert sizes[-1] == pytest.approx(sizes[0], rel=0.2)
    assert len(predictor._calibrations) == MOST_CALIBRATIONS  # noqa: SLF001 - as above
