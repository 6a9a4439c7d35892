"""Metis's files in and out, on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from amp_ray.runtime.files import load_experiment
from support.commands import Run
from support.metis import CLUSTERFILE, HOSTFILE, metis_document, metis_profile_files

FIGURES = (
    *("--hidden-size", "256", "--sequence-length", "128"),
    *("--vocab-size", "1024", "--gbs", "8"),
)


def write_inputs(
    folder: Path,
    *,
    hostfile: str = HOSTFILE,
    clusterfile: str | None = None,
    profile: dict[str, str] | None = None,
) -> None:
    """Write what Metis is given."""
    (folder / "hostfile").write_text(hostfile, encoding="utf-8")
    text = json.dumps(CLUSTERFILE) if clusterfile is None else clusterfile
    (folder / "clusterfile.json").write_text(text, encoding="utf-8")
    (folder / "profile").mkdir()
    for name, content in (metis_profile_files() if profile is None else profile).items():
        (folder / "profile" / name).write_text(content, encoding="utf-8")


def imported(amp_ray: Run, folder: Path, *more: str, profile: bool = True) -> Any:  # noqa: ANN401
    """Import what `write_inputs` wrote."""
    chosen = ("--profile", folder / "profile") if profile else ()
    files = ("--hostfile", folder / "hostfile", "--clusterfile", folder / "clusterfile.json")
    output = ("-o", folder / "mine.yaml")
    return amp_ray("import", "metis", *files, *chosen, *FIGURES, *output, *more)


def test_an_import_loads(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    ended = imported(amp_ray, tmp_path)
    assert ended.code == 0, ended.err
    assert f"amp-ray plan {tmp_path / 'mine.yaml'}" in ended.out
    experiment = load_experiment(tmp_path / "mine.yaml")
    assert experiment.name == "mine"
    assert experiment.profile.published is not None
    assert [node.name for node in experiment.cluster.nodes] == ["0.0.0.1", "0.0.0.2"]


def test_a_profile_beside_the_experiment_moves_with_it(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    imported(amp_ray, tmp_path)
    assert 'path: "profile"' in (tmp_path / "mine.yaml").read_text(encoding="utf-8")


def test_a_profile_elsewhere_is_named_in_full(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "out").mkdir()
    ended = imported(amp_ray, tmp_path, "-o", str(tmp_path / "out" / "mine.yaml"))
    assert ended.code == 0, ended.err
    text = (tmp_path / "out" / "mine.yaml").read_text(encoding="utf-8")
    assert f'path: "{tmp_path / "profile"}"' in text


def test_what_was_recognised_is_said(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    ended = imported(amp_ray, tmp_path)
    assert "bandwidths are read as GB/s, found 1 to 10" in ended.err
    assert "# " in (tmp_path / "mine.yaml").read_text(encoding="utf-8")


def test_without_a_profile_the_data_sheets_count(amp_ray: Run, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    ended = imported(amp_ray, tmp_path, "--num-layers", "4", profile=False)
    assert ended.code == 0, ended.err
    assert load_experiment(tmp_path / "mine.yaml").profile.published is None


def one_longer() -> dict[str, str]:
    """Return profile files of which one is of another model."""
    longer = json.dumps(metis_document([1, 2, 2, 2, 1]))
    return metis_profile_files() | {"DeviceType.T4_tp2_bs1.json": longer}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "mixed layer counts": ({"profile": one_longer()}, "found 5 layers; DeviceType.A100_tp1_bs1"),
    "a type without profile": (
        {"profile": metis_profile_files(kinds=("A100",))},
        "profile: no profile of 'T4' in it, only of A100",
    ),
    "a missing key": (
        {
            "clusterfile": json.dumps(
                {"0.0.0.1": {"instance_type": "A100", "intra_bandwidth": 9, "memory": 9}}
            )
        },
        "clusterfile.json: 0.0.0.1.inter_bandwidth",
    ),
    "an address that is not described": (
        {"hostfile": "0.0.0.9 slots=2\n"},
        "hostfile:1: found host '0.0.0.9'",
    ),
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_message_and_nothing_is_written(
    amp_ray: Run, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    write_inputs(tmp_path, **given)
    ended = imported(amp_ray, tmp_path)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "mine.yaml").exists()
    assert not (tmp_path / "mine.hosts").exists()


@pytest.mark.parametrize(
    ("more", "profile", "message"),
    [
        (("--num-layers", "5"), True, "--num-layers: found 5; "),
        ((), False, "--num-layers is needed where no --profile tells it"),
        (("-o", "mine.json"), True, "--output: found 'mine.json'; name the experiment .yaml"),
        (("--hidden-size", "100"), True, "tell the number of attention heads"),
    ],
)
def test_wrong_arguments_are_refused(
    amp_ray: Run, tmp_path: Path, more: tuple[str, ...], message: str, *, profile: bool
) -> None:
    write_inputs(tmp_path)
    ended = imported(amp_ray, tmp_path, *more, profile=profile)
    assert ended.code == 2
    assert message in ended.err


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


def test_an_analytic_experiment_is_exported_too(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = amp_ray("export", small, "--to", "metis", "-o", out)
    assert ended.code == 0, ended.err
    names = {path.name for path in (out / "profile").iterdir()}
    assert {"DeviceType.T4_tp1_bs1.json", "DeviceType.T4_tp2_bs8.json"} <= names
    assert "of 8 layers" in ended.out


def test_a_folder_with_files_is_left_alone(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    ended = amp_ray("export", small, "--to", "metis", "-o", tmp_path)
    assert ended.code == 2
    assert "holds 'small.yaml'; name a folder that is new or empty" in ended.err


def test_a_folder_that_is_a_file_is_refused(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("export", small, "--to", "metis", "-o", small)
    assert ended.code == 2
    assert "cannot be written" in ended.err
