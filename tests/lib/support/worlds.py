"""Synthetic worlds: true times of strategies, which differ from the model in a known way."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final
from unittest.mock import patch

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.choice import prior_sigma
from amp_ray.calibration.predictions import (
    PRIOR,
    TIME_CONSTANTS,
    Plan,
    Point,
    Prediction,
    Predictor,
)
from amp_ray.clusters.constants import PROGRAM_SCALE
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Outcome
from amp_ray.trials.steps import IQR_PER_SIGMA
from amp_ray.tuner.belief import ErrorModel
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.state import TunerState
from support.replaying import Replay, measured, out_of_memory, play

Draw = Callable[[np.random.Generator, FloatArray], FloatArray]
"""Draws errors of a model, in logarithms, from features ``(num_strategies, num_features)``."""

OWN_SIGMA: Final = 0.15  # sigma of errors of single strategies, and of errors that neighbours share
POWER_SIGMA: Final = 0.1  # sigma of errors per power of two of a degree
REACH: Final = 1.5  # distance up to which neighbours share errors, in doublings of a degree
TAIL_SHARE: Final = 1 / 12
TAIL_FREEDOM: Final = 3  # degrees of freedom of Student's distribution: the least with a variance
RUN_SIGMA: Final = 0.06  # lognormal sigma of a run in the world with noise


def _as_modelled(_rng: np.random.Generator, features: FloatArray) -> FloatArray:
    return np.zeros(len(features))


def _own(rng: np.random.Generator, features: FloatArray) -> FloatArray:
    return rng.normal(0.0, OWN_SIGMA, len(features))


def _student(rng: np.random.Generator, features: FloatArray) -> FloatArray:
    return OWN_SIGMA * rng.standard_t(TAIL_FREEDOM, len(features))


def _powers(rng: np.random.Generator, features: FloatArray) -> FloatArray:
    return features @ rng.normal(0.0, POWER_SIGMA, features.shape[1])


def _neighbours(rng: np.random.Generator, features: FloatArray) -> FloatArray:
    apart = features[:, None, :] - features[None, :, :]
    covariance = OWN_SIGMA**2 * np.exp(-((apart / REACH) ** 2).sum(axis=2) / 2)
    return rng.multivariate_normal(np.zeros(len(features)), covariance, method="svd")


def _tail(factor: float) -> Draw:
    """Return a function that draws errors: a few strategies are off by ``factor``."""

    def draw(rng: np.random.Generator, features: FloatArray) -> FloatArray:
        return np.where(rng.random(len(features)) < TAIL_SHARE, math.log(factor), 0.0)

    return draw


WORLDS: Final[Mapping[str, Draw]] = MappingProxyType(
    {
        "as modelled": _as_modelled,
        "own factors": _own,
        "missing powers": _powers,
        "neighbours": _neighbours,
        "noise": _as_modelled,
        "tail, third less": _tail(2 / 3),
        "tail, third faster": _tail(3 / 4),
        "tail, third slower": _tail(4 / 3),
        "tail, Student": _student,
    }
)
"""Errors of the model in each world. All worlds also have constants drawn from the model's priors,
and errors of single strategies of the size that the model expects."""


_NAMES: Final = (*TIME_CONSTANTS, PROGRAM_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePredictor(BoundedPredictor):
    """A cost model as a table: logarithms of times are linear in the constants' logarithms."""

    experiment: Experiment
    estimates: Mapping[Strategy, Estimate]  # estimates with every constant at its prior
    slopes: Mapping[Strategy, FloatArray]  # slopes per constant of time, and of the common factor

    @classmethod
    def of(cls, experiment: Experiment, candidates: Sequence[Estimate]) -> "TablePredictor":
        """Make the table from the cost model's times and slopes at the prior."""
        plans = [(experiment, each.strategy) for each in candidates]
        slopes = Predictor().time_slopes(plans, _NAMES, PRIOR)
        return cls(
            experiment=experiment,
            estimates={each.strategy: each for each in candidates},
            slopes={each.strategy: row for each, row in zip(candidates, slopes, strict=True)},
        )

    def predict(self, plans: Sequence[Plan], point: Point) -> list[Prediction]:
        """Return the table's predictions for strategies."""
        times = np.exp(self.log_times(plans, point))
        return [
            Prediction(
                time_s=float(time_s),
                peaks_bytes=estimate.peak_memory_bytes,
                limits_bytes=estimate.memory_limit_bytes,
                fails_certainly=False,
                launch_limit_s=None,
            )
            for time_s, estimate in zip(
                times, (self.estimates[strategy] for _, strategy in plans), strict=True
            )
        ]

    def log_times(self, plans: Sequence[Plan], point: Point) -> FloatArray:
        """Return the logarithm of every time, shape ``(num_plans,)``."""
        logs = dict(point.logs)
        at = np.array([logs.get(name, 0.0) for name in _NAMES])
        prior = np.log([self.estimates[strategy].iteration_time_s for _, strategy in plans])
        moved: FloatArray = prior + self.time_slopes(plans, _NAMES, PRIOR) @ at
        return moved

    def time_slopes(self, plans: Sequence[Plan], names: Sequence[str], point: Point) -> FloatArray:
        """Return the table's slopes, shape ``(num_plans, num_names)``."""
        del point
        columns = [_NAMES.index(name) for name in names]
        rows = np.array([self.slopes[strategy] for _, strategy in plans])
        return rows.reshape(len(plans), len(_NAMES))[:, columns]

    def model(self, *, experiment: Experiment) -> "TableModel":
        """Return an object with the interface of a cost model and the table's times."""
        return TableModel(predictor=self, experiment=experiment)

    @contextmanager
    def instead_of_the_cost_model(self) -> Iterator[None]:
        """Replace the tuner's cost model by the table inside a ``with`` block."""
        with patch("amp_ray.tuner.calibrated_predictions.CostModel", self.model):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    """Replaces the cost model, with times from a table."""

    predictor: TablePredictor
    experiment: Experiment

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return the table's estimate of a strategy."""
        here, prior = self.experiment.constants, self.predictor.experiment.constants
        logs = {name: math.log(getattr(here, name) / getattr(prior, name)) for name in _NAMES}
        point = Point.of(tuple(logs), tuple(logs.values()))
        [log_s] = self.predictor.log_times([(self.experiment, strategy)], point)
        return replace(self.predictor.estimates[strategy], iteration_time_s=math.exp(log_s))

    def with_columns(self, estimate: Estimate) -> Estimate:
        """Return an estimate unchanged: those of the table have all columns."""
        return estimate


