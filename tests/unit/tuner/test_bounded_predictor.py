import pytest

from amp_ray.calibration import calibrate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.tuner.calibrated_predictions import MOST_CALIBRATIONS, BoundedPredictor
from support.planted import planted_observations, small_strategies


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
