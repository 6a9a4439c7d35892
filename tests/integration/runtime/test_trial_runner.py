"""Real training on this machine, which acts as two nodes of two CPU devices each."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.hosts.host import LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.program_files import source_files
from amp_ray.runtime.study.pool import TrialRunner
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.command import WARM_MODULES
from amp_ray.trials.job_file import ds_config, shape_to_json
from amp_ray.trials.outcome import Crashed, Measured, outcome_from_json
from support.experiments import experiment_from
from support.losses import TOLERANCE, largest_difference
from support.trial_runs import Trials, were_warm
from support.waiting import HANG_GUARD_S, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (find_spec("torch") and find_spec("deepspeed")),
        reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
    ),
]

TEXT = """\
name: tiny
model: {family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        vocab_size: 61}
cluster:
  nodes:
    - {count: 2, device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 20}
precision: fp32
optimizer: sgd
global_batch_size: 8
trials: {backend: local, steps: 5, warmup_steps: 2, timeout_s: 600}
"""
EXPERIMENT = experiment_from(TEXT)
ALONE = Candidate(micro_batch_size=8, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1)
CROSSED = Candidate(micro_batch_size=2, options=StageOptions(tp=2, dp=1), pp=2, num_micro_batches=4)
REFERENCE = Strategy.uniform(ALONE, (0, 7))
STRATEGY = Strategy.uniform(CROSSED, (0, 2, 7), (3, 0, 1, 2))


def make(folder: Path, experiment: Experiment = EXPERIMENT) -> Trials:
    settings = AgentSettings(base=str(folder / "base"), grace_s=0.3)
    return Trials(folder, TrialRunner(experiment, 0, LocalHost, settings))


def with_trials(**changes: Any) -> Experiment:  # noqa: ANN401 - TrialSettings' own
    return replace(EXPERIMENT, trials=replace(EXPERIMENT.trials, **changes))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Warm processes for all tests of this file; checks at the end that no file is left."""
    runs = make(tmp_path_factory.mktemp("trials"))
    yield runs
    runs.runner.close()
    assert [*(runs.folder / "base").iterdir()] == []


@pytest.fixture(scope="module")
def losses(trials: Trials) -> list[float]:
    """Return the losses of training on a single rank."""
    return trials.losses(REFERENCE)


def test_a_placed_pipeline_trains_what_one_rank_does(trials: Trials, losses: list[float]) -> None:
    assert largest_difference(trials.losses(STRATEGY), losses) < TOLERANCE
    record = json.loads((trials.last / "outcome.json").read_text(encoding="utf-8"))
    outcome = outcome_from_json(record)
    assert isinstance(outcome, Measured)
    assert len(outcome.step_time_s) == 7
    assert outcome.num_warmup_steps >= 2
    assert len(outcome.peak_memory_bytes) == 2
    assert were_warm(trials.last) == [True] * 4


def test_training_moves_the_losses(losses: list[float]) -> None:
    """If the losses were constant, equal losses would prove nothing."""
    assert max(losses) - min(losses) > 1000 * TOLERANCE


def test_deepspeeds_launcher_starts_the_same_training(losses: list[float], tmp_path: Path) -> None:
    runs = make(tmp_path, with_trials(launcher="deepspeed"))
    assert largest_difference(runs.losses(STRATEGY), losses) < TOLERANCE
    assert len(were_warm(runs.last)) == 2
    runs.runner.close()


@pytest.mark.parametrize("launcher", ["agent", "deepspeed"])
def test_an_interpreter_without_torch_is_told_with_what_to_do(
    tmp_path: Path, launcher: str
) -> None:
    python = tmp_path / "bare python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="ascii")
    python.chmod(0o755)
    runs = make(tmp_path, with_trials(python=str(python), launcher=launcher))
    outcome = runs.run(STRATEGY)
    runs.runner.close()
    assert isinstance(outcome, Crashed)
    assert "No module named" in outcome.reason
    assert "trials.python" in outcome.reason
    assert were_warm(runs.last) == [False] * (4 if launcher == "agent" else 2)


def test_what_a_dead_driver_has_left_is_swept_and_nothing_else(
    trials: Trials, tmp_path: Path
) -> None:
    base = trials.folder / "base"
    mine, others = base / "amp-ray-study-3-0a1b2c", base / "amp-ray-study-31-0a1b2c"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = []
    for folder in (mine, others):
        folder.mkdir(parents=True)
        processes.append(subprocess.Popen(sleep, env={"AMP_RAY_FOLDER": str(folder)}))
    lost, alive = processes
    wait_for(lambda: b"AMP_RAY_FOLDER" in Path(f"/proc/{lost.pid}/environ").read_bytes())
    assert trials.runner.sweep(["study-3"]) == []
    assert lost.wait(HANG_GUARD_S) != 0
    assert alive.poll() is None
    assert (mine.exists(), others.exists()) == (False, True)
    alive.kill()
    alive.wait()
    others.rmdir()


def test_the_files_beside_the_job_say_what_deepspeed_is_told() -> None:
    from amp_ray.training.job import read_job  # noqa: PLC0415 - torch, where it is installed
    from amp_ray.training.pipeline import deepspeed_config  # noqa: PLC0415

    record = {
        "trial_id": "t",
        "out_dir": ".",
        "model": shape_to_json(EXPERIMENT.model.shape),
        "strategy": {
            "tp": 2,
            "dp": 1,
            "pp": 2,
            "micro_batch_size": 2,
            "num_micro_batches": 4,
            "bounds": [0, 2, 7],
        },
        "global_batch_size": 8,
        "steps": 1,
    }
    config = deepspeed_config(read_job(record), [1])
    config.pop("steps_per_print")
    config["zero_optimization"].pop("reduce_bucket_size")
    assert config.items() <= ds_config(EXPERIMENT, STRATEGY).items()


def test_warm_processes_import_all_that_training_needs_of_others(tmp_path: Path) -> None:
    for name, content in source_files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    program = f"""
import importlib, sys
for name in {WARM_MODULES!r}:
    importlib.import_module(name)
before = set(sys.modules)
importlib.import_module("amp_ray.training.loop")
sys.exit(", ".join(name for name in set(sys.modules) - before if not name.startswith("amp_ray")))
"""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.splitlines()[-1:] in ([], [""]), ended.stderr
