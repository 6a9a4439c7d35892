from pathlib import Path

import pytest

from amp_ray.calibration.observation import Observation
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment, load_observations
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import candidates_of
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.state import TunerSettings, TunerState, begin
from support.experiments import SLOW_HOST, small_experiment
from support.replaying import Answers, answers


@pytest.fixture(scope="package")
def small() -> Experiment:
    """Four T4 on slow hosts, small GPT: sixteen strategies, some of them nearly equal."""
    return small_experiment(SLOW_HOST)


@pytest.fixture(scope="package")
def ranking(small: Experiment) -> Ranking:
    """Everything that the planner makes of it."""
    planner = AmpRayPlanner(experiment=small)
    return search_candidates(planner, candidates_of(small), workers=ALONE)


@pytest.fixture(scope="package")
def state(small: Experiment, ranking: Ranking) -> TunerState:
    """A study without trials."""
    return begin(small, ranking.results, TunerSettings(budget=100))


@pytest.fixture(scope="package")
def predictor() -> BoundedPredictor:
    """One for all studies of an experiment: it remembers, and changes nothing."""
    return BoundedPredictor()


@pytest.fixture(scope="package")
def homogeneous(repository: Path) -> Experiment:
    """The published homogeneous experiment."""
    return load_experiment(repository / "experiments" / "homogeneous.yaml")


@pytest.fixture(scope="package")
def published(repository: Path, homogeneous: Experiment) -> list[Observation]:
    """Its published trials."""
    table = repository / "amp_ray" / "data" / "tables" / "amp-2022-homogeneous.csv"
    return load_observations(table, homogeneous)


@pytest.fixture(scope="package")
def recorded(published: list[Observation]) -> Answers:
    """What trials of the published strategies answer."""
    return answers(published)
