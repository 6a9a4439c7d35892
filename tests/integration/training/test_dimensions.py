"""Every dimension of runtime torch, alone and combined, trains the model of one rank."""

from collections.abc import Callable
from typing import Any

import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import SELECTIVE
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.trials.outcome import Measured, Outcome

from .conftest import GLOBAL_BATCH_SIZE, MODELS, Ended, make_job, planned

pytestmark = pytest.mark.integration

NUM_STEPS = 20
PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 4}
CHUNKS: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7]}
DIVIDED: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
KEPT: dict[str, Any] = {"zero_stage": 3, "reshard_after_forward": False}


def stages(bounds: list[int], *own: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy of stages with options each, four samples at a time."""
    return {
        "tp": None,
        "dp": None,
        "pp": len(own),
        "bounds": bounds,
        "micro_batch_size": 4,
        "num_micro_batches": GLOBAL_BATCH_SIZE // 4,
        "stages": [
            {"layers": bounds[i : i + 2], "dp": len(options["shares"]), **options}
            for i, options in enumerate(own)
        ],
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence-parallel-4": ("gpt2-untied", {**DIVIDED, "tp": 4, "micro_batch_size": 4}),
    "sequence-parallel-pp2-tied-recomputed": (
        "gpt2",
        {**PIPELINE, **DIVIDED, "micro_batch_size": 2, "recompute": ["full", "selective"]},
    ),
    "sequence-parallel-interleaved": ("llama", {**CHUNKS, **DIVIDED, "micro_batch_size": 2}),
    "sequence-parallel-slices": (
        "gpt2",
        {**PIPELINE, **DIVIDED, "token_slices": [[1, [16]], [3, [8, 6, 2]]]},
    ),
    "sequence-parallel-to-tp1-uneven-dp2": (
        "gpt2",
        stages(
            [0, 4, 7],
            {"tp": 2, "shares": [4], "sequence_parallel": True},
            {"tp": 1, "shares": [3, 1]},
        ),
    ),
    "zero1-groups": ("gpt2", {"dp": 4, "micro_batch_size": 1, "zero_stage": 1, "shard_ranks": 2}),
    "zero2": ("gpt2", {"dp": 2, "micro_batch_size": 2, "zero_stage": 2}),
    "zero3-tied-recomputed": (
        "gpt2",
        {"dp": 2, "micro_batch_size": 2, "zero_stage": 3, "recompute": "full"},
    ),
    "zero3-kept-uneven-dp3": (
        "llama",
        {**stages([0, 7], {"tp": 1, "shares": [2, 1, 1]}), **KEPT},
    ),
    "zero3-sequence-parallel": (
        "llama",
        {**DIVIDED, "dp": 2, "micro_batch_size": 2, "zero_stage": 3, "recompute": "selective"},
    ),
    "zero3-slices": (
        "gpt2",
        {"dp": 2, "micro_batch_size": 2, "zero_stage": 3, "token_slices": [[2, [9, 7]]]},
    ),
    "zero3-cp2-dp2": ("llama", {"cp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 3}),
    "zero3-pp2-tied": ("gpt2", {**PIPELINE, "dp": 2, "micro_batch_size": 1, **KEPT}),
    "zero3-interleaved": ("llama", {**CHUNKS, "dp": 2, "micro_batch_size": 1, **KEPT}),
    "tp2-to-sequence-parallel": (
        "gpt2-untied",
        stages(
            [0, 2, 7],
            {"tp": 2, "shares": [4]},
            {"tp": 2, "shares": [4], "sequence_parallel": True},
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name], runtime="torch", steps=NUM_STEPS, warmup_steps=0)


def test_clipped_shards_equal_one_rank(trains_as_one_rank: Callable[..., None]) -> None:
    shards = {"dp": 4, "micro_batch_size": 1, "zero_stage": 3, "shard_ranks": 2}
    adam = {"optimizer": "adam", "learning_rate": 0.001, "gradient_clipping": 0.3}
    trains_as_one_rank("gpt2", shards, runtime="torch", steps=NUM_STEPS, warmup_steps=0, **adam)


def test_half_precision_shards_stay_close_to_single(
    run_trial: Callable[..., Ended], reference_losses: Callable[..., list[float]]
) -> None:
    job = make_job(
        "gpt2",
        runtime="torch",
        precision="bf16",
        **PIPELINE | {"micro_batch_size": 2},
        dp=2,
        **KEPT,
    )
    assert run_trial(job).result["losses"] == pytest.approx(reference_losses("gpt2"), abs=5e-3)


@pytest.mark.parametrize("runtime", ["deepspeed", "torch"])
def test_shards_of_weights_need_less_memory(runtime: str, run_trial: Callable[..., Ended]) -> None:
    model = MODELS["gpt2"] | {"hidden_size": 384, "num_layers": 8}

    def peak_bytes(zero_stage: int) -> float:
        layout = {"bounds": [0, 11], "dp": 2, "micro_batch_size": 4, "zero_stage": zero_stage}
        job = make_job("gpt2", runtime=runtime, optimizer="adam", **layout)
        job |= {"model": model, "steps": 2, "warmup_steps": 1}
        return max(float(rank["peak_memory_bytes"]) for rank in run_trial(job).result["ranks"])

    assert peak_bytes(0) > 1.15 * peak_bytes(3)


OPTIONS: dict[str, StageOptions] = {
    "sequence-parallel": StageOptions(tp=2, dp=1, sequence_parallel=True, recompute=SELECTIVE),
    "zero2": StageOptions(tp=1, dp=2, zero=Zero(stage=2)),
    "zero3-groups": StageOptions(tp=1, dp=4, zero=Zero(stage=3, shard_ranks=2)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_strategy_becomes_a_trial(
    name: str, launch_trial: Callable[[Experiment, Strategy], Outcome]
) -> None:
    options = OPTIONS[name]
    candidate = Candidate(
        micro_batch_size=2, options=options, pp=1, num_micro_batches=4 // options.dp
    )
    outcome = launch_trial(planned("llama"), Strategy.uniform(candidate, (0, 7)))
    assert isinstance(outcome, Measured), outcome
    assert len(outcome.step_time_s) == 6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero2-pipeline": ({**PIPELINE, "zero_stage": 2}, "pipelines with zero_stage 0 or 1 or 3"),
    "zero3-pipeline": ({**PIPELINE, "zero_stage": 3}, "set reshard_after_forward to false"),
    "groups": (
        {"dp": 2, "micro_batch_size": 4, "zero_stage": 3, "shard_ranks": 4},
        "shard_ranks 4 must divide the dp of all stages",
    ),
    "deepspeed": ({**DIVIDED, "runtime": "deepspeed"}, "use runtime torch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_a_bad_job(name: str, refuses: Callable[..., None]) -> None:
    refuses("gpt2", *REFUSED[name])
