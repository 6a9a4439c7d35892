import json
import subprocess
from pathlib import Path

import pytest

from amp_ray.runtime.launch.trial_folder import TrialFolder
from amp_ray.trials.launch import Launch, RankCommand

SECRETS = {"HF_TOKEN": "hunter2", "aws_secret_access_key": "hunter3"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trial's folder, with one rank that prints a secret variable and another one."""
    command = RankCommand(
        rank=0,
        host="a",
        slot=0,
        argv=("sh", "-c", 'echo "$HF_TOKEN $PLAIN"'),
        environment={**SECRETS, "PLAIN": "it's"},
    )
    launch = Launch(
        trial_id="t",
        commands=(command,),
        files={"lib/job.json": b"{}"},
        environment={"WANDB_API_KEY": "hunter4"},
    )
    trial = TrialFolder(tmp_path / "t")
    trial.write_launch(launch)
    environment = {**launch.environment, **command.environment}
    trial.write_rerun(launch, [{"argv": command.argv, "environment": environment}])
    return trial.path


def test_values_of_secret_variables_are_in_no_file(folder: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()]
    assert len(texts) == 3
    assert not [text for text in texts if "hunter" in text]
    record = json.loads((folder / "launch.json").read_text())
    assert record["commands"][0]["environment"].keys() == {*SECRETS, "PLAIN"}
    assert record["commands"][0]["environment"]["PLAIN"] == "it's"


def test_a_trials_folder_is_its_owners_alone(folder: Path) -> None:
    TrialFolder(folder / "inner").write_events([{"kind": "ready"}])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_set", [False, True])
def test_running_it_again_asks_for_them(folder: Path, *, is_set: bool) -> None:
    secrets = dict.fromkeys((*SECRETS, "WANDB_API_KEY"), "given")
    ended = subprocess.run(
        ["/bin/sh", str(folder / "rerun.sh")],
        env={"PATH": "/usr/bin:/bin", "FOLDER": str(folder), **(secrets if is_set else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if is_set:
        assert (ended.returncode, ended.stdout) == (0, "given it's\n")
    else:
        assert ended.returncode != 0
        assert ended.stdout == ""
        assert "set it before: its value was not kept" in ended.stderr
