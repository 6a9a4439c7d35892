"""The files of ``amp-ray export --to deepspeed`` and ``--to slurm`` run without changes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.our_program import deepspeed_folder
from amp_ray.exports.schedulers import slurm_folder
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of
from support.experiments import experiment_from

from .conftest import DEADLINE_S, REPOSITORY, free_port

pytestmark = pytest.mark.integration

EXPERIMENT = """
name: exported
model: {family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        vocab_size: 61}
cluster:
  hostfile: hosts
  nodes: [{count: 1, device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}]
precision: fp32
global_batch_size: 4
trials: {backend: local, steps: 2, warmup_steps: 1}
"""

SRUN = """#!/bin/bash
shift 2
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" & done
wait
"""


@pytest.mark.parametrize(
    ("write", "script", "runtime"),
    [(deepspeed_folder, "launch.sh", "deepspeed"), (slurm_folder, "job.sbatch", "torch")],
)
def test_an_exported_folder_runs_as_it_stands(
    write: Callable[[Chosen], Export], script: str, runtime: str, tmp_path: Path
) -> None:
    grid = grid_of(pp=2, micro_batch_size=2, num_micro_batches=2)
    plan = Strategy.uniform(grid, (0, 3, 7))
    experiment = experiment_from(
        f"{EXPERIMENT}runtime: {runtime}\n", {"hosts": "127.0.0.1 slots=2\n"}
    )
    for name, text in write(Chosen(experiment=experiment, strategy=plan)).files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "srun").write_text(SRUN, encoding="utf-8")
    (tmp_path / "srun").chmod(0o755)
    programs = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": programs,
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": str(REPOSITORY),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(result["step_s"]) == 3
    assert [stage["layers"] for stage in result["stages"]] == [[0, 3], [3, 7]]
