"""Slurm and Ray Train around a training program: they start its ranks, one process each.

The runtime of the experiment decides which program it is (`starts.PROGRAMS`).
"""

import json
import re
from dataclasses import replace
from typing import Final

from amp_ray.exports.chosen import Chosen, Export, Program
from amp_ray.exports.our_program import synthetic_program
from amp_ray.exports.scripts import (
    PORT,
    check_ascending,
    check_host_by_host,
    command,
    comment,
    exports,
    places_of,
    python_comment,
    runs_on_cpu,
    without_secret_variables,
)
from amp_ray.exports.starts import PROGRAMS
from amp_ray.trials.launch import slots_by_host

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

FILES = json.loads({files})
PROGRAM = json.loads({program})
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
        for name, text in FILES.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        environment = {{**os.environ, **ENVIRONMENT, "MASTER_PORT": str(port[0])}}
{run}

if __name__ == "__main__":
{start}    trainer = TorchTrainer(
        train_rank,
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=USE_GPU),
        torch_config=TorchConfig(backend="gloo"),  # only for the port: the program has its own
    )
    trainer.fit()
'''

_RUN: Final = """\
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        words = [os.path.join(folder, word) if word in FILES else word for word in PROGRAM]
        subprocess.run([sys.executable, "-u", *words], env=environment, check=True)
"""

_RUN_WITH_RESULT: Final = """\
        program = [sys.executable, "-u", *PROGRAM]
        subprocess.run(program, cwd=folder, env=environment, check=True)
        result = Path(folder, {result})
        report = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {{}}
    ray.train.report({{"iteration_time_s": report.get("iteration_time_s")}})
"""

_FROM_HOME: Final = """\
    home = os.environ.get({home}) or sys.exit("set " {home} " to the folder of " + PROGRAM[0])
    PROGRAM[0] = os.path.join(home, PROGRAM[0])
"""


def slurm_folder(chosen: Chosen) -> Export:
    """Return a batch script for Slurm that starts the program, with the program's files.

    If a hostfile names the nodes, every rank runs on the strategy's own host; otherwise Slurm
    chooses the hosts, which must be alike.

    Raises:
        ValueError: If the program cannot run the strategy, or Slurm cannot place the ranks like
            this.
    """
    program, places = _program(chosen), places_of(chosen, by_scheduler=True)
    hosts = slots_by_host(places)
    check_ascending(hosts, "Slurm", from_zero=True)
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
    files = dict(program.files)
    placing = "--distribution=block"
    first_host = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
    if named:
        first_host = "head -n 1 hosts"
        files["hosts"] = "".join(f"{host}\n" for host, _ in places)
        placing = "--distribution=arbitrary"
        directives += "# hosts has the host of every rank.\nexport SLURM_HOSTFILE=hosts\n"
    use = f"In this folder: sbatch [--partition, --account, --time ...] job.sbatch{_more(program)}"
    script = (
        f"#!/usr/bin/env bash\n{directives}"
        + comment("\n".join((chosen.title, program.head, use, *_needs(program))))
        + "set -euo pipefail\n"
        + exports(chosen, program.variables)
        + f'export MASTER_ADDR="${{MASTER_ADDR:-$({first_host})}}" '
        f'MASTER_PORT="${{MASTER_PORT:-{PORT}}}"\n'
        + f"PROGRAM=(python3 -u {_from_home(program)}{command(program.words)})\n"
        f"srun --ntasks={len(places)} {placing} bash -c '\n"
        "  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n"
        '  exec "$@"\' rank "${PROGRAM[@]}" "$@"\n'
    )
    return Export(files={"job.sbatch": script, **files}, notes=program.notes)


def ray_script(chosen: Chosen) -> Export:
    """Return a program that runs the strategy's ranks as workers of a Ray Train ``TorchTrainer``.

    Raises:
        ValueError: If the program cannot run the strategy, or hosts differ, since Ray chooses them.
    """
    program, places = _program(chosen), places_of(chosen, by_scheduler=True)
    check_host_by_host(places, "Ray Train")
    _check_alike(chosen, set(map(len, slots_by_host(places).values())), "Ray Train")
    lines = (
        chosen.title,
        "For Ray 2.43 or newer with ray[train].",
        program.head,
        f"python {chosen.file_word('train_ray.py')}{_more(program)}",
        *_needs(program),
    )
    run = _RUN_WITH_RESULT.format(result=repr(program.result)) if program.result else _RUN
    start = _FROM_HOME.format(home=repr(program.home)) if program.home else ""
    text = python_comment("\n".join(lines)) + _RAY.format(
        files=repr(json.dumps(program.files)),
        program=repr(json.dumps(program.words)),
        environment=repr(dict(program.variables)),
        num_ranks=len(places),
        use_gpu=not runs_on_cpu(chosen),
        run=run,
        start=f"{start}    PROGRAM += sys.argv[1:]\n",
    )
    return Export(files={"train_ray.py": text}, notes=program.notes)


def _program(chosen: Chosen) -> Program:
    """Return the program of the experiment's runtime, by default ours, with all its variables."""
    _, make = PROGRAMS.get(chosen.experiment.traits.name, (None, synthetic_program))
    program = make(chosen)
    if program.result:
        return program
    variables, missing = without_secret_variables(chosen.experiment.trials.environment)
    return replace(
        program,
        variables={**program.variables, **variables},
        notes=(*program.notes, *missing),
    )


def _more(program: Program) -> str:
    return "" if program.result else " [more flags]"


def _needs(program: Program) -> tuple[str, ...]:
    """Return lines for the head of a script: what the user has to set or add."""
    home = (f"Set {program.home} to the folder of {program.words[0]}, on every host.",)
    notes = () if program.result else program.notes
    return (*(home if program.home else ()), *notes)


def _from_home(program: Program) -> str:
    """Return the shell text of the folder of the program's script; empty for a module."""
    if not program.home:
        return ""
    return f'"${{{program.home}:?the folder of {program.words[0]}}}"/'


def _check_alike(chosen: Chosen, sizes: set[int], launcher: str) -> None:
    """Refuse hosts that differ, if the launcher decides which host is which."""
    if len(chosen.experiment.cluster.device_types) > 1 or len(sizes) > 1:
        raise ValueError(
            f"{launcher} chooses the hosts, and those of this strategy differ: export to slurm "
            "with --hostfile FILE (or cluster.hostfile), which names them, or to deepspeed"
        )
