"""The fit of memory to trials: measured peaks, and limits that were or were not exceeded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.choice import IDENTIFIED_SHARE, identified, not_identified, prior_sigma
from amp_ray.calibration.linear import HUBER_SCALE, inverse, learnt_error
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import MEMORY_CONSTANTS, PRIOR, Point, Prediction, Predictor
from amp_ray.clusters.constants import Constants
from amp_ray.cost.verdict import exceeds_probability

# Chance that a trial ended for a reason outside the model; it keeps one strange outcome from
# outvoting all others
LAPSE_PROBABILITY: Final = 0.01
_STEP: Final = 1e-3
_MAX_ROUNDS: Final = 50
_TOLERANCE: Final = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePeaks:
    """Predicted peaks of a trial's stages; sums of parts, each proportional to a constant."""

    prior_bytes: FloatArray  # shape ``(pp,)``. With every constant at its prior.
    parts_bytes: FloatArray  # shape ``(pp, num_parameters)``. Part that grows with each constant.

    def at(self, values: FloatArray) -> FloatArray:
        """Return the peaks if the constants' logarithms increase by ``values``."""
        peaks: FloatArray = self.prior_bytes + self.parts_bytes @ np.expm1(values)
        return peaks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """The measured peaks of one trial: of every stage, or of the largest."""

    predicted: StagePeaks
    measured_bytes: FloatArray  # shape ``(pp,)`` or ``(1,)``

    def residual(self, values: FloatArray) -> float:
        """Return the root mean square logarithm of predicted over measured bytes."""
        peaks = self.predicted.at(values)
        if len(peaks) != len(self.measured_bytes):
            peaks = peaks.max(keepdims=True)
        return math.sqrt(float((np.log(peaks / self.measured_bytes) ** 2).mean()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limit:
    """A censored observation: whether a trial exceeded the memory limit."""

    predicted: StagePeaks
    limits_bytes: FloatArray  # shape ``(pp,)``. Memory of their devices.
    failed: bool  # whether the trial did not finish
    other_probability: float = 0.0  # chance that the launcher's limit ended it

    def loss(self, values: FloatArray, error: float) -> float:
        """Return the negative log-likelihood of the outcome."""
        fullness = float((self.predicted.at(values) / self.limits_bytes).max())
        finishes = 1.0 - exceeds_probability(fullness, error)
        finishes *= 1.0 - self.other_probability
        chance = 1.0 - finishes if self.failed else finishes
        return -math.log(LAPSE_PROBABILITY + (1.0 - 2.0 * LAPSE_PROBABILITY) * chance)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryProblem:
    """Peaks and limits, and the priors of the constants that they depend on."""

    peaks: tuple[Peaks, ...]
    limits: tuple[Limit, ...]
    prior_sigma: FloatArray  # shape ``(num_parameters,)``
    prior_error: float  # lognormal sigma of the memory estimate before any trial

    def loss(self, values: FloatArray, error: float) -> float:
        """Return the negative logarithm of the posterior, up to a constant."""
        total = float(((values / self.prior_sigma) ** 2).sum()) / 2
        total += sum(limit.loss(values, error) for limit in self.limits)
        for peaks in self.peaks:
            scaled = peaks.residual(values) / (error * HUBER_SCALE)
            total += HUBER_SCALE**2 * (math.sqrt(1.0 + scaled**2) - 1.0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryFit:
    """The most probable parameters."""

    values: FloatArray  # shape ``(num_parameters,)``
    error: float  # lognormal sigma of the estimate; learnt where peaks were measured
    covariance: FloatArray  # shape ``(num_parameters, num_parameters)``. Posterior.


def fit_memory(problem: MemoryProblem) -> MemoryFit:
    """Find the most probable parameters by damped Newton steps, and the error from peaks."""
    values, error = np.zeros(len(problem.prior_sigma)), problem.prior_error
    for _ in range(_MAX_ROUNDS):
        before = np.append(values, error)
        loss = _at_error(problem, error)
        gradient, curvature = _derivatives(loss, values)
        values = _descend(loss, values, inverse(curvature) @ gradient)
        if problem.peaks:
            residuals = np.array([peaks.residual(values) for peaks in problem.peaks])
            error = learnt_error(residuals, error, problem.prior_error, len(values))
        if np.abs(np.append(values, error) - before).max() < _TOLERANCE:
            break
    _, curvature = _derivatives(_at_error(problem, error), values)
    return MemoryFit(values=values, error=error, covariance=inverse(curvature))


def _at_error(problem: MemoryProblem, error: float) -> Callable[[FloatArray], float]:
    """Return the loss as a function of the parameters alone."""
    return lambda values: problem.loss(values, error)


def _derivatives(
    loss: Callable[[FloatArray], float], values: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return gradient and curvature by differences; the curvature made positive."""
    num = len(values)
    steps = _STEP * np.eye(num)
    here = loss(values)
    ahead = np.array([loss(values + step) for step in steps])
    behind = np.array([loss(values - step) for step in steps])
    curvature = np.zeros((num, num))
    for i in range(num):
        curvature[i, i] = (ahead[i] - 2.0 * here + behind[i]) / _STEP**2
        for j in range(i):
            both = loss(values + steps[i] + steps[j])
            mixed = (both - ahead[i] - ahead[j] + here) / _STEP**2
            curvature[i, j] = curvature[j, i] = mixed
    lowest = float(np.linalg.eigvalsh(curvature).min()) if num else 1.0
    if lowest < 1.0:
        curvature += (1.0 - lowest) * np.eye(num)
    return (ahead - behind) / (2.0 * _STEP), curvature


def _descend(
    loss: Callable[[FloatArray], float], values: FloatArray, step: FloatArray
) -> FloatArray:
    """Go along a Newton step as far as the loss falls."""
    here = loss(values)
    for halvings in range(10):
        reached = values - step * 0.5**halvings
        if loss(reached) < here:
            return reached
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTrials:
    """Trials with information about memory."""

    predictor: Predictor
    observations: tuple[Observation, ...]  # trials, those without information on memory left out
    times: tuple[Prediction, ...]  # their predictions by the calibrated constants of time
    constants: Constants  # prior values, and the errors of times and peaks

    @classmethod
    def of(
        cls,
        predictor: Predictor,
        observations: Sequence[Observation],
        time: Point,
        constants: Constants,
    ) -> "MemoryTrials":
        """Select trials with information about memory; one that fails with any memory has none."""
        predictions = predictor.predict([observation.plan for observation in observations], time)
        telling = [
            (observation, prediction)
            for observation, prediction in zip(observations, predictions, strict=True)
            if not prediction.fails_certainly
        ]
        return cls(
            predictor=predictor,
            observations=tuple(observation for observation, _ in telling),
            times=tuple(prediction for _, prediction in telling),
            constants=constants,
        )

    def fit(self, names: Sequence[str]) -> MemoryFit:
        """Find the most probable values of the constants; ``names`` may be empty.

        A peak is a sum of parts that each grow with one constant, so three predictions per trial
        determine its peaks for all values of two constants.
        """
        return fit_memory(self._problem(names))

    def choose(self, most: int) -> tuple[tuple[str, ...], MemoryFit, dict[str, str]]:
        """Fit the constants that these trials identify; say why others were dropped."""
        names = list(MEMORY_CONSTANTS[: min(most, len(self.observations))])
        dropped: dict[str, str] = {}
        while True:
            fit = self.fit(names)
            shares = identified(fit.covariance, names)
            if not names or shares.max() <= IDENTIFIED_SHARE:
                return tuple(names), fit, dropped
            worst = names[int(np.argmax(shares))]
            dropped[worst] = not_identified(float(shares.max()), len(self.observations))
            names.remove(worst)

    def _problem(self, names: Sequence[str]) -> MemoryProblem:
        plans = [observation.plan for observation in self.observations]
        base = self.predictor.predict(plans, PRIOR)
        doubled = [self.predictor.predict(plans, PRIOR.moved(name, math.log(2))) for name in names]
        peaks, limits = [], []
        for index, observation in enumerate(self.observations):
            prior = np.array(base[index].peaks_bytes)
            parts = [np.array(predictions[index].peaks_bytes) - prior for predictions in doubled]
            predicted = StagePeaks(
                prior_bytes=prior,
                parts_bytes=np.array(parts).reshape(len(names), len(prior)).T,
            )
            if observation.peak_memory_bytes:
                measured = np.array(observation.peak_memory_bytes)
                peaks.append(Peaks(predicted=predicted, measured_bytes=measured))
            else:
                limits.append(self._limit(index, predicted))
        return MemoryProblem(
            peaks=tuple(peaks),
            limits=tuple(limits),
            prior_sigma=prior_sigma(names),
            prior_error=self.constants.memory_error,
        )

    def _limit(self, index: int, predicted: StagePeaks) -> Limit:
        outcome, prediction = self.observations[index].outcome, self.times[index]
        other = 0.0
        if outcome == "failed" and prediction.launch_limit_s is not None:
            slow = prediction.time_s / prediction.launch_limit_s
            other = exceeds_probability(slow, self.constants.time_error)
        return Limit(
            predicted=predicted,
            limits_bytes=np.array(prediction.limits_bytes),
            failed=outcome != "measured",
            other_probability=other,
        )
