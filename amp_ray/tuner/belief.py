"""Expected times of candidates, as a joint distribution, and the chance that one is faster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.calibration import Calibration, Predictor
from amp_ray.calibration.choice import prior_sigma
from amp_ray.calibration.linear import PRIOR_TRIALS
from amp_ray.calibration.predictions import PRIOR, TIME_CONSTANTS
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy

FloatArray = NDArray[np.float64]

_LEAST_VARIANCE: Final = 1e-12
"""Of a time that counts as measured: what rounding leaves, and never below."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """Expected times of some candidates."""

    indices: tuple[int, ...]  # length ``num_predicted``. The candidates that are predicted.
    log_mean: FloatArray  # shape ``(num_predicted,)``. Expected logarithm of seconds.
    # Shape ``(num_predicted, num_predicted)``. Uncertain constants move several candidates
    # together; the diagonal also has each prediction's own error.
    covariance: FloatArray
    finishes: FloatArray  # shape ``(num_predicted,)``. Chance that it does not fail.
    degrees: float  # degrees of freedom of the errors' scale, which a few trials do not tell well

    @property
    def sigma(self) -> FloatArray:
        """Lognormal sigma of every time, shape ``(num_predicted,)``."""
        sigma: FloatArray = np.sqrt(np.maximum(np.diag(self.covariance), _LEAST_VARIANCE))
        return sigma

    def as_if_measured(self, row: int) -> "Belief":
        """Return what would be known if one candidate took just what is expected of it.

        Expectations stay; what is uncertain together with it becomes more certain.
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

    As `amp_ray.calibration.prediction_covariance`, with slopes at the prior, which a predictor
    keeps and from which the calibration's own covariance was made. Without a calibration the
    constants are as uncertain as their priors.
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


def degrees_of_freedom(calibration: Calibration | None) -> float:
    """Return how many trials the scale of the errors rests on.

    The prior's scale counts as `PRIOR_TRIALS` trials; each fitted constant of time uses one up.
    """
    if calibration is None:
        return float(PRIOR_TRIALS)
    fitted = sum(constant.name in calibration.time_constants for constant in calibration.constants)
    num_timed = sum(trial.tells_time for trial in calibration.trials)
    return float(PRIOR_TRIALS + max(0, num_timed - fitted))


def log_residuals(calibration: Calibration) -> FloatArray:
    """Return the logarithm of predicted over measured times, of the trials that tell their time."""
    return np.array(
        [
            math.log(trial.after_s / trial.measured_s)
            for trial in calibration.trials
            if trial.tells_time and trial.measured_s is not None
        ]
    )


_NUM_SCALES: Final = 32
"""Points of the quadrature over the errors' scale: twice as many change chances by less than
0.1 %."""

_LOWEST: Final = -8.0
_HIGHEST: Final = 3.0
"""Ends of that quadrature in standard deviations of the scale's logarithm, whose lower tail is the
longer one."""

_NUM_HALVINGS: Final = 20
"""Of the search for a bound: to 0.003 % of an error of 30 %, far below what can be measured."""

_FARTHEST: Final = 100.0
"""Where it begins: so many sigmas before the fastest expectation nothing is left to doubt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chances:
    """Chances about candidates that nobody has measured.

    Given the scale of the errors, the chance that any is fast is at most the sum over candidates.
    The scale itself is known from few trials (chi-squared with `degrees` degrees of freedom),
    so that sum, never above 1, is averaged over it: a single candidate has Student's t
    distribution, many share one scale.
    """

    log_mean: FloatArray  # shape ``(num_candidates,)``. Expected logarithm of seconds.
    sigma: FloatArray  # shape ``(num_candidates,)``. Lognormal sigma of the time.
    finishes: FloatArray  # shape ``(num_candidates,)``. Chance that it does not fail.
    degrees: float

    def any_below(self, limit_s: float) -> float:
        """Return an upper bound of the chance that any candidate finishes in less than a time."""
        scales, weights = self._scales
        sums = (self.finishes[:, None] * self._below(limit_s, scales)).sum(axis=0)
        return float(np.minimum(sums, 1.0) @ weights)

    def bound_s(self, highest_s: float, chance: float) -> float:
        """Return the longest time that any candidate undercuts with at most this chance.

        At most ``highest_s``.
        """
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

    @cached_property
    def _scales(self) -> tuple[FloatArray, FloatArray]:
        """Return scales by which errors may be smaller than thought, with their weights.

        The square of the scale is chi-squared over its degrees of freedom.
        """
        degrees = self.degrees
        deviation = 1.0 / math.sqrt(2.0 * degrees)
        logs = np.linspace(_LOWEST * deviation, _HIGHEST * deviation, _NUM_SCALES)
        density = degrees * logs - degrees / 2 * np.exp(2.0 * logs)
        weights = np.exp(density - density.max())
        return np.exp(logs), weights / weights.sum()

    def _below(self, limit_s: float, scales: FloatArray) -> FloatArray:
        """Return each one's chance to take less, shape ``(num_candidates, num_scales)``."""
        if limit_s <= 0:
            return np.zeros((len(self.log_mean), len(scales)))
        distance = (math.log(limit_s) - self.log_mean) / self.sigma
        return normal_below(distance[:, None] * scales)


def normal_below(distance: FloatArray) -> FloatArray:
    """Return the chance that a standard normal figure lies below, element by element.

    Example:
        >>> normal_below(np.array([0.0])).tolist()
        [0.5]
    """
    return 0.5 * np.asarray(_erfc(-distance / math.sqrt(2.0)), dtype=np.float64)


_erfc = np.frompyfunc(math.erfc, 1, 1)
