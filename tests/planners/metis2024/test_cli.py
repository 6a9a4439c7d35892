"""The exact plans by Metis's formulas, on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run
from support.metis import metis_profile_files

TEXT = """\
name: mixed
model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 32,
        vocab_size: 128}
cluster:
  nodes:
    - {device: A100-80, slots: 2, intra_gbit_per_s: 80, inter_gbit_per_s: 8}
    - {device: T4, slots: 3, intra_gbit_per_s: 40, inter_gbit_per_s: 8}
profile: {source: metis, path: profile}
global_batch_size: 8
search: {space: heterogeneous}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """An experiment on two A100 and three T4."""
    (tmp_path / "profile").mkdir()
    for name, text in metis_profile_files().items():
        (tmp_path / "profile" / name).write_text(text, encoding="utf-8")
    path = tmp_path / "mixed.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def planned(amp_ray: Run, experiment: Path) -> list[dict[str, Any]]:
    """Return all rows of a plan."""
    ended = amp_ray("plan", experiment, "--cost-model", "metis-2024", "--json", "--all")
    assert ended.code == 0, ended.err
    rows: list[dict[str, Any]] = ended.json["ranking"]
    return rows


def test_every_number_of_micro_batches_has_its_best_plan(amp_ray: Run, mixed: Path) -> None:
    rows = planned(amp_ray, mixed)
    assert sorted(row["strategy"]["num_micro_batches"] for row in rows) == [1, 2, 4, 8]
    times = [row["iteration_time_s"] for row in rows if row["feasible"]]
    assert times == sorted(times)
    assert {row["reason"].partition(":")[0] for row in rows if not row["feasible"]} <= {"no plan"}


def test_what_was_planned_is_scored_alike(amp_ray: Run, mixed: Path, tmp_path: Path) -> None:
    rows = [row for row in planned(amp_ray, mixed) if row["feasible"]]
    strategies = tmp_path / "strategies.json"
    strategies.write_text(json.dumps([row["strategy"] for row in rows]), encoding="utf-8")
    ended = amp_ray(
        "score", mixed, "--strategies", strategies, "--cost-model", "metis-2024", "--json"
    )
    assert ended.code == 0, ended.err
    assert [row["iteration_time_s"] for row in ended.json["rows"]] == [
        row["iteration_time_s"] for row in rows
    ]


def test_memory_is_what_the_board_is_sold_with(amp_ray: Run, mixed: Path) -> None:
    text = TEXT.replace("slots: 3,", "slots: 3, nominal_memory_gib: 15,")
    mixed.write_text(text, encoding="utf-8")
    limits = {limit for row in planned(amp_ray, mixed) for limit in row["memory_limit_bytes"] or ()}
    assert 15 * 2**30 in limits
    assert round(14.75 * 2**30) not in limits
