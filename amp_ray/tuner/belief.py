"""What is expected of candidates: a joint distribution of the logarithms of their times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Expected times of some candidates.

    Args:
        places: Length ``num_places``. Which candidates, by place.
        log_mean: Shape ``(num_places,)``. Expected logarithm of seconds.
        covariance: Shape ``(num_places, num_places)``. What constants leave open moves several
            candidates together; the diagonal has each prediction's own error too.
        finishes: Shape ``(num_places,)``. Chance that it does not fail.
        degrees: Degrees of freedom of the errors' scale, which a few trials do not tell well.
    """

    places: tuple[int, ...]
    log_mean: FloatArray
    covariance: FloatArray
    finishes: FloatArray
    degrees: float

    @property
    def sigma(self) -> FloatArray:
        """Lognormal sigma of every time, shape ``(num_places,)``."""
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
    told = sum(trial.tells_time for trial in calibration.trials)
    return float(PRIOR_TRIALS + max(0, told - fitted))


def log_residuals(calibration: Calibration) -> FloatArray:
    """Return the logarithm of predicted over measured times, of the trials that tell their time."""
    return np.array(
        [
            math.log(trial.after_s / trial.measured_s)
            for trial in calibration.trials
            if trial.tells_time and trial.measured_s is not None
        ]
    )
