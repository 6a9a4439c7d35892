"""Expected times of candidates, the errors of predictions, and the chance that one is faster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.calibration import Calibration
from amp_ray.calibration.choice import prior_sigma
from amp_ray.calibration.linear import PRIOR_TRIALS
from amp_ray.calibration.predictions import PRIOR, TIME_CONSTANTS, Predictor
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy

# Prior of the share of surprises: Beta(1/3, 4), on average 1 in 13 and most often close to none. It
# counts for as few trials as the prior of the error, so that a study's own trials soon decide.
PRIOR_SURPRISES: Final = 1 / 3
PRIOR_NO_SURPRISES: Final = float(PRIOR_TRIALS)
# Sigmas of a surprise, equally likely before any trial: off by about a third, or by a factor of two
SURPRISE_SIGMAS: Final = (0.35, 0.7)
_LEAST_SHARE: Final = 1e-8
_MOST_SHARE: Final = 0.95
_NUM_SHARES: Final = 32
# Ends of the quadrature over the logarithm of the scale: beyond them Student's distribution with
# `PRIOR_TRIALS` degrees of freedom has less than 0.1 %
_LOWEST_LOG: Final = -0.9
_HIGHEST_LOG: Final = 2.2
_NUM_SCALES: Final = 16
_MORE: Final = 1.01  # above 1 by more than the quadrature may miss
_LEAST_DENSITY: Final = 1e-300
_LEAST_LOG: Final = -600.0  # least logarithm of a relative probability: its exponential is above 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorModel:
    """The distribution of the errors of predictions.

    The logarithm of measured over predicted time is normal. Its sigma is the prediction's sigma
    times a scale; a surprise, which has a certain chance, adds the sigma of surprises.
    """

    scales: FloatArray  # shape ``(num_scales,)``
    surprise_sigmas: FloatArray  # shape ``(num_sigmas,)``
    weights: FloatArray  # shape ``(num_scales, num_sigmas)``. Probability of each pair; sum 1.
    shares: FloatArray  # the same shape. Expected share of surprises given that pair.

    @property
    def scale(self) -> float:
        """Typical ratio of actual errors to the model's errors."""
        return 1.0 / math.sqrt(float(self.weights.sum(axis=1) @ self.scales**-2.0))

    @property
    def surprise_fraction(self) -> float:
        """Expected share of surprises."""
        return float((self.weights * self.shares).sum())

    @property
    def surprise_sigma(self) -> float:
        """Expected lognormal sigma of a surprise."""
        by_sigma = (self.weights * self.shares).sum(axis=0)
        total = float(by_sigma.sum())
        return float(by_sigma @ self.surprise_sigmas) / total if total else 0.0

    @property
    def surprised(self) -> bool:
        """Whether trials showed more surprises than the prior expects."""
        before = PRIOR_SURPRISES / (PRIOR_SURPRISES + PRIOR_NO_SURPRISES)
        return self.surprise_fraction > _MORE * before

    def without_surprises(self) -> "ErrorModel":
        """Return the distribution without surprises, with the model's errors only."""
        return replace(self, shares=np.zeros_like(self.shares))


def learn_errors(forecasts: Sequence[tuple[float, float]]) -> ErrorModel:
    """Fit the distribution to errors of forecasts and their sigmas, both in logarithms.

    The distribution is a grid over three quantities: the scale (chi-squared prior with
    `PRIOR_TRIALS` degrees of freedom, as for the error of a calibration), the sigma of a surprise,
    and the share of surprises.
    """
    logs = np.linspace(_LOWEST_LOG, _HIGHEST_LOG, _NUM_SCALES)
    log_shares = np.linspace(math.log(_LEAST_SHARE), math.log(_MOST_SHARE), _NUM_SHARES)
    scales, widths, shares = np.exp(logs), np.array(SURPRISE_SIGMAS), np.exp(log_shares)
    of_scale = -PRIOR_TRIALS * (logs + np.exp(-2.0 * logs) / 2)
    of_share = PRIOR_SURPRISES * log_shares + (PRIOR_NO_SURPRISES - 1.0) * np.log1p(-shares)
    density = of_scale[:, None, None] + np.zeros((len(widths), 1)) + of_share
    for error, sigma in forecasts:
        plain = scales * sigma
        expected = _normal(error, plain)[:, None, None]
        surprising = _normal(error, np.hypot(plain[:, None], widths))[:, :, None]
        density = density + np.log((1.0 - shares) * expected + shares * surprising)
    joint = np.exp(np.maximum(density - density.max(), _LEAST_LOG))
    weights = joint.sum(axis=2)
    return ErrorModel(
        scales=scales,
        surprise_sigmas=widths,
        weights=weights / weights.sum(),
        shares=(joint @ shares) / weights,
    )


def _normal(error: float, sigma: FloatArray) -> FloatArray:
    """Return the normal density up to a constant factor, never 0."""
    density: FloatArray = np.exp(-0.5 * (error / sigma) ** 2) / sigma + _LEAST_DENSITY
    return density


