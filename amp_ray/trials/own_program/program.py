"""Trials of a user's training program: commands, files, and the reader of its times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram
from amp_ray.inputs.placeholders import Values, fill_argument, fill_text
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.job_file import ENVIRONMENT, ds_config, to_json
from amp_ray.trials.launch import (
    FOLDER,
    MASTER_ADDRESS,
    MASTER_PORT,
    RESULT_FILE,
    Launch,
    Place,
    RankCommand,
    hostfile_text,
    node_commands,
    placement,
    rank_commands,
)
from amp_ray.trials.own_program.megatron_flags import megatron_flags
from amp_ray.trials.own_program.metrics import (
    HELPER_FILE,
    METRIC_FILES,
    LogReader,
    formats_of,
    read_logs,
    read_told,
    words_of,
)
from amp_ray.trials.result import Measurement, MissingRankError, Reader
from amp_ray.trials.runtime_strategy import describe
from amp_ray.trials.steps import check_total

TRIAL_VARIABLE: Final = "AMP_RAY_TRIAL_ID"
RANKS_PER_STAGE_VARIABLE: Final = "AMP_RAY_RANKS_PER_STAGE"
STRATEGY_FILE: Final = "strategy.json"
HOSTFILE: Final = "hostfile"
DS_CONFIG_FILE: Final = "ds_config.json"
LOG_FILES: Final = "rank-*.log"

RESERVED: Final = (
    *(STRATEGY_FILE, HOSTFILE, DS_CONFIG_FILE, HELPER_FILE),
    *(RESULT_FILE, METRIC_FILES, LOG_FILES),
)
"""Patterns of file names that are reserved for generated or collected files."""


def strategy_values(
    experiment: Experiment, strategy: Strategy, *, no_ds_config: str | None = None
) -> Values:
    """Return the placeholder values that all commands of a trial share."""
    shared = any(stage.shares is not None for stage in strategy.stages)
    # None if stages differ in a value.
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
    values |= _sizes(experiment, strategy)
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
            "strategy": f"{FOLDER}/{STRATEGY_FILE}",
            "trial_dir": FOLDER,
            "master_addr": MASTER_ADDRESS,
            "master_port": MASTER_PORT,
        },
        several=several,
        missing=missing,
    )


def _sizes(experiment: Experiment, strategy: Strategy) -> dict[str, object]:
    trials, shape = experiment.trials, experiment.model.shape
    return {
        "pp": strategy.pp,
        "num_micro_batches": strategy.num_micro_batches,
        "global_batch_size": strategy.global_batch_size,
        "num_blocks": len(experiment.model.indices("block")),
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "sequence_length": shape.sequence_length,
        "vocab_size": shape.vocab_size,
        "total_steps": trials.num_warmup_steps + trials.num_steps,
    }


def command_values(command: RankCommand) -> Values:
    """Return the placeholder values that differ between the commands of a trial."""
    variables = {
        "node_rank": "NODE_RANK",
        "num_nodes": "NNODES",
        "slots_per_node": "LOCAL_WORLD_SIZE",
    }
    return Values(
        texts={name: command.environment[variable] for name, variable in variables.items()}
    )


def program_launch(
    experiment: Experiment,
    strategy: Strategy,
    *,
    trial_id: str,
    hosts: Sequence[str],
    files: Mapping[str, bytes],
    python: str,
) -> Launch:
    """Return the launch of the user's program; ``files`` has the contents of its files by name."""
    program = check_program(experiment)
    _check_strategy(experiment, strategy)
    places = placement(experiment, strategy, hosts)
    generated, no_ds_config = generated_files(experiment, strategy, places)
    values = strategy_values(experiment, strategy, no_ds_config=no_ds_config)
    values |= Values(texts={"python": python})
    return Launch(
        trial_id=trial_id,
        commands=tuple(
            _filled(command, experiment, values | command_values(command))
            for command in _plain_commands(experiment, program, places)
        ),
        files={**files, **generated},
        environment={**ENVIRONMENT, **_trial_variables(strategy, trial_id)},
        cwd=program.cwd,
        timeout_s=experiment.trials.timeout_s,
        collect=(RESULT_FILE, LOG_FILES, METRIC_FILES, *program.collect),
        words=() if program.metric == "helper" else words_of(formats_of(program.metric)),
        sends_events=False,
    )


def program_problem(experiment: Experiment, strategy: Strategy) -> str | None:
    """Return why the program's command cannot express a strategy; None if it can."""
    hosts = experiment.cluster.host_names
    try:
        program_launch(experiment, strategy, trial_id="t", hosts=hosts, files={}, python="python3")
    except InputError as error:
        return str(error)
    return None


