"""The number of processes that a script starts, for every launcher."""

import pytest

from amp_ray.errors import InputError
from amp_ray.exports.launchers import batch_variables
from amp_ray.exports.reading import read_program
from amp_ray.inputs.experiment import Experiment
from support.experiments import small_experiment

FLAGS = "--micro-batch-size 1 --pipeline-model-parallel-size 2"
TITAN = "./run_train.sh --parallelism.pipeline_parallel_degree 2"


def experiment() -> Experiment:
    """Build llama with 6 blocks on 2 nodes of 2 A100."""
    keys = "global_batch_size: 8\nruntime: megatron-core\nprecision: bf16\n"
    return small_experiment(
        ("device: T4", "device: A100-40"),
        ("family: gpt2", "family: llama"),
        ("global_batch_size: 8\n", keys),
    )


def read(script: str) -> dict[str, object]:
    """Return the strategy of a script."""
    record = read_program(f"{script}\n", file="run.sh", experiment=experiment())
    assert record is not None
    return record


STATED = [
    ("torchrun --nnodes 4 --nproc_per_node=8 {}", 32),
    ("torchrun --nproc-per-node 8 {}", 8),
    ("python -m torch.distributed.run --nnodes=4 --nproc-per-node=8 {}", 32),
    ("deepspeed --num_nodes 4 --num_gpus 8 {}", 32),
    ("accelerate launch --num_machines 4 --num_processes 32 {}", 32),
    ("/usr/bin/mpirun -np 16 -H a:8,b:8 {}", 16),
    ("mpiexec -n 16 {}", 16),
    ("mpirun -H a:8,b:8 {}", 16),
    ("srun -N 4 --ntasks-per-node=8 {}", 32),
    ("srun -N4 -n32 {}", 32),
    ("srun --ntasks 32 {}", 32),
    ("srun -n 32 bash -c '{}'", 32),
    ("srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 {}", 32),
    ("#SBATCH -n 32\n#SBATCH --gpus-per-task=1\nsrun {}", 32),
    ("#SBATCH -N 4  # nodes\n#SBATCH --ntasks-per-node 8\nsrun {}", 32),
    ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=a100:8\nsrun {}", 32),
    ("#SBATCH -N 4\nN=$SLURM_JOB_NUM_NODES\ntorchrun --nnodes=$N --nproc_per_node=8 {}", 32),
    ("#SBATCH -N 4\n#SBATCH --gres=gpu:8\ntorchrun --nnodes=$SLURM_NNODES {}", 32),
    ("#SBATCH -N 4\ntorchrun --nnodes=${{SLURM_NNODES:-1}} --nproc_per_node=8 {}", 32),
    ("sbatch -N 4 --ntasks-per-node=8 --wrap 'srun {}'", 32),
    ("NNODES=4 NPROC_PER_NODE=8 bash {}", 32),
    ("env NNODES=4 NPROC_PER_NODE=8 {}", 32),
    ("{} trainer.num_nodes=4 trainer.devices=8", 32),
    ("{} trainer.nnodes=4 trainer.n_gpus_per_node=8", 32),
]


@pytest.mark.parametrize(("script", "world"), STATED)
def test_more_processes_than_devices_are_refused(script: str, world: int) -> None:
    with pytest.raises(InputError, match=rf"run.sh:[1-3]: .* = {world} processes; the experiment"):
        read(script.format(f"python pretrain_gpt.py {FLAGS}"))


@pytest.mark.parametrize(
    "script",
    [
        "#SBATCH -N 1 --ntasks-per-node=1 --gpus-per-node=4\nsrun torchrun --nproc_per_node=4 {}",
        "srun --ntasks 4 {}",
        "srun -n $N {}",
        "mpirun -npernode 8 {}",
        "torchrun --nnodes $N --nproc-per-node 8 {}",
        "torchrun --nnodes 1:4 --nproc-per-node 8 {}",
        "docker run --gpus 8 image {}",
        "#SBATCH -n 1 --gpus-per-node=2 -N 2\n{}",
    ],
)
def test_as_many_processes_as_devices_or_an_unknown_number_are_read(script: str) -> None:
    record = read(script.format(f"python pretrain_gpt.py {FLAGS}"))
    assert (record["pp"], record["dp"]) == (2, 2)


def test_branches_with_other_numbers_are_refused() -> None:
    script = f"if [ $A ]; then B='--nnodes 2'; fi\ntorchrun --nproc-per-node 2 $B x.py {FLAGS}"
    with pytest.raises(
        InputError, match=r"run\.sh:1: the number of processes is 2 or 4, by the con"
    ):
        read(script)


def test_torchtitans_script_is_told_processes_and_a_base() -> None:
    with pytest.raises(InputError, match=r"run\.sh:1: NGPU 16 = 16 processes"):
        read(f"NGPU=16 {TITAN}")
    with pytest.raises(InputError, match="CONFIG: 'llama3_70b' has 80 layers of width 8192"):
        read(f"MODULE=llama3 CONFIG=llama3_70b {TITAN}")
    with pytest.raises(InputError, match="config: 'llama3_70b' has 80 layers of width 8192"):
        read(f"{TITAN} --config llama3_70b")
    for variable in ("CONFIG_FILE", "CONFIG"):
        text = str(read(f"{variable}=./mine.toml {TITAN}")["not_read"])
        assert f"names=('{variable}',), why='it holds more of the run" in text


def test_a_file_that_a_launcher_reads_is_named() -> None:
    record = read(f"accelerate launch --config_file a.yaml x.py {FLAGS}")
    assert "names=('--config_file',), why='it holds more of the run" in str(record["not_read"])


def test_variables_of_slurm_are_those_of_its_directives() -> None:
    variables = batch_variables("#SBATCH --nodes=2 --ntasks-per-node 4\n# SBATCH -n 3\n")
    assert variables["SLURM_NNODES"] == "2"
    assert variables["SLURM_NTASKS_PER_NODE"] == "4"
    assert "SLURM_NTASKS" not in variables
