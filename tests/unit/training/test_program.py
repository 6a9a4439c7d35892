import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_ray.training import main

LIGHT = "import sys, amp_ray.training; print('torch' in sys.modules, 'deepspeed' in sys.modules)"


def test_importing_the_program_imports_neither_torch_nor_deepspeed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: python -m amp_ray.training"),
        (["a.json", "b.json"], "found ['a.json', 'b.json']"),
        (["missing.json"], "missing.json"),
    ],
)
def test_wrong_arguments_are_a_bad_job(
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    event = json.loads(capfd.readouterr().out)
    assert (event["event"], event["cause"]) == ("failed", "bad_job")
    assert words in event["message"]


def test_job_given_as_an_object_is_checked_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main({"trial_id": "t9"}) == 2
    event = json.loads(capfd.readouterr().out)
    assert event["trial_id"] == "t9"
    assert "not a job of this version" in event["message"]


def test_a_profile_run_has_the_name_of_its_trial(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"trial": {"trial_id": "p1"}}', encoding="utf-8")
    assert main([str(path)]) == 2
    assert json.loads(capfd.readouterr().out)["trial_id"] == "p1"


def test_local_rank_of_a_launcher_goes_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    path = tmp_path / "job.json"
    path.write_text("{}", encoding="utf-8")
    assert main(["--local_rank=3", str(path)]) == 2

    assert os.environ["LOCAL_RANK"] == "3"