_LEAST_VARIANCE: Final = 1e-12  # variance of a measured time: rounding errors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """Expected times of some candidates."""

    indices: tuple[int, ...]  # length ``num_predicted``. The candidates that are predicted.
    log_mean: FloatArray  # shape ``(num_predicted,)``. Expected logarithm of seconds.
    # Shape ``(num_predicted, num_predicted)``. Uncertain constants move several candidates
    # together; the diagonal also has each prediction's own error.
    covariance: FloatArray
    finishes: FloatArray  # shape ``(num_predicted,)``. Chance that it does not fail.

    @property
    def sigma(self) -> FloatArray:
        """Lognormal sigma of every time, shape ``(num_predicted,)``."""
        sigma: FloatArray = np.sqrt(np.maximum(np.diag(self.covariance), _LEAST_VARIANCE))
        return sigma

    def as_if_measured(self, row: int) -> "Belief":
        """Return the belief after a measurement of one candidate at its expected time.

        Expected times stay; correlated times become more certain.
        """
        column = self.covariance[:, row]
        explained = np.outer(column, column) / max(float(column[row]), _LEAST_VARIANCE)
        return replace(self, covariance=self.covariance - explained)


def time_covariance(
    experiment: Experiment,
    strategies: Sequence[Strategy],
    calibration: Calibration | None,
    predictor: Predictor,
) -> FloatArray:
    """Return the covariance of the logarithms of predicted times.

    One part comes from the constants, which all strategies share: trials that determine a constant
    make all strategies that depend on it more certain. The rest is the error of each prediction,
    measurement included. Slopes are taken at the prior, where the predictor caches them and the
    calibration computed its covariance. Without a calibration the constants are as uncertain as
    their priors.
    """
    if calibration is None:
        names, constants = TIME_CONSTANTS, np.diag(prior_sigma(TIME_CONSTANTS) ** 2)
        error = experiment.constants.time_error
    else:
        names, constants = calibration.time_constants, np.array(calibration.covariance)
        error = calibration.time_error
    plans = [(experiment, strategy) for strategy in strategies]
    slopes = predictor.time_slopes(plans, names, PRIOR)
    covariance: FloatArray = slopes @ constants @ slopes.T + error**2 * np.eye(len(plans))
    return covariance


def log_residuals(calibration: Calibration) -> FloatArray:
    """Return the logarithm of predicted over measured times, for trials with a measured time."""
    return np.array(
        [
            math.log(trial.after_s / trial.measured_s)
            for trial in calibration.trials
            if trial.tells_time and trial.measured_s is not None
        ]
    )


_NUM_HALVINGS: Final = 20  # to 0.003 % for an error of 30 %, far more precise than trials
_FARTHEST: Final = 100.0  # sigmas below the fastest expectation, where the chance is 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chances:
    """Probabilities for candidates that were not measured.

    Given the scale of the errors and the share of surprises, the chance that any candidate is fast
    is at most the sum over candidates. Trials say how common surprises are, and hardly whether they
    are fast or slow, so all of them count as fast. All candidates share the scale, and few trials
    determine it only roughly, so the sum, limited to 1, is averaged over the posterior of both.
    """

    log_mean: FloatArray  # shape ``(num_candidates,)``. Expected logarithm of seconds.
    sigma: FloatArray  # shape ``(num_candidates,)``. Lognormal sigma of the time.
    finishes: FloatArray  # shape ``(num_candidates,)``. Chance that it does not fail.
    errors: ErrorModel

    def without_surprises(self) -> "Chances":
        """Return the chances if no prediction were a surprise."""
        return replace(self, errors=self.errors.without_surprises())

    def worth_trials(self) -> "Chances":
        """Return the chances that more trials could reduce.

        A trial of one strategy does not show which other one is a surprise. If no trial was a
        surprise so far, only a trial of every close strategy could rule surprises out.
        """
        return self if self.errors.surprised else self.without_surprises()

    def any_below(self, limit_s: float) -> float:
        """Return an upper bound of the chance that any candidate finishes in less than a time."""
        if limit_s <= 0 or not len(self.log_mean):
            return 0.0
        errors, gap = self.errors, math.log(limit_s) - self.log_mean
        plain = self.sigma[:, None] * errors.scales
        wide = np.hypot(plain[:, :, None], errors.surprise_sigmas)
        expected = self.finishes @ normal_below(gap[:, None] / plain)
        one_sided = np.minimum(1.0, 2.0 * normal_below(gap[:, None, None] / wide))
        surprising = np.tensordot(self.finishes, one_sided, 1)
        sums = (1.0 - errors.shares) * expected[:, None] + errors.shares * surprising
        return float((np.minimum(sums, 1.0) * errors.weights).sum())

    def bound_s(self, highest_s: float, chance: float) -> float:
        """Return the time below which some candidate lies with this chance, up to ``highest_s``."""
        if not len(self.log_mean) or self.any_below(highest_s) <= chance:
            return highest_s
        low = float(self.log_mean.min() - _FARTHEST * self.sigma.max())
        high = math.log(highest_s)
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if self.any_below(math.exp(middle)) <= chance:
                low = middle
            else:
                high = middle
        return math.exp(low)


def normal_below(distance: FloatArray) -> FloatArray:
    """Return the chance that a standard normal variable is below each distance.

    Example:
        >>> normal_below(np.array([0.0])).tolist()
        [0.5]
    """
    return 0.5 * np.asarray(_erfc(-distance / math.sqrt(2.0)), dtype=np.float64)


_erfc = np.frompyfunc(math.erfc, 1, 1)
