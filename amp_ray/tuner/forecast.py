"""How well a study's own forecasts have come true: the model's error as seen from outside."""

import math
from typing import Final

from amp_ray.calibration.linear import PRIOR_TRIALS
from amp_ray.trials.outcome import Measured
from amp_ray.tuner.state import TrialRecord, TunerState

NUM_LATEST: Final = 2 * PRIOR_TRIALS
"""So many of the latest forecasts count: older ones were made by a model that knew less."""

_SAME: Final = 1e-9
"""Relative difference of two predictions that are the same one."""


def widening(state: TunerState, program_scale: float = 1.0) -> float:
    """Return by what factor errors are larger than the model says, at least 1.

    Every trial was predicted before it ran, with an error. The mean square of how far off the
    predictions were, in units of that error, should be 1. It is not where the model itself is
    wrong: a fit afterwards explains such a trial away, the forecast does not. As many trials as
    count for the prior of the error count as having come true exactly as well as they should.

    A factor that all trials have in common could not be known when the first ones were launched,
    by the uncalibrated model. It is known now, and is no error of any later prediction.
    """
    squares = [
        (
            math.log(
                trial_record.outcome.iteration_time_s
                / _forecast_s(state, trial_record, program_scale)
            )
            / trial_record.trial.sigma
        )
        ** 2
        for trial_record in state.trials
        if isinstance(trial_record.outcome, Measured)
        and trial_record.trial.repeats is None
        and trial_record.trial.sigma > 0.0
    ]
    latest = squares[-NUM_LATEST:]
    mean = (PRIOR_TRIALS + math.fsum(latest)) / (PRIOR_TRIALS + len(latest))
    return max(1.0, math.sqrt(mean))


def _forecast_s(state: TunerState, trial_record: TrialRecord, program_scale: float) -> float:
    """Return what was predicted of a trial, with the common factor if that was not known yet."""
    predicted_s = trial_record.trial.predicted_s
    uncalibrated_s = state.candidates[trial_record.candidate].iteration_time_s
    is_first = math.isclose(predicted_s, uncalibrated_s, rel_tol=_SAME)
    return predicted_s * (program_scale if is_first else 1.0)
