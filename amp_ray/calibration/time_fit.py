"""Fit the constants that times depend on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.choice import (
    IDENTIFIED_SHARE,
    identified,
    not_identified,
    order_by_effect,
    prior_sigma,
)
from amp_ray.calibration.linear import (
    LinearFit,
    LinearProblem,
    fit_linear,
    inverse,
    left_out_residuals,
    robust_loss,
)
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.populations import second_population
from amp_ray.calibration.predictions import PRIOR, TIME_CONSTANTS, Plan, Point, Predictor
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE
from amp_ray.memo import memoised

_FURTHEST: Final = 1.5  # prior sigmas of one step: beyond, the linear model is not trusted
_CLOSE: Final = 0.02  # a step of less than this share of every prior sigma ends the search
# Sigmas of the error that the constants of time may explain: if all trials are off in the same way
# by more than that, a common factor is the likelier cause
_UNEXPLAINED: Final = 2.0
FEWEST_FOR_CONSTANTS: Final = 4
"""Trials from which on more than the common factor of all times may move: with fewer, constants
follow the errors of single trials. On published tables a common factor alone predicted the rest
better after three trials (docs/cost-model.md, section 10)."""

_MAX_ROUNDS: Final = 8
_MAX_HALVINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeFit:
    """Constants of time, fitted."""

    names: tuple[str, ...]  # fitted constants, in the order of the linear fit's arrays
    problem: LinearProblem  # the linear model around the mode
    fit: LinearFit  # the mode of its posterior

    @property
    def point(self) -> Point:
        """The mode as a point."""
        return Point.of(self.names, self.fit.values)


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeTrials:
    """Trials with a measured time."""

    predictor: Predictor
    observations: tuple[Observation, ...]  # measured trials
    prior_error: float  # expected lognormal sigma of a predicted time
    # Expected lognormal sigma of the common factor of all times, where nothing shows a larger one
    common_sigma: float = PRIOR_SIGMA[PROGRAM_SCALE]

    @property
    def plans(self) -> list[Plan]:
        """Plans of the trials."""
        return [observation.plan for observation in self.observations]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Which constants may be fitted.

        These are the constants of time. If their priors cannot explain the error of the typical
        trial, the common factor of all times is added, which a single trial identifies.
        """
        if not self.observations:
            return TIME_CONSTANTS
        slopes = self.slopes(TIME_CONSTANTS, PRIOR).mean(axis=0)
        variance = float(((slopes * prior_sigma(TIME_CONSTANTS)) ** 2).sum())
        weights = 1.0 / (self.prior_error**2 + self.noise**2)
        variance += 1.0 / float(weights.sum())
        typical = weighted_median(self.residuals(PRIOR), weights)
        is_needed = abs(typical) > _UNEXPLAINED * math.sqrt(variance)
        return (*TIME_CONSTANTS, PROGRAM_SCALE) if is_needed else TIME_CONSTANTS

    def prior_sigma(self, names: Sequence[str]) -> FloatArray:
        """Return the prior's sigma of constants, shape ``(num_names,)``.

        That of the common factor is `common_sigma`, unless the typical trial is off by more than
        all priors explain.
        """
        sigma = prior_sigma(names)
        if PROGRAM_SCALE in names and PROGRAM_SCALE not in self.names:
            sigma[list(names).index(PROGRAM_SCALE)] = self.common_sigma
        return sigma

    def without_second_population(self) -> "TimeTrials":
        """Return the trials without those that are slower than any constants explain.

        Every constant is taken to be as uncertain as the common factor of all times.
        """
        names = (*TIME_CONSTANTS, PROGRAM_SCALE)
        problem = self._linear(names, PRIOR, self.slopes(names, PRIOR))
        wide = np.full(len(names), PRIOR_SIGMA[PROGRAM_SCALE])

        def excess_s(residuals: FloatArray) -> FloatArray:
            pairs = zip(self.observations, residuals.tolist(), strict=True)
            predicted = [(trial, (trial.measured_s or 0.0) * math.exp(log)) for trial, log in pairs]
            return np.array([trial.excess_s(time_s) for trial, time_s in predicted])

        slow = second_population(replace(problem, prior_sigma=wide), excess_s)
        kept = [
            trial for trial, is_slow in zip(self.observations, slow, strict=True) if not is_slow
        ]
        return replace(self, observations=tuple(kept))

    @property
    def noise(self) -> FloatArray:
        """Noise of every measurement, as in `Observation`; shape ``(num_trials,)``."""
        return np.array([observation.noise for observation in self.observations])

    def residuals(self, point: Point) -> FloatArray:
        """Return the logarithm of predicted over measured times, shape ``(num_trials,)``."""
        measured = [observation.measured_s or math.nan for observation in self.observations]
        residuals: FloatArray = self.predictor.log_times(self.plans, point) - np.log(measured)
        return residuals

    def slopes(self, names: Sequence[str], point: Point) -> FloatArray:
        """Return how times change with constants, shape ``(num_trials, num_names)``."""
        return self.predictor.time_slopes(self.plans, names, point)

    def choose(self, most: int) -> tuple[list[str], dict[str, str]]:
        """Choose the constants that these trials identify, or the common factor of all times alone.

        From `FEWEST_FOR_CONSTANTS` trials on constants are chosen if a trial is predicted better
        from the others with them than with a common factor alone, by more than the standard error
        of that difference. So trials that the cost model cannot explain, or that agree by chance,
        leave constants as they are. The common factor moves by any trial, as far as its prior
        allows; trials of both signs keep it near 1.

        Returns at most ``most`` names, the first choice first, and the reasons, by name, why
        constants that change these trials were dropped.
        """
        names, dropped = self.identifiable(most)
        if not names:
            return names, dropped
        common = [PROGRAM_SCALE]
        reason = f"not needed: fewer than {FEWEST_FOR_CONSTANTS} trials move a common factor alone"
        if len(self.observations) >= FEWEST_FOR_CONSTANTS:
            alone, with_them = self._left_out_errors(common), self._left_out_errors(names)
            if _exceeds(alone, with_them):
                return names, dropped
            reason = (
                f"not needed: a trial is predicted from the others with an error of "
                f"{100 * alone.mean():.1f} % by a common factor alone, "
                f"{100 * with_them.mean():.1f} % with those that the trials identify; the "
                "difference must exceed its standard error"
            )
        return common, dropped | {name: reason for name in names if name not in common}

    def _left_out_errors(self, names: Sequence[str]) -> FloatArray:
        """Return the errors of predictions from the other trials, by the linear model.

        They are weighted by how steady the trials are; the mean weight is 1.
        """
        problem = self._linear(names, PRIOR, self.slopes(names, PRIOR))
        weights = 1.0 / (self.prior_error**2 + self.noise**2)
        errors = np.abs(left_out_residuals(problem, fit_linear(problem)))
        weighted: FloatArray = errors * weights / weights.mean()
        return weighted

    def identifiable(self, most: int) -> tuple[list[str], dict[str, str]]:
        """Choose constants that these trials identify, by the linear model around the prior.

        Measured times are not used. Returns at most as many names as there are trials, the first
        choice first. Also returns the reasons, by name, why chosen constants were dropped again in
        favour of the next ones.
        """
        dropped: dict[str, str] = {}
        while True:
            candidates = [name for name in self.names if name not in dropped]
            slopes = self.slopes(candidates, PRIOR)
            names = order_by_effect(slopes, candidates, min(most, len(self.observations)))
            where = [candidates.index(name) for name in names]
            covariance = fit_linear(self._linear(names, PRIOR, slopes[:, where])).covariance
            shares = identified(covariance, names)
            if not names or shares.max() <= IDENTIFIED_SHARE:
                return names, dropped
            worst = int(np.argmax(shares))
            dropped[names[worst]] = not_identified(float(shares[worst]), len(self.observations))

    def fit(self, names: Sequence[str], *, thorough: bool) -> TimeFit:
        """Find the most probable values of some or no constants by Gauss-Newton steps.

        The slopes are those at the prior, which a predictor caches; every step corrects them
        (Broyden's update). With ``thorough`` they are computed again until the fit stops moving.
        """
        slopes = self.slopes(names, PRIOR)
        fitted = self._steps(names, np.zeros(len(names)), slopes, anew=False)
        if thorough:
            slopes = self.slopes(names, fitted.point)
            fitted = self._steps(names, fitted.fit.values, slopes, anew=True)
        return fitted

    def _steps(
        self, names: Sequence[str], at: FloatArray, slopes: FloatArray, *, anew: bool
    ) -> TimeFit:
        sigma = self.prior_sigma(names)
        problem = self._linear(names, Point.of(names, at), slopes)
        fit = fit_linear(problem)
        for _ in range(_MAX_ROUNDS):
            furthest = _FURTHEST * sigma
            reached = self._descend(names, at, np.clip(fit.values - at, -furthest, furthest), fit)
            if (np.abs(reached - at) <= _CLOSE * sigma).all():
                break
            around = Point.of(names, reached)
            if anew:
                slopes = self.slopes(names, around)
            else:
                slopes = self._corrected(names, slopes, at, reached)
            at = reached
            problem = self._linear(names, around, slopes)
            fit = fit_linear(problem)
        return TimeFit(names=tuple(names), problem=problem, fit=replace(fit, values=at))

    def _linear(self, names: Sequence[str], around: Point, slopes: FloatArray) -> LinearProblem:
        at = np.array([dict(around.logs).get(name, 0.0) for name in names])
        return LinearProblem(
            offset=self.residuals(around) - slopes @ at,
            slopes=slopes,
            prior_sigma=self.prior_sigma(names),
            prior_error=self.prior_error,
            noise=self.noise,
        )

    def _corrected(
        self, names: Sequence[str], slopes: FloatArray, start: FloatArray, end: FloatArray
    ) -> FloatArray:
        sigma = self.prior_sigma(names)
        step = (end - start) / sigma
        change = self.residuals(Point.of(names, end)) - self.residuals(Point.of(names, start))
        missed = change - slopes @ (end - start)
        corrected: FloatArray = slopes + np.outer(missed, step / sigma) / (step @ step)
        return corrected

    def _descend(
        self, names: Sequence[str], start: FloatArray, step: FloatArray, fit: LinearFit
    ) -> FloatArray:
        """Go along a step as far as the loss falls: at a kink, less than all of it."""
        sigma, prior = np.hypot(fit.error, self.noise), self.prior_sigma(names)

        def loss(logs: FloatArray) -> float:
            of_prior = float(((logs / prior) ** 2).sum()) / 2
            return robust_loss(self.residuals(Point.of(names, logs)) / sigma) + of_prior

        here = loss(start)
        for halvings in range(_MAX_HALVINGS + 1):
            reached = start + step * 0.5**halvings
            if loss(reached) < here:
                return reached
        return start

    @memoised
    def left_out_times(self, fitted: TimeFit) -> list[float]:
        """Predict every trial from the other trials, in s, by the linear model around the mode."""
        times = []
        for index, plan in enumerate(self.plans):
            fit = fit_linear(fitted.problem.without(index))
            point = Point.of(fitted.names, fit.values)
            times.append(self.predictor.predict([plan], point)[0].time_s)
        return times

    def hurts(self, fitted: TimeFit) -> bool:
        """Return whether trials are predicted worse by fits to the others than by the prior."""
        measured = np.array([trial.measured_s for trial in self.observations], dtype=np.float64)
        before = np.abs(np.exp(self.residuals(PRIOR)) - 1.0)
        left_out = np.abs(np.array(self.left_out_times(fitted)) / measured - 1.0)
        return bool(left_out.sum() > before.sum())

    def covariance(self, fitted: TimeFit) -> tuple[tuple[str, ...], FloatArray]:
        """Return the posterior covariance of the logarithms of constants, fitted or not.

        They are those of `names`, and the common factor of all times if it was fitted.
        """
        names = tuple(dict.fromkeys((*self.names, *fitted.names)))
        slopes = self.slopes(names, PRIOR)
        weighted = slopes.T * (fitted.fit.weights / fitted.problem.sigma(fitted.fit.error) ** 2)
        precision = weighted @ slopes + np.diag(self.prior_sigma(names) ** -2.0)
        return names, inverse(precision)


def _exceeds(errors: FloatArray, others: FloatArray) -> bool:
    """Return whether errors are larger than others by more than their difference is uncertain."""
    gains = errors - others
    return float(gains.mean()) > float(gains.std(ddof=1)) / math.sqrt(len(gains))


def weighted_median(values: FloatArray, weights: FloatArray) -> float:
    """Return the value in the middle of the weights; between two of them, their mean.

    Example:
        >>> weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0]))
        2.0
    """
    order = np.argsort(values)
    below = np.round(np.cumsum(weights[order]) / weights.sum(), 9)  # drops rounding errors
    middle = [int(np.searchsorted(below, 0.5, side=side)) for side in ("left", "right")]
    return float(values[order[middle]].mean())
