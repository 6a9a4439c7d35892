"""YAML configurations of nanotron and Accelerate, which train one grid of even stages."""

import re
from collections.abc import Collection, Mapping
from math import prod
from typing import Any, Final

import yaml

from amp_ray.errors import shown
from amp_ray.exports.assumed import assumptions
from amp_ray.exports.chosen import Chosen, Export, Program, check_even, check_family, settings_of
from amp_ray.exports.megatron import bounds_of
from amp_ray.exports.megatron_keys import is_planned
from amp_ray.exports.scripts import (
    PORT,
    check_host_by_host,
    comment,
    device_order,
    host_notes,
    places_of,
)
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import (
    NotRead,
    count_of,
    not_read,
    section_of,
    switched_on,
    unlike,
    value_at,
)
from amp_ray.runtimes.cut_rules import weighed_bounds
from amp_ray.shipped import Table, Words
from amp_ray.strategies.recompute import parse_recompute
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.trials.launch import slots_by_host

_NANOTRON_FILE: Final = "nanotron.yaml"
_NANOTRON_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MOST_ZERO_STAGE: Final = 1
_SWITCHES: Final = ("tp_linear_async_communication", "accumulate_grad_in_fp32")

_FSDP2: Final = "fsdp2"  # runtime whose plans use Accelerate's FSDP plugin
_SETTINGS: Final = ("tp", "pp", "dp", "recompute", "sequence_parallel", "zero_stage")
_FSDP_SETTINGS: Final = (*_SETTINGS, "shard_ranks", "keeps_weights")

_TP_PLAN: Final = (
    "the strategy divides sequences over tp: give norms the style 'sequence_parallel' in the "
    "model's tp_plan, or plan with sequence_parallel=false; 'auto' keeps whole sequences in most "
    "models"
)
"""Transformers divides by the styles of a plan (``integrations/tensor_parallel.py``)."""

_ACCELERATE_PRECISION: Final = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


class _Table(Table):
    """The file `configs.yaml`, which describes its fields."""

    file = "exports/configs.yaml"
    nanotron: Words
    accelerate: Words
    as_assumed: dict[str, Words]
    nanotron_sizes: dict[str, str]
    nanotron_optimizer: dict[str, Any]


def nanotron_config(chosen: Chosen) -> Export:
    """Return a configuration for nanotron's ``run_train.py --config-file``.

    Raises:
        ValueError: If nanotron cannot express the strategy, or numbers ranks otherwise.
    """
    record, notes = _nanotron(chosen)
    notes = (*notes, *host_notes(chosen, "nanotron"))
    use = f"nanotron 0.4: run_train.py --config-file {chosen.file_word(_NANOTRON_FILE)}"
    return Export(files={_NANOTRON_FILE: _yaml(chosen, use, record, notes)}, notes=notes)


def nanotron_program(chosen: Chosen) -> Program:
    """Return nanotron's ``run_train.py`` with the strategy's configuration as a file.

    Raises:
        ValueError: If nanotron cannot express the strategy.
    """
    record, notes = _nanotron(chosen)
    return Program(
        words=("run_train.py", "--config-file", _NANOTRON_FILE),
        home="NANOTRON",
        files={_NANOTRON_FILE: _yaml(chosen, "nanotron 0.4", record, notes)},
        # "important for some distributed operations" (README of nanotron)
        variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        head="For nanotron 0.4.",
        notes=notes,
    )


def _nanotron(chosen: Chosen) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return nanotron's configuration, and notes on it."""
    check_family(chosen, "nanotron", ("llama",))
    settings = settings_of(
        chosen, "nanotron", ("tp", "pp", "dp", "sequence_parallel", "zero_stage", "gradients")
    )
    if settings["precision"] not in _NANOTRON_DTYPES:
        raise ValueError(f"nanotron is not told precision {settings['precision']} here; use bf16")
    if settings["zero_stage"] > _MOST_ZERO_STAGE:
        message = f"nanotron shards the optimizer (zero_stage 1), not {settings['zero_stage']}"
        raise ValueError(message)
    _check_cuts(chosen)
    notes = ("steps, learning rate, tokenizer and data are placeholders: set them",)
    return _nanotron_record(chosen, settings), notes


