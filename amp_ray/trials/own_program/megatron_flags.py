"""Conversion of a strategy to arguments of Megatron-LM and Megatron-DeepSpeed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.strategy import Strategy, all_bounds, candidate_of
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.units import NARROW

MEGATRON_CORE: Final = "megatron-core"
"""Runtime whose traits have flags of Megatron-LM; what others assume is not written."""
MEGATRON_DEEPSPEED: Final = "megatron"
"""Runtime whose ZeRO settings come from DeepSpeed's configuration, not from Megatron's flags."""

_PRECISION_FLAGS: Final = {
    "fp32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16",),
    "nvfp4": ("--bf16", "--fp4-format", "e2m1"),
}

DTYPE_FLAGS: Final = ("exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype")
"""Flags of formats that a precision-aware optimizer takes: both moments, then the gradients."""

_SHARDED: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""Sharding strategy of Megatron's FSDP, by ZeRO stage."""

_OTHERS: Final = {
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "cp": "context-parallel-size",
    "sequence_parallel": "sequence-parallel",
}
"""Flags for all dimensions of a stage except tp, dp and recompute."""

_CP_KINDS: Final = {"ring": "p2p", "all-gather": "all_gather", "all-to-all": "a2a"}

HEAD_RANKS: Final = "hierarchical-context-parallel-sizes"
"""Flag of the ranks that divide heads, and of those of a ring."""

CAPTURED: Final = ("attn", "moe_router", "moe_preprocess")
"""Parts of a block with experts that one CUDA graph starts."""

LETTERS: Final = {"embedding": "E", "block": "t", "head": "L"}
"""Letters of ``--pipeline-model-parallel-layout``; the final norm belongs to the head. Modules of
multi-token prediction, which are our last blocks, are ``m``."""

_GRAPHS: Final = {
    "attention": ("transformer_engine", "--cuda-graph-scope", *CAPTURED),
    "step": ("local", "--cuda-graph-scope", "full_iteration"),
}

TE_LOSS_FRACTION: Final = 0.2
"""Largest traffic of the loss that is that of Transformer Engine's kernels; megatron-core's own
fused loss has 28 of 60 bytes, these 10."""


def megatron_flags(experiment: Experiment, strategy: Strategy) -> tuple[str, ...]:
    """Return the arguments that make Megatron use a strategy and log every iteration.

    They set the strategy and the number of iterations. Model sizes, data and learning rate come
    from the user's command.
    """
    trials = experiment.trials
    num_steps = trials.num_warmup_steps + trials.num_steps
    length = ("--train-iters", str(num_steps), "--log-interval", "1")
    return (*strategy_flags(experiment, strategy), *length)


def strategy_flags(experiment: Experiment, strategy: Strategy) -> tuple[str, ...]:
    """Return the arguments for the strategy, without those for the trial's length and logs."""
    candidate = candidate_of(strategy)
    model, traits = _checked(experiment), experiment.traits
    num_layers = sum(stage_blocks(model, strategy.bounds)) - model.shape.mtp_layers
    sizes = {
        "tensor-model-parallel-size": candidate.options.tp,
        "pipeline-model-parallel-size": candidate.pp,
        "micro-batch-size": candidate.micro_batch_size,
        "global-batch-size": candidate.global_batch_size,
        "num-layers": num_layers,
    }
    is_core = traits.name == MEGATRON_CORE
    return (
        *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
        *_other_flags(candidate),
        *_stage_flags(model, strategy, traits),
        *_recompute_flags(candidate.options.recompute, traits),
        *_PRECISION_FLAGS[experiment.precision],
        *(("--fp8-format", _fp8_format(traits)) if experiment.precision == "fp8" else ()),
        *_format_flags(traits.formats.kept),
        *_zero_flags(strategy, traits.name),
        *_offload_flags(traits, num_layers),
        *(_exchange_flags(experiment, strategy) if is_core else ()),
        *(_kernel_flags(experiment) if is_core else ()),
        *(_graph_flags(traits, candidate.options.recompute) if is_core else ()),
        *_expert_flags(traits, candidate.options, model.shape.num_experts),
    )


