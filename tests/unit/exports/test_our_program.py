"""Our own program handed over: to DeepSpeed's launcher, Slurm and Ray Train."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.our_program import deepspeed_folder
from amp_ray.exports.reading import read_program
from amp_ray.exports.schedulers import ray_script, slurm_folder
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.training.job import read_job
from support.experiments import MIXED_HOST, small_experiment

GRID = Candidate(options=StageOptions(tp=2, dp=1), pp=2, micro_batch_size=2, num_micro_batches=4)
PLAN = Strategy.uniform(GRID, (0, 4, 9))


def chosen(plan: Strategy = PLAN, experiment: Experiment | None = None) -> Chosen:
    """Choose a strategy on 2 nodes of 2 devices."""
    return Chosen(experiment=experiment or small_experiment(), strategy=plan)


def moved(*placement: int) -> Chosen:
    """Choose the same strategy on devices in another order, of nodes with names."""
    experiment = replace(small_experiment(), names_hosts=True)
    return chosen(replace(PLAN, placement=placement), experiment)


@pytest.mark.parametrize("write", [deepspeed_folder, slurm_folder])
def test_the_job_is_the_strategy(write: Callable[[Chosen], Export]) -> None:
    export = write(chosen())
    record = json.loads(export.files["job.json"])
    assert strategy_from_json(record["strategy"], chosen().experiment.cluster) == PLAN
    assert read_job(record).grid.num_ranks == 4
    assert any("random data" in note for note in export.notes)


@pytest.mark.parametrize("zero", [Zero(stage=2), Zero(stage=3), Zero(stage=3, keeps_weights=True)])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_deepspeed_shares_out_is_exported_and_read_again(zero: Zero, tp: int) -> None:
    grid = replace(GRID, options=StageOptions(tp=tp, dp=4 // tp, zero=zero), pp=1)
    grid = replace(grid, num_micro_batches=tp)
    experiment = small_experiment()
    files = deepspeed_folder(chosen(Strategy.uniform(grid, (0, 9)), experiment)).files
    read = read_job(json.loads(files["job.json"]))
    assert (read.zero_stage, read.grid.keeps_weights) == (zero.stage, zero.keeps_weights)
    record = read_program(files["ds_config.json"], file="ds_config.json", experiment=experiment)
    assert record is not None
    assert (record["tp"], record["pp"], record["dp"]) == (tp, 1, 4 // tp)
    assert record["zero_stage"] == zero.stage
    assert record.get("reshard_after_forward", True) is not zero.keeps_weights


def test_slurm_chooses_hosts_without_names() -> None:
    experiment = replace(small_experiment(), names_hosts=False)
    text = slurm_folder(chosen(experiment=experiment)).files["job.sbatch"]
    assert "--distribution=block" in text
    assert "PROGRAM=(python3 -u -m amp_ray.training" in text
    assert "nodelist" not in text
    with pytest.raises(ValueError, match="host by host"):
        slurm_folder(replace(moved(0, 2, 1, 3), experiment=experiment))


def test_boards_of_two_kinds_in_one_host_are_slots_of_one_host() -> None:
    mixed = replace(small_experiment(MIXED_HOST), names_hosts=True)
    grid = replace(GRID, options=StageOptions(tp=1, dp=1), pp=6)
    files = deepspeed_folder(chosen(Strategy.uniform(grid, (0, 1, 3, 4, 6, 7, 9)), mixed)).files
    assert files["hostfile"] == "big slots=3\nnode1 slots=3\n"
    assert "--include big:0,1,2@node1:0,1,2" in files["launch.sh"]
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in files["launch.sh"]
    assert "CUDA_DEVICE_ORDER" not in deepspeed_folder(chosen()).files["launch.sh"]
    last = replace(mixed, cluster=mixed.cluster.of_hosts(["big"]))
    plan = replace(Strategy.uniform(replace(grid, pp=1), (0, 9)), placement=(2,))
    assert "--include big:2" in deepspeed_folder(chosen(plan, last)).files["launch.sh"]
    with pytest.raises(ValueError, match=r"Slurm takes slots \[0\] of big in turn, not \[2\]"):
        slurm_folder(chosen(plan, last))


def test_what_a_launcher_cannot_place_is_refused() -> None:
    with pytest.raises(ValueError, match="host by host"):
        deepspeed_folder(moved(0, 2, 1, 3))
    with pytest.raises(ValueError, match=r"takes slots \[0, 1\] of node0 in turn, not \[1, 0\]"):
        slurm_folder(moved(1, 0, 2, 3))
    experiment = small_experiment()
    first, second = experiment.cluster.nodes
    other = replace(second, device=replace(second.device, name="other"))
    mixed = replace(experiment, cluster=replace(experiment.cluster, nodes=(first, other)))
    with pytest.raises(ValueError, match="chooses the hosts, and those of this strategy differ"):
        ray_script(chosen(experiment=mixed))


@pytest.mark.parametrize(
    ("runtime", "message"),
    [("megatron", "is another program than ours"), ("torch", "runs without DeepSpeed")],
)
def test_another_program_is_refused(runtime: str, message: str) -> None:
    experiment = replace(small_experiment(), traits=RUNTIMES[runtime])
    with pytest.raises(ValueError, match=message):
        deepspeed_folder(chosen(experiment=experiment))


def test_secrets_are_left_out_and_named() -> None:
    experiment = small_experiment()
    environment = {"NCCL_DEBUG": "a $(id)", "MY_TOKEN": "secret-value"}
    experiment = replace(experiment, trials=replace(experiment.trials, environment=environment))
    for write in (deepspeed_folder, slurm_folder, ray_script):
        export = write(chosen(experiment=experiment))
        assert "secret-value" not in "".join(export.files.values())
        assert any("MY_TOKEN" in note for note in export.notes)
    assert (
        "NCCL_DEBUG='a $(id)'" in deepspeed_folder(chosen(experiment=experiment)).files["launch.sh"]
    )
