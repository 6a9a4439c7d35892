"""Certificates against the truth in synthetic worlds; `check_certificate.py` has more seeds."""

from pathlib import Path
from statistics import fmean, median

import pytest

from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import TunerSettings, begin
from support.worlds import WORLDS, Study, TablePredictor, play_world

SEEDS = range(4)
MOST_WRONG = 0.05
"""Largest share of certificates with 95 % confidence that are wrong."""


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


def test_of_twenty_certificates_at_most_one_is_wrong(studies: dict[str, list[Study]]) -> None:
    certified = [study for group in studies.values() for study in group if study.certified]
    wrong = [study for study in certified if not study.right]
    assert len(wrong) <= MOST_WRONG * len(certified)
    assert len(certified) > 0.8 * len(WORLDS) * len(SEEDS)


def test_no_world_has_more_than_one_wrong_study(studies: dict[str, list[Study]]) -> None:
    assert {
        world for world, group in studies.items() if sum(not s.right for s in group) > 1
    } == set()


@pytest.mark.parametrize("world", ["as modelled", "noise"])
def test_studies_whose_model_is_right_are_certified_and_take_few_trials(
    studies: dict[str, list[Study]], world: str
) -> None:
    assert all(study.certified for study in studies[world])
    assert median(study.replay.num_trials for study in studies[world]) <= 15


def test_studies_state_as_much_confidence_as_they_deserve(studies: dict[str, list[Study]]) -> None:
    every = [study for group in studies.values() for study in group]
    stated = fmean(study.confidence for study in every)
    assert stated == pytest.approx(fmean(study.right for study in every), abs=0.1)


def test_the_winner_runs_twice_and_its_interval_holds_its_true_time(
    studies: dict[str, list[Study]],
) -> None:
    for study in studies["noise"]:
        status = study.replay.knowledge.status
        assert status.best is not None
        assert len(status.figures[status.best].runs) > 1
        found = recommend(study.replay.state, study.replay.knowledge)
        assert found is not None
        low_s, high_s = found.interval_s
        assert low_s <= study.best_true_s <= high_s
