"""Certificates against the truth in synthetic worlds; `check_certificate.py` has more seeds."""

from pathlib import Path
from statistics import fmean, median

import pytest

from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from amp_ray.tuner.state import TunerSettings, begin
from support.worlds import WORLDS, Study, TablePredictor, play_world

SEEDS = range(4)


@pytest.fixture(scope="module")
def studies(repository: Path) -> dict[str, list[Study]]:
    """A few studies of twenty strategies in every world."""
    experiment = load_experiment(repository / "experiments" / "demo.yaml")
    planner = AmpRayPlanner(experiment=experiment)
    results = search_candidates(planner, candidates_of(experiment), workers=ALONE).results
    state = begin(experiment, results, TunerSettings(budget=20))
    predictor = TablePredictor.of(experiment, state.candidates)
    return {
        world: [play_world(world, seed, state, predictor) for seed in SEEDS] for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
def test_certificates_are_right_in_every_world(studies: dict[str, list[Study]], world: str) -> None:
    assert [study for study in studies[world] if study.certified and not study.right] == []


def test_some_studies_are_certified_and_others_say_what_they_believe(
    studies: dict[str, list[Study]],
) -> None:
    every = [study for group in studies.values() for study in group]
    assert any(study.certified for study in every)
    wrong = [study for study in every if not study.right]
    assert all(study.confidence < 0.95 for study in wrong)
    stated = fmean(study.confidence for study in every)
    assert stated == pytest.approx(fmean(study.right for study in every), abs=0.1)


def test_a_world_as_modelled_takes_few_trials(studies: dict[str, list[Study]]) -> None:
    trials = {world: median(s.replay.num_trials for s in group) for world, group in studies.items()}
    assert trials["as modelled"] <= 7
    assert trials["own factors"] > trials["as modelled"]
