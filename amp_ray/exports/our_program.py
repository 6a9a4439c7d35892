"""Exports that run our training program, and DeepSpeed's configuration, written and read.

DeepSpeed's launcher, Slurm or Ray Train starts the program. It trains on random data and writes
``result.json``; it shows that a plan runs, and measures a step. Real training needs the user's
program, whose ranks the same files start on the right hosts. DeepSpeed's configuration is written
here for our program, and read as a strategy for any program.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from amp_ray.errors import InputError, shown
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.scripts import (
    PORT,
    array,
    check_host_by_host,
    command,
    comment,
    exports,
    header,
    master_address,
    places_of,
    python_comment,
    reached,
    runs_on_cpu,
    torchrun_script,
)
from amp_ray.redaction import NOT_KEPT, without_secrets
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.trials.command import CONFIG_FILE, HOSTFILE, trial_launch
from amp_ray.trials.job_file import JOB_FILE, PROGRAM
from amp_ray.trials.launch import FOLDER, Launch, slots_by_host
from amp_ray.trials.runtime_strategy import PLAIN_TORCH

_TRIAL_ID: Final = "export"

_IS_SYNTHETIC: Final = (
    "It runs amp_ray's own program on random data and writes result.json; hosts need\n"
    "pip install 'amp-ray[training]'. For training, exchange the program and keep the launch."
)

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+")  # names that Slurm takes without quotes

_RAY: Final = '''
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

JOB = json.loads({job})
ENVIRONMENT = {environment}
NUM_RANKS = {num_ranks}
USE_GPU = {use_gpu}


def free_port():
    """Return a port that the kernel gives away now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def train_rank():
    """Run one rank: Ray Train has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR."""
    import torch.distributed as dist

    port = [free_port() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(port)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.json").write_text(json.dumps(JOB), encoding="utf-8")
        environment = {{**os.environ, **ENVIRONMENT, "MASTER_PORT": str(port[0])}}
        program = [sys.executable, "-u", "-m", "{program}", "job.json"]
        subprocess.run(program, cwd=folder, env=environment, check=True)
        result = Path(folder, "result.json")
        report = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {{}}
    ray.train.report({{"iteration_time_s": report.get("iteration_time_s")}})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_rank,
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=USE_GPU),
        torch_config=TorchConfig(backend="gloo"),  # only for the port: the program has its own
    )
    trainer.fit()
