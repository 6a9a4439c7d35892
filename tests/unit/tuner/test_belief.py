import math

import numpy as np
import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.belief import (
    Belief,
    Chances,
    ErrorModel,
    learn_errors,
    normal_below,
    time_covariance,
)
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.state import TunerSettings, begin
from support.worlds import error_model


@pytest.fixture
def strategies(small: Experiment, ranking: Ranking) -> list[Strategy]:
    """All sixteen."""
    state = begin(small, ranking.results, TunerSettings(budget=1))
    return [estimate.strategy for estimate in state.candidates]


def belief(covariance: list[list[float]]) -> Belief:
    """A belief with this covariance."""
    size = len(covariance)
    return Belief(
        indices=tuple(range(size)),
        log_mean=np.zeros(size),
        covariance=np.array(covariance),
        finishes=np.ones(size),
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


def chances(
    *log_mean: float, sigma: float = 1.0, finishes: float = 1.0, errors: ErrorModel | None = None
) -> Chances:
    """Chances of candidates that differ in their means only; as the model says by default."""
    return Chances(
        log_mean=np.array(log_mean),
        sigma=np.full(len(log_mean), sigma),
        finishes=np.full(len(log_mean), finishes),
        errors=errors or error_model(),
    )


def test_normal_chances_are_those_of_the_table() -> None:
    found = normal_below(np.array([-1.959964, -1.0, 0.0, 1.644854]))
    assert found == pytest.approx([0.025, 0.158655, 0.5, 0.95], abs=1e-6)


def test_before_any_trial_one_candidate_has_students_distribution() -> None:
    one = chances(0.0, errors=learn_errors([])).without_surprises()
    assert one.any_below(math.exp(-2.131847)) == pytest.approx(0.05, rel=0.01)
    assert one.any_below(math.exp(-7.173182)) == pytest.approx(0.001, rel=0.3)


def test_a_surprise_may_be_far_faster_than_the_error_allows_and_counts_as_fast() -> None:
    limit_s = math.exp(-0.35)
    group = chances(0.0, 0.0, sigma=0.01, errors=error_model(share=0.1, sigma=0.35))
    one = 0.1 * float(normal_below(np.array([-0.35 / math.hypot(0.35, 0.01)]))[0])
    assert group.any_below(limit_s) == pytest.approx(2 * 2 * one)
    assert group.without_surprises().any_below(limit_s) < 1e-9


def test_trials_are_run_for_surprises_only_where_some_were_seen() -> None:
    clean, seen = (learn_errors([(error, 0.05)] * 2) for error in (0.01, 0.6))
    assert not clean.surprised
    assert seen.surprised
    assert chances(0.0, errors=clean).worth_trials().errors.surprise_fraction == 0.0
    assert chances(0.0, errors=seen).worth_trials().errors is seen


def test_chances_of_several_add_up() -> None:
    limit_s = math.exp(-2.0)
    assert chances(0.0, 0.0, 0.0).any_below(limit_s) == pytest.approx(3 * 0.0227501, rel=1e-4)


def test_a_sum_of_chances_is_at_most_certainty() -> None:
    assert chances(*[0.0] * 100).any_below(1.0) == 1.0


def test_what_may_fail_counts_with_its_chance_to_finish() -> None:
    one = chances(0.0, finishes=0.25)
    assert one.any_below(1.0) == pytest.approx(0.125)


def test_nobody_is_faster_than_no_time() -> None:
    assert chances(0.0).any_below(0.0) == 0.0


def test_the_bound_is_where_the_chance_is_met() -> None:
    group = chances(0.1, 0.2, 0.4, sigma=0.1, errors=learn_errors([(0.1, 0.1)] * 3))
    bound_s = group.bound_s(1.2, 0.05)
    assert group.any_below(bound_s) == pytest.approx(0.05, rel=1e-2)


def test_the_bound_is_not_above_the_highest() -> None:
    assert chances(10.0, sigma=0.1).bound_s(1.2, 0.05) == 1.2


def test_nothing_left_leaves_nothing_to_doubt() -> None:
    assert chances().any_below(1.0) == 0.0
    assert chances().bound_s(1.2, 0.05) == 1.2
