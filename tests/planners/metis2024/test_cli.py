"""Metis's formulas, files and profiles, on the command line."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from amp_ray.planners.metis2024.inputs import (
    cluster_hostfile,
    cluster_yaml,
    metis_cluster,
    parse_metis_clusterfile,
)
from amp_ray.runtime.files import load_experiment
from support.checked import check_ended
from support.commands import Run
from support.metis import CLUSTERFILE, HOSTFILE, metis_profile_files

FIGURES: Final = (
    *("--hidden-size", "256", "--sequence-length", "128"),
    *("--vocab-size", "1024", "--gbs", "8"),
)


def write_profile(folder: Path, files: dict[str, str] | None = None) -> None:
    """Write a profile folder."""
    (folder / "profile").mkdir()
    for name, text in (metis_profile_files() if files is None else files).items():
        (folder / "profile" / name).write_text(text, encoding="utf-8")


def write_inputs(folder: Path, hostfile: str = HOSTFILE) -> None:
    """Write the files that Metis reads."""
    (folder / "hostfile").write_text(hostfile, encoding="utf-8")
    (folder / "clusterfile.json").write_text(json.dumps(CLUSTERFILE), encoding="utf-8")
    write_profile(folder)


def imported(amp_ray: Run, folder: Path, *more: str, profile: bool = True) -> Any:  # noqa: ANN401
    """Import what `write_inputs` wrote."""
    chosen = ("--profile", folder / "profile") if profile else ()
    files = ("--hostfile", folder / "hostfile", "--clusterfile", folder / "clusterfile.json")
    output = ("-o", folder / "mine.yaml")
    return amp_ray("import", "metis", *files, *chosen, *FIGURES, *output, *more)


def write_experiment(
    folder: Path,
    hostfile: str,
    *,
    batch: int = 8,
    profile: dict[str, str] | None = None,
    path: str = "profile",
) -> Path:
    """Write an experiment on a cluster of Metis's, with a profile folder that it calls ``path``."""
    write_profile(folder, profile)
    clusterfile = parse_metis_clusterfile(json.dumps(CLUSTERFILE))
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
    check_ended(
        amp_ray("plan", write_experiment(tmp_path, "0.0.0.1 4", profile=files)),
        3,
        "not in the profile",
    )


def test_what_was_recognised_in_a_profile_is_said_with_v(
    amp_ray: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = metis_profile_files(kinds=("A100",))
    del files["DeviceType.A100_tp2_bs1.json"]
    with caplog.at_level("INFO"):
        amp_ray("plan", write_experiment(tmp_path, "0.0.0.1 4", profile=files), "-v")
    assert "profile: A100 at tp 2 lacks micro-batch size 1, which others have" in caplog.messages


PROFILES: Final[dict[str, tuple[dict[str, str], str, str]]] = {
    "a type without profile": (
        metis_profile_files(kinds=("A100",)),
        "profile",
        "profile: no profile of 'T4' in it, only of A100",
    ),
    "no folder": ({}, "elsewhere", "elsewhere: no such folder"),
    "no path": ({}, "null", "source 'metis' needs 'path', a folder with files such as DeviceType."),
}
"""The reader's own messages are tested in tests/unit/inputs/profiles."""


@pytest.mark.parametrize(("files", "path", "message"), PROFILES.values(), ids=PROFILES)
def test_a_wrong_profile_is_led_to_its_place(
    amp_ray: Run, tmp_path: Path, files: dict[str, str], path: str, message: str
) -> None:
    experiment = write_experiment(tmp_path, "0.0.0.1 2\n0.0.0.2 2\n", profile=files, path=path)
    ended = amp_ray("plan", experiment)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    assert message in ended.err


def test_a_profile_elsewhere_is_named_in_full(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "out").mkdir()
    ended = imported(amp_ray, tmp_path, "-o", str(tmp_path / "out" / "mine.yaml"))
    assert ended.code == 0, ended.err
    text = (tmp_path / "out" / "mine.yaml").read_text(encoding="utf-8")
    assert f'path: "{tmp_path / "profile"}"' in text


def test_a_mistake_is_one_message_and_nothing_is_written(amp_ray: Run, tmp_path: Path) -> None:
    """The readers' own messages are tested in test_inputs.py."""
    write_inputs(tmp_path, hostfile="0.0.0.9 slots=2\n")
    ended = imported(amp_ray, tmp_path)
    assert ended.code == 2
    assert "hostfile:1: found host '0.0.0.9'" in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "mine.yaml").exists()
    assert not (tmp_path / "mine.hosts").exists()


@pytest.mark.parametrize(
    ("more", "profile", "message"),
    [
        (("--num-layers", "5"), True, "--num-layers: found 5; "),
        ((), False, "--num-layers is needed where no --profile tells it"),
        (("-o", "mine.json"), True, "--output: found 'mine.json'; name the experiment .yaml"),
        (
            ("--hidden-size", "100"),
            True,
            "hidden size 100 is no multiple of 128 or 64: tell the num",
        ),
        (("--num-layers", "2"), False, "found 2 layers; Metis counts an input and an output layer"),
    ],
)
def test_wrong_arguments_are_refused(
    amp_ray: Run, tmp_path: Path, more: tuple[str, ...], message: str, *, profile: bool
) -> None:
    write_inputs(tmp_path)
    check_ended(imported(amp_ray, tmp_path, *more, profile=profile), 2, message)


def test_an_export_is_imported_again(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    imported(amp_ray, tmp_path)
    out = tmp_path / "out"
    ended = amp_ray("export", tmp_path / "mine.yaml", "--to", "metis", "-o", out)
    assert ended.code == 0, ended.err
    assert imported(amp_ray, out).code == 0
    before, after = load_experiment(tmp_path / "mine.yaml"), load_experiment(out / "mine.yaml")
    assert before.profile.published is not None
    assert after.profile.published is not None
    assert set(after.profile.published.entries) == set(before.profile.published.entries)
    assert [node.device for node in after.cluster.nodes] == [
        node.device for node in before.cluster.nodes
    ]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "holds 'small.yaml'; name a folder that is new or empty"),
        ("small.yaml", "cannot be written"),
    ],
)
def test_an_export_overwrites_nothing(amp_ray: Run, small: Path, output: str, message: str) -> None:
    check_ended(amp_ray("export", small, "--to", "metis", "-o", small.parent / output), 2, message)
