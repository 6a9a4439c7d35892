"""The published planner's figures, row by row, through the project's own experiment files."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.planners.amp2022.planner import Amp2022Planner
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.ranking import Ranking
from amp_ray.search.space import candidates_of
from published.sections import PUBLISHED

HALF_OF_LAST_DECIMAL: Final = 0.5e-4
"""The published predictions have four decimals."""

NUM_CANDIDATES: Final = {"homogeneous": 53, "het_cluster": 53, "het_model": 65}
UNPUBLISHED: Final = {"homogeneous": {(2, 1, 8, 32)}, "het_cluster": set(), "het_model": set()}
"""Candidates (tp, dp, pp, micro-batch size) without a published row."""

Degrees = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published strategy."""

    degrees: Degrees
    bounds: tuple[int, ...]
    predicted_s: float


def published_rows(name: str) -> list[Row]:
    """Read the rows of one experiment, in the published order."""
    with (PUBLISHED / "amp-2022-planner.csv").open(encoding="utf-8", newline="") as file:
        return [
            Row(
                degrees=(
                    int(row["tp"]),
                    int(row["dp"]),
                    int(row["pp"]),
                    int(row["micro_batch_size"]),
                ),
                bounds=tuple(int(bound) for bound in row["bounds"].split()),
                predicted_s=float(row["predicted_s"]),
            )
            for row in csv.DictReader(file)
            if row["experiment"] == name
        ]


def ranked_rows(ranking: Ranking) -> list[Row]:
    """Return what our ranking says, in its order."""
    rows = []
    for result in ranking.results:
        assert isinstance(result, Estimate)
        strategy = result.strategy
        degrees = (
            strategy.stages[0].options.tp,
            strategy.stages[0].options.dp,
            strategy.pp,
            strategy.micro_batch_size,
        )
        rows.append(
            Row(degrees=degrees, bounds=strategy.bounds, predicted_s=result.iteration_time_s)
        )
    return rows


@pytest.fixture(scope="module", params=sorted(NUM_CANDIDATES))
def name(request: pytest.FixtureRequest) -> str:
    """One of the three experiments."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def ranked(name: str) -> list[Row]:
    """Plan an experiment with the published planner."""
    experiment = load_experiment(Path(__file__).parents[3] / "experiments" / f"{name}.yaml")
    planner = Amp2022Planner(experiment=experiment)
    return ranked_rows(search_candidates(planner, candidates_of(experiment), workers=ALONE))


def test_every_candidate_is_ranked(name: str, ranked: list[Row]) -> None:
    published = {row.degrees for row in published_rows(name)}
    assert len(ranked) == NUM_CANDIDATES[name]
    assert {row.degrees for row in ranked} - published == UNPUBLISHED[name]


def test_predictions_are_the_published_ones(name: str, ranked: list[Row]) -> None:
    ours = {row.degrees: row.predicted_s for row in ranked}
    wrong = {
        row.degrees: (ours[row.degrees], row.predicted_s)
        for row in published_rows(name)
        if abs(ours[row.degrees] - row.predicted_s) > HALF_OF_LAST_DECIMAL
    }
    assert not wrong


def test_bounds_are_the_published_ones(name: str, ranked: list[Row]) -> None:
    ours = {row.degrees: row.bounds for row in ranked}
    published = {row.degrees: row.bounds for row in published_rows(name)}
    assert {degrees: ours[degrees] for degrees in published} == published


def test_order_is_the_published_one(name: str, ranked: list[Row]) -> None:
    published = [row.degrees for row in published_rows(name)]
    degrees = set(published)
    assert [row.degrees for row in ranked if row.degrees in degrees] == published
