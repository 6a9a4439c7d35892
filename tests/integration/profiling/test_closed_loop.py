"""Profile, plan and trials in one run of ``experiments/profile_to_trials.py``."""

from pathlib import Path
from statistics import median

import pytest

from .conftest import run_script

pytestmark = pytest.mark.integration

EXPERIMENT = """\
name: tiny
model: {family: gpt2, num_layers: 2, hidden_size: 128, num_heads: 4, sequence_length: 16,
        vocab_size: 61}
cluster:
  nodes:
    - {device: cpu, slots: 4, intra_gbit_per_s: 20, inter_gbit_per_s: 20}
precision: fp32
global_batch_size: 2
search: {micro_batch_sizes: [1]}
trials: {steps: 3, warmup_steps: 1, timeout_s: 600}
"""


def test_the_best_strategies_run_and_stand_beside_their_predictions(tmp_path: Path) -> None:
    options = ["--slots", "2", "--best", "2", "--rounds", "1", "--seconds", "3600"]
    result = run_script("profile_to_trials.py", tmp_path, EXPERIMENT, "e.yaml", *options)
    rows = result["strategies"]
    assert [row["predicted_s"] for row in rows] == sorted(row["predicted_s"] for row in rows)
    for row in rows:
        assert row["tp"] * row["pp"] * row["dp"] == 2
        assert len(row["measured_s"]) == 1
        assert row["error"] == pytest.approx(
            row["predicted_s"] / median(row["measured_s"]) - 1, rel=1e-6
        )
    assert result["median_error"] == pytest.approx(median(abs(row["error"]) for row in rows))
    assert "loss_bytes_per_logit" in result["constants"]
    assert "torch" in result["versions"]
