"""What trials tell about memory, as a problem for `amp_ray.calibration.memory_fit`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_ray.calibration.choice import IDENTIFIED_SHARE, identified, not_identified, prior_sigma
from amp_ray.calibration.memory_fit import (
    Limit,
    MemoryFit,
    MemoryProblem,
    Peaks,
    StagePeaks,
    fit_memory,
)
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import (
    MEMORY_CONSTANTS,
    PRIOR,
    Point,
    Prediction,
    Predictor,
)
from amp_ray.cost.verdict import exceeds_probability
from amp_ray.spec.constants import Constants


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTrials:
    """Trials that tell about memory.

    Args:
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
        """Find the most probable values of constants, of which there may be none.

        A peak is a sum of parts that each grow with one constant, so that three predictions per
        trial tell its peaks for all values of two constants.
        """
        return fit_memory(self._problem(names))

    def choose(self, most: int) -> tuple[tuple[str, ...], MemoryFit, dict[str, str]]:
        """Fit at most as many constants as these trials can tell, and as there are trials.

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

    def _problem(self, names: Sequence[str]) -> MemoryProblem:
        """Return what the trials tell about some constants."""
        plans = [observation.plan for observation in self.observations]
        base = self.predictor.predict(plans, PRIOR)
        doubled = [self.predictor.predict(plans, PRIOR.moved(name, math.log(2))) for name in names]
        peaks, limits = [], []
        for index, observation in enumerate(self.observations):
            prior = np.array(base[index].peaks_bytes)
            parts = [np.array(each[index].peaks_bytes) - prior for each in doubled]
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
        """Return what it tells that a trial finished, or that it did not."""
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
