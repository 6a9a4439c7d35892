"""What trials tell about memory, as a problem for `amp_ray.calibration.memory_fit`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amp_ray.calibration.choice import IDENTIFIED_SHARE, identified, not_identified, prior_sigma
from amp_ray.calibration.memory_fit import Limit, MemoryFit, MemoryProblem, Peaks, fit_memory
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import (
    GRID,
    MEMORY_CONSTANTS,
    Point,
    Prediction,
    Predictor,
    nearest_grid_point,
)
from amp_ray.calibration.time_fit import FURTHEST, MAX_ROUNDS
from amp_ray.cost.verdict import exceeds_probability
from amp_ray.spec.constants import Constants

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTrials:
    """Trials that tell about memory.

    Args:
        predictor: Predicts at points.
        observations: Trials, those without information on memory left out.
        times: Their predictions by the calibrated constants of time.
        constants: Prior values; the errors of times and peaks stand there too.
    """

    predictor: Predictor
    observations: tuple[Observation, ...]
    times: tuple[Prediction, ...]
    constants: Constants

    @classmethod
    def of(
        cls,
        predictor: Predictor,
        observations: Sequence[Observation],
        time: Point,
        constants: Constants,
    ) -> "MemoryTrials":
        """Take the trials that can tell: not those that fail whatever the memory is."""
        found = predictor.predict([observation.plan for observation in observations], time)
        telling = [
            (observation, prediction)
            for observation, prediction in zip(observations, found, strict=True)
            if not prediction.fails_certainly
        ]
        return cls(
            predictor=predictor,
            observations=tuple(observation for observation, _ in telling),
            times=tuple(prediction for _, prediction in telling),
            constants=constants,
        )

    def fit(self, names: Sequence[str]) -> MemoryFit:
        """Find the most probable constants; made linear anew until the point stays.

        Args:
            names: Constants to fit; may be none.
        """
        sigma = prior_sigma(names)
        at, seen = np.zeros(len(names)), set[Point]()
        while True:
            fit = fit_memory(self._problem(names, at, sigma))
            seen.add(Point.of(names, at))
            reached = np.clip(fit.values, at - FURTHEST * sigma, at + FURTHEST * sigma)
            at = nearest_grid_point(reached, sigma)
            if Point.of(names, at) in seen or len(seen) == MAX_ROUNDS:
                return fit

    def choose(self, most: int) -> tuple[tuple[str, ...], MemoryFit, dict[str, str]]:
        """Fit the constants that these trials can tell.

        Args:
            most: How many constants at most; never more than there are trials.

        Returns:
            Names, their fit, and by name why others were dropped.
        """
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

    def _problem(self, names: Sequence[str], at: FloatArray, sigma: FloatArray) -> MemoryProblem:
        """Make peaks and limits linear around a point."""
        plans = [observation.plan for observation in self.observations]
        around = Point.of(names, at)
        here = self.predictor.predict(plans, around)
        steps = GRID * sigma
        there = [
            self.predictor.predict(plans, around.moved(name, step))
            for name, step in zip(names, steps, strict=True)
        ]
        peaks, limits = [], []
        for index, observation in enumerate(self.observations):
            moved = [predictions[index] for predictions in there]
            if observation.peak_memory_bytes:
                offset, slopes = _peaks(observation, here[index], moved, steps)
                peaks.append(Peaks(offset=offset - slopes @ at, slopes=slopes))
            else:
                now = here[index].log_fullness
                rise = np.array([prediction.log_fullness - now for prediction in moved]) / steps
                limits.append(self._limit(index, now - float(rise @ at), rise))
        return MemoryProblem(
            peaks=tuple(peaks),
            limits=tuple(limits),
            prior_sigma=sigma,
            prior_error=self.constants.memory_error,
        )

    def _limit(self, index: int, offset: float, slopes: FloatArray) -> Limit:
        """Return what it tells that a trial finished, or that it did not."""
        outcome, prediction = self.observations[index].outcome, self.times[index]
        other = 0.0
        if outcome == "failed" and prediction.launch_limit_s is not None:
            slow = prediction.time_s / prediction.launch_limit_s
            other = exceeds_probability(slow, self.constants.time_error)
        return Limit(
            offset=offset,
            slopes=slopes,
            failed=outcome != "measured",
            other_probability=other,
        )


def _peaks(
    observation: Observation,
    here: Prediction,
    moved: Sequence[Prediction],
    steps: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return predicted over measured peaks and their slopes, as logarithms."""
    measured = np.log(observation.peak_memory_bytes)
    now = _log_peaks(here, len(measured))
    slopes = [
        (_log_peaks(prediction, len(measured)) - now) / step
        for prediction, step in zip(moved, steps, strict=True)
    ]
    return now - measured, np.array(slopes).reshape(len(steps), len(measured)).T


def _log_peaks(prediction: Prediction, num_measured: int) -> FloatArray:
    """Return predicted peaks in the form of the measured ones: per stage, or the largest."""
    peaks: FloatArray = np.log(prediction.peaks_bytes)
    return peaks if num_measured == len(peaks) else peaks.max(keepdims=True)
