"""Runtime deepspeed: every strategy trains as one rank does, and its measurements are reported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.trials.steps import summarise_steps
from support.losses import TOLERANCE, largest_difference

from .conftest import REPOSITORY, Ended, WarmRanks, check_timeline, free_port, gpt2, make_job

pytestmark = pytest.mark.integration

PLACED = {
    "placement": [["a", 0], ["b", 0], ["a", 1], ["b", 1]],
    "launch_order": [["a", 0], ["a", 1], ["b", 0], ["b", 1]],
}
OTHERWISE_PLACED = {**PLACED, "placement": [["b", 1], ["a", 0], ["a", 1], ["b", 0]]}
PIPELINE: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "micro-batches": ("gpt2", {"micro_batch_size": 2}),
    "tp3-uneven-vocabulary": ("gpt2-3-heads", {"tp": 3, "micro_batch_size": 4}),
    "tp4": ("gpt2-untied", {"tp": 4}),
    "dp4": ("gpt2", {"dp": 4, "micro_batch_size": 1}),
    "pp2-tied-ends-apart": ("gpt2", PIPELINE),
    "pp3-uneven": ("gpt2-untied", {"pp": 3, "bounds": [0, 1, 6, 7], "micro_batch_size": 2}),
    "pp4-recompute": (
        "gpt2",
        {"pp": 4, "bounds": [0, 2, 3, 4, 7], "micro_batch_size": 2, "recompute": "full"},
    ),
    "pp2-selective-and-part": (
        "gpt2",
        {**PIPELINE, "recompute": ["selective", {"kind": "full", "layers": 1}]},
    ),
    "dp2-pp2-zero1-tied": ("gpt2", {**PIPELINE, "dp": 2, "bounds": [0, 4, 7], "zero_stage": 1}),
    "tp2-pp2-recompute-one-stage": (
        "gpt2",
        {**PIPELINE, "tp": 2, "bounds": [0, 2, 7], "recompute": ["full", "none"]},
    ),
    "tp2-pp2-sliced-transfers": (
        "gpt2",
        {
            **PIPELINE,
            "tp": 2,
            "bounds": [0, 5, 7],
            "micro_batch_size": 4,
            "sliced_transfers": True,
        },
    ),
    "dp2-pp2-placed": ("gpt2", {**PIPELINE, "dp": 2, **OTHERWISE_PLACED}),
    "tp2-dp2-zero1": ("llama", {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1}),
    "llama-tp2-pp2": ("llama", {**PIPELINE, "tp": 2, "bounds": [0, 4, 7]}),
    "experts-tp2-pp2": ("mixtral", {**PIPELINE, "tp": 2}),
    "dp4-zero2-tied": ("gpt2", {"dp": 4, "micro_batch_size": 1, "zero_stage": 2}),
    "tp2-dp2-zero2": ("llama", {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 2}),
    "dp2-zero3-tied": ("gpt2", {"dp": 2, "micro_batch_size": 2, "zero_stage": 3}),
    "tp2-dp2-zero3-placed": (
        "llama",
        {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 3, **PLACED},
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
        {**PIPELINE, "dp": 2, "bounds": [0, 3, 6], "recompute": "full", **PLACED},
    ),
}

CLIPPED: dict[str, dict[str, Any]] = {
    "tp2-dp2": {"tp": 2, "dp": 2, "micro_batch_size": 2},
    "tp2-pp2-placed": {
        **PIPELINE,
        "tp": 2,
        **PLACED,
        "placement": [["b", 1], ["a", 1], ["a", 0], ["b", 0]],
    },
    "tp2-pp2-zero1": {**PIPELINE, "tp": 2, "zero_stage": 1},
    **{
        f"tp2-dp2-zero{stage}": {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": stage}
        for stage in (2, 3)
    },
}
CLIPPING_NORM = 0.3
"""Clipping norm below the gradients' norm in every step here, so that each step is scaled."""

