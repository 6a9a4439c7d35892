"""Synthetic trials of a cluster with known constants, which a calibration has to recover."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.calibration import Calibration
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import Predictor
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.belief import time_covariance

Plant = Callable[[Mapping[str, float]], list[Observation]]
"""Makes trials from the ratios of the true constants to the priors."""


def small_strategies(experiment: Experiment) -> tuple[Strategy, ...]:
    """Return the planner's strategy for every feasible candidate of an experiment."""
    planner = AmpRayPlanner(experiment=experiment)
    results = [planner.plan(candidate) for candidate in uniform_candidates(experiment)]
    return tuple(result.strategy for result in results if isinstance(result, Estimate))


def planted_observations(
    experiment: Experiment, strategies: Sequence[Strategy], ratios: Mapping[str, float]
) -> list[Observation]:
    """Return trials with the times that the cost model predicts for other constants.

    Args:
        experiment: Experiment whose constants are the priors.
        strategies: Strategies of the trials.
        ratios: True value divided by prior, by name of the constant.
    """
    true = {name: getattr(experiment.constants, name) * ratio for name, ratio in ratios.items()}
    constants = replace(experiment.constants, **true)
    model = CostModel(experiment=replace(experiment, constants=constants))
    return [
        Observation(
            experiment=experiment,
            strategy=strategy,
            outcome="measured",
            measured_s=model.estimate(strategy).iteration_time_s,
        )
        for strategy in strategies
    ]


def predictive_error(
    calibration: Calibration,
    experiment: Experiment,
    strategies: Sequence[Strategy],
    predictor: Predictor | None = None,
) -> FloatArray:
    """Return the lognormal sigma of predicted times, shape ``(num_strategies,)``."""
    predictor = predictor or Predictor()
    covariance = time_covariance(experiment, strategies, calibration, predictor)
    sigma: FloatArray = np.sqrt(np.diag(covariance))
    return sigma
