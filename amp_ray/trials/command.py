"""Launch of a strategy with our training program: job file, commands and environment."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.job_file import (
    ENVIRONMENT,
    JOB_FILE,
    NO_CLIPPING,
    PROGRAM,
    THREADS_VARIABLE,
    ds_config,
    shape_to_json,
    slices_transfers,
    to_json,
    torch_device,
)
from amp_ray.trials.launch import (
    MASTER_ADDRESS,
    MASTER_PORT,
    RESULT_FILE,
    TIMELINE_FILE,
    Launch,
    Place,
    RankCommand,
    WarmUp,
    hostfile_text,
    node_commands,
    placement,
    rank_commands,
    slots_by_host,
)
from amp_ray.trials.own_program.metrics import LogReader, read_logs
from amp_ray.trials.own_program.program import program_launch, program_problem, program_reader
from amp_ray.trials.result import Measurement, Reader, read_result
from amp_ray.trials.runtime_strategy import PLAIN_TORCH, runtime_strategy, why_not_launchable
from amp_ray.trials.steps import check_total
from amp_ray.trials.timeline import read_timeline

LAUNCHER_MODULE: Final = "deepspeed.launcher.launch"


def deepspeed_commands(
    program: Sequence[str], placement: Sequence[Place]
) -> tuple[RankCommand, ...]:
    """Return one command of DeepSpeed's launcher per host; ranks are as in ``launch_order``."""
    python, *rest = program
    world = {host: list(slots) for host, slots in slots_by_host(placement).items()}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()

    def argv(node: int) -> list[str]:
        return [
            *(python, "-u", "-m", LAUNCHER_MODULE, "--quiet", "--module", "--no_local_rank"),
            *(f"--world_info={info}", f"--node_rank={node}"),
            *(f"--master_addr={MASTER_ADDRESS}", f"--master_port={MASTER_PORT}"),
            *rest,
        ]

    return node_commands(argv, placement)


def launch_order(placement: Sequence[Place]) -> tuple[Place, ...]:
    """Return the place of every process in the order of DeepSpeed's ``RANK``.

    Hosts come in the order of the placement, and processes of one host are consecutive. On a
    host with ``n`` devices the process of rank ``r`` uses device ``r mod n``.

    Example:
        >>> launch_order([("b", 0), ("a", 0), ("a", 1)])
        (('b', 0), ('a', 1), ('a', 0))
    """
    order: list[Place] = []
    for host, slots in slots_by_host(placement).items():
        first = len(order)
        order += [(host, slots[rank % len(slots)]) for rank in range(first, first + len(slots))]
    return tuple(order)


