import json
from pathlib import Path
from typing import Any

import pytest

from amp_ray.training.fields import read_object
from amp_ray.training.job import Job, read_job

MODEL = {
    "family": "gpt2",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "sequence_length": 32,
    "vocab_size": 128,
}
STRATEGY = {
    "tp": 2,
    "pp": 2,
    "dp": 1,
    "micro_batch_size": 2,
    "num_micro_batches": 4,
    "bounds": [0, 3, 7],
    "recompute": "none",
    "placement": [["b", 1], ["b", 0], ["a", 0], ["a", 1]],
}
STAGE = {"tp": 2, "dp": 1, "devices": [0, 1], "recompute": "none", "shares": [2]}
UNEQUAL: dict[str, Any] = {
    "tp": None,
    "dp": None,
    "micro_batch_size": 4,
    "num_micro_batches": 2,
    "stages": [
        {"layers": [0, 3], "tp": 2, "dp": 1, "shares": [4]},
        {"layers": [3, 7], "tp": 1, "dp": 2, "shares": [3, 1]},
    ],
    "placement": None,
}
"""Stages that differ in tp and dp."""

JOB = {
    "trial_id": "7",
    "out_dir": "out",
    "model": MODEL,
    "strategy": STRATEGY,
    "global_batch_size": 8,
    "steps": 5,
}


def job(strategy: dict[str, Any] | None = None, **changes: object) -> Job:
    return read_job({**JOB, **changes, "strategy": {**STRATEGY, **(strategy or {})}})


def test_defaults_train_in_single_precision_without_clipping() -> None:
    read = job()
    assert (read.precision, read.optimizer, read.gradient_clipping, read.zero_stage) == (
        "fp32",
        "adam",
        0.0,
        0,
    )


def test_ranks_follow_the_placement_when_the_launcher_does() -> None:
    assert job().grid.rank_map == (0, 1, 2, 3)


