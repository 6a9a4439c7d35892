"""Convert strategies to Megatron-LM's flags and Megatron-Bridge's overrides, and flags back.

The flags are those of Megatron-LM with megatron-core 0.16 to 0.19. The overrides are those of
Megatron-Bridge 0.6: ``key=value`` for its ``ConfigContainer``, as its script ``run_recipe.py``
takes them behind the name of a recipe.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, Final

from pydantic import BaseModel

from amp_ray.errors import shown
from amp_ray.exports.assumed import assumptions
from amp_ray.exports.chosen import Chosen, Export, Program, check_family, settings_of
from amp_ray.exports.scripts import END, header, host_notes, torchrun_script, words_by_line
from amp_ray.exports.shell import MOST_CHARACTERS
from amp_ray.models.model import Model, ModelShape
from amp_ray.shipped import Table, Words
from amp_ray.strategies.recompute import parse_recompute
from amp_ray.strategies.strategy import chunk_bounds
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.trials.own_program.megatron_flags import (
    HEAD_RANKS,
    MEGATRON_DEEPSPEED,
    strategy_flags,
)

FUSES_EXPERTS: Final = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
"""Variable that switches Transformer Engine's kernels of fused experts on."""

_SETTINGS: Final = (
    *("tp", "pp", "dp", "cp", "ep", "etp", "recompute", "sequence_parallel"),
    *("virtual_stages", "zero_stage", "shard_ranks", "gradients", "moments", "primary"),
    *("offloaded_blocks", "recompute_modules"),
)
_VERSION: Final = "For Megatron-LM with megatron-core 0.16 to 0.19"
_SCRIPT: Final = "pretrain_gpt.py"
_FAMILIES: Final = ("gpt2", "llama")

_FIGURES: Final = (
    *("expert_bias", "first_dense_layers", "attention_windows"),
    *("clamped_activation", "scaled_rotation"),
)
"""Optional figures that have flags, beside those of the table."""

