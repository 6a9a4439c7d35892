"""``amp-ray profile`` on this machine's CPU, and a plan from what it wrote."""

import csv
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 900.0
"""A guard against hangs; the longest run takes 20 s on an idle machine."""

MODEL: dict[str, Any] = {
    "family": "gpt2",
    "num_layers": 3,
    "hidden_size": 32,
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
global_batch_size: 2
trials: {{backend: local}}
"""
NUM_LAYERS = 6
NUM_POINTS = 5 * 2 * 2
"""Four distinct layers and the loss, tp 1 and 2, micro-batches of 1 and 2."""

IMAGE: dict[str, Any] = {
    "family": "transgan",
    "depth": [2, 0, 2],
    "hidden_size": 64,
    "num_heads": 4,
    "bottom_width": 2,
    "latent_size": 13,
    "window_size": 2,
}


def amp_ray(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "amp_ray", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A profile that was made.

    Args:
        folder: With the experiment file in it.
        result: What ``--json`` said.
    """

    folder: Path
    result: dict[str, Any]

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table."""
        text = (self.folder / "profile" / name).read_text(encoding="utf-8")
        return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Make the profile of the tiny model once, with an interruption by the time limit."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "e.yaml").write_text(EXPERIMENT, encoding="utf-8")
    first = amp_ray(folder, "profile", "e.yaml", "-o", "profile", "--seconds", "1", "-v", "--json")
    assert first.returncode == 4, first.stderr
    assert "no plan can be made for cpu yet" in first.stderr
    assert json.loads(first.stdout)["parts"][0]["num_missing"] > NUM_POINTS
    assert not (folder / "profile" / "cpu.csv").exists()
    ended = amp_ray(folder, "profile", "e.yaml", "-o", "profile", "--seconds", "3600", "--json")
    assert ended.returncode == 0, ended.stderr
    return Profiled(folder=folder, result=json.loads(ended.stdout))


def test_everything_was_measured_in_two_runs(profiled: Profiled) -> None:
    (part,) = profiled.result["parts"]
    assert (part["num_missing"], part["problem"], part["too_large"]) == (0, None, {})
    layers = profiled.rows("details/layers.csv")
    assert len(layers) == NUM_POINTS
    records = (profiled.folder / "profile/details/records.jsonl").read_text(encoding="utf-8")
    kinds = [json.loads(line)["record"] for line in records.splitlines()]
    # Nothing twice: the second run went on where the first one ended.
    assert kinds.count("layer") == NUM_POINTS
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
    stream = 16 * 32 * 4
    # The norm keeps its input, and mean and deviation of each of 16 tokens.
    assert kept["4", "1", "1"] == stream + 2 * 16 * 4
    # The head keeps its input; an embedding the tokens and where they stand, 8 bytes each.
    assert kept["5", "1", "1"] == stream
    assert kept["0", "1", "2"] == 2 * 16 * 8 + 16 * 8
    assert stream * 10 < kept["1", "1", "1"] < stream * 40
    assert kept["1", "1", "2"] > 1.8 * kept["1", "1", "1"]
    assert kept["1", "2", "1"] < kept["1", "1", "1"]


def test_a_plan_reads_it(profiled: Profiled) -> None:
    planned = amp_ray(profiled.folder, "plan", "e.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    best = json.loads(planned.stdout)["ranking"][0]
    assert best["iteration_time_s"] > 0


def test_what_surrounds_the_layers_is_measured(profiled: Profiled) -> None:
    (row,) = profiled.rows("details/step.csv")
    # Both are differences, which other work on the machine may make nothing of.
    assert 0 <= float(row["host_s_per_iteration"]) < 1
    assert 0 <= float(row["host_s_per_micro_batch"]) < 1
    assert 1e8 < float(row["memory_bytes_per_s"]) < 1e12
    constants = yaml.safe_load(profiled.result["yaml"])["constants"]
    assert constants["memory_efficiency"] == pytest.approx(
        float(row["memory_bytes_per_s"]) / 10e9, rel=1e-3
    )


def test_links_can_be_pasted_into_the_experiment(profiled: Profiled) -> None:
    (link,) = profiled.result["links"]
    assert link["scope"] == "intra"
    assert link["gbit_per_s"] > 0
    head, _, _ = EXPERIMENT.partition("cluster:")
    _, _, tail = EXPERIMENT.partition("precision:")
    pasted = head + profiled.result["yaml"] + "precision:" + tail
    (profiled.folder / "pasted.yaml").write_text(pasted, encoding="utf-8")
    assert amp_ray(profiled.folder, "plan", "pasted.yaml").returncode == 0


EXPERTS = {
    **MODEL,
    "num_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_feed_forward_size": 24,
    "shared_feed_forward_size": 16,
    "first_dense_layers": 1,
}


def test_experts_are_measured_where_tp_divides_them(tmp_path: Path) -> None:
    text = EXPERIMENT.replace(json.dumps(MODEL), json.dumps(EXPERTS))
    search = "search: {micro_batch_sizes: [1]}\n"
    (tmp_path / "e.yaml").write_text(text + search, encoding="utf-8")
    ended = amp_ray(tmp_path, "profile", "e.yaml", "-o", "profile", "--seconds", "3600", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = (tmp_path / "profile/details/layers.csv").read_text(encoding="utf-8").splitlines()
    # Embedding, a dense block, one with experts, norm, head and loss at tp 1 and 2.
    assert len(rows) == 1 + 6 * 2
    planned = amp_ray(tmp_path, "plan", "e.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["ranking"][0]["iteration_time_s"] > 0


def run_program(
    folder: Path, model: dict[str, Any], points: list[dict[str, int]], *, step: bool = False
) -> list[Any]:
    """Run the program on one rank; return its events."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_layers = 6
    strategy = {"tp": 1, "pp": 1, "dp": 1, "micro_batch_size": 1, "num_micro_batches": 1}
    trial = {
        "trial_id": "t",
        "out_dir": str(folder),
        "model": model,
        "strategy": {**strategy, "bounds": [0, num_layers]},
        "global_batch_size": 1,
        "steps": 1,
        "device": "cpu",
    }
    job = {"trial": trial, "links": [], "points": points, "seconds": 3600, "step": step}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "amp_ray.training.profiling", "job.json"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["complete"]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_out_of_memory_ends_the_size_and_not_the_run(tmp_path: Path) -> None:
    huge = 2**42
    places = [(huge, 1), (huge, 0), (2 * huge, 0), (1, 4)]
    points = [{"tp": 1, "micro_batch_size": size, "layer": layer} for size, layer in places]
    events = run_program(tmp_path, MODEL, points)
    kinds = [event["event"] for event in events if event["event"] in {"oom", "layer"}]
    assert kinds == ["oom", "layer"]


def test_every_layer_of_a_generator_is_measured(tmp_path: Path) -> None:
    points = [{"tp": 1, "micro_batch_size": 2, "layer": layer} for layer in range(6)]
    events = run_program(tmp_path, IMAGE, points)
    found = {event["layer"]: event for event in events if event["event"] == "layer"}
    assert sorted(found) == list(range(6))
    assert found[1]["kept_bytes"] == found[2]["kept_bytes"] > 0


def test_a_generators_step_is_measured_too(tmp_path: Path) -> None:
    events = run_program(tmp_path, IMAGE, [], step=True)
    (step,) = [event for event in events if event["event"] == "step"]
    assert step["host_s_per_iteration"] >= 0
    assert step["memory_bytes_per_s"] > 1e8


NUM_SLICES = (4 + 5) * 2
"""Four lengths, five slices behind a context; tp 1 and 2."""


def test_slices_are_measured_and_planned_with(tmp_path: Path) -> None:
    search = "search: {token_slices: true, slice_granularity: 4, micro_batch_sizes: [1]}\n"
    (tmp_path / "e.yaml").write_text(EXPERIMENT + "runtime: torch\n" + search, encoding="utf-8")
    command = ("profile", "e.yaml", "-o", "profile", "--token-slices", "--json", "--seconds")
    first = amp_ray(tmp_path, *command, "1")
    assert first.returncode == 4, first.stderr
    ended = amp_ray(tmp_path, *command, "3600")
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "profile/details/records.jsonl").read_text(encoding="utf-8")
    kinds = [json.loads(line)["record"] for line in text.splitlines()]
    assert kinds.count("slice") == NUM_SLICES
    for tp in (1, 2):
        name = f"profile/cpu.tp{tp}.slices.json"
        table = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        assert len(table["points"]) == NUM_SLICES / 2
        assert all(each["forward_mean"] > 0 for each in table["points"].values())
        assert all(each["backward_mean"] > 0 for each in table["points"].values())
        # What is kept grows with the slice, and with the keys and values before it.
        memory = {place: each["memory_mb"] for place, each in table["points"].items()}
        assert memory["1_4_0"] < memory["1_8_0"] < memory["1_16_0"]
        assert memory["1_4_4"] < memory["1_4_12"]
        solved = amp_ray(tmp_path, "slices", "--table", name, "--json")
        assert solved.returncode == 0, solved.stderr
        found = json.loads(solved.stdout)
        assert found["time_s"] == found["lower_bound_s"] > 0
        assert {sum(entry["tokens"]) for entry in found["slices"]} == {16}
    planned = amp_ray(tmp_path, "plan", "e.yaml", "--json")
    assert planned.returncode == 0, planned.stderr


def test_a_slice_without_room_ends_what_is_larger_and_not_the_run(tmp_path: Path) -> None:
    huge = 2**42
    places = [(huge, 4, 4), (huge, 8, 4), (huge, 8, 8), (1, 4, 12), (1, 16, 0)]
    points = [
        {"tp": 1, "micro_batch_size": size, "layer": 1, "tokens": tokens, "context": context}
        for size, tokens, context in places
    ]
    events = run_program(tmp_path, MODEL, points)
    found = [event for event in events if event["event"] in {"oom", "slice"}]
    assert [(event["event"], event["tokens"]) for event in found] == [
        ("oom", 4),
        ("slice", 4),
        ("slice", 16),
    ]
