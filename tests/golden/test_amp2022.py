"""The published planner's figures, row by row."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from amp_ray.baselines.amp2022 import mean_forward_s, plan, published_candidates
from amp_ray.baselines.amp2022_chain import Chain, gpt2_chain, transgan_chain
from amp_ray.baselines.amp2022_cost import FloatArray, Network, Prediction
from amp_ray.units import gbit_per_s_to_bytes_per_s

NUM_NODES: Final = 4
SLOTS: Final = 4
HALF_OF_LAST_DECIMAL: Final = 0.5e-4
"""The published predictions have four decimals."""

Degrees = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published strategy."""

    degrees: Degrees
    bounds: tuple[int, ...]
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What the published planner was given; bandwidths in Gbit/s, per node."""

    chain: Chain
    inter: tuple[float, ...]
    intra: tuple[float, ...]
    global_batch_size: int
    profiles: tuple[tuple[str, int], ...]
    num_rows: int
    unpublished: tuple[Degrees, ...] = ()


GPT2: Final = gpt2_chain(num_layers=24, hidden_size=1024, sequence_length=1024, vocab_size=52256)
TRANSGAN: Final = transgan_chain(depth=(12, 0, 0, 0, 0, 12), hidden_size=1024, bottom_width=9)

EXPERIMENTS: Final = {
    "homogeneous": Experiment(
        chain=GPT2,
        inter=(50,) * 4,
        intra=(50,) * 4,
        global_batch_size=32,
        profiles=(("gpt2_T4", 4),),
        num_rows=52,
        unpublished=((32, 2, 1, 8),),
    ),
    "het_cluster": Experiment(
        chain=GPT2,
        inter=(10, 10, 10, 50),
        intra=(170, 170, 170, 50),
        global_batch_size=32,
        profiles=(("gpt2_V100", 3), ("gpt2_T4", 1)),
        num_rows=53,
    ),
    "het_model": Experiment(
        chain=TRANSGAN,
        inter=(10,) * 4,
        intra=(170,) * 4,
        global_batch_size=64,
        profiles=(("transgan_V100", 4),),
        num_rows=65,
    ),
}


def published_rows(name: str) -> list[Row]:
    """Read the rows of one experiment, in the published order."""
    with (Path(__file__).parent / "amp2022.csv").open(encoding="utf-8", newline="") as file:
        return [
            Row(
                degrees=(
                    int(row["micro_batch_size"]),
                    int(row["tp"]),
                    int(row["dp"]),
                    int(row["pp"]),
                ),
                bounds=tuple(map(int, row["bounds"].split())),
                predicted_s=float(row["predicted_s"]),
            )
            for row in csv.DictReader(file)
            if row["experiment"] == name
        ]


def forward_s_from_shared_data(shared_data: Path, stem: str) -> dict[int, FloatArray]:
    """Read the published forward seconds per tp; the project's own profiles will replace this."""
    with (shared_data / "amp" / f"{stem}_forward_s.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {tp: np.array([float(row[f"tp{tp}"]) for row in rows]) for tp in (1, 2, 4)}


def degrees(prediction: Prediction) -> Degrees:
    """Name a candidate as the published tables do."""
    candidate = prediction.candidate
    return candidate.micro_batch_size, candidate.tp, candidate.dp, candidate.pp


@pytest.fixture(scope="module")
def rankings(shared_data: Path) -> dict[str, tuple[Prediction, ...]]:
    """Plan the three experiments once."""
    found = {}
    for name, experiment in EXPERIMENTS.items():
        stems, counts = zip(*experiment.profiles, strict=True)
        tables = [forward_s_from_shared_data(shared_data, stem) for stem in stems]
        network = Network(
            node_of_rank=tuple(rank // SLOTS for rank in range(NUM_NODES * SLOTS)),
            inter_bytes_per_s=tuple(map(gbit_per_s_to_bytes_per_s, experiment.inter)),
            intra_bytes_per_s=tuple(map(gbit_per_s_to_bytes_per_s, experiment.intra)),
        )
        ranking, refused = plan(
            published_candidates(NUM_NODES, SLOTS, experiment.global_batch_size),
            {tp: mean_forward_s([table[tp] for table in tables], counts) for tp in tables[0]},
            experiment.chain,
            network,
        )
        assert refused == ()
        found[name] = ranking
    return found


def cases() -> list[object]:
    """One case per published row, named by its degrees."""
    return [
        pytest.param(name, row, id="{}-b{}-tp{}-dp{}-pp{}".format(name, *row.degrees))
        for name in EXPERIMENTS
        for row in published_rows(name)
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_holds_every_published_row(name: str) -> None:
    assert len(published_rows(name)) == EXPERIMENTS[name].num_rows


@pytest.mark.parametrize(("name", "row"), cases())
def test_published_row_is_reproduced(
    name: str, row: Row, rankings: dict[str, tuple[Prediction, ...]]
) -> None:
    (found,) = (one for one in rankings[name] if degrees(one) == row.degrees)
    assert found.bounds == row.bounds
    assert found.iteration_time_s == pytest.approx(row.predicted_s, rel=0, abs=HALF_OF_LAST_DECIMAL)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_ranking_has_the_published_order(
    name: str, rankings: dict[str, tuple[Prediction, ...]]
) -> None:
    unpublished = EXPERIMENTS[name].unpublished
    found = [degrees(one) for one in rankings[name] if degrees(one) not in unpublished]
    assert found == [row.degrees for row in published_rows(name)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_ranking_has_the_unpublished_candidates_too(
    name: str, rankings: dict[str, tuple[Prediction, ...]]
) -> None:
    experiment = EXPERIMENTS[name]
    found = {degrees(one) for one in rankings[name]}
    assert found.issuperset(experiment.unpublished)
    assert len(rankings[name]) == experiment.num_rows + len(experiment.unpublished)
