"""Trials of a cluster whose constants are known: what a calibration has to find again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration import Calibration, Observation, Predictor
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.strategy import Strategy
from amp_ray.tuner.belief import time_covariance

Plant = Callable[[Mapping[str, float]], list[Observation]]
"""From ratios of constants to trials."""


def small_strategies(experiment: Experiment) -> tuple[Strategy, ...]:
    """Return every strategy that the planner makes of an experiment."""
    planner = AmpRayPlanner(experiment=experiment)
    results = [planner.plan(candidate) for candidate in uniform_candidates(experiment)]
    return tuple(result.strategy for result in results if isinstance(result, Estimate))


def planted_observations(
    experiment: Experiment, strategies: Sequence[Strategy], ratios: Mapping[str, float]
) -> list[Observation]:
    """Return trials as they would be where constants differ from the experiment's.

    Args:
        experiment: With the constants that are the priors.
        strategies: What is run.
        ratios: True value over prior, by name of the constant.
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
