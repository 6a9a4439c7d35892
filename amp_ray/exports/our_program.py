"""Our training program as an export, and DeepSpeed's configuration, written and read.

DeepSpeed's launcher, Slurm or Ray Train (`schedulers`) starts the program. It trains on random data
and writes ``result.json``; it shows that a plan runs, and measures a step. Real training needs the
user's program, whose ranks the same files start on the right hosts. DeepSpeed's configuration is
written here for our program, and read as a strategy for any program.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from amp_ray.exports.chosen import Chosen, Export, Program
from amp_ray.exports.megatron_keys import is_planned
from amp_ray.exports.scripts import (
    PORT,
    check_ascending,
    check_host_by_host,
    command,
    exports,
    header,
    master_address,
    places_of,
    reached,
    without_secret_variables,
)
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead, count_of, not_read, switched_on, unlike, value_at
from amp_ray.shipped import Table, Words
from amp_ray.strategies.zero import MOST_ZERO_STAGE, SHARDED_GRADIENTS
from amp_ray.trials.command import CONFIG_FILE, HOSTFILE, trial_launch
from amp_ray.trials.job_file import JOB_FILE, PROGRAM
from amp_ray.trials.launch import FOLDER, RESULT_FILE, Launch, slots_by_host
from amp_ray.trials.runtime_strategy import PLAIN_TORCH

_RUNTIME: Final = "deepspeed"
_TRIAL_ID: Final = "export"
_BATCH_SIZES: Final = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
_STRING: Final = r'("(?:\\.|[^"\\])*")'
_COMMENT: Final = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA: Final = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)

_IS_SYNTHETIC: Final = (
    "It runs amp_ray's own program on random data and writes result.json; hosts need\n"
    "pip install 'amp-ray[training]'. For training, exchange the program and keep the launch."
)


class _Keys(Table):
    """The file `deepspeed.yaml`, which describes its fields."""

    file = "exports/deepspeed.yaml"
    sections: Words
    read: Words
    as_assumed: dict[str, Words]
    least: dict[str, float]
    most: dict[str, float]
    without_effect: Words


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
    check_ascending(hosts, "DeepSpeed's launcher")
    if any(":" in host for host in hosts):
        raise ValueError("DeepSpeed's launcher takes no IPv6 address: name the hosts")
    variables, missing = _variables(launch)
    included = [f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items()]
    words = (
        *("deepspeed", "--hostfile", HOSTFILE, "--no_ssh", "--no_local_rank"),
        *("--include", "@".join(included)),
    )
    experiment, names = reached(chosen.experiment)
    sizes = Counter[str]()
    for name, nodes in zip(names, experiment.cluster.machines, strict=True):
        sizes[name] += sum(node.num_slots for node in nodes)
    script = (
        header(chosen, _IS_SYNTHETIC, "On host i: NODE_RANK=i bash launch.sh")
        + 'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"\n'
        + exports(chosen, variables)
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
    return Export(files=files, notes=(note, _IS_SYNTHETIC.replace("\n", " "), *missing))


def read_ds_config(config: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return the settings of a configuration, as keys of a STRATEGY and of the step.

    It has tp as ``tensor_parallel.autotp_size`` and pp as ``pipeline.stages``; if one is missing,
    it follows from the number of devices. Of its three batch sizes two are enough, as for
    DeepSpeed. It has no cuts, so the solver chooses them. With ZeRO-3, weights remain gathered if
    DeepSpeed may reuse them after as many parameters as a rank has.

    Raises:
        ValueError: If the batch sizes contradict each other, or tp and pp do not follow.
    """
    num_devices = experiment.cluster.num_devices
    tp = _count(config.get("tensor_parallel", {}), "autotp_size") or 0
    pp = _count(config.get("pipeline", {}), "stages") or 0
    batch, micro, steps = _batch_sizes(config, experiment, num_devices // ((tp or 1) * (pp or 1)))
    dp, rest = divmod(batch, micro * steps)
    per_replica, idle = divmod(num_devices, dp or 1)
    if rest or idle or not dp:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x a dp that divides {num_devices} devices"
        )
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
    return {
        "tp": tp,
        "pp": pp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        **_zero(config, experiment, dp, tp),
        **_precision(config),
    }


def _zero(config: Mapping[str, Any], experiment: Experiment, dp: int, tp: int) -> dict[str, Any]:
    """Return the keys of ZeRO; refuse MiCS in a runtime that is planned without it."""
    zero, traits = config.get("zero_optimization"), experiment.traits
    zero = zero if isinstance(zero, Mapping) else {}
    record = {"zero_stage": zero.get("stage", 0)}
    is_off = zero.get("mics_shard_size") == -1  # DeepSpeed's default
    shard_ranks = (not is_off and _count(zero, "mics_shard_size")) or dp
    if shard_ranks < dp and traits.name == _RUNTIME and not traits.hybrid_shards:
        raise ValueError(
            f"mics_shard_size: found {shard_ranks}; runtime {traits.name} is planned with shards "
            f"over all {dp} data-parallel ranks, not with MiCS: take the key out to plan that"
        )
    if record["zero_stage"] == MOST_ZERO_STAGE and shard_ranks < dp:
        record["shard_ranks"] = shard_ranks
    distance = zero.get("stage3_max_reuse_distance")
    if record["zero_stage"] == MOST_ZERO_STAGE and isinstance(distance, int | float):
        record["reshard_after_forward"] = distance < experiment.model.num_parameters / tp
    return record


