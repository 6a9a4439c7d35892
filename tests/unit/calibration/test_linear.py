from dataclasses import replace

import numpy as np
import pytest

from amp_ray.calibration.linear import (
    HUBER_SCALE,
    NORMAL_SHARE,
    LinearProblem,
    fit_linear,
    huber_weights,
    left_out_residuals,
    robust_loss,
)

GENERATOR_SEED = 7


def problem(offset: list[float], slopes: list[list[float]], sigma: float = 1.0) -> LinearProblem:
    """An error of 5 % expected."""
    array = np.array(slopes, dtype=np.float64).reshape(len(offset), -1)
    return LinearProblem(
        offset=np.array(offset, dtype=np.float64),
        slopes=array,
        prior_sigma=np.full(array.shape[1], sigma),
        prior_error=0.05,
        noise=np.zeros(len(offset)),
    )


def test_without_trials_the_prior_stays() -> None:
    nothing = LinearProblem(
        offset=np.empty(0),
        slopes=np.empty((0, 2)),
        prior_sigma=np.array([0.3, 0.1]),
        prior_error=0.05,
        noise=np.empty(0),
    )
    fit = fit_linear(nothing)
    assert fit.values == pytest.approx([0.0, 0.0])
    assert fit.error == pytest.approx(0.05)
    assert fit.covariance == pytest.approx(np.diag([0.09, 0.01]))


def test_parameters_that_explain_everything_are_found() -> None:
    fit = fit_linear(problem([-0.2, -0.1, -0.3] * 10, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]] * 10))
    assert fit.values == pytest.approx([0.2, 0.1], abs=1e-3)


def test_one_trial_is_shared_out_between_prior_and_error() -> None:
    fit = fit_linear(problem([-0.05], [[1.0]], sigma=0.05))
    assert 0.0 < fit.values[0] < 0.05


def test_an_outlier_hardly_moves_the_fit() -> None:
    clean = fit_linear(problem([-0.1] * 20, [[1.0]] * 20))
    spoilt = fit_linear(problem([-0.1] * 19 + [-3.0], [[1.0]] * 20))
    assert abs(spoilt.values[0] - clean.values[0]) < 0.02
    assert spoilt.weights[-1] < 0.1
    assert spoilt.error < 0.1


def test_learnt_error_agrees_with_the_spread_of_normal_errors() -> None:
    errors = np.random.default_rng(GENERATOR_SEED).normal(0.0, 0.02, 2000)
    fit = fit_linear(problem(errors.tolist(), [[1.0]] * 2000))
    assert fit.error == pytest.approx(0.02, rel=0.05)


def test_few_trials_that_fit_do_not_make_the_model_sure_of_itself() -> None:
    fit = fit_linear(problem([0.0, 0.0], [[1.0], [1.0]]))
    assert fit.error > 0.03


def test_more_trials_leave_less_uncertainty() -> None:
    few, many = (fit_linear(problem([0.01, -0.01] * n, [[1.0]] * 2 * n)) for n in (2, 20))
    assert many.covariance[0, 0] < few.covariance[0, 0]


def test_leaving_a_trial_out_keeps_the_others() -> None:
    left = problem([1.0, 2.0, 3.0], [[1.0], [2.0], [3.0]]).without(1)
    assert left.offset.tolist() == [1.0, 3.0]
    assert left.slopes.tolist() == [[1.0], [3.0]]


def test_left_out_residuals_are_those_of_fits_of_the_others() -> None:
    generator = np.random.default_rng(GENERATOR_SEED)
    slopes = generator.normal(size=(12, 2)).tolist()
    trials = problem(generator.normal(scale=0.001, size=12).tolist(), slopes, sigma=0.5)
    fit = fit_linear(trials)  # of such small residuals, neither weights nor error differ much
    expected = []
    for trial in range(12):
        values = fit_linear(trials.without(trial)).values
        expected.append(trials.offset[trial] + trials.slopes[trial] @ values)
    assert left_out_residuals(trials, fit) == pytest.approx(expected, rel=0.02, abs=1e-6)


def test_loss_is_square_near_zero_and_linear_far_away() -> None:
    assert robust_loss(np.array([0.01])) == pytest.approx(0.5e-4, rel=1e-3)
    assert robust_loss(np.array([1e4])) == pytest.approx(HUBER_SCALE * 1e4, rel=1e-3)


def test_normal_share_is_the_mean_of_weighted_squares_of_normal_errors() -> None:
    points, weights = np.polynomial.hermite_e.hermegauss(201)
    mean = (weights * (huber_weights(points) * points) ** 2).sum() / weights.sum()
    assert mean == pytest.approx(NORMAL_SHARE, abs=1e-4)


def noisy(offset: list[float], noise: list[float]) -> LinearProblem:
    """Trials of one parameter that all depend on alike."""
    return replace(problem(offset, [[1.0]] * len(offset)), noise=np.array(noise))


def test_noise_takes_weight_from_a_measurement() -> None:
    two = fit_linear(noisy([-0.2, -0.4], [0.0, 0.3])).values[0]
    assert 0.19 < two < 0.22
    alone = fit_linear(noisy([-0.4], [0.3])).values[0]
    assert 0.3 < alone < 0.4


def test_noise_is_no_part_of_the_learnt_error() -> None:
    errors = np.random.default_rng(GENERATOR_SEED).normal(0.0, np.hypot(0.05, 0.3), 2000)
    fit = fit_linear(noisy(errors.tolist(), [0.3] * 2000))
    assert fit.error == pytest.approx(0.05, abs=0.03)
    assert fit_linear(problem(errors.tolist(), [[1.0]] * 2000)).error > 0.25
