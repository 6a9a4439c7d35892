"""A user's own training program as a trial: its commands, its files, and how it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.own_program import OwnProgram
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.job_file import ENVIRONMENT
from amp_ray.trials.launch import (
    FOLDER,
    MASTER_ADDRESS,
    MASTER_PORT,
    RESULT_FILE,
    Launch,
    Place,
    RankCommand,
    node_commands,
    placement,
    rank_commands,
)
from amp_ray.trials.own_program.files import (
    DS_CONFIG_FILE,
    HOSTFILE,
    LOG_FILES,
    STRATEGY_FILE,
    file_names,
    generated_files,
)
from amp_ray.trials.own_program.megatron_flags import megatron_flags, stage_blocks
from amp_ray.trials.own_program.metric_files import METRIC_FILES, read_told
from amp_ray.trials.own_program.metrics import LogReader, formats_of, read_logs, words_of
from amp_ray.trials.own_program.placeholders import (
    SEVERAL,
    Values,
    fill_argument,
    fill_text,
    names_in,
)
from amp_ray.trials.result import Measurement, MissingRankError, Reader
from amp_ray.trials.runtime_strategy import describe
from amp_ray.trials.steps import check_total

TRIAL_VARIABLE: Final = "AMP_RAY_TRIAL_ID"
RANKS_PER_STAGE_VARIABLE: Final = "AMP_RAY_RANKS_PER_STAGE"


NOT_PER_NODE: Final = ("rank", "local_rank")  # a command that starts several ranks is none of them


def strategy_values(
    experiment: Experiment, strategy: Strategy, *, no_ds_config: str | None = None
) -> Values:
    """Return everything that is the same for all commands of a trial."""
    shared = any(stage.shares is not None for stage in strategy.stages)
    # What stages may differ in; None where they do.
    values: dict[str, object] = {
        "tp": strategy.tp,
        "dp": strategy.dp,
        "recompute": strategy.recompute,
        "micro_batch_size": None if shared else strategy.micro_batch_size,
    }
    missing = {
        name: "the stages of this strategy differ in it; read the file {strategy}"
        for name, value in values.items()
        if value is None
    }
    values |= {**_experiment_values(experiment), **_shape_values(experiment, strategy)}
    several: dict[str, tuple[str, ...]] = {}
    try:
        several["megatron_flags"] = megatron_flags(experiment, strategy)
    except ValueError as error:
        missing["megatron_flags"] = str(error)
    if no_ds_config is not None:
        missing["ds_config"] = no_ds_config
    return Values(
        texts={
            **{name: str(value) for name, value in values.items() if name not in missing},
            "ds_config": f"{FOLDER}/{DS_CONFIG_FILE}",
            "hostfile": f"{FOLDER}/{HOSTFILE}",
            "strategy": f"{FOLDER}/{STRATEGY_FILE}",
            "trial_dir": FOLDER,
            "master_addr": MASTER_ADDRESS,
            "master_port": MASTER_PORT,
        },
        several=several,
        missing=missing,
    )


def command_values(command: RankCommand) -> Values:
    """Return what differs between the commands of a trial."""
    variables = {
        "rank": "RANK",
        "local_rank": "LOCAL_RANK",
        "world_size": "WORLD_SIZE",
        "node_rank": "NODE_RANK",
        "num_nodes": "NNODES",
        "slots_per_node": "LOCAL_WORLD_SIZE",
    }
    own = command.environment
    return Values(
        texts={name: own[variable] for name, variable in variables.items() if variable in own},
        missing=dict.fromkeys(NOT_PER_NODE, "one command starts all ranks of a node")
        if command.slots
        else {},
    )


def _experiment_values(experiment: Experiment) -> dict[str, object]:
    """Return what no strategy changes."""
    trials, shape = experiment.trials, experiment.model.shape
    return {
        "num_layers": experiment.model.num_layers,
        "num_blocks": len(experiment.model.indices("block")),
        "zero_stage": experiment.zero_stage,
        "precision": experiment.precision,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "sequence_length": shape.sequence_length,
        "vocab_size": shape.vocab_size,
        "steps": trials.num_steps,
        "warmup_steps": trials.num_warmup_steps,
        "total_steps": trials.num_warmup_steps + trials.num_steps,
    }


def _shape_values(experiment: Experiment, strategy: Strategy) -> dict[str, object]:
    layers = [stage.end_layer - stage.first_layer for stage in strategy.stages]
    blocks = stage_blocks(experiment.model, strategy.bounds)
    return {
        "pp": strategy.pp,
        "num_micro_batches": strategy.num_micro_batches,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "global_batch_size": strategy.global_batch_size,
        "bounds": ",".join(map(str, strategy.bounds)),
        "stage_layers": ",".join(map(str, layers)),
        "stage_blocks": ",".join(map(str, blocks)),
    }


def program_launch(
    experiment: Experiment,
    strategy: Strategy,
    *,
    trial_id: str,
    hosts: Sequence[str],
    files: Mapping[str, bytes],
    python: str,
) -> Launch:
    """Return a trial of the user's program on hosts, ready to start, with files of these names."""
    program = check_program(experiment)
    _check_strategy(experiment, strategy)
    places = placement(experiment, strategy, hosts)
    generated, no_ds_config = generated_files(experiment, strategy, places)
    values = strategy_values(experiment, strategy, no_ds_config=no_ds_config)
    values |= Values(texts={"trial_id": trial_id, "python": python})
    return Launch(
        trial_id=trial_id,
        commands=tuple(
            _filled(command, experiment, values | command_values(command))
            for command in _plain_commands(experiment, program, places)
        ),
        files={**files, **generated},
        environment={**ENVIRONMENT, **_own_environment(strategy, trial_id)},
        cwd=program.cwd,
        timeout_s=experiment.trials.timeout_s,
        collect=(RESULT_FILE, LOG_FILES, METRIC_FILES, *program.collect),
        words=() if program.metric == "helper" else words_of(formats_of(program.metric)),
        sends_events=False,
    )