_CLAMPED: Final = (  # gpt-oss: modeling_gpt_oss.py of Transformers, limit 7.0, up + 1
    *("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "7.0"),
)


class _Model(BaseModel, extra="forbid", frozen=True):
    figures: tuple[tuple[int, int, int], ...]
    flags: Words


class _Table(Table):
    """The file `megatron.yaml`, which describes its fields."""

    file = "exports/megatron.yaml"
    sizes: dict[str, str]
    optional: dict[str, Words]
    models: tuple[_Model, ...]
    places: dict[str, str]
    recipe_sets: dict[str, str]
    no_shards: dict[str, str]
    recipes: dict[str, tuple[int, int, int, int, int, int, int]]


_RECIPE_FIGURES: Final = (
    *("num_layers", "hidden_size", "num_heads", "num_key_value_heads", "feed_forward_size"),
    *("vocab_size", "num_experts"),
)


def megatron_script(chosen: Chosen) -> Export:
    """Return a script that starts Megatron-LM's ``pretrain_gpt.py``.

    Raises:
        ValueError: If Megatron cannot express the strategy, or does not train the model.
    """
    program = megatron_program(chosen)
    text = torchrun_script(chosen, program, "megatron.sh", program.head, *program.notes)
    return Export(files={"megatron.sh": text}, notes=program.notes)


def megatron_program(chosen: Chosen) -> Program:
    """Return Megatron-LM's ``pretrain_gpt.py`` with the flags of a strategy and its model.

    Raises:
        ValueError: If Megatron cannot express the strategy, or does not train the model.
    """
    flags, notes = _flags(chosen)
    options = chosen.strategy.options
    # "Here we rely on CUDA_DEVICE_MAX_CONNECTIONS=1" (core/tensor_parallel/layers.py of 0.16);
    # Megatron's FSDP wants more than one connection.
    is_ordered = options is not None and options.tp * options.cp > 1
    is_ordered &= chosen.strategy.zero.stage <= 1
    ordered = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_ordered else {}
    return Program(
        words=(_SCRIPT, *flags),
        home="MEGATRON_LM",
        variables={**ordered, **(FUSES_EXPERTS if chosen.experiment.traits.fused_experts else {})},
        head="\n".join((f"{_VERSION}.", *assumptions(chosen, "megatron-lm", flags))),
        notes=(
            *notes,
            "data, tokenizer and learning rate are yours: add their flags behind the file",
        ),
    )


def bridge_overrides(chosen: Chosen) -> Export:
    """Return a script that starts a recipe of Megatron-Bridge with overrides.

    Raises:
        ValueError: If Megatron-Bridge cannot express the strategy.
    """
    flags, notes = _flags(chosen)
    table = _Table.shipped()
    unsharded = {} if chosen.strategy.zero.stage else table.no_shards
    overrides = {**table.recipe_sets, **unsharded, **dict(_overrides(chosen, flags))}
    words = [f"{key}={_override(value)}" for key, value in overrides.items()]
    named = _recipe(chosen.experiment.model.shape)
    recipe = (
        f"the recipe {named} has a model of these sizes"
        if named
        else "no recipe of Megatron-Bridge is known for this model: set RECIPE to yours"
    )
    kept = chosen.experiment.traits.formats.kept
    formats = [_KEPT_IN_RECIPES[key].format(name) for key, name in kept.items()]
    notes = (*notes, *formats, recipe, *host_notes(chosen, "Megatron-Bridge"))
    head = header(
        chosen,
        "For Megatron-Bridge 0.6: overrides. Start it once per rank, by srun or by torchrun:",
        f"torchrun ... --no-python bash {chosen.file_word('megatron-bridge.sh')} [more overrides]",
        *notes,
        *assumptions(chosen, "megatron-bridge", words),
    )
    default = f"-{named}" if named else "?the name of a recipe"
    fuses = chosen.experiment.traits.fused_experts
    start = "".join(f"export {name}={value}\n" for name, value in FUSES_EXPERTS.items() if fuses)
    start += (
        f'exec python "${{RUN_RECIPE:-scripts/training/run_recipe.py}}"{END}'
        f'--recipe "${{RECIPE:{default}}}"{END}{words_by_line(words)}\n'
    )
    return Export(files={"megatron-bridge.sh": head + start}, notes=notes)


def is_recipe(name: str, shape: ModelShape) -> bool:
    """Return whether a recipe of Megatron-Bridge is known to train a model.

    Raises:
        ValueError: If the recipe is known, and its model has other sizes than the experiment's.
    """
    is_known = name in _Table.shipped().recipes
    if is_known and name != _recipe(shape):
        raise ValueError(
            f"--recipe {name} trains another model than the experiment's: compare it with an "
            "experiment of its own model"
        )
    return is_known


def _recipe(shape: ModelShape) -> str | None:
    """Return the name of the recipe that trains a model; None if none is known."""
    figures = {figure: getattr(shape, figure) for figure in _RECIPE_FIGURES}
    if shape.num_experts:
        figures["feed_forward_size"] = 0
    if shape.key_value_rank or shape.family == "gpt2":
        figures["num_key_value_heads"] = 0
    sizes = tuple(figures.values())
    return next((name for name, key in _Table.shipped().recipes.items() if key == sizes), None)


def _flags(chosen: Chosen) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags of a strategy and its model, and notes on settings that have no flag."""
    is_old = chosen.experiment.traits.name == MEGATRON_DEEPSPEED
    table, name = _Table.shipped(), "Megatron-DeepSpeed" if is_old else "Megatron-LM"
    optional = () if is_old else (*table.optional, *_FIGURES)
    biased, ranks = chosen.experiment.model.shape.expert_bias, chosen.strategy.stages[0].options
    # Of gpt-oss: with --softmax-type and without --disable-bias-linear Megatron has them, too
    optional = (*optional, *(("extra_parameters",) if biased else ()))
    check_family(chosen, name, _FAMILIES, optional=optional)
    settings_of(chosen, "Megatron-LM", _SETTINGS)
    if biased and ranks.expert_tp > 1:
        message = f"Megatron-LM divides no experts with biases, found {ranks.expert_tp} ranks each"
        raise ValueError(f"{message}: set etp 1")
    experiment, strategy = chosen.experiment, chosen.strategy
    flags = strategy_flags(experiment, strategy)
    shape, kinds = experiment.model.shape, [layer.kind for layer in experiment.model.layers]
    notes = [_NORM_MOVES] if kinds.index("head") in strategy.bounds else []
    figures = shape.num_layers, shape.hidden_size, shape.vocab_size
    named = next((model.flags for model in table.models if figures in model.figures), None)
    is_mixtral = shape.num_experts > 0 and not named
    if shape.family == "llama" and (named is None or is_mixtral):
        notes.append(_NOT_NAMED if shape.num_experts else _NOT_NAMED.partition(",")[0] + _YOURS)
        named = ()
    model = (*_model_flags(shape, dropout=experiment.traits.dropout), *(named or ()))
    return (*flags, *model), tuple(notes)


def _model_flags(shape: ModelShape, *, dropout: bool) -> Iterator[str]:
    """Yield the flags of a model's sizes, without the vocabulary, which the tokenizer decides."""
    table = _Table.shipped()
    for flag, figure in table.sizes.items():
        yield from (f"--{flag}", str(getattr(shape, figure)))
    yield from _style(shape)
    if shape.key_value_rank:
        yield from ("--multi-latent-attention", "--qk-layernorm")
    for figure, names in table.optional.items():
        value = getattr(shape, figure)
        if value:
            yield names[-1 if shape.key_value_rank else 0]
            yield from [] if value is True else [str(value)]
    yield from _block_flags(shape)
    if not shape.tied_embedding:
        yield "--untie-embeddings-and-output-weights"
    if not dropout or shape.family == "llama":
        yield from ("--attention-dropout", "0.0", "--hidden-dropout", "0.0")


def _style(shape: ModelShape) -> Iterator[str]:
    """Yield the flags of a family."""
    if shape.family == "gpt2":
        yield from ("--position-embedding-type", "learned_absolute")
        return
    yield from _CLAMPED if shape.clamped_activation else ("--swiglu",)
    kind = "yarn" if shape.scaled_rotation else "rope"
    yield from ("--normalization", "RMSNorm", "--position-embedding-type", kind)
    if not shape.expert_bias:
        yield "--disable-bias-linear"
    if not shape.key_value_rank:
        yield from ("--group-query-attention", "--num-query-groups", str(shape.num_key_value_heads))


def _block_flags(shape: ModelShape) -> Iterator[str]:
    """Yield the flags for what blocks of one model differ in."""
    dense = shape.first_dense_layers
    if dense:
        yield from ("--moe-layer-freq", f"([0]*{dense}+[1]*{shape.num_layers - dense})")
    windows = shape.attention_windows
    sizes = {*windows} - {0}
    if len(sizes) > 1:
        raise ValueError(f"Megatron-LM has one attention window, found {sorted(sizes)}")
    if sizes:  # the size counts tokens before a token, ours the token itself, too
        yield from ("--window-size", f"{max(sizes) - 1},0")
    if sizes and 0 in windows:
        pattern = [int(windows[block % len(windows)] > 0) for block in range(shape.num_layers)]
        yield from ("--window-attn-skip-freq", str(pattern).replace(" ", ""))


def _overrides(chosen: Chosen, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield keys and values for the flags of the strategy; the recipe already has the model."""
    words = strategy_flags(chosen.experiment, chosen.strategy)
    strategy_words = pairs_of((*words, "--seq-length", pairs_of(flags)["seq-length"]))
    for several in _LISTS & strategy_words.keys():
        first = words.index(f"--{several}") + 1
        names = takewhile(lambda word: not word.startswith("--"), words[first:])
        strategy_words[several] = f"[{','.join(names)}]"
    if "fp8-format" in strategy_words:
        del strategy_words["bf16"]
        yield "mixed_precision", _FP8_RECIPES[chosen.experiment.traits.fp8_recipe]
    if chosen.experiment.model.shape.num_experts:
        overlaps = "moe-shared-expert-overlap" in strategy_words
        yield "model.moe_shared_expert_overlap", str(overlaps).lower()
        strategy_words.pop("moe-shared-expert-overlap", None)
    for flag, value in strategy_words.items():
        place = _Table.shipped().places.get(flag, f"model.{flag.replace('-', '_')}")
        if "=" in place:
            key, _, fixed = place.partition("=")
            yield key, fixed
        elif place:
            yield place, value or "true"
    virtual_stages = chosen.strategy.virtual_stages
    if "num-layers-per-virtual-pipeline-stage" in strategy_words:
        yield "model.virtual_pipeline_model_parallel_size", str(virtual_stages)
    if _OFFLOAD in strategy_words:
        yield "model.cpu_offloading", "true"
    yield "model.seq_length", strategy_words["seq-length"]


def _override(value: str) -> str:
    """Return a value quoted for Hydra, in which characters of a layout have a meaning."""
    return f"'{value}'" if re.search(r"[|*]", value) else value


def pairs_of(words: Sequence[str]) -> dict[str, str]:
    """Return flags with their values; an empty value for a flag without one.

    Example:
        >>> pairs_of(["--bf16", "--seq-length", "8", "--tp=2"])
        {'bf16': '', 'seq-length': '8', 'tp': '2'}
    """
    pairs: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            pairs[name] = value
        elif name and not pairs[name]:
            pairs[name] = word
    return pairs


_KEPT_IN_RECIPES: Final = {
    "gradients": "gradients in {}: the recipe's MixedPrecisionConfig has grad_reduce_in_fp32=False",
    "moments": "moments in {}: the recipe's optimizer has use_precision_aware_optimizer=True and "
    "this exp_avg_dtype, exp_avg_sq_dtype",
    "primary": "weights in {}: the recipe of mixed precision has fp8_param_gather=True",
}
"""Notes on formats that a recipe of Megatron-Bridge sets in Python, as types of torch."""

_YOURS: Final = " of your model is not known here: add its flags, or Megatron's defaults apply"
_NOT_NAMED: Final = f"the rotary base, and the router's score function and groups,{_YOURS}"
_NORM_MOVES: Final = "the final norm goes with the head, to the last stage"

_STRATEGY: Final = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
    "micro-batch-size": "micro_batch_size",
}
"""Flags that are counts of a STRATEGY; a missing flag means 1."""

_NARROW: Final = {"fp8-format": "fp8", "fp4-format": "nvfp4"}
"""Precisions by the flag that stands beside ``--bf16``."""

_LISTS: Final = frozenset({"recompute-modules", "cuda-graph-scope", HEAD_RANKS})
"""Flags with several values, which are lists in Megatron-Bridge."""

_FP8_RECIPES: Final = {
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
"""Names of Megatron-Bridge's recipes of mixed precision (training/mixed_precision.py of 0.6)."""
_OFFLOAD: Final = "cpu-offloading-num-layers"
_ACCOUNTS: Final = (
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)
_ENDS: Final = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_PART: Final = "num-layers-per-virtual-pipeline-stage"
_NUMBER: Final = "num-virtual-stages-per-pipeline-rank"

_SHARDING: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_flags(flags: Mapping[str, str], model: Model) -> dict[str, Any]:
    """Return Megatron's flags as keys of a STRATEGY and of the experiment.

    Args:
        flags: Values by flag, from `pairs_of`.
        model: The trained model, whose blocks are divided.

    Returns:
        Keys of a STRATEGY without ``dp``, and ``global_batch_size`` and ``zero_stage`` if the flags
        have them.

    Raises:
        ValueError: If a count is not a positive number, or the cuts do not fit the model.
    """
    record: dict[str, Any] = {
        ours: _count(flags, flag) for flag, ours in _STRATEGY.items() if flag in flags
    }
    record = {"tp": 1, "pp": 1, "micro_batch_size": 1, **record}
    if "global-batch-size" in flags:
        record["global_batch_size"] = _count(flags, "global-batch-size")
    precisions = [name for name in ("bf16", "fp16") if name in flags]
    if len(precisions) > 1:
        raise ValueError("--bf16 and --fp16: keep one")
    precisions = [name for flag, name in _NARROW.items() if flag in flags] or precisions
    if precisions:
        record["precision"] = precisions[0]
    record |= _formats(flags)
    is_off = flags.get(_OFFLOAD, "0") == "0"
    record["offloaded_blocks"] = 0 if is_off else _count(flags, _OFFLOAD)
    record["recompute"] = parse_recompute(_recompute(flags)).to_json()
    if "sequence-parallel" in flags and record["tp"] > 1:
        record["sequence_parallel"] = True
    record |= _sharding(flags)
    if "num-distributed-optimizer-instances" in flags:
        record["shard_groups"] = _count(flags, "num-distributed-optimizer-instances")
    if record["pp"] > model.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size: found {record['pp']} for a model of "
            f"{model.num_layers} layers"
        )
    chunks = _chunks(flags, record["pp"], model)
    number = record["virtual_stages"] = len(chunks) // record["pp"]
    stages = bounds_of(model, [sum(chunks[stage :: record["pp"]]) for stage in range(record["pp"])])
    bounds = bounds_of(model, chunks)
    is_usual = number > 1 and bounds == list(chunk_bounds(model, stages, number))
    record["bounds"] = stages if is_usual else bounds
    return record


def _sharding(flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of ZeRO; Megatron's FSDP takes precedence over its distributed optimizer."""
    if "use-torch-fsdp2" in flags:
        keeps = "torch-fsdp2-no-reshard-after-forward" in flags
        return {"zero_stage": MOST_ZERO_STAGE, "reshard_after_forward": not keeps}
    if "use-megatron-fsdp" in flags:
        name = flags.get("data-parallel-sharding-strategy", "no_shard")
        if name not in _SHARDING:
            message = f"--data-parallel-sharding-strategy: found {shown(name)}; expected one of "
            raise ValueError(message + ", ".join(_SHARDING))
        return {"zero_stage": _SHARDING[name]}
    if "zero-stage" in flags:  # Megatron-DeepSpeed
        stage = flags["zero-stage"]
        return {"zero_stage": 0 if stage == "0" else _count(flags, "zero-stage")}
    return {"zero_stage": int("use-distributed-optimizer" in flags)}


def _formats(flags: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of the mapping ``precision`` that the flags set."""
    switches = {
        "grad-reduce-in-bf16": ("gradients", "bf16"),
        "fp8-param-gather": ("primary", "fp8"),
        "use-precision-aware-optimizer": ("moments", flags.get("exp-avg-dtype", "fp32")),
    }
    return dict(keyed for flag, keyed in switches.items() if flag in flags)


def _count(flags: Mapping[str, str], flag: str) -> int:
    value = flags[flag]
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        message = (
            f"--{flag}: found {shown(value)}; expected a count: write the number into the file"
        )
        raise ValueError(message)
    return int(value)


def bounds_of(model: Model, blocks: Sequence[int]) -> list[int]:
    """Return the bounds of stages with the given numbers of blocks."""
    first = model.indices("block")[0]
    cuts = [first + done for done in accumulate(blocks[:-1])]
    return [0, *cuts, model.num_layers]


def _chunks(flags: Mapping[str, str], pp: int, model: Model) -> list[int]:
    """Return the number of blocks of every chunk, in the model's order."""
    num_blocks = len(model.indices("block"))
    if "pipeline-model-parallel-layout" in flags:
        chunks = parse_layout(flags["pipeline-model-parallel-layout"])
        if len(chunks) % pp or sum(chunks) != num_blocks:
            raise ValueError(
                f"--pipeline-model-parallel-layout has {len(chunks)} stages with {sum(chunks)} "
                f"blocks together, for pp {pp} and a model of {num_blocks}"
            )
        return chunks
    num_blocks -= model.shape.mtp_layers  # they come after the last stage's share
    ends = {
        stage: _count(flags, flag)
        for stage, flag in zip((0, pp - 1), _ENDS, strict=True)
        if flag in flags
    }
    added = [int(flag in flags) for flag in _ACCOUNTS]  # embedding and loss as a block each
    size, rest = divmod(num_blocks + sum(added) - sum(ends.values()), (pp - len(ends)) or 1)
    if rest or size < 0:
        count = f"{num_blocks} blocks{' with embedding or loss' if any(added) else ''}"
        raise ValueError(f"{count} are not divided evenly among {pp} stages")
    sizes = [ends.get(stage, size) for stage in range(pp)]
    number = _num_chunks(flags, size) if pp > 1 else 1
    if any(blocks % number for blocks in sizes):
        message = f"--{_NUMBER} {number} does not divide the {max(sizes)} blocks of a stage"
        raise ValueError(message)
    chunks = [blocks // number for blocks in sizes] * number
    chunks[0] -= added[0]
    chunks[-1] += model.shape.mtp_layers - added[1]
    return chunks


def _num_chunks(flags: Mapping[str, str], size: int) -> int:
    """Return the number of chunks of a stage with ``size`` blocks."""
    if _PART not in flags:
        return _count(flags, _NUMBER) if _NUMBER in flags else 1
    part = _count(flags, _PART)
    if size % part:
        raise ValueError(f"--{_PART} {part} does not divide the {size} blocks of a stage")
    return size // part or 1


def parse_layout(text: str) -> list[int]:
    """Return the number of blocks of every part of a layout, with modules of further tokens (m).

    Raises:
        ValueError: If the text is no layout, or longer than that of any model.

    Example:
        >>> parse_layout("Et*3|(tt|)*2,tL")
        [3, 2, 2, 1]
    """
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*([0-9]{1,4})", r"([A-Za-z|])\*([0-9]{1,4})"):
        written_out = [len(part[1]) * int(part[2]) for part in re.finditer(pattern, unrolled)]
        if len(unrolled) + sum(written_out) > MOST_CHARACTERS:
            raise ValueError(
                f"--pipeline-model-parallel-layout: found {shown(text)}, which is more than "
                f"{MOST_CHARACTERS} characters when it is written out"
            )
        unrolled = re.sub(pattern, lambda part: part[1] * int(part[2]), unrolled)
    if not re.fullmatch(r"E[t|]*[m|]*L", unrolled):
        raise ValueError(
            f"--pipeline-model-parallel-layout: found {shown(text)}; expected E, t, m, L with "
            "| between stages, such as 'Et*3|t*4L'"
        )
    return [part.count("t") + part.count("m") for part in unrolled.split("|")]


def _recompute(flags: Mapping[str, str]) -> str:
    """Return the kind of recompute; ``--recompute-modules`` without the core is no selective."""
    kind = flags.get("recompute-granularity", "none")
    if "recompute-activations" in flags:
        kind = "selective"
    if kind == "full" and flags.get("recompute-method") == "block":
        return f"full:{_count(flags, 'recompute-num-layers')}"
    if kind not in {"none", "selective", "full"}:
        message = f"--recompute-granularity: found {shown(kind)}; expected selective or full"
        raise ValueError(message)
    is_core = "core_attn" in flags.get("recompute-modules", "core_attn").split()
    return "none" if kind == "selective" and not is_core else kind
