"""Predictions of whole tables, as shipped, calibrated, or with every constant disturbed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.calibrate import Choice, calibrate
from amp_ray.calibration.calibration import Calibration
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import Predictor
from amp_ray.clusters.constants import PROGRAM_SCALE, Constants
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel

BAND_SIGMA: Final = 0.3
"""Every constant is multiplied by an independent lognormal factor of this sigma."""

BAND_PERCENTILES: Final = (5, 95)

_NOT_DRAWN: Final = ("memory_error", "time_error", PROGRAM_SCALE, "expert_imbalance")
"""Constants that tell how sure the model is, that move all others, or that dense models lack."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """A table's predictions beside what was measured.

    Args:
        observations: The rows.
        estimates: In the same order.
    """

    observations: tuple[Observation, ...]
    estimates: tuple[Estimate, ...]

    def times(self) -> tuple[FloatArray, FloatArray]:
        """Return predicted and measured seconds of the rows that have a time."""
        pairs = [
            (estimate.iteration_time_s, observation.measured_s)
            for observation, estimate in zip(self.observations, self.estimates, strict=True)
            if observation.measured_s is not None
        ]
        predicted, measured = np.array(pairs, dtype=np.float64).T
        return predicted, measured

    def order(self) -> FloatArray:
        """Return the keys by which rows that have a time are ranked: seconds, or none at all."""
        return np.array(
            [
                math.inf if estimate.unexplained else estimate.iteration_time_s
                for observation, estimate in zip(self.observations, self.estimates, strict=True)
                if observation.measured_s is not None
            ]
        )

    def peaks(self) -> tuple[FloatArray, FloatArray]:
        """Return predicted and measured largest peaks of the rows that have one."""
        pairs = [
            (max(estimate.peak_memory_bytes), max(observation.peak_memory_bytes))
            for observation, estimate in zip(self.observations, self.estimates, strict=True)
            if observation.peak_memory_bytes
        ]
        predicted, measured = np.array(pairs, dtype=np.float64).T
        return predicted, measured

    def failures(self) -> tuple[list[bool], list[bool]]:
        """Return which rows are told to fail, and which failed."""
        predicted_to_fail = [not estimate.feasible for estimate in self.estimates]
        return predicted_to_fail, [
            observation.outcome != "measured" for observation in self.observations
        ]


def predict(
    observations: Sequence[Observation],
    change: Callable[[Constants], Constants] = lambda constants: constants,
) -> Predicted:
    """Predict a table.

    Args:
        observations: Rows.
        change: From shipped to other constants.
    """
    models: dict[object, CostModel] = {}
    estimates = []
    for observation in observations:
        experiment = observation.experiment
        if experiment not in models:
            models[experiment] = CostModel(
                experiment=replace(experiment, constants=change(experiment.constants))
            )
        estimates.append(models[experiment].estimate(observation.strategy))
    return Predicted(observations=tuple(observations), estimates=tuple(estimates))


def with_values(calibration: Calibration) -> Callable[[Constants], Constants]:
    """Return the change that a calibration makes, whatever experiment it was made for."""
    values = calibration.values()
    scale = {PROGRAM_SCALE: values.pop(PROGRAM_SCALE, 1.0)}
    errors = {"time_error": calibration.time_error, "memory_error": calibration.memory_error}
    return lambda constants: replace(constants, **values, **errors).moved(scale)


def fitted(
    observations: Sequence[Observation], choice: Choice, predictor: Predictor | None = None
) -> Calibration:
    """Calibrate with some rows of a table, without leaving rows out in turn."""
    experiment = observations[0].experiment
    return calibrate(experiment, observations, choice, predictor=predictor, thorough=False)


def band(
    observations: Sequence[Observation],
    metrics: Callable[[Predicted], Metrics],
    num_draws: int,
    seed: int = 0,
) -> dict[str, float]:
    """Return percentiles of metrics with every constant disturbed.

    Args:
        observations: Rows.
        metrics: What to compute of each disturbed prediction.
        num_draws: How many.
        seed: Of the draws.

    Returns:
        ``name_p5`` and ``name_p95`` for every metric.
    """
    generator = np.random.default_rng(seed)
    names = [field.name for field in fields(Constants) if field.name not in _NOT_DRAWN]
    drawn = []
    for _ in range(num_draws):
        factors = np.exp(generator.normal(0.0, BAND_SIGMA, len(names)))
        drawn.append(metrics(predict(observations, _disturbance(names, factors))))
    return {
        f"{name}_p{percentile}": float(np.percentile([draw[name] for draw in drawn], percentile))
        for name in drawn[0]
        for percentile in BAND_PERCENTILES
    }


def _disturbance(names: Sequence[str], factors: FloatArray) -> Callable[[Constants], Constants]:
    """Return the change that multiplies constants by factors."""
    pairs = list(zip(names, map(float, factors), strict=True))
    return lambda constants: replace(
        constants, **{name: getattr(constants, name) * factor for name, factor in pairs}
    )
