"""Slurm and Ray Train around Megatron-LM, nanotron and torchtitan."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from amp_ray.exports.chosen import Chosen
from amp_ray.exports.megatron import megatron_program
from amp_ray.exports.schedulers import ray_script, slurm_folder
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from support.experiments import small_experiment

GRID = Candidate(options=StageOptions(tp=2, dp=1), pp=2, micro_batch_size=1, num_micro_batches=8)
PLAN = Strategy.uniform(GRID, (0, 3, 9))


def experiment(runtime: str) -> Experiment:
    """Build llama on 2 nodes of 2 A100."""
    return small_experiment(
        ("device: T4", "device: A100-40"),
        ("family: gpt2", "family: llama"),
        (
            "global_batch_size: 8\n",
            f"global_batch_size: 8\nprecision: bf16\nruntime: {runtime}\n",
        ),
    )


def chosen(runtime: str = "megatron-core", plan: Strategy = PLAN) -> Chosen:
    """Choose a strategy on hosts that the scheduler chooses."""
    return Chosen(experiment=experiment(runtime), strategy=plan)


def named(runtime: str = "megatron-core", *placement: int) -> Chosen:
    """Choose the strategy on hosts with names."""
    plan = replace(PLAN, placement=placement) if placement else PLAN
    return Chosen(experiment=replace(experiment(runtime), names_hosts=True), strategy=plan)


SRUN = """#!/bin/bash
shift 2
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_NTASKS=4 "$@" || exit
done
"""
PYTHON = """#!/bin/bash
printf '%s|' "$RANK" "$LOCAL_RANK" "$WORLD_SIZE" "$MASTER_ADDR" "$MASTER_PORT" \
  "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"