def program_problem(experiment: Experiment, strategy: Strategy) -> str | None:
    """Say why the program cannot be told to run a strategy; None if it can."""
    hosts = [node.name for node in experiment.cluster.nodes]
    try:
        program_launch(experiment, strategy, trial_id="t", hosts=hosts, files={}, python="python3")
    except InputError as error:
        return str(error)
    return None


def program_reader(experiment: Experiment, log_reader: LogReader = read_logs) -> Reader:
    """Return what finds the iteration times in the files of a trial."""
    trials, program = experiment.trials, experiment.trials.program
    assert program is not None

    def read(files: Mapping[str, bytes], trial_id: str) -> Measurement:
        num_warmup_steps = trials.num_warmup_steps
        try:
            if program.metric == "helper":
                found = read_told(files, trial_id, num_warmup_steps=num_warmup_steps)
            else:
                samples = experiment.global_batch_size  # per step, which turn a rate into a time
                options = {"num_warmup_steps": num_warmup_steps, "samples": samples}
                found = log_reader(files, formats_of(program.metric), **options)
        except MissingRankError:
            raise
        except ValueError as error:
            asked = f"{num_warmup_steps} warm-up and {trials.num_steps} measured steps"
            raise ValueError(f"{error} (the trial was asked for {asked})") from None
        check_total(found.step_time_s, timeout_s=trials.timeout_s)
        return found

    return read


def _check_strategy(experiment: Experiment, strategy: Strategy) -> None:
    end, num_layers = strategy.bounds[-1], experiment.model.num_layers
    last, num_devices = max(strategy.placement), experiment.cluster.num_devices
    samples, batch = strategy.global_batch_size, experiment.global_batch_size
    reasons = [
        (end != num_layers, f"its bounds end at {end}, the model has {num_layers} layers"),
        (last >= num_devices, f"it uses device {last}, the cluster has 0 to {num_devices - 1}"),
        (samples != batch, f"it makes {samples} samples per step, global_batch_size is {batch}"),
    ]
    found = [reason for is_wrong, reason in reasons if is_wrong]
    if found:
        message = f"{describe(strategy)} cannot be launched: {'; '.join(found)}"
        raise InputError(message, where=experiment.where())


