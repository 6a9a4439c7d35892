"""Mixtures of experts: ranks that share experts out train the model that one rank trains."""

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
ORDER = {
    "placement": [["b", 1], ["a", 1], ["a", 0], ["b", 0]],
    "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-divides-each-expert": ("mixtral", {"tp": 2, "micro_batch_size": 4}),
    "ep2-dp2": ("mixtral", {"ep": 2, "dp": 2, "micro_batch_size": 2}),
    "ep4-dp4-zero1": ("mixtral", {"ep": 4, "dp": 4, "micro_batch_size": 1, "zero_stage": 1}),
    "ep2-dp4-zero1-placed": (
        "mixtral",
        {"ep": 2, "dp": 4, "micro_batch_size": 1, "zero_stage": 1, **ORDER},
    ),
    "ep2-tp2-whole-experts": ("shared-experts", {"ep": 2, "tp": 2, "etp": 1, "recompute": "full"}),
    "ep2-tp2-dp2-divided-experts-placed": (
        "mixtral",
        {"ep": 2, "tp": 2, "dp": 2, "micro_batch_size": 2, **ORDER},
    ),
    "tp2-dp2-experts-on-every-rank": (
        "mixtral",
        {"tp": 2, "etp": 1, "dp": 2, "micro_batch_size": 4},
    ),
    "tp2-sequence-parallel": ("mixtral", {"tp": 2, "sequence_parallel": True}),
    "ep2-tp2-sequence-parallel": (
        "shared-experts",
        {"ep": 2, "tp": 2, "etp": 1, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "ep2-cp2-pp2": ("mixtral", {**PIPELINE, "ep": 2, "cp": 2}),
    "ep2-dp2-pp2-uneven-tied": ("shared-experts", {**PIPELINE, "ep": 2, "dp": 2}),
    "ep2-tp2-pp2-slices": (
        "shared-experts",
        {**PIPELINE, "ep": 2, "tp": 2, "etp": 1, "token_slices": [[2, [10, 6]]]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name], runtime="torch", steps=NUM_STEPS)


@pytest.mark.parametrize("model", ["mixtral", "shared-experts"])
def test_training_learns(model: str, reference_losses: Callable[..., list[float]]) -> None:
    losses = reference_losses(model, runtime="torch", steps=NUM_STEPS)
    assert losses[-1] < losses[0]


def test_clipped_losses_equal_one_rank(trains_as_one_rank: Callable[..., None]) -> None:
    spread = {**PIPELINE, "ep": 2, "dp": 2}
    trains_as_one_rank("mixtral", spread, runtime="torch", gradient_clipping=0.3)


def test_deepspeed_trains_experts_that_tp_divides(
    trains_as_one_rank: Callable[..., None],
) -> None:
    deepspeed = {**PIPELINE, "tp": 2, "runtime": "deepspeed"}
    trains_as_one_rank("mixtral", deepspeed, runtime="torch")


@pytest.mark.parametrize("model", ["mixtral", "shared-experts"])
def test_the_plan_counts_the_parameters_that_are_trained(
    model: str, run_trial: Callable[..., Ended]
) -> None:
    ended = run_trial(make_job(model, runtime="torch", steps=1, warmup_steps=0))
    assert ended.codes == [0]
    (rank,) = ended.result["ranks"]
    assert rank["num_parameters"] == planned(model).model.num_parameters


def test_a_strategy_becomes_a_trial(
    launch_trial: Callable[[Experiment, Strategy], Outcome],
) -> None:
    options = StageOptions(tp=1, dp=2, ep=2)
    strategy = Strategy(
        stages=(
            Stage(first_layer=0, end_layer=3, options=options),
            Stage(first_layer=3, end_layer=7, options=options),
        ),
        micro_batch_size=2,
        num_micro_batches=2,
        placement=(0, 1, 2, 3),
    )
    outcome = launch_trial(planned("mixtral"), strategy)
    assert isinstance(outcome, Measured), outcome
    assert len(outcome.peak_memory_bytes) == 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("llama", {"ep": 2, "dp": 2, "micro_batch_size": 4}, "need a model with experts"),
    "number": ("mixtral", {"ep": 3, "dp": 2, "micro_batch_size": 4}, "ep divides the 4 experts"),
    "ranks": ("mixtral", {"ep": 4, "dp": 2, "micro_batch_size": 4}, "ep x etp the 2 ranks"),
    "tokens": (
        "mixtral",
        {"tp": 2, "etp": 1, "token_slices": [[8, [9, 7]]]},
        "tp 2 ranks each send a share of",
    ),
    "deepspeed": (
        "mixtral",
        {"ep": 2, "dp": 2, "micro_batch_size": 4, "runtime": "deepspeed"},
        "no context or expert parallelism",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_cannot_be_spread_are_a_bad_job(
    name: str, refuses: Callable[..., None]
) -> None:
    refuses(*REFUSED[name])
