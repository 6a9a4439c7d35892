"""Every strategy trains the same model: its losses are those of one rank alone."""

from collections.abc import Callable
from typing import Any

import pytest

from support.losses import TOLERANCE, largest_difference

from .conftest import make_job

pytestmark = pytest.mark.integration

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "micro-batches": ("gpt2", {"micro_batch_size": 2}),
    "tp2": ("gpt2", {"tp": 2, "micro_batch_size": 4}),
    "tp3-uneven-vocabulary": ("gpt2-3-heads", {"tp": 3, "micro_batch_size": 4}),
    "tp4": ("gpt2-untied", {"tp": 4}),
    "dp2": ("gpt2", {"dp": 2, "micro_batch_size": 2}),
    "dp4": ("gpt2", {"dp": 4, "micro_batch_size": 1}),
    "pp2-tied-ends-apart": ("gpt2", {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 2}),
    "pp3-uneven": ("gpt2-untied", {"pp": 3, "bounds": [0, 1, 6, 7], "micro_batch_size": 2}),
    "pp4-recompute": (
        "gpt2",
        {"pp": 4, "bounds": [0, 2, 3, 4, 7], "micro_batch_size": 2, "recompute": "full"},
    ),
    "pp2-selective-and-part": (
        "gpt2",
        {
            "pp": 2,
            "bounds": [0, 3, 7],
            "micro_batch_size": 2,
            "recompute": ["selective", {"kind": "full", "layers": 1}],
        },
    ),
    "dp2-pp2-zero1-tied": (
        "gpt2",
        {"dp": 2, "pp": 2, "bounds": [0, 4, 7], "micro_batch_size": 2, "zero_stage": 1},
    ),
    "tp2-pp2-recompute-one-stage": (
        "gpt2",
        {
            "tp": 2,
            "pp": 2,
            "bounds": [0, 2, 7],
            "micro_batch_size": 2,
            "recompute": ["full", "none"],
        },
    ),
    "tp2-pp2-sliced-transfers": (
        "gpt2",
        {"tp": 2, "pp": 2, "bounds": [0, 5, 7], "micro_batch_size": 4, "sliced_transfers": True},
    ),
    "dp2-pp2-placed": (
        "gpt2",
        {
            "dp": 2,
            "pp": 2,
            "bounds": [0, 3, 7],
            "micro_batch_size": 2,
            "placement": [["b", 1], ["a", 0], ["a", 1], ["b", 0]],
            "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
        },
    ),
    "tp2-dp2-zero1": ("llama", {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1}),
    "llama-tp2-pp2": ("llama", {"tp": 2, "pp": 2, "bounds": [0, 4, 7], "micro_batch_size": 2}),
    "dp4-zero2-tied": ("gpt2", {"dp": 4, "micro_batch_size": 1, "zero_stage": 2}),
    "tp2-dp2-zero2": ("llama", {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 2}),
    "dp2-zero3-tied": ("gpt2", {"dp": 2, "micro_batch_size": 2, "zero_stage": 3}),
    "tp2-dp2-zero3-placed": (
        "llama",
        {
            "tp": 2,
            "dp": 2,
            "micro_batch_size": 2,
            "zero_stage": 3,
            "placement": [["a", 0], ["b", 0], ["a", 1], ["b", 1]],
            "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
        },
    ),
    "dp2-zero3-kept": (
        "gpt2-untied",
        {"dp": 2, "micro_batch_size": 2, "zero_stage": 3, "reshard_after_forward": False},
    ),
    "dp2-zero3-recompute-part": (
        "gpt2",
        {
            "dp": 2,
            "micro_batch_size": 2,
            "zero_stage": 3,
            "recompute": {"kind": "full", "layers": 2},
        },
    ),
    "tp2-dp2-zero3-experts-selective": (
        "mixtral",
        {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 3, "recompute": "selective"},
    ),
    "transgan-dp2-zero3": (
        "transgan",
        {"dp": 2, "micro_batch_size": 2, "zero_stage": 3, "recompute": "full"},
    ),
    "transgan-tp4": ("transgan", {"tp": 4, "micro_batch_size": 4}),
    "transgan-dp2-pp2-placed": (
        "transgan",
        {
            "dp": 2,
            "pp": 2,
            "bounds": [0, 3, 6],
            "micro_batch_size": 2,
            "recompute": "full",
            "placement": [["a", 0], ["b", 0], ["a", 1], ["b", 1]],
            "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
        },
    ),
}

CLIPPED: dict[str, dict[str, Any]] = {
    "tp2-dp2": {"tp": 2, "dp": 2, "micro_batch_size": 2},
    "tp2-pp2-placed": {
        "tp": 2,
        "pp": 2,
        "bounds": [0, 3, 7],
        "micro_batch_size": 2,
        "placement": [["b", 1], ["a", 1], ["a", 0], ["b", 0]],
        "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
    },
    "tp2-pp2-zero1": {
        "tp": 2,
        "pp": 2,
        "bounds": [0, 3, 7],
        "micro_batch_size": 2,
        "zero_stage": 1,
    },
}
CLIPPED |= {
    f"tp2-dp2-zero{stage}": {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": stage}
    for stage in (2, 3)
}
CLIPPING_NORM = 0.3
"""Below the norm of every step here, so that each one is scaled."""


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name])


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank("gpt2", CLIPPED[name], gradient_clipping=CLIPPING_NORM)


def test_wrong_step_size_would_show(reference_losses: Callable[..., list[float]]) -> None:
    usual = make_job("gpt2")["learning_rate"]
    right, wrong = reference_losses("gpt2"), reference_losses("gpt2", learning_rate=1.01 * usual)
    assert largest_difference(right, wrong) > 10 * TOLERANCE


def test_clipping_changes_training(reference_losses: Callable[..., list[float]]) -> None:
    clipped = reference_losses("gpt2", gradient_clipping=CLIPPING_NORM)
    assert largest_difference(reference_losses("gpt2"), clipped) > 100 * TOLERANCE


@pytest.mark.parametrize("model", ["gpt2", "llama", "transgan"])
def test_training_learns(model: str, reference_losses: Callable[..., list[float]]) -> None:
    losses = reference_losses(model)
    assert losses[-1] < losses[0]
