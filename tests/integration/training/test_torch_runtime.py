"""Runtime torch: every dimension, alone and combined, trains as one rank does."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.cost.model import CostModel
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import NO_RECOMPUTE, SELECTIVE, Recompute
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.trials.command import trial_launch
from support.checked import as_estimate

from .conftest import (
    GLOBAL_BATCH_SIZE,
    NUM_IMAGE_LAYERS,
    Ended,
    check_timeline,
    gpt2,
    make_job,
    planned,
)

pytestmark = pytest.mark.integration

PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 4}
CHUNKS: dict[str, Any] = {
    "pp": 2,
    "virtual_stages": 2,
    "bounds": [0, 2, 3, 4, 7],
    "micro_batch_size": 2,
}
DIVIDED: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
KEPT: dict[str, Any] = {"zero_stage": 3, "reshard_after_forward": False}
ORDER = {
    "placement": [["b", 1], ["a", 1], ["a", 0], ["b", 0]],
    "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
}


def stages(
    bounds: list[int], *options: tuple[int, list[int]] | dict[str, Any], **more: object
) -> dict[str, Any]:
    """Return a strategy of stages; each has a pair (tp, shares), or a mapping with more options."""
    records: list[dict[str, Any]] = [
        dict(zip(("tp", "shares"), stage, strict=True)) if isinstance(stage, tuple) else stage
        for stage in options
    ]
    micro_batch_size = sum(records[0]["shares"])
    return {
        "tp": None,
        "dp": None,
        "pp": len(records),
        "bounds": bounds,
        "micro_batch_size": micro_batch_size,
        "num_micro_batches": GLOBAL_BATCH_SIZE // micro_batch_size,
        "stages": [
            {"layers": bounds[i : i + 2], "dp": len(record["shares"]), **record}
            for i, record in enumerate(records)
        ],
        **more,
    }


UNEQUAL: dict[str, tuple[str, dict[str, Any]]] = {
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
    "interleaved-selective": ("gpt2", {**CHUNKS, "recompute": "selective"}),
    "interleaved-slices-tp2": (
        "gpt2-untied",
        {**CHUNKS, "tp": 2, "micro_batch_size": 4, "token_slices": [[4, [10, 6]]]},
    ),
}

TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence-parallel-4": ("gpt2-untied", {**DIVIDED, "tp": 4, "micro_batch_size": 4}),
    "sequence-parallel-pp2-tied-recomputed": (
        "gpt2",
        {**PIPELINE, **DIVIDED, "micro_batch_size": 2, "recompute": ["full", "selective"]},
    ),
    "sequence-parallel-interleaved": ("llama", {**CHUNKS, **DIVIDED}),
    "sequence-parallel-slices": (
        "gpt2",
        {**PIPELINE, **DIVIDED, "token_slices": [[1, [16]], [3, [8, 6, 2]]]},
    ),
    "sequence-parallel-to-tp1-uneven-dp2": (
        "gpt2",
        stages([0, 4, 7], {"tp": 2, "shares": [4], "sequence_parallel": True}, (1, [3, 1])),
    ),
    "tp2-to-sequence-parallel": (
        "gpt2-untied",
        stages([0, 2, 7], (2, [4]), {"tp": 2, "shares": [4], "sequence_parallel": True}),
    ),
    "cp2": ("llama", {"cp": 2}),
    "cp4-learned-positions": ("gpt2", {"cp": 4, "micro_batch_size": 2}),
    "cp2-tp2-recompute": ("llama", {"cp": 2, "tp": 2, "micro_batch_size": 4, "recompute": "full"}),
    "cp2-tp2-sequence-parallel": ("gpt2", {**DIVIDED, "cp": 2, "micro_batch_size": 4}),
    "cp2-dp2-zero1": ("llama", {"cp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1}),
    "cp2-pp2-tied-uneven-core-again": (
        "gpt2",
        {**PIPELINE, "micro_batch_size": 2, "cp": 2, "recompute": "selective"},
    ),
    "cp2-pp2-interleaved": ("llama", {**CHUNKS, "cp": 2}),
}

SHARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1-groups": ("gpt2", {"dp": 4, "micro_batch_size": 1, "zero_stage": 1, "shard_ranks": 2}),
    "zero3-tied-recomputed": (
        "gpt2",
        {"dp": 2, "micro_batch_size": 2, "zero_stage": 3, "recompute": "full"},
    ),
    "zero3-kept-uneven-dp3": ("llama", stages([0, 7], (1, [2, 1, 1]), **KEPT)),
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
}

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
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
    "tp2-sequence-parallel": ("mixtral", DIVIDED),
    "ep2-tp2-sequence-parallel": (
        "shared-experts",
        {**DIVIDED, "ep": 2, "etp": 1, "micro_batch_size": 4},
    ),
    "ep2-cp2-pp2": ("mixtral", {**PIPELINE, "micro_batch_size": 2, "ep": 2, "cp": 2}),
    "ep2-dp2-pp2-uneven-tied": (
        "shared-experts",
        {**PIPELINE, "micro_batch_size": 2, "ep": 2, "dp": 2},
    ),
    "ep2-tp2-pp2-slices": (
        "shared-experts",
        {
            **PIPELINE,
            "micro_batch_size": 2,
            "ep": 2,
            "tp": 2,
            "etp": 1,
            "token_slices": [[2, [10, 6]]],
        },
    ),
}

CASES = {**UNEQUAL, **TOKENS, **SHARDS, **EXPERTS}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name], runtime="torch")


@pytest.mark.parametrize("model", ["gpt2", "llama", "transgan", "mixtral"])
def test_one_rank_trains_as_with_deepspeed(
    model: str, trains_as_one_rank: Callable[..., None]
) -> None:
    trains_as_one_rank(model, {"runtime": "torch"})


CLIPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "uneven": ("gpt2", stages([0, 3, 7], (2, [4]), (1, [3, 1])), {}),
    "cp2-pp2": ("gpt2", {**PIPELINE, "micro_batch_size": 2, "cp": 2}, {}),
    "ep2-dp2-pp2": ("mixtral", {**PIPELINE, "micro_batch_size": 2, "ep": 2, "dp": 2}, {}),
    "adam-zero3-groups": (
        "gpt2",
        {"dp": 4, "micro_batch_size": 1, "zero_stage": 3, "shard_ranks": 2},
        {"optimizer": "adam", "learning_rate": 0.001},
    ),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    model, changes, both = CLIPPED[name]
    trains_as_one_rank(model, changes, runtime="torch", gradient_clipping=0.3, **both)


@pytest.mark.parametrize("zero", [{"zero_stage": 1}, KEPT], ids=["zero1", "zero3"])
def test_half_precision_stays_close_to_single(
    zero: dict[str, Any], trains_as_one_rank: Callable[..., None]
) -> None:
    changes = {**PIPELINE, "dp": 2, "micro_batch_size": 2, "precision": "bf16", **zero}
    trains_as_one_rank("gpt2", changes, tolerance=5e-3, runtime="torch")


PLANNED: dict[str, tuple[str, StageOptions, dict[str, Any], tuple[int, ...]]] = {
    "interleaved": ("llama", StageOptions(tp=1, dp=2), {"pp": 2, "virtual_stages": 2}, ()),
    "uneven-chunks": (
        "llama",
        StageOptions(tp=1, dp=2),
        {"pp": 2, "virtual_stages": 2},
        (0, 2, 3, 5, 7),
    ),
    "part-recomputed": (
        "llama",
        StageOptions(tp=1, dp=2, recompute=Recompute(kind="full", layers=1)),
        {"pp": 2, "virtual_stages": 2},
        (0, 3, 4, 5, 7),
    ),
    "sequence-parallel": (
        "llama",
        StageOptions(tp=2, dp=1, sequence_parallel=True, recompute=SELECTIVE),
        {"pp": 1},
        (0, 7),
    ),
    "zero2": ("llama", StageOptions(tp=1, dp=2, zero=Zero(stage=2)), {"pp": 1}, (0, 7)),
    "zero3-groups": (
        "llama",
        StageOptions(tp=1, dp=4, zero=Zero(stage=3, shard_ranks=2)),
        {"pp": 1},
        (0, 7),
    ),
    "context": ("llama", StageOptions(tp=1, cp=2, dp=1), {"pp": 2}, (0, 3, 7)),
    "experts": ("mixtral", StageOptions(tp=1, dp=2, ep=2), {"pp": 2}, (0, 3, 7)),
}
"""Model, options of stages, pipeline, and bounds if they differ from the search's."""