HALF: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "bounds": [0, 3, 7]},
    "dp2-pp2-zero1": {"dp": 2, "pp": 2, "bounds": [0, 3, 7], "zero_stage": 1},
    "tp2-zero1": {"tp": 2, "zero_stage": 1},
    "dp2-zero2": {"dp": 2, "zero_stage": 2},
    "dp2-zero3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank(*CASES[name])


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_losses_equal_one_rank(name: str, trains_as_one_rank: Callable[..., None]) -> None:
    trains_as_one_rank("gpt2", CLIPPED[name], gradient_clipping=CLIPPING_NORM)


@pytest.mark.parametrize("name", HALF)
def test_half_precision_stays_close_to_single(
    name: str, trains_as_one_rank: Callable[..., None]
) -> None:
    changes = {"precision": "bf16", "micro_batch_size": 2, **HALF[name]}
    trains_as_one_rank("gpt2", changes, tolerance=5e-3)


def test_adam_trains_the_same_when_spread(trains_as_one_rank: Callable[..., None]) -> None:
    adam = {"optimizer": "adam", "learning_rate": 1e-2}
    changes = {**PIPELINE, "dp": 2, "bounds": [0, 4, 7], "zero_stage": 1}
    trains_as_one_rank("gpt2", changes, tolerance=1e-4, **adam)