def _fp8_format(traits: RuntimeTraits) -> str:
    """Return the format of gradients: scales of blocks leave no need for a wider exponent."""
    return "e4m3" if traits.fp8_recipe == "mxfp8" else "hybrid"


def _other_flags(candidate: Candidate) -> list[str]:
    flags = []
    for name, value in candidate.options.others.items():
        if name not in _OTHERS:
            raise ValueError(f"Megatron has no flag for {name} {value}")
        flags += [f"--{_OTHERS[name]}", *([] if value is True else [str(value)])]
    return flags


def stage_blocks(model: Model, bounds: Sequence[int]) -> tuple[int, ...]:
    """Count the transformer blocks of every stage."""
    blocks = set(model.indices("block"))
    return tuple(len(blocks & set(range(first, end))) for first, end in pairwise(bounds))


def _checked(experiment: Experiment) -> Model:
    """Return the model; refuse blocks that are not consecutive, or differ in what has no flag."""
    model, shape = experiment.model, experiment.model.shape
    blocks = model.indices("block")
    distinct = {model.layers[index] for index in blocks}
    differ = shape.first_dense_layers or shape.attention_windows or shape.mtp_layers
    may_differ = differ and experiment.traits.name != MEGATRON_DEEPSPEED
    if (len(distinct) != 1 and not may_differ) or blocks[-1] - blocks[0] >= len(blocks):
        raise ValueError(f"Megatron trains a chain of equal blocks, not {model.name}")
    return model


def _stage_flags(model: Model, strategy: Strategy, traits: RuntimeTraits) -> list[str]:
    """Return the flags that divide blocks into stages.

    Stages between the first and the last need equal numbers of blocks. All other bounds need a
    layout, which Megatron core supports since 0.12. If every stage has blocks, Megatron always puts
    embedding and head on the first and the last stage.
    """
    blocks = stage_blocks(model, all_bounds(model, strategy))
    if model.shape.mtp_layers:
        layout = layout_text(model, all_bounds(model, strategy))
        return ["--pipeline-model-parallel-layout", layout] if strategy.pp > 1 else []
    if len(set(blocks)) == 1:
        part = ["--num-layers-per-virtual-pipeline-stage", str(blocks[0])]
        return part if strategy.is_interleaved else []
    if traits.name == MEGATRON_DEEPSPEED:
        raise ValueError(
            "Megatron-DeepSpeed divides the blocks evenly among the stages, found stages with "
            f"{', '.join(map(str, blocks))} blocks"
        )
    if not strategy.is_interleaved and min(blocks) > 0:
        first = ["--decoder-first-pipeline-num-layers", str(blocks[0])]
        last = ["--decoder-last-pipeline-num-layers", str(blocks[-1])]
        if len(set(blocks[1:])) == 1:
            return first
        if len(set(blocks[:-1])) == 1:
            return last
        if len(set(blocks[1:-1])) == 1:
            return [*first, *last]
    return ["--pipeline-model-parallel-layout", layout_text(model, all_bounds(model, strategy))]


def layout_text(model: Model, bounds: Sequence[int]) -> str:
    """Return Megatron's layout text, such as ``Et*3|t*4|tL`` for stages of 3, 4 and 1 blocks."""
    letter_of = [LETTERS.get(layer.kind, "") for layer in model.layers]
    blocks = model.indices("block")
    for index in blocks[len(blocks) - model.shape.mtp_layers :]:
        letter_of[index] = "m"
    stages = []
    for first, end in pairwise(bounds):
        letters = "".join(letter_of[first:end])
        runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
        stages.append("".join(f"{one}*{size}" if size > 1 else one for one, size in runs))
    return "|".join(stages)


