from pathlib import Path

from amp_ray.testing.experiments import SMALL

from .conftest import Run


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
