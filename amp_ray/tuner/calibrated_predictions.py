"""Calibrated predictions of all candidates; the influence of a single trial is limited."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration import Calibration, Predictor, apply_calibration
from amp_ray.calibration.choice import prior_sigma
from amp_ray.calibration.linear import LinearProblem, fit_linear
from amp_ray.calibration.predictions import PRIOR
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.tuner.belief import Belief, log_residuals, time_covariance

_ALMOST: Final = 1e-9  # relative room below a limit, so that rounding does not cross it


def influences(problem: LinearProblem, slopes: FloatArray) -> FloatArray:
    """Return what each trial has changed: predictions with it minus predictions without it.

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

    Two plans that lie further apart than the model's error without the trial stay in their order
    with it. Plans that lie closer are ties, and may change places. What a trial has changed in all
    plans alike turns no order and is kept. What several trials say together is in none of their
    own influences, and is not limited.

    ``log_mean`` (num_plans,) has the expected logarithms of times with all trials, ``changes``
    (num_trials, num_plans) what each trial has changed of them; ``error`` is the lognormal sigma of
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


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedPredictions:
    """What trials say about candidates."""

    given: Experiment  # the experiment, with the constants that are the priors
    candidates: Sequence[Estimate]  # uncalibrated
    calibration: Calibration | None  # None where there is no trial
    observed: Sequence[int]  # indices of what the calibration was made from, in its order
    judged: tuple[int, ...]  # indices to predict; those of ``observed`` are among them
    unrun: tuple[int, ...]
    predictor: Predictor

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment with calibrated constants."""
        if self.calibration is None:
            return self.given
        return apply_calibration(self.calibration, self.given)

    @property
    def program_scale(self) -> float:
        """The factor by which all trials took longer than the uncalibrated model says; 1 if none.

        Only what trials have moved: an experiment may have been given with another factor.
        """
        return self.experiment.constants.program_scale / self.given.constants.program_scale

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """Predictions of all candidates.

        Those that were not judged are scaled by the most favourable change of an unrun one that
        was, and keep their verdict: a cautious guess where a prediction would cost too much.
        """
        if self.calibration is None:
            return tuple(self.candidates)
        changes = [self._log_s[index] - _log_s(self.candidates[index]) for index in self.unrun]
        scale = math.exp(min(changes, default=0.0))
        return tuple(
            replace(self._predicted[index], iteration_time_s=math.exp(self._log_s[index]))
            if index in self._log_s
            else replace(estimate, iteration_time_s=estimate.iteration_time_s * scale)
            for index, estimate in enumerate(self.candidates)
        )

    def belief(self) -> Belief:
        """Return the joint distribution of the judged candidates' times."""
        strategies = [self.candidates[index].strategy for index in self.judged]
        estimates = [self.estimates[index] for index in self.judged]
        return Belief(
            indices=self.judged,
            log_mean=np.array([_log_s(estimate) for estimate in estimates]),
            covariance=time_covariance(self.given, strategies, self.calibration, self.predictor),
            finishes=np.array([1.0 - estimate.failure_probability for estimate in estimates]),
        )

    @cached_property
    def _predicted(self) -> Mapping[int, Estimate]:
        model = CostModel(experiment=self.experiment)
        return {
            index: model.with_columns(model.estimate(self.candidates[index].strategy))
            for index in self.judged
        }

    @cached_property
    def _log_s(self) -> Mapping[int, float]:
        """Logarithms of the judged candidates' times, every trial's influence limited."""
        logs = {index: _log_s(estimate) for index, estimate in self._predicted.items()}
        unrun = list(self.unrun)
        limited = limit_influences(
            np.array([logs[index] for index in unrun]),
            self._influences([logs[index] for index in unrun]),
            self.given.constants.time_error,
        )
        return logs | dict(zip(unrun, map(float, limited), strict=True))

    def _influences(self, log_s: Sequence[float]) -> FloatArray:
        """Return what each trial has changed in the predictions of unrun candidates.

        A single trial has changed all that is different from the uncalibrated prediction. Returns
        shape ``(num_trials, num_unrun)``.
        """
        assert self.calibration is not None
        trials = zip(self.observed, self.calibration.trials, strict=True)
        noise = {index: trial.noise for index, trial in trials if trial.tells_time}
        timed = list(noise)
        if len(timed) == 1:
            before = [_log_s(self.candidates[index]) for index in self.unrun]
            return (np.array(log_s) - before).reshape(1, -1)
        names_of_time = self.calibration.time_constants
        fitted = [each for each in self.calibration.constants if each.name in names_of_time]
        names = [constant.name for constant in fitted]
        slopes = self._slopes(timed, names)
        mode = np.array([math.log(constant.ratio) for constant in fitted])
        problem = LinearProblem(
            offset=log_residuals(self.calibration) - slopes @ mode,
            slopes=slopes,
            prior_sigma=prior_sigma(names),
            prior_error=self.given.constants.time_error,
            noise=np.array(list(noise.values())),
        )
        return influences(problem, self._slopes(self.unrun, names))

    def _slopes(self, indices: Sequence[int], names: Sequence[str]) -> FloatArray:
        """Return how times of candidates change with constants, around the prior."""
        plans = [(self.given, self.candidates[index].strategy) for index in indices]
        return self.predictor.time_slopes(plans, names, PRIOR)


def _log_s(estimate: Estimate) -> float:
    return math.log(estimate.iteration_time_s)
