"""The measured timeline of a step: the instruction lists, in their order, at plausible times."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from amp_ray.cost.instructions import Schedule

from .conftest import Ended, make_job

pytestmark = pytest.mark.integration

CASES: dict[str, tuple[dict[str, Any], Schedule]] = {
    "torch": (
        {"runtime": "torch", "pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 2},
        Schedule(pp=2, num_slices=(1,) * 4),
    ),
    "torch-interleaved-slices": (
        {
            "runtime": "torch",
            "pp": 2,
            "virtual_stages": 2,
            "bounds": [0, 2, 3, 4, 7],
            "micro_batch_size": 4,
            "token_slices": [[4, [9, 7]]],
        },
        Schedule(pp=2, num_slices=(2, 2), virtual_stages=2),
    ),
    "deepspeed": (
        {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 2},
        Schedule(pp=2, num_slices=(1,) * 4, blocking=True),
    ),
}


def test_shared_gradients_are_reduced_within_backward_passes(
    run_trial: Callable[..., Ended],
) -> None:
    ended = run_trial(make_job("gpt2", dp=2, micro_batch_size=2, zero_stage=3))
    for rank in json.loads((ended.folder / "timeline.json").read_text())["ranks"]:
        assert [item for item, _, _ in rank["instructions"]] == [
            "0F0",
            "0B0",
            "0F1",
            "0B1",
            "0STEP",
        ]


@pytest.mark.parametrize("name", CASES)
def test_ranks_execute_the_list_that_is_simulated(
    name: str, run_trial: Callable[..., Ended]
) -> None:
    changes, schedule = CASES[name]
    ended = run_trial(make_job("gpt2", **changes))
    timeline = json.loads((ended.folder / "timeline.json").read_text())
    assert (timeline["trial_id"], timeline["step"]) == ("trial-1", 6)
    step_s = ended.result["step_s"][-1]
    begins: dict[str, float] = {}
    for rank in timeline["ranks"]:
        found = rank["instructions"]
        wanted = [str(item) for item in schedule.instructions(rank["stage"])]
        assert [instruction for instruction, _, _ in found] == wanted
        moments = [moment for _, begin_s, end_s in found for moment in (begin_s, end_s)]
        assert moments == sorted(moments)
        assert moments[-1] - moments[0] <= step_s
        begins |= {instruction: begin_s for instruction, begin_s, _ in found}
    # On one clock: what is received was sent before.
    assert (
        begins["0F0.0" if "0F0.0" in begins else "0F0"]
        < begins["1F0.0" if "1F0.0" in begins else "1F0"]
    )
    assert min(begins.values()) == 0
