"""Planning with Metis's own files, also where its planner crashes."""

import json
from pathlib import Path

import pytest

from amp_ray.planners.metis2024.inputs import (
    cluster_hostfile,
    cluster_yaml,
    metis_cluster,
    parse_metis_clusterfile,
)
from support.commands import Run
from support.metis import CLUSTERFILE, metis_profile_files

KINDS = ("A100", "H100", "T4")
FAST = {
    **CLUSTERFILE,
    "0.0.0.3": {
        "instance_type": "H100",
        "inter_bandwidth": 1,
        "intra_bandwidth": 10,
        "memory": 80,
    },
}


def write_experiment(
    folder: Path,
    hostfile: str,
    *,
    batch: int = 8,
    profile: dict[str, str] | None = None,
    path: str = "profile",
) -> Path:
    """Write an experiment on a cluster of Metis's, with a profile of its own.

    Args:
        folder: Where to.
        hostfile: Of either form.
        batch: Global batch size.
        profile: Files of the profile folder; all types by default.
        path: What the experiment calls that folder.
    """
    files = metis_profile_files(kinds=KINDS) if profile is None else profile
    (folder / "profile").mkdir()
    for name, text in files.items():
        (folder / "profile" / name).write_text(text, encoding="utf-8")
    clusterfile = parse_metis_clusterfile(json.dumps(FAST))
    cluster = metis_cluster(hostfile, clusterfile).cluster
    (folder / "hosts").write_text(cluster_hostfile(cluster), encoding="utf-8")
    experiment = folder / "experiment.yaml"
    experiment.write_text(
        "name: metis\n"
        "model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, "
        "sequence_length: 32, vocab_size: 128}\n"
        + cluster_yaml(cluster, hostfile="hosts")
        + f"profile: {{source: metis, path: {path}}}\n"
        + f"global_batch_size: {batch}\n",
        encoding="utf-8",
    )
    return experiment


CRASHES = {
    "12 devices": ("0.0.0.1 slots=4\n0.0.0.1 slots=4\n0.0.0.2 slots=4\n", 12, 24),
    "unequal nodes": ("0.0.0.1 slots=4\n0.0.0.2 slots=2\n", 6, 6),
    "the README's hostfile": ("0.0.0.1 4\n0.0.0.2 4\n", 8, 8),
}


@pytest.mark.parametrize(("hostfile", "devices", "batch"), CRASHES.values(), ids=CRASHES)
def test_clusters_on_which_metis_crashes_are_planned(
    amp_ray: Run, tmp_path: Path, hostfile: str, devices: int, batch: int
) -> None:
    ended = amp_ray("plan", write_experiment(tmp_path, hostfile, batch=batch), "--json", "--all")
    assert ended.code == 0, ended.err
    assert ended.json["num_feasible"] > 0
    best = ended.json["ranking"][0]["strategy"]
    assert best["tp"] * best["pp"] * best["dp"] == devices
    assert best["dp"] * best["micro_batch_size"] * best["num_micro_batches"] == batch


def test_a_degree_that_was_not_measured_is_dropped_and_counted(
    amp_ray: Run, tmp_path: Path
) -> None:
    experiment = write_experiment(tmp_path, "0.0.0.1 slots=4\n0.0.0.2 slots=4\n")
    ended = amp_ray("plan", experiment, "--json", "--all")
    reasons = {row["strategy"]["tp"]: row["reason"] for row in ended.json["ranking"]}
    assert reasons[4] == "not in the profile: tp 4 on A100-80"
    assert "not in the profile" in amp_ray("plan", experiment).out


def test_a_profile_without_any_degree_that_is_asked_for_leaves_nothing(
    amp_ray: Run, tmp_path: Path
) -> None:
    files = metis_profile_files(kinds=("A100",), tps=(2,))
    ended = amp_ray("plan", write_experiment(tmp_path, "0.0.0.1 4", profile=files))
    assert ended.code == 3
    assert "not in the profile" in ended.err


def test_what_was_recognised_is_said_with_v(
    amp_ray: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = metis_profile_files(kinds=("A100",))
    del files["DeviceType.A100_tp2_bs1.json"]
    with caplog.at_level("INFO"):
        amp_ray("plan", write_experiment(tmp_path, "0.0.0.1 4", profile=files), "-v")
    assert "profile: A100 at tp 2 lacks micro-batch size 1, which others have" in caplog.messages


MISTAKES: dict[str, tuple[dict[str, str], str, str]] = {
    "a type without profile": (
        metis_profile_files(kinds=("A100",)),
        "profile",
        "profile: no profile of 'T4' in it, only of A100",
    ),
    "no folder": ({}, "elsewhere", "elsewhere: no such folder"),
    "no path": ({}, "null", "source 'metis' needs 'path', a folder with files such as DeviceType."),
}
"""The reader's own messages are tested in tests/unit/formats."""


@pytest.mark.parametrize(("files", "path", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_profile_is_led_to_its_place(
    amp_ray: Run, tmp_path: Path, files: dict[str, str], path: str, message: str
) -> None:
    experiment = write_experiment(tmp_path, "0.0.0.1 2\n0.0.0.2 2\n", profile=files, path=path)
    ended = amp_ray("plan", experiment)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    assert message in ended.err
