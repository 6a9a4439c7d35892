import numpy as np
import pytest

from amp_ray.calibration.choice import (
    identified,
    not_identified,
    order_by_effect,
    prior_effects,
    prior_sigma,
)

NAMES = ("host_scale", "nic_efficiency", "latency_scale")
"""Prior sigmas .30, .20 and .90."""


def test_effect_is_what_the_prior_moves() -> None:
    effects = prior_effects(np.array([[1.0, 0.0, 0.2], [1.0, 0.0, 0.2]]), NAMES)
    assert effects == pytest.approx([0.30, 0.0, 0.09])


def test_without_trials_nothing_has_an_effect() -> None:
    assert prior_effects(np.empty((0, 3)), NAMES).tolist() == [0.0, 0.0, 0.0]


def test_the_largest_effect_comes_first() -> None:
    slopes = np.array([[0.1, 1.0, 0.0], [0.1, 0.9, 0.1]])
    assert order_by_effect(slopes, NAMES, 1) == ["nic_efficiency"]


def test_a_constant_that_repeats_another_is_not_chosen() -> None:
    slopes = np.array([[1.0, 0.9, 0.0], [0.5, 0.45, 0.01]])
    assert order_by_effect(slopes, NAMES, 3) == ["host_scale", "latency_scale"]


def test_never_more_constants_than_trials() -> None:
    assert len(order_by_effect(np.array([[1.0, 0.5, 0.3]]), NAMES, 3)) == 1


def test_a_constant_without_effect_is_not_chosen() -> None:
    slopes = np.array([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert order_by_effect(slopes, NAMES, 3) == ["host_scale"]


def test_without_trials_nothing_is_chosen() -> None:
    assert order_by_effect(np.empty((0, 3)), NAMES, 3) == []


def test_share_compares_the_posterior_with_the_prior() -> None:
    covariance = np.diag((prior_sigma(NAMES) * [0.5, 1.0, 0.1]) ** 2)
    assert identified(covariance, NAMES) == pytest.approx([0.5, 1.0, 0.1])


def test_reason_tells_trials_and_share() -> None:
    assert not_identified(0.96, 3) == (
        "not identified: 3 trials leave 96 % of its prior uncertainty (at most 90 % is asked for)"
    )