@pytest.mark.parametrize("name", PLANNED)
def test_planned_strategies_can_be_launched_and_train_the_same(
    name: str, trains_as_one_rank: Callable[..., None]
) -> None:
    model, options, pipeline, bounds = PLANNED[name]
    experiment = planned(model, "{virtual_stages: [1, 2], max_cp: 2}")
    candidate = Candidate(
        micro_batch_size=1,
        options=options,
        num_micro_batches=GLOBAL_BATCH_SIZE // options.dp,
        **pipeline,
    )
    if bounds:
        strategy = Strategy.uniform(candidate, bounds)
        assert CostModel(experiment=experiment).estimate(strategy).launchable
    else:
        plain = replace(candidate, options=replace(options, recompute=NO_RECOMPUTE))
        result = as_estimate(AmpRayPlanner(experiment=experiment).plan(plain))
        assert result.launchable
        strategy = result.strategy
    launch = trial_launch(
        experiment, strategy, trial_id="t", hosts=["node0"], files={}, python="python"
    )
    sent = json.loads(launch.files["job.json"])["strategy"]
    trains_as_one_rank(model, sent, runtime="torch")


# --------------------------------------------------------------------------- measurements


@pytest.mark.parametrize("runtime", ["deepspeed", "torch"])
def test_shards_of_weights_need_less_memory(runtime: str, run_trial: Callable[..., Ended]) -> None:
    def peak_bytes(zero_stage: int) -> float:
        layout = {"bounds": [0, 11], "dp": 2, "micro_batch_size": 4, "zero_stage": zero_stage}
        job = make_job("gpt2", runtime=runtime, optimizer="adam", **layout)
        job |= {"model": gpt2(hidden_size=256, num_layers=8), "steps": 1, "warmup_steps": 1}
        return max(float(rank["peak_memory_bytes"]) for rank in run_trial(job).result["ranks"])

    assert peak_bytes(0) > 1.15 * peak_bytes(3)


