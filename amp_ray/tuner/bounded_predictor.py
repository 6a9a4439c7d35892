"""A predictor for long studies: it drops predictions that no later calibration needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from amp_ray.calibration import Calibration, Observation, Predictor, calibrate
from amp_ray.inputs.experiment import Experiment

Key = tuple[Observation, ...]
MOST_CALIBRATIONS: Final = 4  # a driver asks for the same one a few times in a row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundedPredictor(Predictor):
    """Remembers predictions around the prior, where every calibration starts, and no others.

    The points that a fit passes through never come again, and after thousands of trials they
    would fill the memory. Like its parent it holds nothing that cannot be computed again.
    """

    _calibrations: dict[Key, Calibration] = field(default_factory=dict)

    def calibrated(self, experiment: Experiment, trials: Sequence[Observation]) -> Calibration:
        """Calibrate, or return the calibration to the same trials."""
        key = tuple(trials)
        if key not in self._calibrations:
            found = calibrate(experiment, trials, predictor=self, thorough=False)
            for oldest in list(self._calibrations)[: 1 - MOST_CALIBRATIONS]:
                del self._calibrations[oldest]
            self._calibrations[key] = found
            self._forget()
        return self._calibrations[key]

    def _forget(self) -> None:
        """Drop what was predicted with more than one constant away from its prior."""
        passed = [key for key in self._memo if len(key[2].logs) > 1]
        for key in passed:
            del self._memo[key]
