"""Predictions at points of the constants' space, and how they change with each constant."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Constants
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.verdict import WITHOUT_PARAMETERS, Judge
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.planner import AMP_RAY, make_planner
from amp_ray.strategies.strategy import Strategy

Plan = tuple[Experiment, Strategy]
# Constants that peaks depend on, and times do not
MEMORY_CONSTANTS: Final = ("context_scale", "allocator_scale")

TIME_CONSTANTS: Final = tuple(
    name for name in PRIOR_SIGMA if name not in (*MEMORY_CONSTANTS, PROGRAM_SCALE)
)
"""Constants that times depend on and that may be fitted: those with a prior. The common factor of
all times is fitted if these cannot explain the measurements."""

_STEP: Final = 0.25
"""Step of a central difference quotient, in prior sigmas. It averages the slopes on both sides of a
kink, since a time is in many places the longer of device and host time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place in the space of constants."""

    # Logarithm of the ratio to the prior by name, sorted; constants at their prior left out
    logs: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, names: Sequence[str], logs: Sequence[float] | FloatArray) -> "Point":
        """Return the point with these logarithms."""
        pairs = zip(names, map(float, logs), strict=True)
        return cls(logs=tuple(sorted((name, log) for name, log in pairs if log)))

    def moved(self, name: str, step: float) -> "Point":
        """Return the point with one logarithm increased."""
        logs = dict(self.logs)
        logs[name] = logs.get(name, 0.0) + step
        return Point.of(tuple(logs), tuple(logs.values()))

    def constants(self, prior: Constants) -> Constants:
        """Return the constants at this point."""
        return prior.moved({name: math.exp(log) for name, log in self.logs})


PRIOR: Final = Point()  # every constant at its physical value


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time and memory of one strategy at one point."""

    time_s: float
    peaks_bytes: tuple[float, ...]  # shape ``(pp,)``. Peak of each stage.
    limits_bytes: tuple[float, ...]  # shape ``(pp,)``. Memory of its devices.
    fails_certainly: bool  # whether it fails with any constants
    launch_limit_s: float | None  # longest iteration that the launcher waits for; None = no limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """Predicts and caches: a tuner that calibrates after every trial computes only new predictions.

    A predictor belongs to one process, and its cache is its only state.
    """

    _memo: dict[tuple[Experiment, Strategy, Point], Prediction] = field(default_factory=dict)

    def predict(self, plans: Sequence[Plan], point: Point) -> list[Prediction]:
        """Predict strategies at one point; ``ValueError`` if a cost model cannot estimate one."""
        estimators: dict[Experiment, tuple[Callable[[Strategy], Result], Experiment]] = {}
        for experiment, strategy in plans:
            if (experiment, strategy, point) in self._memo:
                continue
            if experiment not in estimators:
                at_point = replace(experiment, constants=point.constants(experiment.constants))
                estimators[experiment] = _estimator(at_point), at_point
            prediction = _predict(*estimators[experiment], strategy)
            self._memo[experiment, strategy, point] = prediction
        return [self._memo[experiment, strategy, point] for experiment, strategy in plans]

    def log_times(self, plans: Sequence[Plan], point: Point) -> FloatArray:
        """Return the logarithm of every predicted time, shape ``(num_plans,)``."""
        return np.log([prediction.time_s for prediction in self.predict(plans, point)])

    def time_slopes(self, plans: Sequence[Plan], names: Sequence[str], point: Point) -> FloatArray:
        """Return ``d log time / d log constant`` at a point, shape ``(num_plans, num_names)``."""
        columns = []
        for name in names:
            if name == PROGRAM_SCALE:
                columns.append(np.ones(len(plans)))
                continue
            step = _STEP * PRIOR_SIGMA[name]
            ahead, behind = (self.log_times(plans, point.moved(name, way)) for way in (step, -step))
            columns.append((ahead - behind) / (2.0 * step))
        return np.array(columns).reshape(len(names), len(plans)).T


def _estimator(experiment: Experiment) -> Callable[[Strategy], Result]:
    """Return the estimator of strategies: our cost model, or a guest's planner."""
    if experiment.profile.operators is None:
        return CostModel(experiment=experiment).estimate
    return make_planner(experiment, AMP_RAY).score


def _predict(
    estimator: Callable[[Strategy], Result], experiment: Experiment, strategy: Strategy
) -> Prediction:
    estimate = estimator(strategy)
    assert isinstance(estimate, Estimate), "a plan that was found has a price"
    judge = Judge(model=experiment.model, traits=experiment.traits, constants=experiment.constants)
    return Prediction(
        time_s=estimate.iteration_time_s,
        peaks_bytes=estimate.peak_memory_bytes,
        limits_bytes=estimate.memory_limit_bytes,
        fails_certainly=any(reason.kind == WITHOUT_PARAMETERS for reason in estimate.reasons),
        launch_limit_s=judge.launch_limit_s,
    )
