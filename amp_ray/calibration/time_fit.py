"""Fit the constants that times depend on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.calibration.choice import (
    IDENTIFIED_SHARE,
    identified,
    not_identified,
    order_by_effect,
    prior_sigma,
)
from amp_ray.calibration.linear import LinearFit, LinearProblem, fit_linear
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import (
    PRIOR,
    TIME_CONSTANTS,
    Point,
    Predictor,
    nearest_grid_point,
)
from amp_ray.spec.constants import Constants

FloatArray = NDArray[np.float64]

FURTHEST: Final = 1.5
"""Prior sigmas that one step may go: beyond, the linear model is not to be trusted."""

MAX_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeFit:
    """Constants of time, fitted.

    Args:
        names: Which, shape ``(num_names,)`` as all arrays of the linear fit.
        problem: The linear model around the mode.
        fit: The mode of its posterior.
    """

    names: tuple[str, ...]
    problem: LinearProblem
    fit: LinearFit

    @property
    def point(self) -> Point:
        """The mode as a point."""
        return Point.of(self.names, self.fit.values)


def fit_time(
    predictor: Predictor,
    observations: Sequence[Observation],
    names: Sequence[str],
    constants: Constants,
) -> TimeFit:
    """Find the most probable constants of time by Gauss-Newton steps.

    Args:
        predictor: Predicts at points.
        observations: Trials that tell their time.
        names: Constants to fit; may be none.
        constants: Their prior values; the prior error of times stands there too.
    """
    sigma = prior_sigma(names)
    plans = [observation.plan for observation in observations]
    measured = np.log([observation.measured_s or math.nan for observation in observations])
    at, seen = np.zeros(len(names)), set[Point]()
    while True:
        around = Point.of(names, at)
        slopes = predictor.time_slopes(plans, names, around)
        problem = LinearProblem(
            offset=predictor.log_times(plans, around) - measured - slopes @ at,
            slopes=slopes,
            prior_sigma=sigma,
            prior_error=constants.time_error,
        )
        fit = fit_linear(problem)
        seen.add(around)
        reached = np.clip(fit.values, at - FURTHEST * sigma, at + FURTHEST * sigma)
        at = nearest_grid_point(reached, sigma)
        if Point.of(names, at) in seen or len(seen) == MAX_ROUNDS:
            return TimeFit(names=tuple(names), problem=problem, fit=fit)


def choose_time(
    predictor: Predictor, observations: Sequence[Observation], most: int, constants: Constants
) -> tuple[TimeFit, dict[str, str]]:
    """Fit the constants that these trials can tell.

    Args:
        predictor: Predicts at points.
        observations: Trials that tell their time.
        most: How many constants at most; never more than there are trials.
        constants: Prior values.

    Returns:
        The fit, and by name why constants were dropped that had been chosen; others took their
        places.
    """
    plans = [observation.plan for observation in observations]
    dropped: dict[str, str] = {}
    while True:
        left = [name for name in TIME_CONSTANTS if name not in dropped]
        slopes = predictor.time_slopes(plans, left, PRIOR)
        names = order_by_effect(slopes, left, min(most, len(plans)))
        found = fit_time(predictor, observations, names, constants)
        shares = identified(found.fit.covariance, names)
        if not names or shares.max() <= IDENTIFIED_SHARE:
            return found, dropped
        worst = int(np.argmax(shares))
        dropped[names[worst]] = not_identified(float(shares[worst]), len(plans))


def left_out_times(
    predictor: Predictor, observations: Sequence[Observation], found: TimeFit
) -> FloatArray:
    """Predict every trial by a calibration that has not seen it.

    The fits use the linear model around the mode of all trials; the predictions are exact.

    Args:
        predictor: Predicts at points.
        observations: Trials that tell their time.
        found: The fit to all of them.

    Returns:
        Shape ``(num_observations,)``. Seconds.
    """
    times = []
    for index, observation in enumerate(observations):
        fit = fit_linear(found.problem.without(index))
        point = Point.of(found.names, fit.values)
        times.append(predictor.predict([observation.plan], point)[0].time_s)
    return np.array(times)


def posterior_covariance(
    predictor: Predictor, observations: Sequence[Observation], found: TimeFit
) -> FloatArray:
    """Return the posterior covariance of all constants of time, those that were not fitted too.

    Args:
        predictor: Predicts at points.
        observations: Trials that tell their time.
        found: The fit, whose error and weights count.

    Returns:
        Shape ``(num_time_constants, num_time_constants)``, of the logarithms.
    """
    plans = [observation.plan for observation in observations]
    slopes = predictor.time_slopes(plans, TIME_CONSTANTS, PRIOR)
    weighted = slopes.T * (found.fit.weights / found.fit.error**2)
    precision = weighted @ slopes + np.diag(prior_sigma(TIME_CONSTANTS) ** -2.0)
    covariance: FloatArray = np.linalg.inv(precision)
    return covariance