@pytest.mark.parametrize("model", ["mixtral", "shared-experts"])
def test_the_plan_counts_the_parameters_that_are_trained(
    model: str, run_trial: Callable[..., Ended]
) -> None:
    (rank,) = run_trial(make_job(model, runtime="torch")).result["ranks"]
    assert rank["num_parameters"] == planned(model).model.num_parameters


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({**PIPELINE, "micro_batch_size": 2}, Schedule(pp=2, num_slices=(1,) * 4)),
        (
            {**CHUNKS, "micro_batch_size": 4, "token_slices": [[4, [9, 7]]]},
            Schedule(pp=2, num_slices=(2, 2), virtual_stages=2),
        ),
    ],
    ids=["whole", "interleaved-slices"],
)
def test_ranks_execute_the_list_that_is_simulated(
    changes: dict[str, Any], schedule: Schedule, run_trial: Callable[..., Ended]
) -> None:
    check_timeline(run_trial(make_job("gpt2", runtime="torch", **changes)), schedule)


def test_ranks_of_a_timeline_say_their_part_of_the_sequence(
    run_trial: Callable[..., Ended],
) -> None:
    model, changes = CASES["cp2-dp2-zero1"]
    ranks = run_trial(make_job(model, runtime="torch", **changes)).timeline["ranks"]
    places = [(rank["dp_rank"], rank["cp_rank"]) for rank in ranks]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_parts_of_a_step_fit_into_it(run_trial: Callable[..., Ended]) -> None:
    model, changes = CASES["tp2-dp2-pp2-zero1"]
    result = run_trial(make_job(model, runtime="torch", **changes)).result
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
