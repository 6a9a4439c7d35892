"""Context parallelism: ranks that divide sequences train the model that one rank trains."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.outcome import Measured, Outcome

from .conftest import Ended, make_job, planned

pytestmark = pytest.mark.integration

NUM_STEPS = 18
"""After two steps of warm-up."""

PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2": ("llama", {"cp": 2}),
    "cp4-learned-positions": ("gpt2", {"cp": 4, "micro_batch_size": 2}),
    "cp2-tp2-recompute": ("llama", {"cp": 2, "tp": 2, "micro_batch_size": 4, "recompute": "full"}),
    "cp2-tp2-sequence-parallel": (
        "gpt2",
        {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "cp2-dp2-zero1": ("llama", {"cp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1}),
    "cp2-pp2-tied-uneven-core-again": ("gpt2", {**PIPELINE, "cp": 2, "recompute": "selective"}),
    "cp2-pp2-interleaved": (
        "llama",
        {"cp": 2, "pp": 2, "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7], "micro_batch_size": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name], runtime="torch", steps=NUM_STEPS)


def test_clipped_losses_equal_one_rank(trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank("gpt2", {**PIPELINE, "cp": 2}, runtime="torch", gradient_clipping=0.3)


def test_ranks_of_a_timeline_say_their_part_of_the_sequence(
    run_trial: Callable[..., Ended],
) -> None:
    ended = run_trial(make_job("llama", runtime="torch", cp=2, dp=2, micro_batch_size=4))
    ranks = json.loads((ended.folder / "timeline.json").read_text())["ranks"]
    assert [(rank["dp_rank"], rank["cp_rank"]) for rank in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_strategy_becomes_a_trial(
    launch_trial: Callable[[Experiment, Strategy], Outcome],
) -> None:
    options = StageOptions(tp=1, cp=2, dp=1)
    strategy = Strategy(
        stages=(
            Stage(first_layer=0, end_layer=3, options=options),
            Stage(first_layer=3, end_layer=7, options=options),
        ),
        micro_batch_size=2,
        num_micro_batches=4,
        placement=(0, 1, 2, 3),
    )
    outcome = launch_trial(planned("llama", "{max_cp: 2}"), strategy)
    assert isinstance(outcome, Measured), outcome
    assert len(outcome.step_time_s) == 6
    assert len(outcome.peak_memory_bytes) == 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "length": ("llama", {"cp": 3}, "2 x cp 3 does not divide sequence_length 16"),
    "pictures": ("transgan", {"cp": 2}, "pictures attend as a whole"),
    "slices": ("llama", {"cp": 2, "token_slices": [[8, [8, 8]]]}, "no token_slices"),
    "deepspeed": ("llama", {"cp": 2, "runtime": "deepspeed"}, "no context or expert parallelism"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_a_bad_job(name: str, refuses: Callable[..., None]) -> None:
    refuses(*REFUSED[name])
