import numpy as np
import pytest

from amp_ray.calibration import apply_calibration, calibrate, prediction_covariance
from amp_ray.search.ranking import Ranking
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.tuner import BoundedPredictor, TunerSettings, begin
from amp_ray.tuner.belief import Belief, degrees_of_freedom, time_covariance
from support.planted import planted_observations


@pytest.fixture
def strategies(small: Experiment, ranking: Ranking) -> list[Strategy]:
    """All sixteen."""
    state = begin(small, ranking.results, TunerSettings(budget=1))
    return [estimate.strategy for estimate in state.candidates]


def belief(covariance: list[list[float]]) -> Belief:
    """A belief with this covariance."""
    size = len(covariance)
    return Belief(
        places=tuple(range(size)),
        log_mean=np.zeros(size),
        covariance=np.array(covariance),
        finishes=np.ones(size),
        degrees=4.0,
    )


def test_a_supposed_measurement_makes_what_goes_with_it_certain() -> None:
    after = belief([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 4.0]]).as_if_measured(0)
    assert after.sigma[:2] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert after.sigma[2] == 2.0


def test_a_supposed_measurement_leaves_expectations() -> None:
    before = belief([[1.0, 0.5], [0.5, 1.0]])
    after = before.as_if_measured(1)
    assert after.log_mean.tolist() == before.log_mean.tolist()
    assert after.covariance[0, 0] == pytest.approx(0.75)


def test_supposing_twice_changes_nothing_more() -> None:
    once = belief([[1.0, 0.5], [0.5, 1.0]]).as_if_measured(0)
    assert once.as_if_measured(0).covariance == pytest.approx(once.covariance)


def test_before_any_trial_errors_are_those_of_the_priors(
    small: Experiment, strategies: list[Strategy]
) -> None:
    covariance = time_covariance(small, strategies, None, BoundedPredictor())
    own = small.constants.time_error**2
    assert (np.diag(covariance) > own).all()
    assert (np.linalg.eigvalsh(covariance) > 0.5 * own).all()
    assert covariance[0, 1] > 0.0


def test_after_trials_errors_are_those_of_the_calibration(
    small: Experiment, strategies: list[Strategy]
) -> None:
    trials = planted_observations(small, strategies[:6], {"host_scale": 1.1})
    found = calibrate(small, trials)
    ours = time_covariance(small, strategies, found, BoundedPredictor())
    theirs = prediction_covariance(found, apply_calibration(found, small), strategies)
    assert np.sqrt(np.diag(ours)) == pytest.approx(np.sqrt(np.diag(theirs)), rel=0.1)


def test_trials_make_the_scale_of_errors_better_known(
    small: Experiment, strategies: list[Strategy]
) -> None:
    few = calibrate(small, planted_observations(small, strategies[:2], {}))
    many = calibrate(small, planted_observations(small, strategies, {}))
    assert degrees_of_freedom(None) == 4
    assert degrees_of_freedom(few) < degrees_of_freedom(many)
