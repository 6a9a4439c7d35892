"""Runtime torch: strategies that only it runs train the same model as one rank of DeepSpeed."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.command import trial_launch

from .conftest import GLOBAL_BATCH_SIZE, NUM_IMAGE_LAYERS, Ended, make_job, planned

pytestmark = pytest.mark.integration


PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 4}
CHUNKS: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7]}


def stages(bounds: list[int], *degrees: tuple[int, list[int]], **others: object) -> dict[str, Any]:
    """Return a strategy of stages with a tp and shares each."""
    micro_batch_size = sum(degrees[0][1])
    return {
        "tp": None,
        "dp": None,
        "pp": len(degrees),
        "bounds": bounds,
        "micro_batch_size": micro_batch_size,
        "num_micro_batches": GLOBAL_BATCH_SIZE // micro_batch_size,
        "stages": [
            {"layers": bounds[i : i + 2], "tp": tp, "dp": len(shares), "shares": shares}
            for i, (tp, shares) in enumerate(degrees)
        ],
        **others,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-dp2-pp2-zero1": (
        "gpt2",
        {**PIPELINE, "tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1},
    ),
    "tp2-to-uneven-dp2-recompute-one-block": (
        "llama",
        stages([0, 4, 7], (2, [4]), (1, [3, 1]), recompute=["none", {"kind": "full", "layers": 1}]),
    ),
    "uneven-dp2-to-tp2-tied-zero1": (
        "gpt2",
        {**stages([0, 2, 7], (1, [1, 3]), (2, [4])), "zero_stage": 1},
    ),
    "pictures-tp2-to-dp2": ("transgan", stages([0, 3, NUM_IMAGE_LAYERS], (2, [4]), (1, [2, 2]))),
    "slices-recomputed": (
        "gpt2",
        {**PIPELINE, "recompute": "full", "token_slices": [[1, [16]], [3, [7, 6, 3]]]},
    ),
    "slices-of-unequal-stages": (
        "llama",
        stages([0, 3, 7], (2, [4]), (1, [1, 3]), token_slices=[[4, [9, 7]]]),
    ),
    "interleaved-selective": (
        "gpt2",
        {**CHUNKS, "micro_batch_size": 2, "recompute": "selective"},
    ),
    "interleaved-slices-tp2": (
        "gpt2-untied",
        {**CHUNKS, "tp": 2, "micro_batch_size": 4, "token_slices": [[4, [10, 6]]]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    model, changes = CASES[name]
    trains_as_one_rank(model, {**changes, "runtime": "torch"})


INTERLEAVED: dict[str, tuple[int, Recompute, tuple[int, ...]]] = {
    "as-planned": (1, NO_RECOMPUTE, ()),
    "uneven-chunks": (1, NO_RECOMPUTE, (0, 2, 3, 5, 7)),
    "part-recomputed": (2, Recompute(kind="full", layers=1), (0, 3, 4, 5, 7)),
}
"""Samples of a micro-batch, recompute and bounds of chunks, if they are not those of the search."""


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_strategies_are_launched_and_train_the_same(
    name: str, trains_as_one_rank: Callable[..., None]
) -> None:
    size, recompute, bounds = INTERLEAVED[name]
    experiment = planned("llama", "{virtual_stages: [2]}")
    candidate = Candidate(
        micro_batch_size=size,
        options=StageOptions(tp=1, dp=2, recompute=recompute),
        pp=2,
        num_micro_batches=GLOBAL_BATCH_SIZE // (2 * size),
        virtual_stages=2,
    )
    result = AmpRayPlanner(experiment=experiment).plan(
        replace(candidate, options=replace(candidate.options, recompute=NO_RECOMPUTE))
    )
    assert isinstance(result, Estimate)
    assert result.launchable
    strategy = Strategy.uniform(candidate, bounds) if bounds else result.strategy
    launch = trial_launch(
        experiment, strategy, trial_id="t", hosts=["node0"], files={}, python="python"
    )
    sent = json.loads(launch.files["job.json"])["strategy"]
    trains_as_one_rank("llama", {**sent, "runtime": "torch"})


def test_clipped_losses_equal_one_rank(trains_as_one_rank: Callable[..., None]) -> None:
    uneven = stages([0, 3, 7], (2, [4]), (1, [3, 1]), runtime="torch")
    trains_as_one_rank("gpt2", uneven, gradient_clipping=0.3)


def test_half_precision_stays_close_to_single(
    run_trial: Callable[..., Ended], reference_losses: Callable[..., list[float]]
) -> None:
    changes = {**PIPELINE, "dp": 2, "micro_batch_size": 2, "zero_stage": 1}
    job = make_job("gpt2", runtime="torch", precision="bf16", **changes)
    assert run_trial(job).result["losses"] == pytest.approx(reference_losses("gpt2"), abs=5e-3)


def test_parts_of_a_step_fit_into_it(run_trial: Callable[..., Ended]) -> None:
    result = run_trial(make_job("gpt2", runtime="torch", **{**PIPELINE, "tp": 2})).result
    for rank in result["ranks"]:
        parts = rank["spans_s"]
        mean_step_s = sum(rank["step_s"][2:]) / 5
        assert sum(parts.values()) - parts["tensor_parallel"] <= mean_step_s
        assert min(parts["send"], parts["receive"], parts["optimizer"]) > 0
    assert "deepspeed" not in result["versions"]


def test_failures_are_told_as_with_deepspeed(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", runtime="torch", **stages([0, 3, 7], (2, [4]), (1, [3, 1])))
    ended = run_trial(job, fault={"rank": 3, "step": 2, "how": "out_of_memory"})
    assert ended.codes == [43, 43, 43, 42]


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("gpt2", {"token_slices": [[8, [8, 4]]]}, "must add up to sequence_length 16"),
        ("gpt2", {"precision": "fp8"}, "fp8 needs an NVIDIA GPU of compute capability 8.9"),
        ("transgan", {"precision": "fp8"}, "fp8 is for language models"),
        ("gpt2", {"precision": "fp8", "runtime": "deepspeed"}, "does not train in fp8"),
    ],
)
def test_what_it_cannot_run_is_a_bad_job(
    model: str, changes: dict[str, Any], reason: str, refuses: Callable[..., None]
) -> None:
    refuses(model, changes, reason)