def error_model(scale: float = 1.0, share: float = 0.0, sigma: float = 0.35) -> ErrorModel:
    """Return an error model without uncertainty about its own parameters."""
    return ErrorModel(
        scales=np.array([scale]),
        surprise_sigmas=np.array([sigma]),
        weights=np.ones((1, 1)),
        shares=np.array([[share]]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study of a world, and whether its last certificate is true."""

    replay: Replay
    certified: bool  # whether the certificate held
    right: bool  # whether really no untested strategy is more than the tolerance faster
    confidence: float  # confidence of the study's certificate
    best_true_s: float  # true time of the best measured strategy


def true_times(
    world: str, seed: int, state: TunerState, predictor: TablePredictor
) -> dict[Strategy, float]:
    """Draw the true seconds of strategies; infinite if a strategy runs out of memory."""
    rng = np.random.default_rng([seed, list(WORLDS).index(world)])
    strategies = [estimate.strategy for estimate in state.candidates]
    plans = [(state.experiment, strategy) for strategy in strategies]
    logs = prior_sigma(TIME_CONSTANTS) * rng.standard_normal(len(TIME_CONSTANTS))
    times = predictor.log_times(plans, Point.of(TIME_CONSTANTS, logs))
    times = times + rng.normal(0.0, state.experiment.constants.time_error, len(plans))
    times = times + WORLDS[world](rng, _features(strategies))
    fails = rng.random(len(plans)) < [each.failure_probability for each in state.candidates]
    return dict(zip(strategies, np.where(fails, math.inf, np.exp(times)).tolist(), strict=True))


def play_world(world: str, seed: int, state: TunerState, predictor: TablePredictor) -> Study:
    """Run a study of a world, and compare its certificate with the true times."""
    true_s = true_times(world, seed, state, predictor)
    noise = RUN_SIGMA if world == "noise" else 0.0
    rng = np.random.default_rng([seed, len(WORLDS)])

    def answer(strategy: Strategy, _number: int) -> Outcome:
        """Return the outcome of a trial."""
        if math.isinf(true_s[strategy]):
            return out_of_memory()
        time_s = true_s[strategy] * math.exp(noise * rng.standard_normal())
        return measured(time_s, spread_fraction=noise * IQR_PER_SIGMA)

    with predictor.instead_of_the_cost_model():
        replay = play(state, answer, predictor=predictor)
    certificate, best = replay.certificate, replay.knowledge.status.best
    assert certificate is not None
    assert best is not None
    untested = [state.candidates[index].strategy for index in replay.knowledge.untested()]
    best_s = true_s[state.candidates[best].strategy]
    limit_s = best_s / (1.0 + state.settings.tolerance_fraction)
    return Study(
        replay=replay,
        certified=certificate.holds,
        right=all(true_s[strategy] >= limit_s for strategy in untested),
        confidence=1.0 - certificate.chance,
        best_true_s=best_s,
    )


def _features(strategies: Sequence[Strategy]) -> FloatArray:
    """Return the base-2 logarithms of the strategies' degrees and micro-batch sizes."""
    degrees = [(each.tp, each.pp, each.dp, each.micro_batch_size) for each in strategies]
    return np.log2(np.array(degrees, dtype=np.float64))
