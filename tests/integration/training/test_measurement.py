"""What a trial measures, and how it reports it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_ray.trials.steps import summarise_steps

from .conftest import REPOSITORY, Ended, WarmRanks, free_port, make_job

pytestmark = pytest.mark.integration

MAX_RANK_BYTES = 600_000_000
"""Limit of a whole CPU rank of a tiny model, libraries included."""

WIDE: dict[str, Any] = {
    "family": "gpt2",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "sequence_length": 256,
    "vocab_size": 64,
}


def test_preloading_starts_no_thread(warm_ranks: WarmRanks) -> None:
    assert warm_ranks.threads == 1


def test_stdout_holds_events_only(run_trial: Callable[..., Ended]) -> None:
    ended = run_trial(make_job("gpt2", dp=2, micro_batch_size=2))
    assert [event["event"] for event in ended.events(0)] == [
        "started",
        "ready",
        "first_step",
        *["step"] * 7,
        "result",
    ]
    assert [event["event"] for event in ended.events(1)] == ["started", "ready", "first_step"]


def test_result_names_trial_steps_and_stages(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", pp=2, bounds=[0, 5, 7], micro_batch_size=2)
    result = run_trial(job).result
    assert result["trial_id"] == "trial-1"
    assert len(result["step_s"]) == len(result["losses"]) == 7
    slowest = [max(pair) for pair in zip(*(r["step_s"] for r in result["ranks"]), strict=True)]
    assert result["step_s"] == slowest
    assert result["iteration_time_s"] == summarise_steps(slowest[2:]).mean_s
    assert [stage["layers"] for stage in result["stages"]] == [[0, 5], [5, 7]]
    assert [rank["stage"] for rank in result["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("most_steps", "within_s", "number"), [(64, 1e9, 64), (12, 1e9, 12), (64, 0.0, 8)]
)
def test_all_ranks_go_on_alike_while_one_of_them_becomes_faster(
    run_trial: Callable[..., Ended], most_steps: int, within_s: float, number: int
) -> None:
    job = make_job("gpt2", pp=2, bounds=[0, 5, 7], micro_batch_size=2, steps=8)
    job |= {"most_steps": most_steps, "more_steps_within_s": within_s}
    ended = run_trial(job, fault={"rank": 1, "step": 0, "how": "decay"})
    counts = [len(rank["step_s"]) for rank in ended.result["ranks"]]
    assert counts == [2 + number] * 2
    told = [event for event in ended.events(0) if event["event"] == "step"]
    assert len(told) == len(ended.result["losses"]) == 2 + number


def test_stages_run_where_the_placement_says(run_trial: Callable[..., Ended]) -> None:
    places = [["b", 1], ["a", 0], ["a", 1], ["b", 0]]
    job = make_job(
        "gpt2",
        dp=2,
        pp=2,
        bounds=[0, 3, 7],
        micro_batch_size=2,
        placement=places,
        launch_order=sorted(places),
    )
    ranks = run_trial(job).result["ranks"]
    # Processes a0, a1, b0, b1 are ranks 1, 2, 3 and 0 of the strategy.
    assert [(rank["stage"], rank["dp_rank"]) for rank in ranks] == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_parts_of_a_step_fit_into_it(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", tp=2, pp=2, bounds=[0, 3, 7], micro_batch_size=2)
    result = run_trial(job).result
    for rank in result["ranks"]:
        parts = rank["spans_s"]
        mean_step_s = sum(rank["step_s"][2:]) / 5
        assert sum(parts.values()) - parts["tensor_parallel"] <= mean_step_s
        assert parts["tensor_parallel"] < parts["forward"] + parts["backward"]
        assert min(parts["send"], parts["receive"], parts["optimizer"]) > 0


def test_stage_with_more_layers_computes_longer(run_trial: Callable[..., Ended]) -> None:
    job = {**make_job("gpt2", pp=2, bounds=[0, 5, 7], micro_batch_size=2), "model": WIDE}
    long, short = run_trial(job).result["stages"]
    assert long["backward_s"] > 2 * short["backward_s"]


def test_recomputing_saves_memory(run_trial: Callable[..., Ended]) -> None:
    model = {**WIDE, "num_layers": 6, "hidden_size": 256}
    none, part, full = (
        run_trial({**make_job("gpt2", bounds=[0, 9], recompute=how), "model": model}).result[
            "peak_memory_bytes"
        ]
        for how in ("none", {"kind": "full", "layers": 3}, "full")
    )
    # A block keeps some 36 MB; freed memory that the allocator holds on to blurs the difference.
    assert none - part > 30_000_000
    assert none - full > 50_000_000


def test_zero_spreads_the_optimizer_state(run_trial: Callable[..., Ended]) -> None:
    # Wide, so that the allocator's habits, up to 50 MB, matter less than what is looked for.
    model = {**WIDE, "hidden_size": 512, "sequence_length": 8}
    peaks = {}
    for dp in (1, 4):
        job = make_job("gpt2", dp=dp, micro_batch_size=2, optimizer="adam", zero_stage=1)
        result = run_trial({**job, "model": model}).result
        peaks[dp] = result["peak_memory_bytes"]
    # Two moments of 4 bytes for each of 12.6 M weights, of which a rank of four keeps a quarter.
    assert peaks[1] - peaks[4] > 12_600_000 * 8 * 3 / 4


def test_tiny_rank_stays_small(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", dp=2, pp=2, bounds=[0, 3, 7], micro_batch_size=2, zero_stage=1)
    result = run_trial(job).result
    assert max(rank["reserved_memory_bytes"] for rank in result["ranks"]) < MAX_RANK_BYTES


HALF: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2, "bounds": [0, 3, 7]},
    "tp2": {"tp": 2},
    "dp2-zero1": {"dp": 2, "zero_stage": 1},
    "pp2-zero1": {"pp": 2, "bounds": [0, 3, 7], "zero_stage": 1},
    "tp2-zero1": {"tp": 2, "zero_stage": 1},
    "dp2-zero2": {"dp": 2, "zero_stage": 2},
    "dp2-zero3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_stays_close_to_single(
    name: str, run_trial: Callable[..., Ended], reference_losses: Callable[..., list[float]]
) -> None:
    job = make_job("gpt2", precision="bf16", micro_batch_size=2, **HALF[name])
    losses = run_trial(job).result["losses"]
    assert losses == pytest.approx(reference_losses("gpt2"), abs=5e-3)


def test_adam_trains_the_same_when_spread(
    run_trial: Callable[..., Ended], reference_losses: Callable[..., list[float]]
) -> None:
    adam = {"optimizer": "adam", "learning_rate": 1e-2}
    job = make_job("gpt2", dp=2, pp=2, bounds=[0, 4, 7], micro_batch_size=2, zero_stage=1, **adam)
    assert run_trial(job).result["losses"] == pytest.approx(
        reference_losses("gpt2", **adam), abs=1e-4
    )


def test_program_runs_without_a_compiler_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a job; $(true).json"
    path.write_text(json.dumps({**make_job("llama"), "out_dir": str(tmp_path / "out")}))
    done = subprocess.run(
        [sys.executable, "-m", "amp_ray.training", "--local_rank=0", str(path)],
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "RANK": "0",
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
