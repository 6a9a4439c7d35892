"""Every dimension of runtime torch, alone and combined, trains the model of one rank."""

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import GLOBAL_BATCH_SIZE, Ended, make_job

pytestmark = pytest.mark.integration

TOLERANCE = 1e-5
NUM_STEPS = 20
PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 4}
CHUNKS: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7]}
DIVIDED: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


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
    "sequence-parallel-2": ("gpt2", {**DIVIDED, "micro_batch_size": 4}),
    "sequence-parallel-4": ("gpt2-untied", {**DIVIDED, "tp": 4, "micro_batch_size": 1}),
    "sequence-parallel-dp2-zero1": (
        "llama",
        {**DIVIDED, "dp": 2, "micro_batch_size": 2, "zero_stage": 1},
    ),
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
    "tp2-to-sequence-parallel": (
        "gpt2-untied",
        stages(
            [0, 2, 7],
            {"tp": 2, "shares": [4]},
            {"tp": 2, "shares": [4], "sequence_parallel": True},
        ),
    ),
}


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return how far two loss curves are apart."""
    assert len(losses) == len(others) == NUM_STEPS
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(
    name: str,
    run_trial: Callable[..., Ended],
    reference_losses: Callable[..., list[float]],
) -> None:
    model, changes = CASES[name]
    run = {"runtime": "torch", "steps": NUM_STEPS, "warmup_steps": 0}
    ended = run_trial(make_job(model, **run, **changes))
    assert largest_difference(ended.result["losses"], reference_losses(model, **run)) < TOLERANCE
    assert set(ended.codes) == {0}
