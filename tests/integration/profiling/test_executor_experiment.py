"""The comparisons of ``experiments/executor.py`` on real ranks, each with one core and thread."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import executor
from profile_to_trials import profiled

from .conftest import run_script

pytestmark = pytest.mark.integration

EXPERIMENT = """\
name: long
model: {family: gpt2, num_layers: 4, hidden_size: 128, num_heads: 2, sequence_length: 512,
        vocab_size: 61}
cluster:
  nodes:
    - {device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}
precision: fp32
runtime: torch
global_batch_size: 1
search: {token_slices: true, slice_granularity: 128, max_tp: 1}
trials: {steps: 2, warmup_steps: 1, timeout_s: 600}
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the profile of layers and slices that two comparisons need."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "e.yaml").write_text(EXPERIMENT, encoding="utf-8")
    profiled(folder / "e.yaml", None, folder, options=["--token-slices"])
    return folder / "profile"


@pytest.fixture
def compared(profile: Path, tmp_path: Path) -> Callable[[executor.Compare], dict[str, Any]]:
    """Return a function that runs one round of a comparison and returns its figures."""

    def run(compare: executor.Compare) -> dict[str, Any]:
        (tmp_path / "long.yaml").write_text(EXPERIMENT, encoding="utf-8")
        shutil.copytree(profile, tmp_path / "profile")
        return compare(tmp_path / "long.yaml", tmp_path, None, 1)

    return run


def test_planned_slices_and_whole_sequences_run_beside_each_other(
    compared: Callable[[executor.Compare], dict[str, Any]],
) -> None:
    # tests/hosts/bench_physics.py checks which is faster, without other work on the processor.
    figures = compared(executor.compare_slices)
    assert figures["predicted_ratio"] >= 1
    assert figures["measured_ratio"] > 0
    for sequences, tokens in figures["token_slices"]:
        assert (sequences, sum(tokens)) == (1, 512)


def test_ranks_execute_a_plan_in_the_order_that_is_predicted(
    compared: Callable[[executor.Compare], dict[str, Any]],
) -> None:
    figures = compared(executor.compare_timelines)
    assert figures["order_identical"]
    assert figures["predicted_s"] > 0
    assert len(figures["measured_s"]) == 1


def test_both_programs_run_the_same_grids(tmp_path: Path) -> None:
    options = ["--experiment", "e.yaml", "--rounds", "1"]
    figures = run_script("executor.py", tmp_path, EXPERIMENT, "runtimes", *options)
    assert [(row["tp"], row["pp"], row["dp"]) for row in figures["grids"]] == [(1, 2, 1)]
    assert all(len(row["torch_s"]) == len(row["deepspeed_s"]) == 1 for row in figures["grids"])
