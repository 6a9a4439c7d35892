"""Knowledge after some trials: calibrated predictions, their errors, and a new ranking."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.calibration.calibration import Calibration
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.trials.outcome import Measured
from amp_ray.tuner.belief import Belief, Chances, ErrorModel, learn_errors
from amp_ray.tuner.calibrated_predictions import BoundedPredictor, Evidence, predict
from amp_ray.tuner.state import TrialRecord, TunerState
from amp_ray.tuner.trial_status import TrialStatus, observations, status_of

MOST_OBSERVATIONS: Final = 200  # more take seconds and add little
# Candidates without a trial whose errors are computed, the most promising ones: each costs about
# thirty predictions once. The others share one cautious guess.
MOST_JUDGED: Final = 512
MOST_JUDGED_AT_FIRST: Final = 32  # before a measurement, to choose the first launches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Knowledge:
    """Predictions, errors and status of every candidate."""

    experiment: Experiment  # with calibrated constants
    calibration: Calibration | None  # None before the first measurement
    status: TrialStatus
    estimates: tuple[Estimate, ...]  # calibrated, in the order of the study's candidates
    belief: Belief  # the joint distribution of the candidates whose errors were computed
    forecasts: tuple[tuple[float, float], ...]  # errors of predicted trials, and their sigmas
    errors: ErrorModel  # of predictions, learnt from these

    @property
    def time_error(self) -> float:
        """Lognormal sigma of a predicted time, without the error that all predictions share."""
        return self.experiment.constants.time_error

    @property
    def widening(self) -> float:
        """Ratio of actual errors to the model's errors, at least 1."""
        return max(1.0, self.errors.scale)

    def sigma(self, index: int) -> float:
        """Return the lognormal sigma of a predicted time; the largest one if not computed."""
        if index in self.belief.indices:
            return float(self.belief.sigma[self.belief.indices.index(index)])
        return float(self.belief.sigma.max(initial=self.time_error))

    def expected_s(self, index: int) -> float:
        """Return the expected time of a strategy from its trials and prediction."""
        figure = self.status.figures.get(index)
        return self.estimates[index].iteration_time_s if figure is None else figure.expected_s

    def expected_sigma(self, index: int) -> float:
        """Return the lognormal sigma of that time."""
        figure = self.status.figures.get(index)
        return self.widening * self.sigma(index) if figure is None else figure.expected_sigma

    def proposable(self) -> tuple[int, ...]:
        """Return candidates that may be run for the first time, the fastest prediction first."""
        new = [
            index
            for index, estimate in enumerate(self.estimates)
            if estimate.feasible and estimate.launchable and self.status.is_new(index)
        ]
        return tuple(sorted(new, key=lambda index: (self.estimates[index].iteration_time_s, index)))

    def untested(self) -> tuple[int, ...]:
        """Return the candidates without an outcome that may finish, including running ones."""
        return tuple(
            index
            for index, estimate in enumerate(self.estimates)
            if estimate.launchable
            and estimate.failure_probability < 1
            and index not in self.status.closed
        )

    def expected(self) -> tuple[int, ...]:
        """Return the untested candidates that are expected to finish."""
        return tuple(index for index in self.untested() if self.estimates[index].feasible)

    def chances(self, indices: Sequence[int], belief: Belief | None = None) -> Chances:
        """Return the chances of being fast by this belief or another one."""
        belief = belief or self.belief
        estimates = [self.estimates[index] for index in indices]
        rows = {index: row for row, index in enumerate(belief.indices)}
        sigma, widest = belief.sigma, self.sigma(-1)
        sigmas = [sigma[rows[index]] if index in rows else widest for index in indices]
        return Chances(
            log_mean=np.log([estimate.iteration_time_s for estimate in estimates]),
            sigma=np.array(sigmas, dtype=np.float64),
            finishes=np.array([1.0 - estimate.failure_probability for estimate in estimates]),
            errors=self.errors,
        )


def learn(state: TunerState, predictor: BoundedPredictor) -> Knowledge:
    """Calibrate with all trials so far and predict every candidate anew."""
    status = status_of(state)
    strategies = [estimate.strategy for estimate in state.candidates]
    observed = observations(state.experiment, strategies, status, MOST_OBSERVATIONS)
    unrun = _promising(state, status, MOST_JUDGED if observed else MOST_JUDGED_AT_FIRST)
    calibration = None
    if observed:
        calibration = predictor.calibrated(state.experiment, list(observed.values()))
    evidence = Evidence(
        experiment=state.experiment,
        candidates=state.candidates,
        calibration=calibration,
        observed=tuple(observed),
        unrun=unrun,
        predictor=predictor,
    )
    predictions = predict(evidence)
    experiment, estimates = predictions.experiment, predictions.estimates
    forecasts = forecast_errors(state, program_scale(state, experiment))
    errors = learn_errors(forecasts)
    error = max(1.0, errors.scale) * experiment.constants.time_error
    times_s = {index: estimates[index].iteration_time_s for index in observed}
    return Knowledge(
        experiment=experiment,
        calibration=calibration,
        status=status.with_predictions(times_s, error),
        estimates=estimates,
        belief=predictions.belief,
        forecasts=forecasts,
        errors=errors,
    )


def program_scale(state: TunerState, calibrated: Experiment) -> float:
    """Return the factor by which all trials took longer than the uncalibrated model says.

    It is relative to the experiment's initial factor, which may differ from 1.
    """
    return calibrated.constants.program_scale / state.experiment.constants.program_scale


def _promising(state: TunerState, status: TrialStatus, most: int) -> tuple[int, ...]:
    """Return the first candidates of the ranking that have no outcome yet.

    Running ones are always among them. Candidates are in the ranking's order, feasible ones first,
    so the first ones are the most promising.
    """
    waiting = [
        index
        for index, estimate in enumerate(state.candidates)
        if estimate.launchable and estimate.failure_probability < 1 and status.is_new(index)
    ]
    running = (index for index in status.running if index not in status.closed)
    return tuple(sorted({*running, *waiting[:most]}))


_SAME: Final = 1e-9  # relative difference below which two predictions are the same


def forecast_errors(
    state: TunerState, program_scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    """Return the errors of the latest forecasts of first trials in logarithms, and their sigmas.

    Every trial was predicted before it ran, with an error. If the model is wrong, a fit after the
    trial hides the error by adapting the constants; the forecast shows it.

    The uncalibrated model could not know the common factor of all trials when the first ones were
    launched. The factor is known now, so it is no error of later predictions.
    """
    forecasts = tuple(
        (
            math.log(trial_record.outcome.mean_s / forecast_s(state, trial_record, program_scale)),
            math.hypot(trial_record.trial.sigma, trial_record.outcome.error_fraction),
        )
        for trial_record in state.trials
        if isinstance(trial_record.outcome, Measured)
        and trial_record.trial.repeats is None
        and trial_record.trial.sigma > 0.0
    )
    return forecasts[-MOST_OBSERVATIONS:]


def forecast_s(state: TunerState, trial_record: TrialRecord, program_scale: float) -> float:
    """Return the forecast of a trial, times the common factor if that was still unknown."""
    predicted_s = trial_record.trial.predicted_s
    uncalibrated_s = state.candidates[trial_record.candidate].iteration_time_s
    is_first = math.isclose(predicted_s, uncalibrated_s, rel_tol=_SAME)
    return predicted_s * (program_scale if is_first else 1.0)
