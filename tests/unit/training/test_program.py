import json
from pathlib import Path

import pytest

from amp_ray.training import main
from support.programs import python

LIGHT = "import sys, amp_ray.training; print('torch' in sys.modules, 'deepspeed' in sys.modules)"


def test_importing_the_program_imports_neither_torch_nor_deepspeed() -> None:
    assert python("-c", LIGHT).stdout == "False False\n"


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


@pytest.mark.parametrize(
    ("record", "name"), [({"trial_id": "t9"}, "t9"), ({"trial": {"trial_id": "p1"}}, "p1")]
)
def test_a_job_of_another_version_is_refused_by_its_name(
    record: object, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    assert main([str(path)]) == 2
    event = json.loads(capfd.readouterr().out)
    assert event["trial_id"] == name
    assert "not a job of this version" in event["message"]
