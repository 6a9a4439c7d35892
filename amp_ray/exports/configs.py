"""YAML configurations of nanotron and Accelerate, which train one grid of even stages."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from amp_ray.exports.chosen import Chosen, Export, Program, check_even, check_family, settings_of
from amp_ray.exports.scripts import PORT, check_host_by_host, comment, host_notes, places_of
from amp_ray.trials.launch import slots_by_host

_NANOTRON_FILE: Final = "nanotron.yaml"
_NANOTRON_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MOST_ZERO_STAGE: Final = 1

_OPTIMIZER: Final = {
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "adam_eps": 1e-08,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "torch_adam_is_fused": True,
    "learning_rate_scheduler": {"learning_rate": 0.0003, "lr_warmup_steps": 10},
}
"""Settings that nanotron requires and a strategy does not contain."""

_FSDP2: Final = "fsdp2"  # runtime whose plans use Accelerate's FSDP plugin
_SETTINGS: Final = ("tp", "pp", "dp", "recompute", "sequence_parallel", "zero_stage")
_FSDP_SETTINGS: Final = (*_SETTINGS, "shard_ranks", "keeps_weights")

_TP_PLAN: Final = (
    "the strategy divides sequences over tp: give norms the style 'sequence_parallel' in the "
    "model's tp_plan, or plan with sequence_parallel=false; 'auto' keeps whole sequences in most "
    "models"
)
"""Transformers divides by the styles of a plan (``integrations/tensor_parallel.py``)."""

_ACCELERATE_PRECISION: Final = {"fp32": "no"}


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
    check_even(chosen, "nanotron")
    if settings["precision"] not in _NANOTRON_DTYPES:
        raise ValueError(f"nanotron is not told precision {settings['precision']} here; use bf16")
    if settings["zero_stage"] > _MOST_ZERO_STAGE:
        message = f"nanotron shards the optimizer (zero_stage 1), not {settings['zero_stage']}"
        raise ValueError(message)
    notes = (
        "nanotron cuts by its own count of FLOPs, which may move a block from the last stage",
        "steps, learning rate, tokenizer and data are placeholders: set them",
    )
    return _nanotron_record(chosen, settings), notes


def _nanotron_record(chosen: Chosen, settings: Mapping[str, Any]) -> dict[str, Any]:
    shape = chosen.experiment.model.shape
    is_divided = settings.get("sequence_parallel", False)
    return {
        "general": {"project": "amp_ray", "run": chosen.experiment.name, "seed": 42},
        "parallelism": {
            **{name: settings[name] for name in ("dp", "pp", "tp")},
            "expert_parallel_size": 1,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if is_divided else "ALL_REDUCE",
            "tp_linear_async_communication": is_divided,
        },
        "model": {
            "dtype": _NANOTRON_DTYPES[settings["precision"]],
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.feed_forward_size,
                "max_position_embeddings": shape.sequence_length,
                "num_attention_heads": shape.num_heads,
                "num_hidden_layers": shape.num_layers,
                "num_key_value_heads": shape.num_key_value_heads,
                "tie_word_embeddings": shape.tied_embedding,
                "vocab_size": shape.vocab_size,
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
            "accumulate_grad_in_fp32": chosen.experiment.traits.accumulates_bf16_in_fp32
            and "gradients" not in chosen.experiment.traits.formats.kept,
            **_OPTIMIZER,
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
    plugin, notes = _fsdp_plugin(chosen, settings) if is_fsdp else _plugin(chosen, settings)
    record = {
        "compute_environment": "LOCAL_MACHINE",
        **plugin,
        "mixed_precision": _ACCELERATE_PRECISION.get(precision, precision),
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
    if recompute.kind == "selective" or recompute.layers:
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
        if recompute.kind == "full" or recompute.layers or settings["zero_stage"] > 1:
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
    head = "\n".join((chosen.title, f"For {program}.", *notes))
    return comment(head) + yaml.safe_dump(dict(record), sort_keys=False)
