"""Conversion of a strategy to arguments of Megatron-LM and Megatron-DeepSpeed."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, all_bounds, candidate_of

MEGATRON_DEEPSPEED: Final = "megatron"
"""Runtime whose ZeRO settings come from DeepSpeed's configuration, not from Megatron's flags."""

_PRECISION_FLAGS: Final = {
    "fp32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format", "hybrid"),
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

LETTERS: Final = {"embedding": "E", "block": "t", "head": "L"}
"""Letters of ``--pipeline-model-parallel-layout``; the final norm belongs to the head."""


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
    model, traits = _checked(experiment.model), experiment.traits
    blocks = stage_blocks(model, strategy.bounds)
    sizes = {
        "tensor-model-parallel-size": candidate.options.tp,
        "pipeline-model-parallel-size": candidate.pp,
        **({"context-parallel-size": candidate.options.cp} if candidate.options.cp > 1 else {}),
        "micro-batch-size": candidate.micro_batch_size,
        "global-batch-size": candidate.global_batch_size,
        "num-layers": sum(blocks),
    }
    return (
        *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
        *_other_flags(candidate),
        *_stage_flags(model, strategy, traits),
        *_recompute_flags(candidate),
        *_PRECISION_FLAGS[experiment.precision],
        *_format_flags(traits.formats.kept),
        *_zero_flags(strategy, traits.name),
        *_offload_flags(traits, sum(blocks)),
    )


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


def _checked(model: Model) -> Model:
    """Return the model; refuse one whose blocks differ or are not consecutive."""
    blocks = model.indices("block")
    distinct = {model.layers[index] for index in blocks}
    if len(distinct) != 1 or blocks[-1] - blocks[0] >= len(blocks):
        raise ValueError(f"Megatron trains a chain of equal blocks, not {model.name}")
    return model


def _stage_flags(model: Model, strategy: Strategy, traits: RuntimeTraits) -> list[str]:
    """Return the flags that divide blocks into stages.

    Stages between the first and the last need equal numbers of blocks. All other bounds need a
    layout, which Megatron core supports since 0.12. If every stage has blocks, Megatron always puts
    embedding and head on the first and the last stage.
    """
    blocks = stage_blocks(model, all_bounds(model, strategy))
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
    stages = []
    for first, end in pairwise(bounds):
        letters = "".join(LETTERS.get(layer.kind, "") for layer in model.layers[first:end])
        runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
        stages.append("".join(f"{one}*{size}" if size > 1 else one for one, size in runs))
    return "|".join(stages)


def _recompute_flags(candidate: Candidate) -> list[str]:
    recompute = candidate.options.recompute
    if recompute.kind == "none":
        return []
    if recompute.kind == "selective":
        if recompute.layers is not None:
            raise ValueError(f"Megatron recomputes selectively in all layers, found {recompute}")
        return ["--recompute-granularity", "selective"]
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
    zero = strategy.zero
    if runtime == MEGATRON_DEEPSPEED:
        return ["--zero-stage", str(zero.stage)]
    if zero.keeps_weights or (zero.shard_ranks and zero.stage in _SHARDED):
        message = f"Megatron shards weights over all data-parallel ranks, found zero_stage {zero}"
        raise ValueError(message)
    if zero.stage in _SHARDED:
        return ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", _SHARDED[zero.stage]]
    if not zero.stage:
        return []
    copies = (strategy.dp or 1) // zero.shards(strategy.dp or 1)
    several = ["--num-distributed-optimizer-instances", str(copies)] if copies > 1 else []
    return ["--use-distributed-optimizer", *several]