def test_rank_map_makes_up_for_a_launcher_that_counts_host_by_host() -> None:
    order = [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert job(launch_order=order).grid.rank_map == (3, 2, 0, 1)


def test_placement_may_be_left_out() -> None:
    strategy = {key: value for key, value in STRATEGY.items() if key != "placement"}
    assert read_job({**JOB, "strategy": strategy}).grid.rank_map == (0, 1, 2, 3)


def test_zero_is_read_from_the_strategy_or_the_job() -> None:
    said = {"zero_stage": 3, "shard_ranks": 1, "reshard_after_forward": False}
    read = job(said, runtime="torch")
    assert (read.zero_stage, read.grid.shard_ranks, read.grid.keeps_weights) == (3, 1, True)
    assert job(zero_stage=1).zero_stage == job({"zero_stage": 1}, zero_stage=1).zero_stage == 1
    with pytest.raises(ValueError, match="zero_stage is 0, the strategy's is 1"):
        job({"zero_stage": 1}, zero_stage=0)


def test_one_word_of_recompute_is_for_all_stages() -> None:
    stages = job({"recompute": "full"}).grid.stages
    assert [stage.recompute for stage in stages] == ["full", "full"]


def test_recompute_may_differ_by_stage() -> None:
    some = {"kind": "selective", "layers": 2}
    stages = job({"recompute": [some, "none"]}).grid.stages
    found = [(stage.recompute, stage.recompute_layers) for stage in stages]
    assert found == [("selective", 2), ("none", None)]


def test_stages_that_repeat_the_strategy_are_accepted() -> None:
    stages = [{**STAGE, "layers": [0, 3]}, {**STAGE, "layers": [3, 7]}]
    assert job({"stages": stages}).grid.bounds == (0, 3, 7)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"bounds": [0, 3, 6]}, "rise from 0 to the model's 7 layers"),
        ({"bounds": [0, 3, 3, 7], "pp": 3, "placement": None, "dp": 1}, "none of them empty"),
        ({"bounds": [0, 7]}, "pp = 2 stages"),
        ({"bounds": [1, 3, 7]}, "bounds [1, 3, 7]"),
        ({"num_micro_batches": 3}, "dp 1 x micro_batch_size 2 x num_micro_batches 3 = 6"),
        ({"tp": 3, "placement": None}, "tp 3 does not divide the model's num_heads 4"),
        ({"tp": None, "dp": None}, "job.strategy.tp must be a whole number"),
        ({**UNEQUAL, "placement": None}, "runtime deepspeed runs one tp, dp"),
        ({"token_slices": [[2, [16, 16]]]}, "use runtime torch"),
        ({"sequence_parallel": True}, "sequence_parallel [True, True]; use runtime torch"),
        ({"token_slices": [[1, [32]]]}, "must have the 2 sequences of a micro-batch"),
        ({"token_slices": [[2, []]]}, "[[sequences, [tokens, ...]], ...]"),
        ({"virtual_stages": 2}, "pp = 2 stages of 2 chunks"),
        ({"recompute": ["full"]}, "each of the 2 stages"),
        ({"recompute": "some"}, "none, selective, full"),
        ({"recompute": {"kind": "full", "layers": 0}}, "recompute.layers"),
        ({"placement": [["a", 0]]}, "4 pairs of host name and slot"),
        ({"placement": [["a", "0"]] * 4}, "4 pairs of host name and slot"),
        ({"placement": [["a", 0]] * 4}, "each once"),
        ({"stages": [{**STAGE, "layers": [0, 3]}]}, "1 stages and bounds"),
        (
            {"stages": [{**STAGE, "layers": [0, 3], "tp": 1}, {**STAGE, "layers": [3, 7]}]},
            "job.strategy.stages[0].tp is 1, all stages have 2",
        ),
        ({"micro_batch": 4}, "job.strategy has unknown keys ['micro_batch']"),
        ({"tp": 0}, "job.strategy.tp must be a whole number >= 1, found 0"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        job(strategy)
    assert words in str(refused.value)


def test_plain_torch_takes_stages_that_differ() -> None:
    grid = job(UNEQUAL, runtime="torch").grid
    assert [(stage.tp, stage.dp) for stage in grid.stages] == [(2, 1), (1, 2)]
    assert (grid.shares(0), grid.shares(1), grid.num_ranks) == ((4,), (3, 1), 4)


def test_plain_torch_takes_slices_and_chunks() -> None:
    change = {"token_slices": [[2, [20, 12]]], "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7]}
    grid = job(change, runtime="torch").grid
    assert [passage.tokens for passage in grid.passages] == [(20, 12)] * 4
    assert grid.chunks_of(1) == [(2, 3), (4, 7)]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"token_slices": [[2, [16, 15]]]}, "must add up to sequence_length 32"),
        (
            {"token_slices": [[2, [17, 15]]], "sequence_parallel": True},
            "sequence_parallel divides tokens evenly over tp 2 ranks, found slices of [",
        ),
        (
            {"tp": 1, "dp": 2, "micro_batch_size": 1, "sequence_parallel": True},
            "over tp 1 ranks, found one rank alone",
        ),
        (
            {**UNEQUAL, "token_slices": [[1, [32]], [3, [32]]]},
            "several batch slices need one dp and even shares",
        ),
        ({"zero_stage": 2}, "runtime 'torch' pipelines with zero_stage 0 or 1 or 3, found 2"),
        ({"zero_stage": 3}, "keeps its weights: set reshard_after_forward to false"),
        (
            {"zero_stage": 1, "reshard_after_forward": False},
            "reshard_after_forward is for zero_stage 3, found 1",
        ),
        ({"zero_stage": 4}, "works with zero_stage up to 3, found 4"),
        ({"zero_stage": 1, "shard_ranks": 2}, "shard_ranks 2 must divide the dp of all stages"),
        ({"shard_ranks": 1}, "need runtime 'torch' and zero_stage 1 to 3, found runtime 'torch'"),
        (
            {"pp": 1, "virtual_stages": 2, "bounds": [0, 3, 7], "placement": None},
            "virtual_stages 2 need several stages",
        ),
        (
            {
                **UNEQUAL,
                "stages": [UNEQUAL["stages"][0], {**UNEQUAL["stages"][1], "shares": [1, 1]}],
            },
            "take [4, 2] samples",
        ),
        (
            {**UNEQUAL, "stages": [UNEQUAL["stages"][0], {**UNEQUAL["stages"][1], "shares": [4]}]},
            "shares needs 2 positive counts",
        ),
    ],
)
def test_what_plain_torch_does_not_run_is_named(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        job(strategy, runtime="torch")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliced_transfers": True, "runtime": "torch"}, "sliced_transfers is for deepspeed"),
        ({"runtime": "jax"}, "deepspeed, torch; found 'jax'"),
        ({"zero_stage": 2}, "runtime 'deepspeed' pipelines with zero_stage 0 or 1, found 2"),
        ({"precision": "fp4"}, "fp32, bf16, fp16, fp8; found 'fp4'"),
        ({"optimizer": "lion"}, "adam, adamw, sgd; found 'lion'"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"steps": True}, "steps must be a whole number >= 1, found True"),
        ({"trial_id": 7}, "trial_id must be a string, found 7"),
        ({"epochs": 3}, "job has unknown keys ['epochs']"),
        ({"model": "gpt2"}, "model must be an object, found 'gpt2'"),
        ({"launch_order": [["c", 0]] * 4}, "must name the same places"),
    ],
)
def test_wrong_jobs_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        job(**change)
    assert words in str(refused.value)


def test_job_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB), encoding="utf-8")
    assert read_job(read_object(str(path))) == job()


def test_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"job\.json is not JSON"):
        read_job(read_object(str(path)))
