from pathlib import Path

import pytest

from amp_ray.cli.exits import TRIALS_FAILED
from support.commands import Run
from support.experiments import PICTURE_MODEL, SMALL, TEXT_MODEL


def test_a_profile_needs_a_folder(amp_ray: Run, tmp_path: Path) -> None:
    ended = amp_ray("profile", tmp_path / "e.yaml")
    assert ended.code == 2
    assert "--output" in ended.err


def test_a_missing_experiment_is_bad_input(amp_ray: Run, tmp_path: Path) -> None:
    ended = amp_ray("profile", tmp_path / "e.yaml", "-o", tmp_path / "p")
    assert ended.code == 2
    assert "no such file" in ended.err
    assert not (tmp_path / "p").exists()


def test_another_list_of_layers_is_bad_input(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(SMALL + "runtime: amp-2022\n", encoding="utf-8")
    ended = amp_ray("profile", path, "-o", tmp_path / "p", "--local")
    assert ended.code == 2
    assert "layer list" in ended.err


def missing_key(amp_ray: Run, folder: Path, *options: str) -> str:
    """Profile hosts whose key file does not exist; return the message, which names the file."""
    path = folder / "e.yaml"
    ssh = "{identities: [keys/own], config: null}"
    path.write_text(SMALL + f"trials: {{ssh: {ssh}}}\n", encoding="utf-8")
    ended = amp_ray("profile", path, "-o", folder / "p", *options)
    assert ended.code == TRIALS_FAILED
    return ended.err


def test_hosts_are_reached_as_the_experiment_says(amp_ray: Run, tmp_path: Path) -> None:
    assert f"key file {tmp_path}/keys/own does not exist" in missing_key(amp_ray, tmp_path)


def test_options_win_and_start_at_the_current_folder(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    message = missing_key(amp_ray, tmp_path, "--identity", "other", "--known-hosts", "known")
    assert f"key file {here}/other does not exist" in message


def test_pictures_have_no_slices_to_measure(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(SMALL.replace(TEXT_MODEL, PICTURE_MODEL), encoding="utf-8")
    ended = amp_ray("profile", path, "-o", tmp_path / "p", "--local", "--token-slices")
    assert ended.code == 2
    assert "no sequence to cut into token slices" in ended.err