def test_wrong_step_size_and_clipping_would_show(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2")
    usual = job["learning_rate"]
    losses, wrong, clipped = (
        run_trial({**job, **change}).result["losses"]
        for change in ({}, {"learning_rate": 1.01 * usual}, {"gradient_clipping": CLIPPING_NORM})
    )
    assert largest_difference(losses, wrong) > 10 * TOLERANCE
    assert largest_difference(losses, clipped) > 100 * TOLERANCE


@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral", "transgan"])
def test_training_learns(model: str, run_trial: Callable[..., Ended]) -> None:
    losses = run_trial(make_job(model)).result["losses"]
    assert losses[-1] < losses[0]


# --------------------------------------------------------------------------- measurements

MAX_RANK_BYTES = 600_000_000
"""Maximum memory of a CPU rank of a tiny model, including libraries."""


def test_preloading_starts_no_thread(warm_ranks: WarmRanks) -> None:
    assert warm_ranks.threads == 1


def test_stdout_holds_events_only(run_trial: Callable[..., Ended]) -> None:
    ended = run_trial(make_job("gpt2", **PIPELINE))
    assert [event["event"] for event in ended.events(0)] == [
        "started",
        "ready",
        "first_step",
        *["step"] * 7,
        "result",
    ]
    assert [event["event"] for event in ended.events(1)] == ["started", "ready", "first_step"]


def test_result_names_trial_steps_and_stages(run_trial: Callable[..., Ended]) -> None:
    result = run_trial(make_job("gpt2", **PIPELINE)).result
    assert result["trial_id"] == "trial-1"
    assert len(result["step_s"]) == len(result["losses"]) == 7
    slowest = [max(pair) for pair in zip(*(r["step_s"] for r in result["ranks"]), strict=True)]
    assert result["step_s"] == slowest
    assert result["iteration_time_s"] == summarise_steps(slowest[2:]).mean_s
    assert [stage["layers"] for stage in result["stages"]] == [[0, 3], [3, 7]]
    assert [rank["stage"] for rank in result["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("most_steps", "within_s", "number"), [(32, 1e9, 32), (12, 1e9, 12), (32, 0.0, 8)]
)
def test_all_ranks_go_on_alike_while_one_of_them_becomes_faster(
    run_trial: Callable[..., Ended], most_steps: int, within_s: float, number: int
) -> None:
    job = make_job("gpt2", **PIPELINE, steps=8)
    job |= {"most_steps": most_steps, "more_steps_within_s": within_s}
    ended = run_trial(job, fault={"rank": 1, "step": 0, "how": "decay"})
    counts = [len(rank["step_s"]) for rank in ended.result["ranks"]]
    assert counts == [2 + number] * 2
    told = [event for event in ended.events(0) if event["event"] == "step"]
    assert len(told) == len(ended.result["losses"]) == 2 + number


def test_stages_run_where_the_placement_says(run_trial: Callable[..., Ended]) -> None:
    model, changes = CASES["dp2-pp2-placed"]
    ranks = run_trial(make_job(model, **changes)).result["ranks"]
    # Processes a0, a1, b0, b1 are ranks 1, 2, 3 and 0 of the strategy.
    assert [(rank["stage"], rank["dp_rank"]) for rank in ranks] == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_parts_of_a_step_fit_into_it(run_trial: Callable[..., Ended]) -> None:
    model, changes = CASES["llama-tp2-pp2"]
    for rank in run_trial(make_job(model, **changes)).result["ranks"]:
        parts = rank["spans_s"]
        mean_step_s = sum(rank["step_s"][2:]) / 5
        assert sum(parts.values()) - parts["tensor_parallel"] <= mean_step_s
        assert parts["tensor_parallel"] < parts["forward"] + parts["backward"]
        assert min(parts["send"], parts["receive"], parts["optimizer"]) > 0


def test_ranks_execute_the_list_that_is_simulated(run_trial: Callable[..., Ended]) -> None:
    schedule = Schedule(pp=2, num_slices=(1,) * 4, blocking=True)
    check_timeline(run_trial(make_job("gpt2", **PIPELINE)), schedule)


def test_sharded_gradients_are_reduced_within_backward_passes(
    run_trial: Callable[..., Ended],
) -> None:
    model, changes = CASES["dp2-zero3-tied"]
    for rank in run_trial(make_job(model, **changes)).timeline["ranks"]:
        instructions = [item for item, _, _ in rank["instructions"]]
        assert instructions == ["0F0", "0B0", "0F1", "0B1", "0STEP"]


def test_stage_with_more_layers_computes_longer(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", **{**PIPELINE, "bounds": [0, 5, 7]})
    job["model"] = gpt2(hidden_size=64, sequence_length=256, vocab_size=64)
    long, short = run_trial(job).result["stages"]
    assert long["backward_s"] > 2 * short["backward_s"]


def test_recomputing_saves_memory(run_trial: Callable[..., Ended]) -> None:
    def peak_bytes(recompute: object) -> int:
        job = make_job("gpt2", bounds=[0, 9], recompute=recompute, steps=1, warmup_steps=0)
        sizes = {"num_layers": 6, "hidden_size": 256, "sequence_length": 512, "vocab_size": 64}
        return int(run_trial({**job, "model": gpt2(**sizes)}).result["peak_memory_bytes"])

    # Three blocks keep some 120 MB; freed memory that the allocator does not return hides a part.
    assert peak_bytes("none") - peak_bytes({"kind": "full", "layers": 3}) > 30_000_000


def test_zero_spreads_the_optimizer_state(run_trial: Callable[..., Ended]) -> None:
    # A wide model, so that up to 50 MB that the allocator does not return matter little.
    peaks = {}
    for dp in (1, 4):
        job = make_job("gpt2", dp=dp, micro_batch_size=2, optimizer="adam", zero_stage=1)
        job |= {"model": gpt2(hidden_size=512, sequence_length=8, vocab_size=64)}
        peaks[dp] = run_trial({**job, "steps": 1, "warmup_steps": 0}).result["peak_memory_bytes"]
    # Two moments of 4 bytes for each of 12.6 M weights; each of four ranks keeps a quarter.
    assert peaks[1] - peaks[4] > 12_600_000 * 8 * 3 / 4


def test_tiny_rank_stays_small(run_trial: Callable[..., Ended]) -> None:
    model, changes = CASES["dp2-pp2-zero1-tied"]
    ranks = run_trial(make_job(model, **changes)).result["ranks"]
    assert max(rank["reserved_memory_bytes"] for rank in ranks) < MAX_RANK_BYTES


def test_program_runs_without_a_compiler_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a job; $(true).json"
    path.write_text(json.dumps({**make_job("llama"), "out_dir": str(tmp_path / "out")}))
    done = subprocess.run(
        [sys.executable, "-m", "amp_ray.training", str(path)],
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["versions"]["deepspeed"] == "0.19.8"
