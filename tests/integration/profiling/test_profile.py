"""``amp-ray profile`` on this machine's CPU, and a plan from the written profile."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands import Run

from .conftest import run_python

pytestmark = pytest.mark.integration

MODEL: dict[str, Any] = {
    "family": "gpt2",
    "num_layers": 3,
    "hidden_size": 128,
    "num_heads": 4,
    "sequence_length": 16,
    "vocab_size": 61,
}
EXPERIMENT = f"""\
name: tiny
model: {json.dumps(MODEL)}
cluster:
  nodes:
    - {{device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 20}}
profile: {{source: table, path: profile}}
precision: fp32
runtime: torch
global_batch_size: 2
search: {{token_slices: true, slice_granularity: 8}}
trials: {{backend: local}}
"""
NUM_LAYERS = 6
NUM_POINTS = 5 * 2 * 2
"""Points: four distinct layers and the loss, for tp 1 and 2 and micro-batch sizes 1 and 2."""

NUM_SLICES = (2 + 1) * 2 * 2
"""Slices: two without context and one with it, for tp 1 and 2 and micro-batch sizes 1 and 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A finished profile.

    Args:
        folder: Folder with the experiment file.
        result: The object of ``--json``.
    """

    folder: Path
    result: dict[str, Any]

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table."""
        text = (self.folder / "profile" / name).read_text(encoding="utf-8")
        return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Make the profile of the tiny model once, as a user does."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "e.yaml").write_text(EXPERIMENT, encoding="utf-8")
    command = ("profile", "e.yaml", "-o", "profile", "--json", "--seconds", "3600")
    out = run_python(folder, "-m", "amp_ray", *command, "--token-slices")
    return Profiled(folder=folder, result=json.loads(out))


def test_everything_was_measured_once(profiled: Profiled) -> None:
    (part,) = profiled.result["parts"]
    assert (part["num_missing"], part["problem"], part["too_large"]) == (0, None, {})
    layers = profiled.rows("details/layers.csv")
    assert len(layers) == NUM_POINTS
    records = (profiled.folder / "profile/details/records.jsonl").read_text(encoding="utf-8")
    kinds = [json.loads(line)["record"] for line in records.splitlines()]
    assert (kinds.count("layer"), kinds.count("slice")) == (NUM_POINTS, NUM_SLICES)
    assert kinds.count("link") == 2 * 9
    assert kinds.count("step") == 1


def test_every_layer_has_positive_times(profiled: Profiled) -> None:
    rows = profiled.rows("cpu.csv")
    assert len(rows) == NUM_LAYERS * 2 * 2
    assert all(float(row["forward_s"]) > 0 and float(row["backward_s"]) > 0 for row in rows)


def test_all_reduces_are_told_apart(profiled: Profiled) -> None:
    for row in profiled.rows("details/layers.csv"):
        talks = row["tp"] == "2" and row["layer"] != "4"
        assert (float(row["all_reduce_s"]) > 0) == talks, row


def test_kept_memory_is_what_autograd_holds(profiled: Profiled) -> None:
    kept = {
        (row["layer"], row["tp"], row["micro_batch_size"]): int(row["kept_bytes"])
        for row in profiled.rows("details/memory.csv")
    }
    stream = 16 * 128 * 4
    # The norm keeps its input, and the mean and deviation of each of 16 tokens.
    assert kept["4", "1", "1"] == stream + 2 * 16 * 4
    # The head keeps its input; an embedding keeps the tokens and their positions, 8 bytes each.
    assert kept["5", "1", "1"] == stream
    assert kept["0", "1", "2"] == 2 * 16 * 8 + 16 * 8
    assert stream * 10 < kept["1", "1", "1"] < stream * 40
    assert kept["1", "1", "2"] > 1.8 * kept["1", "1", "1"]
    assert kept["1", "2", "1"] < kept["1", "1", "1"]


def test_a_plan_reads_it(profiled: Profiled, amp_ray: Run) -> None:
    best = amp_ray("plan", profiled.folder / "e.yaml", "--json").json["ranking"][0]
    assert best["iteration_time_s"] > 0


def test_what_surrounds_the_layers_is_measured(profiled: Profiled) -> None:
    (row,) = profiled.rows("details/step.csv")
    # Both are differences of times, which may become 0 because of other work on the machine.
    assert 0 <= float(row["host_s_per_iteration"]) < 1
    assert 0 <= float(row["host_s_per_micro_batch"]) < 1
    assert 1e8 < float(row["memory_bytes_per_s"]) < 1e12
    constants = yaml.safe_load(profiled.result["yaml"])["constants"]
    assert constants["memory_efficiency"] == pytest.approx(
        float(row["memory_bytes_per_s"]) / 10e9, rel=1e-3
    )


def test_links_can_be_pasted_into_the_experiment(profiled: Profiled, amp_ray: Run) -> None:
    (link,) = profiled.result["links"]
    assert link["scope"] == "intra"
    assert link["gbit_per_s"] > 0
    head, _, _ = EXPERIMENT.partition("cluster:")
    _, _, tail = EXPERIMENT.partition("precision:")
    pasted = head + profiled.result["yaml"] + "precision:" + tail
    (profiled.folder / "pasted.yaml").write_text(pasted, encoding="utf-8")
    assert amp_ray("plan", profiled.folder / "pasted.yaml").code == 0


def test_slices_are_measured_and_planned_with(profiled: Profiled, amp_ray: Run) -> None:
    for tp in (1, 2):
        path = profiled.folder / f"profile/cpu.tp{tp}.slices.json"
        table = json.loads(path.read_text(encoding="utf-8"))
        assert len(table["points"]) == NUM_SLICES / 2
        assert all(point["forward_mean"] > 0 for point in table["points"].values())
        assert all(point["backward_mean"] > 0 for point in table["points"].values())
        # The kept memory grows with the slice, and with the keys and values before it.
        memory = {place: point["memory_mb"] for place, point in table["points"].items()}
        assert memory["1_8_0"] < memory["1_16_0"]
        assert memory["1_8_0"] < memory["1_8_8"]
        solved = amp_ray("slices", "--table", path, "--json")
        result = solved.json
        assert result["time_s"] == result["lower_bound_s"] > 0
        assert {sum(entry["tokens"]) for entry in result["slices"]} == {16}
