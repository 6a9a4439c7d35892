"""Expected times of candidates, as a joint distribution, and the chance that one is faster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration import Calibration, Predictor
from amp_ray.calibration.choice import prior_sigma
from amp_ray.calibration.predictions import PRIOR, TIME_CONSTANTS
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.error_model import ErrorModel

_LEAST_VARIANCE: Final = 1e-12  # of a time that counts as measured: what rounding leaves


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
    measurement included. Slopes are those at the prior, which a predictor keeps and from which the
    calibration's own covariance was made; without a calibration the constants are as uncertain as
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
    """Return the logarithm of predicted over measured times, of the trials that tell their time."""
    return np.array(
        [
            math.log(trial.after_s / trial.measured_s)
            for trial in calibration.trials
            if trial.tells_time and trial.measured_s is not None
        ]
    )


_NUM_HALVINGS: Final = 20  # to 0.003 % of an error of 30 %, far below what can be measured
_FARTHEST: Final = 100.0  # so many sigmas before the fastest expectation there is no doubt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chances:
    """Probabilities for candidates that were not measured.

    Given the scale of the errors and how common surprises are, the chance that any is fast is at
    most the sum over candidates. Both are known from few trials only, so this sum, limited to 1, is
    averaged over their posterior: many candidates share one scale.
    """

    log_mean: FloatArray  # shape ``(num_candidates,)``. Expected logarithm of seconds.
    sigma: FloatArray  # shape ``(num_candidates,)``. Lognormal sigma of the time.
    finishes: FloatArray  # shape ``(num_candidates,)``. Chance that it does not fail.
    errors: ErrorModel

    def without_surprises(self) -> "Chances":
        """Return the chances if no prediction were a surprise."""
        return replace(self, errors=self.errors.without_surprises())

    def worth_trials(self) -> "Chances":
        """Return the chances for which trials are run.

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
        surprising = np.tensordot(self.finishes, normal_below(gap[:, None, None] / wide), 1)
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
    """Return the chance that a standard normal figure lies below, element by element.

    Example:
        >>> normal_below(np.array([0.0])).tolist()
        [0.5]
    """
    return 0.5 * np.asarray(_erfc(-distance / math.sqrt(2.0)), dtype=np.float64)


_erfc = np.frompyfunc(math.erfc, 1, 1)