def _check_cuts(chosen: Chosen) -> None:
    """Refuse cuts that nanotron would not make."""
    bounds = chosen.strategy.bounds
    expected = weighed_bounds(chosen.experiment.model, chosen.strategy.pp)
    if bounds != expected:
        cuts = "with a stage left empty" if expected is None else f"at {_text(expected)}"
        raise ValueError(
            f"nanotron cuts by the weights of blocks and head, {cuts}; this strategy cuts at "
            f"{_text(bounds)}: plan with runtime nanotron"
        )


def _text(bounds: tuple[int, ...]) -> str:
    return " ".join(map(str, bounds))


def _nanotron_record(chosen: Chosen, settings: Mapping[str, Any]) -> dict[str, Any]:
    shape, traits = chosen.experiment.model.shape, chosen.experiment.traits
    table = _Table.shipped()
    is_divided = settings.get("sequence_parallel", False)
    return {
        "general": {"project": "amp_ray", "run": chosen.experiment.name, "seed": 42},
        "parallelism": {
            **{name: settings[name] for name in ("dp", "pp", "tp")},
            "expert_parallel_size": 1,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if is_divided else "ALL_REDUCE",
            "tp_linear_async_communication": is_divided and not traits.keeps_gathered_inputs,
        },
        "model": {
            "dtype": _NANOTRON_DTYPES[settings["precision"]],
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "max_position_embeddings": shape.sequence_length,
                **{theirs: getattr(shape, ours) for theirs, ours in table.nanotron_sizes.items()},
            },
        },
        "tokens": {
            "sequence_length": shape.sequence_length,
            "train_steps": 100,
            "micro_batch_size": settings["micro_batch_size"],
            "batch_accumulation_per_replica": settings["num_micro_batches"],
        },
        "optimizer": {
            "zero_stage": settings["zero_stage"],
            "accumulate_grad_in_fp32": _sums_wide(chosen.experiment),
            **table.nanotron_optimizer,
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "data": {"dataset": None, "seed": 42},
    }


