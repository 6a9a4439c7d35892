"""Calibrated predictions of all candidates; the influence of a single trial is limited."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.calibrate import calibrate
from amp_ray.calibration.calibration import Calibration, apply_calibration
from amp_ray.calibration.linear import LinearProblem, fit_linear
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import PRIOR, Predictor
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.tuner.belief import Belief, log_residuals, time_covariance

_ALMOST: Final = 1e-9  # relative room below a limit, so that rounding does not cross it
MOST_CALIBRATIONS: Final = 4  # a driver asks for the same one a few times in a row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundedPredictor(Predictor):
    """Caches only predictions around the prior, where every calibration starts.

    The other points of a fit never occur again, and after thousands of trials they would fill the
    memory. Everything in the cache can be computed again.
    """

    _calibrations: dict[tuple[Observation, ...], Calibration] = field(default_factory=dict)

    def calibrated(self, experiment: Experiment, trials: Sequence[Observation]) -> Calibration:
        """Calibrate, or return the cached calibration to the same trials."""
        key = tuple(trials)
        if key not in self._calibrations:
            calibration = calibrate(experiment, trials, predictor=self, thorough=False)
            for oldest in list(self._calibrations)[: 1 - MOST_CALIBRATIONS]:
                del self._calibrations[oldest]
            self._calibrations[key] = calibration
            self._forget()
        return self._calibrations[key]

    def _forget(self) -> None:
        """Drop predictions with more than one constant away from its prior."""
        passed = [key for key in self._memo if len(key[2].logs) > 1]
        for key in passed:
            del self._memo[key]


def influences(problem: LinearProblem, slopes: FloatArray) -> FloatArray:
    """Return the influence of each trial: predictions with it minus predictions without it.

    Slopes, shape ``(num_plans, num_constants)``, are those of the plans' times around the mode of
    the problem. The result, shape ``(num_trials, num_plans)``, is in logarithms.
    """
    values = fit_linear(problem).values
    moved = [
        values - fit_linear(problem.without(trial)).values for trial in range(len(problem.offset))
    ]
    changes: FloatArray = np.array(moved).reshape(len(moved), len(values)) @ slopes.T
    return changes


def limit_influences(log_mean: FloatArray, changes: FloatArray, error: float) -> FloatArray:
    """Reduce every trial's influence until no trial alone reverses a certain order.

    If two plans differ by more than the model's error without the trial, they keep their order with
    it. Closer plans are ties, and may change places. A change that is equal for all plans reverses
    no order and is kept. A joint effect of several trials appears in no single influence, so it is
    not limited.

    ``log_mean`` (num_plans,) has the expected logarithms of times with all trials, ``changes``
    (num_trials, num_plans) the influence of each trial on them; ``error`` is the lognormal sigma of
    a prediction. The result, shape ``(num_plans,)``, is expected logarithms too.
    """
    limited = log_mean.copy()
    for change in changes:
        share = _share(log_mean - change, change, error)
        if share < 1.0:
            limited -= (1.0 - share) * (change - np.median(change))
    return limited


def _share(before: FloatArray, change: FloatArray, error: float) -> float:
    """Return the largest share of a change that reverses no certain order."""
    if not len(change) or change.max() - change.min() <= error:
        return 1.0
    ahead = before[None, :] - before[:, None]
    closing = change[:, None] - change[None, :]
    turned = (ahead > error) & (closing >= ahead)
    if not turned.any():
        return 1.0
    return float((ahead[turned] / closing[turned]).min()) * (1.0 - _ALMOST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The data behind predictions of candidates."""

    experiment: Experiment  # its constants are the priors
    candidates: Sequence[Estimate]  # uncalibrated
    calibration: Calibration | None  # None without trials
    observed: Sequence[int]  # indices of the calibration's trials, in its order
    unrun: tuple[int, ...]  # indices of other candidates to predict
    predictor: Predictor

    def slopes(self, indices: Sequence[int], names: Sequence[str]) -> FloatArray:
        """Return how times of candidates change with constants, around the prior."""
        plans = [(self.experiment, self.candidates[index].strategy) for index in indices]
        return self.predictor.time_slopes(plans, names, PRIOR)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Calibrated predictions of candidates."""

    experiment: Experiment  # with calibrated constants
    estimates: tuple[Estimate, ...]  # of all candidates
    belief: Belief  # the joint distribution of the times of those that were predicted


def predict(evidence: Evidence) -> Predictions:
    """Predict the observed and the unrun candidates; bound the others from below."""
    experiment, estimates = evidence.experiment, tuple(evidence.candidates)
    indices = tuple(sorted({*evidence.observed, *evidence.unrun}))
    if evidence.calibration is not None:
        experiment = apply_calibration(evidence.calibration, experiment)
        estimates = _calibrated(evidence, evidence.calibration, CostModel(experiment=experiment))
    belief = Belief(
        indices=indices,
        log_mean=np.array([_log_s(estimates[index]) for index in indices]),
        covariance=time_covariance(
            evidence.experiment,
            [evidence.candidates[index].strategy for index in indices],
            evidence.calibration,
            evidence.predictor,
        ),
        finishes=np.array([1.0 - estimates[index].failure_probability for index in indices]),
    )
    return Predictions(experiment=experiment, estimates=estimates, belief=belief)


def _calibrated(
    evidence: Evidence, calibration: Calibration, model: CostModel
) -> tuple[Estimate, ...]:
    """Return estimates of all candidates, every trial's influence limited.

    A candidate that is neither observed nor unrun is scaled by the most favourable change of an
    unrun one, and keeps its verdict: a prediction would cost too much.
    """
    candidates, unrun = evidence.candidates, evidence.unrun
    indices = sorted({*evidence.observed, *unrun})
    estimates = {
        index: model.with_columns(model.estimate(candidates[index].strategy)) for index in indices
    }
    log_s = {index: _log_s(estimate) for index, estimate in estimates.items()}
    log_unrun_s = np.array([log_s[index] for index in unrun])
    changes = _influences(evidence, calibration, log_unrun_s)
    limited = limit_influences(log_unrun_s, changes, evidence.experiment.constants.time_error)
    log_s |= dict(zip(unrun, map(float, limited), strict=True))
    shifts = [log_s[index] - _log_s(candidates[index]) for index in unrun]
    scale = math.exp(min(shifts, default=0.0))
    return tuple(
        replace(estimates[index], iteration_time_s=math.exp(log_s[index]))
        if index in log_s
        else replace(candidate, iteration_time_s=candidate.iteration_time_s * scale)
        for index, candidate in enumerate(candidates)
    )


def _influences(evidence: Evidence, calibration: Calibration, log_s: FloatArray) -> FloatArray:
    """Return the influence of each trial on the predictions of unrun candidates.

    With a single trial, that is the whole difference from the uncalibrated prediction. Returns
    shape ``(num_trials, num_unrun)``.
    """
    trials = zip(evidence.observed, calibration.trials, strict=True)
    noise = {index: trial.noise for index, trial in trials if trial.tells_time}
    timed = list(noise)
    if len(timed) == 1:
        before = [_log_s(evidence.candidates[index]) for index in evidence.unrun]
        return (log_s - before).reshape(1, -1)
    names_of_time = calibration.time_constants
    fitted = [constant for constant in calibration.constants if constant.name in names_of_time]
    names = [constant.name for constant in fitted]
    slopes = evidence.slopes(timed, names)
    mode = np.array([math.log(constant.ratio) for constant in fitted])
    problem = LinearProblem(
        offset=log_residuals(calibration) - slopes @ mode,
        slopes=slopes,
        prior_sigma=np.array([constant.prior_sigma for constant in fitted]),
        prior_error=evidence.experiment.constants.time_error,
        noise=np.array(list(noise.values())),
    )
    return influences(problem, evidence.slopes(evidence.unrun, names))


def _log_s(estimate: Estimate) -> float:
    return math.log(estimate.iteration_time_s)
