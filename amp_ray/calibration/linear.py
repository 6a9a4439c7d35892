"""Maximum a posteriori of a linear model with a robust loss and a learnt scale of error."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray

# Where the loss turns from square to linear, in units of the error: 95 % efficient for normal
# errors (Huber, Robust Statistics)
HUBER_SCALE: Final = 1.345
# Mean of ``(w(z) z)^2`` with the weight below for standard normal ``z``: makes the learnt error
# agree with the standard deviation where errors are normal
NORMAL_SHARE: Final = 0.4632
PRIOR_TRIALS: Final = 4  # how many trials the prior value of the error counts for
_MAX_ROUNDS: Final = 100
_TOLERANCE: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearProblem:
    """Residuals ``r(x) = offset + slopes x`` with normal priors around 0."""

    offset: FloatArray  # shape ``(num_trials,)``. Residuals with each parameter at its prior.
    slopes: FloatArray  # shape ``(num_trials, num_parameters)``
    prior_sigma: FloatArray  # shape ``(num_parameters,)``
    prior_error: float  # expected standard deviation of a residual, noise apart
    # Shape ``(num_trials,)``. Standard deviation of each measurement in addition to that error; 0
    # for a steady one.
    noise: FloatArray

    def sigma(self, error: float) -> FloatArray:
        """Return the standard deviation of every residual, shape ``(num_trials,)``."""
        return np.hypot(error, self.noise)

    def only(self, trials: BoolArray) -> "LinearProblem":
        """Return the problem of some trials, those that are true."""
        return replace(
            self,
            offset=self.offset[trials],
            slopes=self.slopes[trials],
            noise=self.noise[trials],
        )

    def without(self, trial: int) -> "LinearProblem":
        """Return the problem with one trial left out."""
        return self.only(np.arange(len(self.offset)) != trial)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearFit:
    """The most probable parameters."""

    values: FloatArray  # shape ``(num_parameters,)``
    error: float  # learnt standard deviation of a residual, noise apart
    weights: FloatArray  # shape ``(num_trials,)``. 1 for a good fit, towards 0 for an outlier.
    # Shape ``(num_parameters, num_parameters)``. Posterior of the parameters.
    covariance: FloatArray


def fit_linear(problem: LinearProblem) -> LinearFit:
    """Fit by reweighted least squares; without trials the fit is the prior.

    The loss of a residual is the pseudo-Huber function of ``z = r / sigma``, where sigma has the
    error and the noise of the measurement. The error itself is fitted too: its prior counts as
    ``PRIOR_TRIALS`` trials, so that a few trials that fit by chance do not make the error too
    small.

    References:
        Charbonnier et al., Deterministic edge-preserving regularization, IEEE TIP 1997.
    """
    values = np.zeros(problem.slopes.shape[1])
    error, weights = problem.prior_error, np.ones(len(problem.offset))
    covariance: FloatArray = np.diag(problem.prior_sigma**2)
    for _ in range(_MAX_ROUNDS):
        before = np.append(values, error)
        sigma = problem.sigma(error)
        weights = huber_weights((problem.offset + problem.slopes @ values) / sigma)
        weighted = problem.slopes.T * (weights / sigma**2)
        covariance = inverse(weighted @ problem.slopes + np.diag(problem.prior_sigma**-2.0))
        values = -covariance @ weighted @ problem.offset
        residuals = problem.offset + problem.slopes @ values
        num_learnt = len(values) - float(np.diag(covariance) @ problem.prior_sigma**-2.0)
        share = (error / sigma) ** 2
        error = learnt_error(residuals, error, problem.prior_error, num_learnt, share)
        if np.abs(np.append(values, error) - before).max() < _TOLERANCE:
            break
    return LinearFit(values=values, error=error, weights=weights, covariance=covariance)


def left_out_residuals(problem: LinearProblem, fit: LinearFit) -> FloatArray:
    """Return the residual of every trial under the fit of the others, shape ``(num_trials,)``.

    Exact for the weights and the error of ``fit``: leaving a trial out of a weighted ridge
    regression divides its residual by one minus its leverage.

    References:
        Cook and Weisberg, Residuals and influence in regression, 1982, section 2.2.
    """
    residuals = problem.offset + problem.slopes @ fit.values
    precision = fit.weights / problem.sigma(fit.error) ** 2
    leverages = precision * ((problem.slopes @ fit.covariance) * problem.slopes).sum(axis=1)
    left_out: FloatArray = residuals / (1.0 - leverages)
    return left_out


def inverse(matrix: FloatArray) -> FloatArray:
    """Return the inverse of a symmetric positive matrix."""
    inverted: FloatArray = np.linalg.inv(matrix).astype(np.float64)
    return inverted


def robust_loss(scaled: FloatArray) -> float:
    """Return the pseudo-Huber loss of residuals in units of the error, summed."""
    per_trial = np.sqrt(1.0 + (scaled / HUBER_SCALE) ** 2) - 1.0
    return HUBER_SCALE**2 * float(per_trial.sum())


def huber_weights(scaled: FloatArray) -> FloatArray:
    """Return weights under the pseudo-Huber loss of residuals that are in units of the error."""
    weights: FloatArray = 1.0 / np.sqrt(1.0 + (scaled / HUBER_SCALE) ** 2)
    return weights


def learnt_error(
    residuals: FloatArray,
    error: float,
    prior_error: float,
    num_learnt: float,
    share: FloatArray | None = None,
) -> float:
    """Return the standard deviation of residuals without noise, shrunk to its prior value.

    An outlier of any size counts as a few trials that are off by the present error (Huber's
    proposal 2). The fitted parameters use ``num_learnt`` degrees of freedom. ``share`` is the share
    of each residual's variance that is not noise, all of it by default: a noisy trial has less
    weight in the error (the M step of expectation maximisation).
    """
    share = np.ones(len(residuals)) if share is None else share
    scaled = residuals * np.sqrt(share) / error
    squares = error**2 * float((share * (huber_weights(scaled) * scaled) ** 2).sum()) / NORMAL_SHARE
    num_free = max(0.0, float(share.sum()) - num_learnt)
    return float(np.sqrt((PRIOR_TRIALS * prior_error**2 + squares) / (PRIOR_TRIALS + num_free)))
