import pytest

from amp_ray.calibration import calibrate
from amp_ray.cost.model import CostModel
from amp_ray.search.ranking import Ranking
from amp_ray.spec.experiment import Experiment
from amp_ray.tuner import BoundedPredictor, TunerSettings, begin
from amp_ray.tuner.calibrated_predictions import CalibratedPredictions
from support.planted import planted_observations


@pytest.fixture
def lesson(
    small: Experiment, ranking: Ranking, predictor: BoundedPredictor
) -> CalibratedPredictions:
    """What six trials of a cluster with slow hosts say."""
    candidates = begin(small, ranking.results, TunerSettings(budget=1)).candidates
    strategies = [each.strategy for each in candidates[:6]]
    trials = planted_observations(small, strategies, {"host_scale": 1.5})
    return CalibratedPredictions(
        given=small,
        candidates=candidates,
        calibration=calibrate(small, trials, predictor=predictor, thorough=False),
        observed=tuple(range(6)),
        judged=tuple(range(16)),
        unrun=tuple(range(6, 16)),
        predictor=predictor,
    )


def test_what_all_trials_say_together_is_the_cost_models_prediction(
    lesson: CalibratedPredictions,
) -> None:
    model = CostModel(experiment=lesson.experiment)
    for estimate in lesson.estimates:
        expected = model.estimate(estimate.strategy)
        assert estimate.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-3)
        assert estimate.peak_memory_bytes == expected.peak_memory_bytes


def test_predictions_come_near_the_planted_truth(
    lesson: CalibratedPredictions, small: Experiment
) -> None:
    strategies = [each.strategy for each in lesson.candidates]
    for estimate, truth in zip(
        lesson.estimates,
        planted_observations(small, strategies, {"host_scale": 1.5}),
        strict=True,
    ):
        assert estimate.iteration_time_s == pytest.approx(truth.measured_s, rel=0.1)


def test_the_belief_expects_what_the_estimates_say(lesson: CalibratedPredictions) -> None:
    belief = lesson.belief()
    assert belief.places == tuple(range(16))
    for row, place in enumerate(belief.places):
        expected_s = lesson.estimates[place].iteration_time_s
        assert 2.718281828459045 ** belief.log_mean[row] == pytest.approx(expected_s)