'''


def deepspeed_folder(chosen: Chosen) -> Export:
    """Return DeepSpeed's configuration, a hostfile and a script that starts our program.

    Raises:
        ValueError: If our program cannot run the strategy under DeepSpeed, or DeepSpeed's launcher
            cannot place the ranks like this.
    """
    if chosen.experiment.traits.name == PLAIN_TORCH:
        message = "runtime torch runs without DeepSpeed: set runtime=deepspeed, or export to slurm"
        raise ValueError(message)
    launch = _launch(chosen, by_scheduler=False)
    config = json.loads(launch.files[CONFIG_FILE])
    config["pipeline"]["stages"] = chosen.strategy.pp
    places = places_of(chosen)
    check_host_by_host(places, "DeepSpeed's launcher")
    hosts = slots_by_host(places)
    _check_ascending(hosts, "DeepSpeed's launcher")
    if any(":" in host for host in hosts):
        raise ValueError("DeepSpeed's launcher takes no IPv6 address: name the hosts")
    included = [f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items()]
    words = (
        *("deepspeed", "--hostfile", HOSTFILE, "--no_ssh", "--no_local_rank"),
        *("--include", "@".join(included)),
    )
    experiment, names = reached(chosen.experiment)
    sizes = Counter[str]()
    for name, node in zip(names, experiment.cluster.nodes, strict=True):
        sizes[name] += node.num_slots
    script = (
        header(chosen, _IS_SYNTHETIC, "On host i: NODE_RANK=i bash launch.sh")
        + 'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"\n'
        + exports(_variables(launch))
        + master_address(hosts)
        + "exec "
        + command(words)
        + f' \\\n  --node_rank "${{NODE_RANK:-0}}" '
        f'--master_addr "$MASTER_ADDR" '
        f'--master_port "${{MASTER_PORT:-{PORT}}}" \\\n  --module {PROGRAM} {JOB_FILE}\n'
    )
    files = {
        "launch.sh": script,
        CONFIG_FILE: json.dumps(config, indent=1) + "\n",
        HOSTFILE: "".join(f"{host} slots={sizes[host]}\n" for host in hosts),
        JOB_FILE: launch.files[JOB_FILE].decode(),
    }
    note = f"{CONFIG_FILE} and {HOSTFILE} are for any program"
    return Export(files=files, notes=(note, *_notes(launch)))


def read_ds_config(
    config: Mapping[str, Any], num_devices: int, num_parameters: int
) -> dict[str, Any]:
    """Return the settings of a configuration, as keys of a STRATEGY and of the step.

    It has tp as ``tensor_parallel.autotp_size`` and pp as ``pipeline.stages``; if one is missing,
    it follows from the number of devices. It has no cuts, so the solver chooses them.

    Args:
        config: The configuration as a JSON object.
        num_devices: Number of devices of the run.
        num_parameters: Number of the model's parameters. With ZeRO-3, weights remain gathered if
            DeepSpeed may reuse them after that many parameters.

    Raises:
        ValueError: If the batch sizes contradict each other, or tp and pp do not follow.
    """
    micro = _count(config, "train_micro_batch_size_per_gpu", 1, low=1)
    steps = _count(config, "gradient_accumulation_steps", 1, low=1)
    batch = _count(config, "train_batch_size", micro * steps, low=1)
    dp, rest = divmod(batch, micro * steps)
    per_replica, idle = divmod(num_devices, dp or 1)
    if rest or idle or not dp:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x a dp that divides {num_devices} devices"
        )
    tp = _count(config.get("tensor_parallel", {}), "autotp_size", 0)
    pp = _count(config.get("pipeline", {}), "stages", 0)
    if per_replica > 1 and not tp and not pp:
        raise ValueError(
            f"{num_devices} devices, dp {dp}: whether the other {per_replica} are tp or pp the "
            'configuration does not say; add "tensor_parallel": {"autotp_size": N} or "pipeline": '
            '{"stages": N}'
        )
    tp = tp or max(1, per_replica // (pp or 1))
    pp = pp or max(1, per_replica // tp)
    if tp * pp != per_replica:
        raise ValueError(f"tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp} devices, not {num_devices}")
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    record = {
        "tp": tp,
        "pp": pp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "zero_stage": zero.get("stage", 0),
    }
    distance = zero.get("stage3_max_reuse_distance")
    if record["zero_stage"] == MOST_ZERO_STAGE and isinstance(distance, int | float):
        record["reshard_after_forward"] = distance < num_parameters / tp
    return record


def _count(config: object, key: str, default: int, *, low: int = 0) -> int:
    """Return a count; ``auto`` or a missing key gives the default."""
    value = config.get(key, default) if isinstance(config, Mapping) else default
    if value == "auto":
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 10**9:
        raise ValueError(f"{key}: found {shown(value)}; expected a count")
    return value


def slurm_folder(chosen: Chosen) -> Export:
    """Return a batch script for Slurm that starts our program, with its job file.

    If a hostfile names the nodes, every rank runs on the strategy's own host; otherwise Slurm
    chooses the hosts, which must be alike.

    Raises:
        ValueError: If our program cannot run the strategy, or Slurm cannot place the ranks like
            this.
    """
    launch, places = _launch(chosen, by_scheduler=True), places_of(chosen, by_scheduler=True)
    hosts = slots_by_host(places)
    _check_ascending(hosts, "Slurm", from_zero=True)
    named = chosen.experiment.names_hosts
    sizes = {len(slots) for slots in hosts.values()}
    if not named:
        check_host_by_host(places, "Slurm")
        _check_alike(chosen, sizes, "Slurm")
    wrong = [host for host in hosts if not _PLAIN.fullmatch(host)]
    if wrong:
        raise ValueError(f"host {wrong[0]!r} is no name that Slurm takes")
    name = "-".join(_PLAIN.findall(chosen.experiment.name)) or "amp-ray"
    gpus = "" if runs_on_cpu(chosen) else f"#SBATCH --gpus-per-node={max(sizes)}\n"
    nodes = f"#SBATCH --nodelist={','.join(hosts)}\n" if named else ""
    directives = (
        f"#SBATCH --job-name={name}\n#SBATCH --nodes={len(hosts)}\n#SBATCH --ntasks={len(places)}\n"
        f"#SBATCH --ntasks-per-node={max(sizes)}\n{gpus}{nodes}"
    )
    files = {JOB_FILE: launch.files[JOB_FILE].decode()}
    placing = "--distribution=block"
    first_host = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
    if named:
        first_host = "head -n 1 hosts"
        files["hosts"] = "".join(f"{host}\n" for host, _ in places)
        placing = "--distribution=arbitrary"
        directives += "# hosts has the host of every rank.\nexport SLURM_HOSTFILE=hosts\n"
    script = (
        f"#!/usr/bin/env bash\n{directives}"
        + comment(f"{chosen.title}\n{_IS_SYNTHETIC}\nsbatch job.sbatch, in this folder")
        + "set -euo pipefail\n"
        + exports(_variables(launch))
        + f'export MASTER_ADDR="${{MASTER_ADDR:-$({first_host})}}" '
        f'MASTER_PORT="${{MASTER_PORT:-{PORT}}}"\n'
        + array("PROGRAM", ("python3", "-u", "-m", PROGRAM, JOB_FILE))
        + f"srun --ntasks={len(places)} {placing} bash -c '\n"
        "  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n"
        '  exec "$@"\' rank "${PROGRAM[@]}"\n'
    )
    return Export(files={"job.sbatch": script, **files}, notes=_notes(launch))


def torchrun_folder(chosen: Chosen) -> Export:
    """Return a script that starts our program with ``torchrun``, and its job file.

    Raises:
        ValueError: If our program cannot run the strategy, or ranks of a host are not consecutive.
    """
    launch = _launch(chosen, by_scheduler=True)
    script = torchrun_script(chosen, ("-m", PROGRAM, JOB_FILE), _IS_SYNTHETIC)
    files = {"torchrun.sh": script, JOB_FILE: launch.files[JOB_FILE].decode()}
    return Export(files=files, notes=_notes(launch))


def ray_script(chosen: Chosen) -> Export:
    """Return a program that runs the strategy's ranks as workers of a Ray Train ``TorchTrainer``.

    Raises:
        ValueError: If our program cannot run the strategy, or hosts differ, since Ray chooses them.
    """
    launch, places = _launch(chosen, by_scheduler=True), places_of(chosen, by_scheduler=True)
    check_host_by_host(places, "Ray Train")
    _check_alike(chosen, set(map(len, slots_by_host(places).values())), "Ray Train")
    job = json.loads(launch.files[JOB_FILE])
    head = f"{chosen.title}\nFor Ray 2.43 or newer with ray[train].\n{_IS_SYNTHETIC}"
    text = python_comment(head) + _RAY.format(
        job=repr(json.dumps(job)),
        environment=repr(_variables(launch)),
        num_ranks=len(places),
        use_gpu=not runs_on_cpu(chosen),
        program=PROGRAM,
    )
    return Export(files={"train_ray.py": text}, notes=_notes(launch))


def _launch(chosen: Chosen, *, by_scheduler: bool) -> Launch:
    """Return the files of a trial of the strategy, without the program's sources.

    A scheduler starts rank by rank, DeepSpeed's launcher node by node.
    """
    experiment, hosts = reached(chosen.experiment, by_scheduler=by_scheduler)
    launcher: Any = "agent" if by_scheduler else "deepspeed"
    trials = replace(experiment.trials, launcher=launcher, program=None)
    try:
        return trial_launch(
            replace(experiment, trials=trials),
            chosen.strategy,
            trial_id=_TRIAL_ID,
            hosts=hosts,
            files={},
            python="python3",
        )
    except InputError as error:
        raise ValueError(str(error)) from None


def _variables(launch: Launch) -> dict[str, str]:
    """Return the variables of every rank, except paths in a trial's folder and likely secrets."""
    left_out = _secret(launch)
    return {
        name: value
        for name, value in launch.environment.items()
        if FOLDER not in value and name not in left_out
    }


def _secret(launch: Launch) -> list[str]:
    """Return the names of variables whose values are left out, or were left out before."""
    kept = without_secrets(launch.environment)
    return [name for name, text in kept.items() if NOT_KEPT in text]


def _notes(launch: Launch) -> tuple[str, ...]:
    """Describe the purpose of the program, and the variables that the user must set."""
    secret = _secret(launch)
    missing = (f"not written, since it looks secret: {', '.join(secret)}",) if secret else ()
    return (_IS_SYNTHETIC.replace("\n", " "), *missing)


def _check_ascending(
    hosts: Mapping[str, Sequence[int]], launcher: str, *, from_zero: bool = False
) -> None:
    """Refuse slots of a host in an order that the launcher would not keep."""
    for host, slots in hosts.items():
        expected = list(range(len(slots))) if from_zero else sorted(slots)
        if list(slots) != expected:
            message = f"{launcher} takes slots {expected} of {host} in turn, not {list(slots)}"
            raise ValueError(message)


def _check_alike(chosen: Chosen, sizes: set[int], launcher: str) -> None:
    """Refuse hosts that differ, if the launcher decides which host is which."""
    if len(chosen.experiment.cluster.device_types) > 1 or len(sizes) > 1:
        raise ValueError(
            f"{launcher} chooses the hosts, and those of this strategy differ: export to slurm "
            "with --hostfile FILE (or cluster.hostfile), which names them, or to deepspeed"
        )
