import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from support.experiments import SLOW_HOST, small_experiment
from support.planted import Plant, planted_observations, small_strategies


@pytest.fixture(scope="package")
def small() -> Experiment:
    """Four T4 on slow hosts, small GPT."""
    return small_experiment(SLOW_HOST)


@pytest.fixture(scope="package")
def strategies(small: Experiment) -> tuple[Strategy, ...]:
    """Every strategy that the planner makes of it."""
    return small_strategies(small)


@pytest.fixture(scope="module")
def plant(small: Experiment, strategies: tuple[Strategy, ...]) -> Plant:
    """Trials of a cluster whose constants differ from the priors by given ratios."""
    return lambda ratios: planted_observations(small, strategies, ratios)