def program_reader(experiment: Experiment, log_reader: LogReader = read_logs) -> Reader:
    """Return the function that reads iteration times from the files of a trial."""
    trials, program = experiment.trials, experiment.trials.program
    assert program is not None

    def read(files: Mapping[str, bytes], trial_id: str) -> Measurement:
        num_warmup_steps = trials.num_warmup_steps
        try:
            if program.metric == "helper":
                measurement = read_told(files, trial_id, num_warmup_steps=num_warmup_steps)
            else:
                samples = experiment.global_batch_size  # per step, to convert a rate to a time
                options = {"num_warmup_steps": num_warmup_steps, "samples": samples}
                measurement = log_reader(files, formats_of(program.metric), **options)
        except MissingRankError:
            raise
        except ValueError as error:
            asked = f"{num_warmup_steps} warm-up and {trials.num_steps} measured steps"
            raise ValueError(f"{error} (the trial was asked for {asked})") from None
        check_total(measurement.step_time_s, timeout_s=trials.timeout_s)
        return measurement

    return read


def _check_strategy(experiment: Experiment, strategy: Strategy) -> None:
    end, num_layers = strategy.bounds[-1], experiment.model.num_layers
    last, num_devices = max(strategy.placement), experiment.cluster.num_devices
    samples, batch = strategy.global_batch_size, experiment.global_batch_size
    checks = [
        (end != num_layers, f"its bounds end at {end}, the model has {num_layers} layers"),
        (last >= num_devices, f"it uses device {last}, the cluster has 0 to {num_devices - 1}"),
        (samples != batch, f"it makes {samples} samples per step, global_batch_size is {batch}"),
    ]
    reasons = [reason for is_wrong, reason in checks if is_wrong]
    if reasons:
        message = f"{describe(strategy)} cannot be launched: {'; '.join(reasons)}"
        raise InputError(message, where=experiment.where())


def _check_per_node(experiment: Experiment, places: Sequence[Place]) -> None:
    """Refuse a placement whose ranks are not numbered host by host."""
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
    """Return the commands with environment variables, but without arguments."""
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
    """Add arguments and the user's variables; variables already set take precedence."""
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


def _trial_variables(strategy: Strategy, trial_id: str) -> dict[str, str]:
    ranks = {stage.num_ranks for stage in strategy.stages}
    per_stage = {RANKS_PER_STAGE_VARIABLE: str(ranks.pop())} if len(ranks) == 1 else {}
    return {TRIAL_VARIABLE: trial_id, **per_stage}


def check_program(experiment: Experiment) -> OwnProgram:
    """Return the experiment's program; refuse one that no strategy could launch."""
    trials = experiment.trials
    program = trials.program
    assert program is not None
    for index, word in enumerate(program.argv):
        with experiment.source.at("trials", "program", "argv", index):
            _refuse_zero_bytes(word)
    for name, text in trials.environment.items():
        with experiment.source.at("trials", "environment", name):
            _refuse_zero_bytes(text)
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


def _refuse_zero_bytes(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"found {text!r}; no argument or variable can hold a zero byte")


def file_names(experiment: Experiment) -> dict[str, str]:
    """Return the user's path of each file, by its name in the trial's folder.

    A path relative to the experiment file is also the name, so that packages stay packages; for
    any other path the name is the path's last part.
    """
    program = experiment.trials.program
    assert program is not None
    names: dict[str, str] = {}
    for index, path in enumerate(program.files):
        where = experiment.where("trials", "program", "files", index)
        name = _file_name(path)
        if not name or "\0" in name:
            raise InputError(f"found {path!r}, which names no file", where=where)
        if any(fnmatchcase(name, pattern) for pattern in RESERVED):
            message = f"found {path!r}; every trial has a {name} of its own: rename yours"
            raise InputError(message, where=where)
        if name in names:
            message = (
                f"found {path!r}, which would be {name!r} in the trial's folder, as {names[name]!r}"
            )
            raise InputError(message, where=where)
        names[name] = path
    return names


def generated_files(
    experiment: Experiment, strategy: Strategy, places: Sequence[Place]
) -> tuple[dict[str, bytes], str | None]:
    """Return strategy file, hostfile and DeepSpeed config; if the config is missing, also why."""
    record = strategy_to_json(strategy, experiment.cluster)
    record["placement"] = [list(place) for place in places]
    files = {STRATEGY_FILE: to_json(record), HOSTFILE: hostfile_text(places).encode()}
    if not strategy.is_uniform:
        return files, "its stages differ in tp, dp or shares, which DeepSpeed has no words for"
    if strategy.is_sliced:
        return files, "it cuts sequences into token slices, which DeepSpeed has no words for"
    config = ds_config(experiment, strategy)
    program = experiment.trials.program
    if program is not None and program.metric == "deepspeed":
        # Except for pipelines, DeepSpeed's engines log speed only at level info, which is not the
        # default.
        config["log_level"] = "info"
    return {**files, DS_CONFIG_FILE: to_json(config)}, None


def _file_name(path: str) -> str:
    """Return a file's name in the trial's folder; empty if the path has no file name."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith(("/", "~")) or ".." in parts:
        parts = [part for part in parts[-1:] if part != ".."]
    return "/".join(parts)
