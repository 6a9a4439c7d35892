"""What ``experiments/executor.py`` compares on real ranks, a core and a thread each."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import run_script

pytestmark = pytest.mark.integration

EXPERIMENT = """\
name: long
model: {family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 2, sequence_length: 512,
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


def compared(folder: Path, what: str, *options: str) -> dict[str, Any]:
    """Run a comparison and return its figures."""
    return run_script("executor.py", folder, EXPERIMENT, what, "--experiment", "e.yaml", *options)


def test_planned_slices_and_whole_sequences_run_beside_each_other(tmp_path: Path) -> None:
    # Which is faster tests/hosts/test_physics.py asks, where other work takes no processor time.
    found = compared(tmp_path, "slices", "--rounds", "1")
    assert found["predicted_ratio"] >= 1
    assert found["measured_ratio"] > 0
    for sequences, tokens in found["token_slices"]:
        assert (sequences, sum(tokens)) == (1, 512)


def test_ranks_execute_a_plan_in_the_order_that_is_predicted(tmp_path: Path) -> None:
    found = compared(tmp_path, "timeline", "--rounds", "1")
    assert found["order_identical"]
    assert found["predicted_s"] > 0
    assert len(found["measured_s"]) == 1


def test_both_programs_run_the_same_grids(tmp_path: Path) -> None:
    found = compared(tmp_path, "runtimes", "--rounds", "1")
    assert [(row["tp"], row["pp"], row["dp"]) for row in found["grids"]] == [(1, 2, 1)]
    assert all(len(row["torch_s"]) == len(row["deepspeed_s"]) == 1 for row in found["grids"])