def _recompute_flags(recompute: Recompute, traits: RuntimeTraits) -> list[str]:
    modules: list[str] = [*traits.recompute_modules]
    if recompute.kind == "selective" and recompute.layers is not None:
        raise ValueError(f"Megatron recomputes selectively in all layers, found {recompute}")
    if recompute.kind == "per-operator":
        raise ValueError("Megatron recomputes no single operators, found recompute per-operator")
    if recompute.kind != "full":
        if recompute.kind == "selective":
            modules = ["core_attn", *modules] if modules else []
        elif not modules:
            return []
        named = ("--recompute-modules", *modules) if modules else ()
        return ["--recompute-granularity", "selective", *named]
    if modules and recompute.layers is not None:
        message = f"Megatron recomputes {', '.join(modules)} or whole blocks, found {recompute}"
        raise ValueError(message)
    method, number = ("uniform", 1) if recompute.layers is None else ("block", recompute.layers)
    flags = ("granularity", "full"), ("method", method), ("num-layers", str(number))
    return [word for name, value in flags for word in (f"--recompute-{name}", value)]


def _format_flags(kept: Mapping[str, str]) -> list[str]:
    """Return the flags of what is kept in narrower formats than usual."""
    flags = ["--grad-reduce-in-bf16"] if "gradients" in kept else []
    flags += ["--fp8-param-gather"] if "primary" in kept else []
    if "moments" in kept:
        formats = [kept["moments"]] * 2 + ([kept["gradients"]] if "gradients" in kept else [])
        pairs = zip(DTYPE_FLAGS, formats, strict=False)
        flags += ["--use-precision-aware-optimizer"]
        flags += [word for flag, name in pairs for word in (f"--{flag}", name)]
    return flags


def _offload_flags(traits: RuntimeTraits, num_blocks: int) -> list[str]:
    number = traits.offloaded_blocks
    if number >= num_blocks:
        raise ValueError(f"Megatron offloads fewer than its {num_blocks} blocks, found {number}")
    return ["--cpu-offloading-num-layers", str(number)] if number else []


def _zero_flags(strategy: Strategy, runtime: str) -> list[str]:
    """Return the flags of ZeRO.

    Megatron's FSDP saves checkpoints in one format only. From stage 3 on, devices that hold no
    whole model cannot build one either, so it is built without memory and sharded.
    """
    zero = strategy.zero
    if runtime == MEGATRON_DEEPSPEED:
        return ["--zero-stage", str(zero.stage)]
    if zero.keeps_weights or (zero.shard_ranks and zero.stage in _SHARDED):
        message = f"Megatron shards weights over all data-parallel ranks, found zero_stage {zero}"
        raise ValueError(message)
    if zero.stage in _SHARDED:
        return [
            *("--use-megatron-fsdp", "--use-distributed-optimizer"),
            *("--data-parallel-sharding-strategy", _SHARDED[zero.stage]),
            *("--ckpt-format", "fsdp_dtensor"),
            *(["--init-model-with-meta-device"] if zero.stage == MOST_ZERO_STAGE else []),
        ]
    if not zero.stage:
        return []
    copies = (strategy.dp or 1) // zero.shards(strategy.dp or 1)
    several = ["--num-distributed-optimizer-instances", str(copies)] if copies > 1 else []
    return ["--use-distributed-optimizer", *several]