echo
"""


def batch(
    folder: Path, files: Mapping[str, str], *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a batch script with stand-ins for Slurm and the interpreter."""
    scontrol = '#!/bin/bash\n[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"\n'
    programs = {"srun": SRUN, "python3": PYTHON, "scontrol": scontrol}
    for name, text in {**files, **programs}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    subprocess.run(["/bin/bash", "-n", "job.sbatch"], cwd=folder, check=True, timeout=60)
    return subprocess.run(
        ["/bin/bash", "job.sbatch", *more],
        cwd=folder,
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "gpu[3-4]",
            **variables,
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_slurm_starts_every_rank_of_megatron(tmp_path: Path) -> None:
    files = slurm_folder(chosen()).files
    text = files["job.sbatch"]
    assert "#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in text
    done = batch(tmp_path, files, "--data-path", "a b", MEGATRON_LM="/opt/$(x) lm")
    assert done.returncode == 0, done.stderr
    rows = [line.rstrip("|").split("|") for line in done.stdout.splitlines()]
    flags = megatron_program(chosen()).words[1:]
    for rank, row in enumerate(rows):
        assert row[:6] == [str(rank), str(rank % 2), "4", "gpu3", "29500", "1"]
        assert row[6:] == ["-u", "/opt/$(x) lm/pretrain_gpt.py", *flags, "--data-path", "a b"]
    assert len(rows) == 4


@pytest.mark.parametrize("runtime", ["megatron-lm-2022", "megatron"])
def test_slurm_starts_megatron_for_older_runtimes(runtime: str) -> None:
    even = Strategy.uniform(GRID, (0, 4, 9))
    text = slurm_folder(chosen(runtime, even)).files["job.sbatch"]
    assert "pretrain_gpt.py" in text
    assert "--tensor-model-parallel-size 2" in text


def test_slurm_starts_nanotron_with_its_configuration(tmp_path: Path) -> None:
    export = slurm_folder(chosen("nanotron", Strategy.uniform(GRID, (0, 5, 9))))
    assert yaml.safe_load(export.files["nanotron.yaml"])["parallelism"]["pp"] == 2
    done = batch(tmp_path, export.files, NANOTRON="/opt/nanotron")
    [last] = [line for line in done.stdout.splitlines() if line.startswith("3|")]
    words = "-u|/opt/nanotron/run_train.py|--config-file|nanotron.yaml|"
    assert last == f"3|1|4|gpu3|29500|1|{words}"


def test_slurm_ends_without_the_folder_of_megatron(tmp_path: Path) -> None:
    done = batch(tmp_path, slurm_folder(chosen()).files)
    assert done.returncode != 0
    assert "MEGATRON_LM: the folder of pretrain_gpt.py" in done.stderr


def test_slurm_starts_torchtitan_with_its_configuration(tmp_path: Path) -> None:
    plan = Strategy.uniform(
        replace(GRID, options=StageOptions(tp=1, dp=2, zero=Zero(stage=3)), num_micro_batches=4),
        (0, 3, 9),
    )
    export = slurm_folder(chosen("fsdp2", plan))
    assert '"layers.1"' in export.files["amp_ray_titan.py"].replace("'", '"')
    done = batch(tmp_path, export.files, "--training.steps", "9")
    [last] = [line for line in done.stdout.splitlines() if line.startswith("3|")]
    words = "-m|torchtitan.train|--module|amp_ray_titan|--config|planned|--training.steps|9|"
    assert last.endswith(f"|-u|{words}")


def test_named_hosts_get_their_ranks_in_any_order(tmp_path: Path) -> None:
    files = slurm_folder(named("megatron-core", 0, 2, 1, 3)).files
    assert files["hosts"].split() == ["node0", "node1", "node0", "node1"]
    assert "#SBATCH --nodelist=node0,node1\n" in files["job.sbatch"]
    assert "--distribution=arbitrary" in files["job.sbatch"]
    done = batch(tmp_path, files, MEGATRON_LM="/lm")
    assert "0|0|4|node0|29500|" in done.stdout


RAY = {
    "ray/__init__.py": "",
    "ray/train/__init__.py": "ScalingConfig = dict\n",
    "ray/train/torch.py": (
        "TorchConfig = dict\n\nclass TorchTrainer:\n"
        "    def __init__(self, train, **_):\n        self.fit = train\n"
    ),
    "torch/__init__.py": "",
    "torch/distributed.py": (
        "def get_rank():\n    return 0\n\ndef broadcast_object_list(_):\n    pass\n"
    ),
    "torchtitan/__init__.py": "",
}
SHOW = """import json, os, sys
print(json.dumps([sys.argv, os.environ["NCCL_DEBUG"], int(os.environ["MASTER_PORT"]) > 0]))
"""


def run_ray(
    folder: Path, text: str, *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program for Ray Train with stand-ins for Ray, torch and the training programs."""
    programs = ("torchtitan/train.py", "lm/pretrain_gpt.py", "nanotron/run_train.py")
    files = {**RAY, "train_ray.py": text, **dict.fromkeys(programs, SHOW)}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "train_ray.py", *more],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def with_variables(source: Chosen) -> Chosen:
    """Add variables to the trials, one of them secret."""
    environment = {"NCCL_DEBUG": "a '$(id)", "HF_TOKEN": "planted"}
    base = source.experiment
    return replace(
        source,
        experiment=replace(base, trials=replace(base.trials, environment=environment)),
    )


@pytest.mark.parametrize("runtime", ["megatron-core", "fsdp2"])
def test_ray_runs_the_program_of_the_runtime(runtime: str, tmp_path: Path) -> None:
    plan = PLAN
    if runtime == "fsdp2":
        options = StageOptions(tp=1, dp=4, zero=Zero(stage=3))
        plan = Strategy.uniform(
            Candidate(options=options, pp=1, micro_batch_size=1, num_micro_batches=2), (0, 9)
        )
    export = ray_script(with_variables(chosen(runtime, plan)))
    [text] = export.files.values()
    assert "planted" not in text
    assert any("HF_TOKEN" in note for note in export.notes)
    lm = tmp_path / "lm"
    done = run_ray(tmp_path, text, "--lr", "a b", MEGATRON_LM=str(lm))
    assert done.returncode == 0, done.stderr
    argv, debug, has_port = json.loads(done.stdout.splitlines()[-1])
    assert (debug, has_port) == ("a '$(id)", True)
    assert argv[-2:] == ["--lr", "a b"]
    if runtime == "fsdp2":
        assert argv[1:5] == ["--module", "amp_ray_titan", "--config", "planned"]
    else:
        assert argv[0] == str(lm / "pretrain_gpt.py")
        assert tuple(argv[1:-2]) == megatron_program(chosen()).words[1:]


def test_ray_names_the_configuration_where_it_wrote_it(tmp_path: Path) -> None:
    plan = Strategy.uniform(GRID, (0, 5, 9))
    [text] = ray_script(with_variables(chosen("nanotron", plan))).files.values()
    done = run_ray(tmp_path, text, NANOTRON=str(tmp_path / "nanotron"))
    argv, *_ = json.loads(done.stdout.splitlines()[-1])
    assert argv[:2] == [str(tmp_path / "nanotron/run_train.py"), "--config-file"]
    assert Path(argv[2]).is_absolute()
    assert Path(argv[2]).name == "nanotron.yaml"


def test_ray_ends_without_the_folder_of_megatron(tmp_path: Path) -> None:
    [text] = ray_script(with_variables(chosen())).files.values()
    done = run_ray(tmp_path, text)
    assert done.returncode == 1
    assert done.stderr == "set MEGATRON_LM to the folder of pretrain_gpt.py\n"


def test_one_connection_where_megatron_orders_kernels_by_it() -> None:
    """Tensor parallelism needs it; FSDP of Megatron wants more than one."""
    for options, is_set in (
        (StageOptions(tp=2, dp=2), True),
        (StageOptions(tp=1, dp=4), False),
        (StageOptions(tp=2, dp=2, zero=Zero(stage=3)), False),
    ):
        grid = Candidate(
            options=options, pp=1, micro_batch_size=1, num_micro_batches=8 // options.dp
        )
        variables = megatron_program(chosen(plan=Strategy.uniform(grid, (0, 9)))).variables
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in variables) is is_set
