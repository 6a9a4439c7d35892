import json

import pytest

from amp_ray.training.events import EXIT_CODES
from amp_ray.training.profiling.program import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "usage"), (["a", "b"], "usage"), (["no such file"], "no such file")],
)
def test_a_bad_job_is_reported(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_CODES["bad_job"]
    event = json.loads(capfd.readouterr().out)
    assert event["cause"] == "bad_job"
    assert message in event["message"]
