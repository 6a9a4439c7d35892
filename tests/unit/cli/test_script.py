import shutil
from pathlib import Path

import pytest

from amp_ray.cli.script import experiment_file, run_experiment
from amp_ray.errors import InputError

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
NAMES = (
    "homogeneous",
    "het_cluster",
    "het_model",
    "het_placement",
    "het_gpus",
    "het_gpus_uneven",
    "het_gpus_large",
)


def test_a_script_finds_the_file_beside_it(tmp_path: Path) -> None:
    beside = tmp_path / "mine.yaml"
    beside.write_text("name: mine\n", encoding="utf-8")
    assert experiment_file(tmp_path / "mine.py") == beside


@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_was_copied_alone_finds_the_packages_file(name: str, tmp_path: Path) -> None:
    copied = tmp_path / f"{name}.py"
    shutil.copy(EXPERIMENTS / f"{name}.py", copied)
    file = experiment_file(copied)
    assert file.read_text(encoding="utf-8") == (EXPERIMENTS / f"{name}.yaml").read_text(
        encoding="utf-8"
    )


def test_a_missing_file_names_the_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no nothing\.yaml in .*experiments"):
        experiment_file(tmp_path / "nothing.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "3"], "--full"),
        (["--full"], "cluster.hostfile"),
        (["--full", "--budget", "3"], "cluster.hostfile"),
    ],
)
def test_flags_that_need_others_are_refused(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(EXPERIMENTS / "homogeneous.py")
    monkeypatch.setattr("sys.argv", [script, *flags])
    with pytest.raises(SystemExit) as ended:
        run_experiment(script, "An experiment.")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_flags_a_script_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXPERIMENTS / "homogeneous.py")
    monkeypatch.setattr("sys.argv", [script, "--top", "1"])
    with pytest.raises(SystemExit) as ended:
        run_experiment(script, "An experiment.")
    assert ended.value.code == 0
    assert "\n53 candidates in " in capsys.readouterr().out
