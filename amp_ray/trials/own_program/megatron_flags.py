"""A strategy as arguments of Megatron-LM and Megatron-DeepSpeed."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from amp_ray.spec.candidate import Candidate
from amp_ray.spec.chunks import all_bounds
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.model import Model
from amp_ray.spec.strategy import Strategy, candidate_of

MEGATRON_DEEPSPEED: Final = "megatron"
"""Name of the runtime that shards the optimizer by DeepSpeed's settings, not by Megatron's own."""

_PRECISION_FLAGS: Final = {
    "fp32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format", "hybrid"),
}

_MAX_MEGATRON_ZERO_STAGE: Final = 1
"""Megatron's distributed optimizer shards what ZeRO-1 does."""


def megatron_flags(experiment: Experiment, strategy: Strategy) -> tuple[str, ...]:
    """Return the arguments that make Megatron train by a strategy and log every iteration.

    They name what a strategy decides, and how long a trial is. Sizes of the model, data and
    learning rate are the user's.

    Raises:
        ValueError: If Megatron has no flags for such a strategy or model.
    """
    candidate = candidate_of(strategy)
    trials, traits = experiment.trials, experiment.traits
    blocks = stage_blocks(_checked(experiment.model), strategy.bounds)
    sizes = {
        "tensor-model-parallel-size": candidate.options.tp,
        "pipeline-model-parallel-size": candidate.pp,
        **({"context-parallel-size": candidate.options.cp} if candidate.options.cp > 1 else {}),
        "micro-batch-size": candidate.micro_batch_size,
        "global-batch-size": candidate.global_batch_size,
        "num-layers": sum(blocks),
        "train-iters": trials.num_warmup_steps + trials.num_steps,
        "log-interval": 1,
    }
    return (
        *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
        *_stage_flags(blocks, traits.name),
        *_interleaving_flags(experiment.model, strategy),
        *_recompute_flags(candidate),
        *_PRECISION_FLAGS[experiment.precision],
        *_zero_flags(experiment),
    )


def stage_blocks(model: Model, bounds: Sequence[int]) -> tuple[int, ...]:
    """Count the transformer blocks of every stage."""
    blocks = set(model.indices("block"))
    return tuple(len(blocks & set(range(first, end))) for first, end in pairwise(bounds))


def _checked(model: Model) -> Model:
    """Return a model that is a chain of equal blocks with ends, as all of Megatron's are."""
    blocks = model.indices("block")
    distinct = {model.layers[index] for index in blocks}
    if len(distinct) != 1 or blocks[-1] - blocks[0] >= len(blocks):
        message = f"Megatron trains a chain of equal blocks, not {model.name}"
        raise ValueError(message)
    return model


def _stage_flags(blocks: tuple[int, ...], runtime: str) -> list[str]:
    """Say how blocks are divided; first and last stage may have numbers of their own.

    Embedding and head need no check: where every stage has blocks, they are on the first and
    the last stage, as in Megatron.
    """
    found = f"found stages with {', '.join(map(str, blocks))} blocks"
    if min(blocks) < 1:
        message = f"Megatron needs a transformer block in every stage, {found}"
        raise ValueError(message)
    if len(set(blocks)) == 1:
        return []
    if runtime == MEGATRON_DEEPSPEED:
        message = f"Megatron-DeepSpeed divides the blocks evenly among the stages, {found}"
        raise ValueError(message)
    first = ["--decoder-first-pipeline-num-layers", str(blocks[0])]
    last = ["--decoder-last-pipeline-num-layers", str(blocks[-1])]
    if len(set(blocks[1:])) == 1:
        return first
    if len(set(blocks[:-1])) == 1:
        return last
    if len(set(blocks[1:-1])) == 1:
        return [*first, *last]
    message = (
        "Megatron lets the first and the last stage have a number of blocks of their own; the "
        f"others must all have the same, {found}"
    )
    raise ValueError(message)


def _interleaving_flags(model: Model, strategy: Strategy) -> list[str]:
    """Say how many blocks of a stage follow each other, where its schedule is interleaved."""
    if strategy.virtual_stages == 1:
        return []
    blocks = stage_blocks(model, all_bounds(model, strategy))
    if len(set(blocks)) > 1:
        message = (
            "an interleaved schedule of Megatron needs the same number of blocks in every chunk, "
            f"found virtual_stages {strategy.virtual_stages} with {', '.join(map(str, blocks))}"
        )
        raise ValueError(message)
    return ["--num-layers-per-virtual-pipeline-stage", str(blocks[0])]


def _recompute_flags(candidate: Candidate) -> list[str]:
    """Say what is computed again."""
    recompute = candidate.options.recompute
    if recompute.kind == "none":
        return []
    if recompute.kind == "selective":
        if recompute.layers is not None:
            message = f"Megatron recomputes selectively in all layers, found {recompute}"
            raise ValueError(message)
        return ["--recompute-granularity", "selective"]
    method, number = ("uniform", 1) if recompute.layers is None else ("block", recompute.layers)
    flags = ("granularity", "full"), ("method", method), ("num-layers", str(number))
    return [word for name, value in flags for word in (f"--recompute-{name}", value)]


def _zero_flags(experiment: Experiment) -> list[str]:
    """Say how the optimizer is sharded."""
    stage = experiment.zero_stage
    if experiment.traits.name == MEGATRON_DEEPSPEED:
        return ["--zero-stage", str(stage)]
    if stage > _MAX_MEGATRON_ZERO_STAGE:
        message = (
            f"zero_stage is {stage}; Megatron shards the optimizer alone, which is zero_stage 1"
        )
        raise ValueError(message)
    return ["--use-distributed-optimizer"] if stage else []