def accelerate_config(chosen: Chosen) -> Export:
    """Return a configuration for ``accelerate launch --config_file``.

    Pure data parallelism uses Accelerate itself, with its DeepSpeed plugin for ZeRO; tp and pp use
    its Megatron-LM plugin. Plans of runtime fsdp2 use its FSDP plugin, version 2.

    Raises:
        ValueError: If Accelerate cannot express the strategy, or would start other ranks on a host.
    """
    is_fsdp = chosen.experiment.traits.name == _FSDP2
    settings = settings_of(chosen, "Accelerate", _FSDP_SETTINGS if is_fsdp else _SETTINGS)
    places = places_of(chosen)
    check_host_by_host(places, "Accelerate")
    hosts = slots_by_host(places)
    if len({len(slots) for slots in hosts.values()}) > 1:
        raise ValueError("Accelerate starts as many processes on every host; here they differ")
    precision = settings["precision"]
    if precision not in _ACCELERATE_PRECISION:
        raise ValueError(f"Accelerate does not train in {precision}: plan with bf16")
    plugin, notes = _fsdp_plugin(chosen, settings) if is_fsdp else _plugin(chosen, settings)
    record = {
        "compute_environment": "LOCAL_MACHINE",
        **plugin,
        "mixed_precision": _ACCELERATE_PRECISION[precision],
        "num_machines": len(hosts),
        "num_processes": len(places),
        "machine_rank": 0,
        "main_process_ip": next(iter(hosts)),
        "main_process_port": PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    if len(hosts) > 1:
        notes = (*notes, f"on host i add --machine_rank i: {', '.join(hosts)}")
    is_first = all(slots == tuple(range(len(slots))) for slots in hosts.values())
    notes += host_notes(chosen, "Accelerate") if device_order(chosen) or not is_first else ()
    use = f"Accelerate 1.x: accelerate launch --config_file {chosen.file_word('accelerate.yaml')}"
    text = _yaml(chosen, use, record, notes)
    return Export(files={"accelerate.yaml": text}, notes=notes)


def _fsdp_plugin(
    chosen: Chosen, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the FSDP plugin, version 2, with tensor parallelism beside it.

    The keys are those of Accelerate 1.15: its guides "FSDP1 vs FSDP2" and "Fully Sharded Data
    Parallel", and ``ParallelismConfig``, which refuses a mesh without a dimension to shard over.
    """
    tp, dp, recompute = settings["tp"], settings["dp"], settings["recompute"]
    shards = chosen.strategy.zero.shards(dp)
    if settings["pp"] > 1:
        raise ValueError("Accelerate's FSDP plugin has no pipeline: plan with search.max_pp=1")
    if recompute.kind not in {"none", "full"} or recompute.layers:
        message = f"Accelerate's FSDP plugin recomputes all blocks or none, not {recompute}"
        raise ValueError(message)
    if shards == 1:
        message = f"Accelerate's FSDP plugin shards over at least 2 ranks; here dp is {dp}"
        raise ValueError(message)
    plugin: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": not settings["keeps_weights"],
            "fsdp_activation_checkpointing": recompute.kind == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        },
    }
    if tp > 1 or shards < dp:
        sizes = {"dp_replicate": dp // shards, "dp_shard": shards, "tp": tp}
        plugin["parallelism_config"] = {
            f"parallelism_config_{name}_size": size for name, size in sizes.items()
        }
    notes: tuple[str, ...] = (
        f"per_device_train_batch_size of your script is {settings['micro_batch_size']}",
        f"gradient_accumulation_steps of your Accelerator is {settings['num_micro_batches']}",
    )
    if tp > 1:
        notes += (
            f"for tp {tp} load the model with tp_plan='auto' (Transformers), Accelerate 1.10 on",
        )
    if settings.get("sequence_parallel"):
        notes += (_TP_PLAN,)
    return plugin, notes


def _plugin(chosen: Chosen, settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plugin that runs the strategy, and settings for the user's script."""
    size = settings["micro_batch_size"]
    notes: tuple[str, ...] = (f"per_device_train_batch_size of your script is {size}",)
    recompute = settings["recompute"]
    if settings["tp"] * settings["pp"] > 1:
        check_even(chosen, "Accelerate's Megatron-LM plugin")
        is_told = recompute.kind in {"none", "selective"} and not recompute.layers
        if not is_told or settings["zero_stage"] > 1:
            raise ValueError(
                "Accelerate's Megatron-LM plugin cannot be told recompute "
                f"{recompute} with zero_stage {settings['zero_stage']}: selective and 1 at most"
            )
        return {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {
                "megatron_lm_tp_degree": settings["tp"],
                "megatron_lm_pp_degree": settings["pp"],
                "megatron_lm_num_micro_batches": settings["num_micro_batches"],
                "megatron_lm_gradient_clipping": 1.0,
                "megatron_lm_recompute_activations": recompute.kind == "selective",
                "megatron_lm_sequence_parallelism": settings.get("sequence_parallel", False),
                "megatron_lm_use_distributed_optimizer": settings["zero_stage"] == 1,
            },
        }, notes
    if recompute.kind != "none":
        notes = (*notes, f"recompute {recompute}: call gradient_checkpointing_enable() yourself")
    if settings["zero_stage"]:
        return {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": settings["zero_stage"],
                "gradient_accumulation_steps": settings["num_micro_batches"],
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": settings["zero_stage"] > 2,  # noqa: PLR2004
            },
        }, notes
    steps = settings["num_micro_batches"]
    kind = "MULTI_GPU" if settings["dp"] > 1 else "NO"
    return {"distributed_type": kind}, (
        *notes,
        f"gradient_accumulation_steps of your Accelerator is {steps}",
    )


def _yaml(chosen: Chosen, program: str, record: Mapping[str, Any], notes: tuple[str, ...]) -> str:
    """Return the text of the file, with a comment on its origin at the top."""
    assumed = assumptions(chosen, "nanotron", _SWITCHES) if "optimizer" in record else ()
    head = "\n".join((chosen.title, f"For {program}.", *notes, *assumed))
    return comment(head) + yaml.safe_dump(dict(record), sort_keys=False)


# ------------------------------------------------------------------------------ reading


_FSDP1: Final = {
    **dict.fromkeys((1, "1", "FULL_SHARD", 4, "4", "HYBRID_SHARD"), 3),
    **dict.fromkeys((2, "2", "SHARD_GRAD_OP", 5, "5", "HYBRID_SHARD_ZERO2"), 2),
    **dict.fromkeys((3, "3", "NO_SHARD"), 0),
}
"""ZeRO stage by the sharding strategy of FSDP's first version."""

_MICRO_BATCH: Final = re.compile(
    r"^#.*\bper_device_train_batch_size\D*([1-9][0-9]{0,5})", re.MULTILINE
)
_STEPS: Final = re.compile(r"^#.*\bgradient_accumulation_steps\D*([1-9][0-9]{0,5})", re.MULTILINE)
_RECOMPUTE: Final = re.compile(r"^# recompute ([\w:]+): call gradient_checkp", re.MULTILINE)
"""Settings of the training script, which the comments of an export name."""


def read_configuration(
    config: Mapping[str, Any], text: str, experiment: Experiment
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a STRATEGY, and patterns of the keys that are read or have no effect.

    Beside its keys it has ``processes``: their number, and how the file states it.

    Args:
        config: A configuration of nanotron or Accelerate.
        text: The same as text, with its comments.
        experiment: The experiment, whose devices and batch complete it.

    Raises:
        ValueError: If a value is none of its kind, or contradicts the experiment.
    """
    if "distributed_type" not in config:
        return _read_nanotron(config, experiment), _Table.shipped().nanotron
    record = {"tp": 1, "pp": 1, "recompute": "none", **_read_plugin(config)}
    record["bounds"] = _even_bounds(experiment, record["pp"])
    processes = count_of(config, "num_processes", experiment.cluster.num_devices)
    record["processes"] = processes, f"num_processes {processes}"
    name = {"no": "fp32"}.get(str(config.get("mixed_precision", "")), config.get("mixed_precision"))
    record |= {} if name is None else {"precision": name}
    recompute = _RECOMPUTE.search(text)
    if recompute is not None:
        record["recompute"] = parse_recompute(recompute[1]).to_json()
    samples = experiment.global_batch_size * record["tp"] * record["pp"] // processes
    micro, steps = _MICRO_BATCH.search(text), _STEPS.search(text)
    known_steps = record.pop("steps", None) or (steps and int(steps[1]))
    if micro is None and not known_steps:
        raise ValueError(
            "per_device_train_batch_size is in your training script: write the line "
            "'# per_device_train_batch_size: N' into this file, too"
        )
    record["micro_batch_size"] = int(micro[1]) if micro else max(1, samples // (known_steps or 1))
    if micro and known_steps and record["micro_batch_size"] * known_steps != samples:
        batch = record["micro_batch_size"] * known_steps * experiment.global_batch_size // samples
        record["global_batch_size"] = batch
    return record, _Table.shipped().accelerate


def _read_plugin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tp, pp and what the plugin of a configuration of Accelerate sets."""
    kind = config["distributed_type"]
    other = value_at(config, "deepspeed_config.deepspeed_config_file")
    if other:
        message = f"deepspeed_config_file: {shown(other)} has the strategy: score that file instead"
        raise ValueError(message)
    if kind == "MEGATRON_LM":
        plugin = section_of(config, "megatron_lm_config")
        record = {ours: count_of(plugin, f"megatron_lm_{ours}_degree", 1) for ours in ("tp", "pp")}
        return {
            **record,
            "steps": count_of(plugin, "megatron_lm_num_micro_batches", 1),
            "recompute": "selective" if plugin.get("megatron_lm_recompute_activations") else "none",
            "zero_stage": int(bool(plugin.get("megatron_lm_use_distributed_optimizer"))),
            **({"sequence_parallel": True} if _divides(plugin, record["tp"]) else {}),
        }
    if kind == "DEEPSPEED":
        plugin = section_of(config, "deepspeed_config")
        steps = {"steps": count_of(plugin, "gradient_accumulation_steps", 0, low=0)}
        return {**steps, "zero_stage": count_of(plugin, "zero_stage", 0, low=0)}
    if kind in {"MULTI_GPU", "NO"}:
        return {"zero_stage": 0}
    if kind != "FSDP":
        message = f"distributed_type: found {shown(kind)}; expected FSDP, DEEPSPEED, MEGATRON_LM"
        raise ValueError(f"{message}, MULTI_GPU or NO")
    plugin, sizes = section_of(config, "fsdp_config"), section_of(config, "parallelism_config")
    degrees = {
        name: count_of(sizes, f"parallelism_config_{name}_size", 1)
        for name in ("tp", "cp", "dp_replicate")
    }
    reshards = plugin.get("fsdp_reshard_after_forward", True)
    strategy = plugin.get("fsdp_sharding_strategy", 1 if isinstance(reshards, bool) else reshards)
    if strategy not in list(_FSDP1):
        raise ValueError(f"fsdp_sharding_strategy: found {shown(strategy)}; expected FULL_SHARD")
    is_whole = plugin.get("fsdp_activation_checkpointing") is True
    sharding: dict[str, Any] = {
        "tp": degrees["tp"],
        "cp": degrees["cp"],
        "zero_stage": _FSDP1[strategy],
        "shard_groups": degrees["dp_replicate"],
        "recompute": "full" if is_whole else "none",
    }
    if sharding["zero_stage"] == MOST_ZERO_STAGE:
        sharding["reshard_after_forward"] = reshards is not False
    return sharding


def _divides(plugin: Mapping[str, Any], tp: int) -> bool:
    return tp > 1 and plugin.get("megatron_lm_sequence_parallelism") is True


def _read_nanotron(config: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    parallelism, tokens = section_of(config, "parallelism"), section_of(config, "tokens")
    optimizer, model = section_of(config, "optimizer"), section_of(config, "model")
    shape = experiment.model.shape
    sizes = {**section_of(model, "model_config"), "sequence_length": tokens.get("sequence_length")}
    for theirs, ours in (
        *_Table.shipped().nanotron_sizes.items(),
        ("sequence_length", "sequence_length"),
    ):
        value, expected = sizes.get(theirs), getattr(shape, ours)
        if value is not None and value != expected:
            message = f"{theirs} {shown(value)}: the experiment's model has {ours} {expected}"
            raise ValueError(f"{message}; compare it with an experiment of its own model")
    record: dict[str, Any] = {name: count_of(parallelism, name, 1) for name in ("tp", "pp", "dp")}
    record["ep"] = count_of(parallelism, "expert_parallel_size", 1)
    record["cp"] = count_of(parallelism, "context_parallel_size", 1)
    degrees = ("tp", "pp", "cp", "dp")
    world = prod(record[name] for name in degrees)
    record["processes"] = world, " x ".join(f"{name} {record[name]}" for name in degrees)
    steps = count_of(tokens, "batch_accumulation_per_replica", 1)
    record["micro_batch_size"] = count_of(tokens, "micro_batch_size", 1)
    record["global_batch_size"] = record["dp"] * record["micro_batch_size"] * steps
    record["zero_stage"] = count_of(optimizer, "zero_stage", 0, low=0)
    kind = section_of(optimizer, "optimizer_factory").get("name", experiment.optimizer)
    is_planned(str(kind), "optimizer_factory.name", experiment)
    is_wide = optimizer.get("accumulate_grad_in_fp32")
    if isinstance(is_wide, bool) and is_wide != _sums_wide(experiment):
        record["gradients"] = "fp32" if is_wide else "bf16"
    if parallelism.get("tp_mode") == "REDUCE_SCATTER" and record["tp"] > 1:
        record["sequence_parallel"] = True
    record["recompute"] = "full" if parallelism.get("recompute_layer") is True else "none"
    names = {theirs: ours for ours, theirs in _NANOTRON_DTYPES.items()}
    if "dtype" in model:
        record["precision"] = names.get(str(model["dtype"]), str(model["dtype"]))
    bounds = weighed_bounds(experiment.model, record["pp"])
    record["bounds"] = None if bounds is None else [*bounds]
    return record


def _sums_wide(experiment: Experiment) -> bool:
    """Return what ``accumulate_grad_in_fp32`` is of the experiment."""
    traits = experiment.traits
    return traits.accumulates_bf16_in_fp32 and "gradients" not in traits.formats.kept


def configuration_notes(
    config: Mapping[str, Any], experiment: Experiment, known: Collection[str], file: str
) -> tuple[NotRead, ...]:
    """Return what to say about keys that are not read, beside ``known`` patterns."""
    assumed = _Table.shipped().as_assumed
    notes = not_read(switched_on(config), file, known=(*known, *assumed))
    rare = [*unlike(config, assumed)]
    asynchronous = "parallelism.tp_linear_async_communication"
    if value_at(config, asynchronous) is True and experiment.traits.keeps_gathered_inputs:
        why = "plan it with --set traits.keeps_gathered_inputs=false"
        notes += not_read([asynchronous], file, why=why)
    return notes + not_read(rare, file)


def _even_bounds(experiment: Experiment, pp: int) -> list[int] | None:
    """Return the cuts of even stages; None if they do not divide the blocks, so that it is told."""
    size, rest = divmod(len(experiment.model.indices("block")), pp)
    return None if rest else bounds_of(experiment.model, [size] * pp)
