"""Errors of predictions: a common scale for all, and a few much larger ones, the surprises."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.linear import PRIOR_TRIALS

# Prior of the share of surprises: Beta(1/3, 4), on average 1 in 13 and most often close to none. It
# counts for as few trials as the prior of the error, so that a study's own trials soon decide.
PRIOR_SURPRISES: Final = 1 / 3
PRIOR_NO_SURPRISES: Final = float(PRIOR_TRIALS)
# How far a surprise may be off, equally likely before any trial: a third or so, or a factor of two
SURPRISE_SIGMAS: Final = (0.35, 0.7)
_LEAST_SHARE: Final = 1e-8
_MOST_SHARE: Final = 0.95
_NUM_SHARES: Final = 32
# Ends of the quadrature over the logarithm of the scale: beyond them Student's distribution with
# `PRIOR_TRIALS` degrees of freedom has less than 0.1 %
_LOWEST_LOG: Final = -0.9
_HIGHEST_LOG: Final = 2.2
_NUM_SCALES: Final = 16
_MORE: Final = 1.01  # above what the quadrature may miss
_LEAST_DENSITY: Final = 1e-300
_LEAST_LOG: Final = -600.0  # of a relative probability: its exponential is above 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorModel:
    """The distribution of the errors of predictions.

    The logarithm of measured over predicted time is normal with the prediction's own sigma times a
    scale. With the chance of a surprise, it also has the sigma of a surprise.
    """

    scales: FloatArray  # shape ``(num_scales,)``
    surprise_sigmas: FloatArray  # shape ``(num_sigmas,)``
    weights: FloatArray  # shape ``(num_scales, num_sigmas)``. Probability of each pair; sum 1.
    shares: FloatArray  # the same shape. Expected share of surprises given that pair.

    @property
    def scale(self) -> float:
        """Typical ratio of actual errors to those of the model."""
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

    A grid over the scale (chi-squared prior with `PRIOR_TRIALS` degrees of freedom, as for the
    error of a calibration), the sigma of a surprise and the share of surprises.
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
    """Return the normal density but for a constant factor, never 0."""
    density: FloatArray = np.exp(-0.5 * (error / sigma) ** 2) / sigma + _LEAST_DENSITY
    return density