def _batch_sizes(config: Mapping[str, Any], experiment: Experiment, dp: int) -> tuple[int, ...]:
    """Return samples per step, per micro-batch, and micro-batches, as DeepSpeed derives them.

    See ``_set_batch_related_parameters`` (deepspeed/runtime/config.py). A size that is ``auto`` is
    the trainer's; the experiment's batch takes its place.
    """
    batch, micro, steps = (_count(config, key) for key in _BATCH_SIZES)
    if not micro and config.get(_BATCH_SIZES[1]) == "auto" and not (batch and steps):
        automatic = [key for key in _BATCH_SIZES if config.get(key) == "auto"]
        raise ValueError(
            f"{_BATCH_SIZES[1]}: {', '.join(automatic)} are 'auto', so the trainer sets them: give "
            f"{_BATCH_SIZES[1]} (Hugging Face's per_device_train_batch_size) as a number"
        )
    if not batch and "auto" in {config.get(key) for key in (_BATCH_SIZES[0], _BATCH_SIZES[2])}:
        batch = experiment.global_batch_size
    if micro:
        if not batch:
            batch = micro * (steps or 1) * dp
        return batch, micro, steps or max(1, batch // (micro * dp))
    batch = batch or experiment.global_batch_size
    return batch, max(1, batch // ((steps or 1) * dp)), steps or 1


def _precision(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the key ``precision`` if a section of a format is enabled."""
    sections = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    enabled = {name for key, name in sections.items() if value_at(config, f"{key}.enabled") is True}
    if len(enabled) > 1:
        raise ValueError("fp16.enabled and bf16.enabled are both true: keep one")
    return {"precision": enabled.pop()} if enabled else {}


def ds_config_notes(
    config: Mapping[str, Any], experiment: Experiment, record: Mapping[str, Any], file: str
) -> tuple[NotRead, ...]:
    """Return what to say about keys that are not read: those that are on, and unusual values.

    Args:
        config: The configuration.
        experiment: The experiment, whose layers buckets are compared with.
        record: What `read_ds_config` returned for it.
        file: The name of its file.

    Raises:
        ValueError: If the optimizer is another one than the experiment's.
    """
    table, names = _Keys.shipped(), (key.split(".") for key in switched_on(config))
    keys = [".".join(name[: 1 + (name[0] in table.sections)]) for name in names]
    stage, precision = record["zero_stage"], record.get("precision", experiment.precision)
    shards = isinstance(stage, int) and stage >= SHARDED_GRADIENTS
    assumed: dict[str, Collection[str]] = {
        **table.as_assumed,
        "zero_optimization.overlap_comm": [str(shards).lower()],
        "data_types.grad_accum_dtype": ["fp32" if shards and precision == "bf16" else precision],
    }
    named = (*table.read, *table.without_effect, *assumed, *table.least, *table.most)
    notes = not_read(keys, file, known=named)
    rare = [*unlike(config, assumed), *_unusual_sizes(config, experiment, record["tp"])]
    optimizer = config.get("optimizer")
    kind = str(optimizer.get("type", "adam")) if isinstance(optimizer, Mapping) else "adam"
    if not is_planned(kind, "optimizer", experiment):
        rare.append(f"optimizer.type {kind}")
    return notes + not_read(rare, file)


def _unusual_sizes(config: Mapping[str, Any], experiment: Experiment, tp: int) -> Iterator[str]:
    """Yield keys with numbers of elements outside of what the cost model assumes."""
    table, layers = _Keys.shipped(), experiment.model.layers
    largest = max(layer.sharded_parameters / tp + layer.replicated_parameters for layer in layers)
    for key in (*table.least, *table.most):
        value, least = value_at(config, key), min(table.least.get(key, 0), int(largest))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not least <= value <= table.most.get(key, math.inf):
            yield f"{key} {value:g}"


def without_comments(text: str) -> str:
    r"""Return JSON without comments and trailing commas, which DeepSpeed's reader (HJSON) allows.

    Example:
        >>> without_comments('{"a": 1, // one' + chr(10) + '"b": "//", }')
        '{"a": 1, \n"b": "//" }'
    """
    for pattern in (_COMMENT, _TRAILING_COMMA):
        text = pattern.sub(lambda match: match[1] or re.sub(r"[^\n]", "", match[0]), text)
    return text


def _count(config: object, key: str) -> int | None:
    """Return a count; None if it is missing or ``auto``."""
    if not isinstance(config, Mapping) or config.get(key) in (None, "auto"):
        return None
    return count_of(config, key, 0, low=int(key in _BATCH_SIZES))


def synthetic_program(chosen: Chosen) -> Program:
    """Return our program on random data, as a scheduler starts it.

    Raises:
        ValueError: If it cannot run the strategy.
    """
    launch = _launch(chosen, by_scheduler=True)
    variables, missing = _variables(launch)
    return Program(
        words=("-m", PROGRAM, JOB_FILE),
        files={JOB_FILE: launch.files[JOB_FILE].decode()},
        variables=variables,
        head=_IS_SYNTHETIC,
        notes=(_IS_SYNTHETIC.replace("\n", " "), *missing),
        result=RESULT_FILE,
    )


def _launch(chosen: Chosen, *, by_scheduler: bool) -> Launch:
    """Return the files of a trial of the strategy, without the program's sources.

    A scheduler starts rank by rank, DeepSpeed's launcher node by node.
    """
    experiment, hosts = reached(chosen.experiment, by_scheduler=by_scheduler)
    launcher: Any = "agent" if by_scheduler else "deepspeed"
    trials = replace(experiment.trials, launcher=launcher, program=None)
    return trial_launch(
        replace(experiment, trials=trials),
        chosen.strategy,
        trial_id=_TRIAL_ID,
        hosts=hosts,
        files={},
        python="python3",
    )


def _variables(launch: Launch) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of every rank, except paths in a trial's folder and likely secrets."""
    return without_secret_variables(
        {name: value for name, value in launch.environment.items() if FOLDER not in value}
    )