CONFIG_FILE: Final = "ds_config.json"  # not read by our program; for people and DeepSpeed's tools
HOSTFILE: Final = "hostfile"
# Common learning rates: the time of a step does not depend on them, but losses should stay finite
LEARNING_RATES: Final = {"sgd": 1e-2}
OTHER_LEARNING_RATE: Final = 1e-4
# While step times still change, a trial runs on: up to this multiple of the requested steps, and
# within this share of the trial's time limit
MOST_STEPS_FACTOR: Final = 16
MORE_STEPS_SHARE: Final = 0.5
WARM_TORCH: Final = ("torch", "torch._dynamo")
WARM_MODULES: Final = (
    *(*WARM_TORCH, "deepspeed", "deepspeed.pipe"),
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Third-party imports of our training program; DeepSpeed imports the last with ZeRO only."""


def trial_launch(
    experiment: Experiment,
    strategy: Strategy,
    *,
    trial_id: str,
    hosts: Sequence[str],
    files: Mapping[str, bytes],
    python: str,
) -> Launch:
    """Return the launch of a strategy with our training program.

    ``strategy.bounds`` index the experiment's list of layers; ``files`` are the sources of our
    program, or the files of the user's program.
    """
    if experiment.trials.program is not None:
        return program_launch(
            experiment, strategy, trial_id=trial_id, hosts=hosts, files=files, python=python
        )
    chosen = runtime_strategy(experiment, strategy)
    places = placement(experiment, strategy, hosts)
    argv = [python, "-u", "-m", PROGRAM, JOB_FILE]
    by_node = experiment.trials.launcher == "deepspeed"
    return Launch(
        trial_id=trial_id,
        commands=deepspeed_commands([python, *argv[3:]], places)
        if by_node
        else rank_commands(argv, places),
        files={
            **files,
            JOB_FILE: to_json(job_record(experiment, chosen, trial_id, places)),
            **_config_file(experiment, chosen),
            HOSTFILE: hostfile_text(places).encode(),
        },
        environment=_environment(experiment),
        timeout_s=experiment.trials.timeout_s,
        collect=(RESULT_FILE, TIMELINE_FILE, "rank-*.log"),
    )


def _config_file(experiment: Experiment, strategy: Strategy) -> dict[str, bytes]:
    if experiment.traits.name == PLAIN_TORCH:
        return {}
    return {CONFIG_FILE: to_json(ds_config(experiment, strategy))}


def trial_problem(experiment: Experiment, strategy: Strategy) -> str | None:
    """Return why a strategy cannot be run as a trial, and what to change; None if it can."""
    if experiment.trials.program is not None:
        return program_problem(experiment, strategy)
    return why_not_launchable(experiment, strategy)


def trial_warm_up(experiment: Experiment, python: str) -> WarmUp | None:
    """Return the modules that a warm process imports; None if ranks start without one."""
    trials = experiment.trials
    if not trials.warm or trials.program is not None or trials.launcher != "agent":
        return None
    # Counting GPUs through the CUDA driver would break CUDA in every forked child; NVML does not.
    environment = {**_environment(experiment), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    plain = experiment.traits.name == PLAIN_TORCH
    modules = WARM_TORCH if plain else WARM_MODULES
    return WarmUp(python=python, modules=modules, environment=environment)


def trial_reader(experiment: Experiment, log_reader: LogReader = read_logs) -> Reader:
    """Return the function that reads the measurement from a trial's files."""
    trials = experiment.trials
    if trials.program is None:
        return partial(_read_trial, experiment)
    return program_reader(experiment, log_reader)


def _read_trial(experiment: Experiment, files: Mapping[str, bytes], trial_id: str) -> Measurement:
    measurement = read_result(files, trial_id)
    check_total(measurement.step_time_s, timeout_s=experiment.trials.timeout_s)
    if TIMELINE_FILE not in files:
        return measurement
    try:
        data, num_ranks = files[TIMELINE_FILE], experiment.cluster.num_devices
        read_timeline(data, num_ranks=num_ranks, trial_id=trial_id)
    except ValueError as error:
        return replace(measurement, remarks=(f"no timeline: {error}",))
    return measurement


def job_record(
    experiment: Experiment, strategy: Strategy, trial_id: str, places: Sequence[Place]
) -> dict[str, Any]:
    """Return the JSON object of a trial's job, which `training.job.read_job` reads."""
    trials = experiment.trials
    job: dict[str, Any] = {
        "trial_id": trial_id,
        "out_dir": ".",
        "runtime": PLAIN_TORCH if experiment.traits.name == PLAIN_TORCH else "deepspeed",
        "model": shape_to_json(experiment.model.shape),
        "strategy": {
            **strategy_to_json(strategy, experiment.cluster),
            "placement": [list(place) for place in places],
        },
        "global_batch_size": experiment.global_batch_size,
        "steps": trials.num_steps,
        "warmup_steps": trials.num_warmup_steps,
        "most_steps": MOST_STEPS_FACTOR * trials.num_steps,
        "more_steps_within_s": MORE_STEPS_SHARE * trials.timeout_s,
        "precision": experiment.precision,
        "optimizer": experiment.optimizer,
        "learning_rate": LEARNING_RATES.get(experiment.optimizer, OTHER_LEARNING_RATE),
        "gradient_clipping": NO_CLIPPING,
        "zero_stage": strategy.zero.stage,
        "sliced_transfers": slices_transfers(experiment),
        "device": _device(experiment),
        "num_threads": _num_threads(experiment),
        # No shorter than the trial's own limit: a rank that gives up while a peer hangs would
        # blame the network.
        "init_timeout_s": trials.timeout_s,
        "communication_timeout_s": trials.timeout_s,
    }
    if trials.launcher == "deepspeed":
        job["launch_order"] = [list(place) for place in launch_order(places)]
    return job


def _device(experiment: Experiment) -> str:
    return torch_device(device.name for device in experiment.cluster.device_types)


def _environment(experiment: Experiment) -> dict[str, str]:
    """Return the environment variables of every rank; the user's variables override ours."""
    return {
        **ENVIRONMENT,
        "DS_ACCELERATOR": _device(experiment),
        **experiment.trials.environment,
    }


def _num_threads(experiment: Experiment) -> int:
    text = _environment(experiment)[THREADS_VARIABLE]
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        where = experiment.where("trials", "environment", THREADS_VARIABLE)
        message = f"found {text!r}; expected a number of threads per rank, such as 1"
        raise InputError(message, where=where)
    return int(text)