def _context_flags(experiment: Experiment, options: StageOptions) -> Iterator[str]:
    """Yield the flags for exchanges between the ranks of a sequence."""
    if options.cp == 1:
        return
    no_heads = experiment.why_no_heads(options)
    if no_heads:
        raise ValueError(no_heads)
    kind, heads = experiment.traits.context_parallel, experiment.head_ranks(options.tp, options.cp)
    if kind != "both":
        yield from ("--cp-comm-type", _CP_KINDS[kind])
        return
    yield from ("--cp-comm-type", "a2a+p2p")
    yield from (f"--{HEAD_RANKS}", str(heads), str(options.cp // heads))


def _exchange_flags(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """Yield the flags for messages between replicas, tensor-parallel and context-parallel ranks."""
    options, traits = candidate_of(strategy).options, experiment.traits
    is_sharded, is_fsdp = strategy.zero.stage > 0, strategy.zero.stage in _SHARDED
    if traits.overlaps_gradient_sync and (is_sharded or options.dp * options.cp > 1):
        yield "--overlap-grad-reduce"
        if traits.overlaps_weight_gather and is_sharded:
            yield "--overlap-param-gather"
        if not is_fsdp:
            yield from ("--ddp-bucket-size", str(int(traits.bucket_elements)))
    if is_fsdp and traits.waiting_elements:
        yield from ("--suggested-communication-unit-size", str(int(traits.waiting_elements)))
    yield from _context_flags(experiment, options)
    if traits.overlaps_gathers and options.sequence_parallel:
        yield "--tp-comm-overlap"


def _kernel_flags(experiment: Experiment) -> Iterator[str]:
    """Yield the flags for kernels that a time was predicted with."""
    traits, precision = experiment.traits, experiment.precision
    fused = "auto" if traits.native_attention else "flash"
    yield from ("--attention-backend", fused if traits.fused_attention else "unfused")
    if not traits.fused_pointwise:
        yield from ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion")
    if traits.loss_fraction < 1:
        fusion = "te" if traits.loss_fraction <= TE_LOSS_FRACTION else "native"
        yield from ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", fusion)
    if precision == "fp8":
        yield from ("--fp8-recipe", traits.fp8_recipe)
    if precision == "nvfp4":
        yield from ("--fp4-recipe", "nvfp4")
    if precision == "fp16" and traits.accumulates_fp16_in_fp32:
        yield "--accumulate-allreduce-grads-in-fp32"
    if not (traits.accumulates_bf16_in_fp32 or "gradients" in traits.formats.kept):
        yield from ("--grad-reduce-in-bf16",) if precision in {"bf16", *NARROW} else ()
    if not traits.fused_accumulation:
        yield "--no-gradient-accumulation-fusion"
    yield from ("--make-vocab-size-divisible-by", str(traits.vocabulary_multiple))


def _graph_flags(traits: RuntimeTraits, recompute: Recompute) -> Iterator[str]:
    """Yield the flags of CUDA graphs; those of parts of a block work without full recompute."""
    if traits.cuda_graphs == "none" or (
        recompute.kind == "full" and traits.cuda_graphs == "attention"
    ):
        return
    yield from ("--te-rng-tracker", "--cuda-graph-impl", *_GRAPHS[traits.cuda_graphs])


def _expert_flags(traits: RuntimeTraits, options: StageOptions, num_experts: int) -> Iterator[str]:
    """Yield the flags for products of experts and for the exchange of their tokens."""
    if not num_experts or traits.name == MEGATRON_DEEPSPEED:
        return
    yield from ("--moe-grouped-gemm", "--moe-permute-fusion")
    if traits.fused_router:
        yield "--moe-router-fusion"
    if traits.fused_experts:
        yield "--use-transformer-engine-op-fuser"
    yield from ("--moe-token-dispatcher-type",)
    if not (traits.sends_tokens_once and options.spreads_experts):
        yield "alltoall"
    else:  # both take probabilities in single precision only
        backend = traits.dispatcher
        yield from ("flex", "--moe-flex-dispatcher-backend", backend, "--moe-router-dtype", "fp32")
        yield from (f"--moe-{backend}-num-sms", str(traits.taken_multiprocessors))
    if traits.overlaps_shared_experts and not traits.sends_tokens_once:
        yield "--moe-shared-expert-overlap"
    if traits.overlaps_exchanges and options.ep > 1:
        yield "--overlap-moe-expert-parallel-comm"