def _check_per_node(experiment: Experiment, places: Sequence[Place]) -> None:
    """Refuse a placement by which ranks are not numbered host by host."""
    runs = [host for host, _ in groupby(host for host, _ in places)]
    if len(set(runs)) < len(runs):
        message = (
            f"found 'node', but this strategy's ranks are on {', '.join(runs)} in turn, and a "
            "command per node numbers them host by host; use per: rank"
        )
        raise InputError(message, where=experiment.where("trials", "program", "per"))


def _plain_commands(
    experiment: Experiment, program: OwnProgram, places: Sequence[Place]
) -> tuple[RankCommand, ...]:
    """Return the commands with their variables, still without arguments."""
    if program.per == "node":
        _check_per_node(experiment, places)
        commands = node_commands(lambda _: (), places)
    else:
        commands = rank_commands((), places)
    hosts = list(dict.fromkeys(host for host, _ in places))
    return tuple(
        replace(
            command,
            environment={
                **command.environment,
                "NODE_RANK": str(hosts.index(command.host)),
                "NNODES": str(len(hosts)),
                "NPROC_PER_NODE": command.environment["LOCAL_WORLD_SIZE"],
            },
        )
        for command in commands
    )


def _filled(command: RankCommand, experiment: Experiment, values: Values) -> RankCommand:
    """Give a command its arguments and the user's variables; its own variables win."""
    trials = experiment.trials
    assert trials.program is not None
    argv: list[str] = []
    for index, word in enumerate(trials.program.argv):
        with experiment.source.at("trials", "program", "argv", index):
            argv += fill_argument(word, values)
    environment: dict[str, str] = {}
    for name, text in trials.environment.items():
        with experiment.source.at("trials", "environment", name):
            environment[name] = fill_text(text, values)
    if trials.program.metric == "helper":
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{FOLDER}:{path}" if path else FOLDER
    return replace(command, argv=tuple(argv), environment={**environment, **command.environment})


def _own_environment(strategy: Strategy, trial_id: str) -> dict[str, str]:
    ranks = {stage.num_ranks for stage in strategy.stages}
    per_stage = {RANKS_PER_STAGE_VARIABLE: str(ranks.pop())} if len(ranks) == 1 else {}
    return {TRIAL_VARIABLE: trial_id, **per_stage}


def check_program(experiment: Experiment) -> OwnProgram:
    """Refuse a program that could not be launched whatever the strategy is."""
    trials = experiment.trials
    program = trials.program
    assert program is not None
    for index, word in enumerate(program.argv):
        with experiment.source.at("trials", "program", "argv", index):
            _check_text(word, program, alone=True)
    for name, text in trials.environment.items():
        with experiment.source.at("trials", "environment", name):
            _check_text(text, program, alone=False)
    if program.cwd is not None and (not program.cwd.startswith("/") or "\0" in program.cwd):
        message = (
            f"found {program.cwd!r}; expected a folder that every host has, from the root: "
            "'/home/me/code'. Without cwd the program starts in the trial's folder"
        )
        raise InputError(message, where=experiment.where("trials", "program", "cwd"))
    for index, pattern in enumerate(program.collect):
        if "/" in pattern:
            message = f"found {pattern!r}; what comes back lies in the trial's folder, not below"
            raise InputError(message, where=experiment.where("trials", "program", "collect", index))
    if trials.launcher != "agent":
        message = (
            f"found {trials.launcher!r} for a program of your own; put the launcher into its argv, "
            "with per: node"
        )
        raise InputError(message, where=experiment.where("trials", "launcher"))
    file_names(experiment)
    return program


def _check_text(text: str, program: OwnProgram, *, alone: bool) -> None:
    """Refuse placeholders that can have no value, and what no argument can hold."""
    if "\0" in text:
        raise ValueError(f"found {text!r}; no argument or variable can hold a zero byte")
    for name in names_in(text):
        if program.per == "node" and name in NOT_PER_NODE:
            message = f"found {{{name}}} with per: node, where one command starts all ranks of one"
            raise ValueError(message)
        if name in SEVERAL and not (alone and text == f"{{{name}}}"):
            message = f"{{{name}}} stands for several arguments: it has to be one of its own"
            raise ValueError(message)
