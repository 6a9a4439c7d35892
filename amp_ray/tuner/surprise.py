"""Trials whose outcome was not expected."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from amp_ray.trials.outcome import Measured, OutOfMemory
from amp_ray.tuner.state import Trial, TrialRecord, TunerState

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise:
    """A trial outside the band that was predicted when it was launched."""

    trial: Trial
    measured_s: float | None  # what it took; None if it ran out of memory
    low_s: float
    high_s: float
    text: str


def surprise_of(state: TunerState, trial_record: TrialRecord) -> Surprise | None:
    """Return a surprise if a trial is outside its band of the study's confidence, or out of memory.

    A trial with unsteady steps is never a surprise, since its time cannot be compared.
    """
    width = _NORMAL.inv_cdf((1.0 + state.settings.confidence_fraction) / 2.0)
    trial, outcome = trial_record.trial, trial_record.outcome
    low_s, high_s = (trial.predicted_s * math.exp(way * trial.sigma) for way in (-width, width))
    if isinstance(outcome, Measured) and outcome.tells_time:
        measured_s = outcome.mean_s
        if low_s <= measured_s <= high_s:
            return None
        where = "faster" if measured_s < low_s else "slower"
        text = (
            f"trial {trial.number} was {where} than expected: measured {measured_s:.4g} s, "
            f"predicted {trial.predicted_s:.4g} s, at most {high_s:.4g} s and at least "
            f"{low_s:.4g} s with {100 * state.settings.confidence_fraction:.3g} % confidence"
        )
        return Surprise(trial=trial, measured_s=measured_s, low_s=low_s, high_s=high_s, text=text)
    chance = state.candidates[trial_record.candidate].failure_probability
    if isinstance(outcome, OutOfMemory) and chance < 1.0 - state.settings.confidence_fraction:
        text = (
            f"trial {trial.number} ran out of memory, with a chance of {100 * chance:.2g} % to "
            "fail by the uncalibrated model"
        )
        return Surprise(trial=trial, measured_s=None, low_s=low_s, high_s=high_s, text=text)
    return None
