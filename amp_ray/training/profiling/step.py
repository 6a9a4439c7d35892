"""The step around the layers: host work per micro-batch and step, and the rate of the memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from amp_ray.training.clock import HostClock, Spans
from amp_ray.training.data import step_batches
from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.pipeline import build_engine, build_module
from amp_ray.training.profiling.group import Ranks
from amp_ray.training.profiling.passes import SwitchedParallel, make_subject
from amp_ray.training.shapes import SHRINK_FACTOR, ImageShape, TextShape, layer_kinds
from amp_ray.training.whole_model import build_optimizer
from amp_ray.trials.profile.points import LayerPoint

WARMUP_STEPS: Final = 3
REPEATS: Final = 12
MICRO_BATCHES: Final = (1, 3)
"""Of the two runs; their difference is that of two micro-batches."""

TINY_TOKENS: Final = 2
HEAD_SIZE: Final = 2
"""Smallest that rotary positions allow."""

MEMORY_BYTES: Final = 64 * 2**20
"""Parameters that are streamed: more than caches hold."""

BYTES_PER_ELEMENT: Final = 4
ACCUMULATION_PASSES: Final = 3
"""Adding a gradient reads both and writes one."""

BUCKET_PASSES: Final = 4
"""Copied to a flat buffer and back, each read and written."""

LEAST_TRAFFIC_FRACTION: Final = 0.5
"""At least that much of the full pass is traffic, whatever the empty pass says: on a busy machine
their difference may be anything."""

UPDATE_PASSES: Final = {"adam": 7, "adamw": 7, "sgd": 3}
"""Gradient read; weight and moments read and written."""


def time_step(job: Job, ranks: Ranks, *, cuda: bool) -> dict[str, float] | None:
    """Measure an optimizer step without its layers, all ranks at once.

    Returns:
        Medians over the ranks of ``host_s_per_micro_batch``, ``host_s_per_iteration`` and
        ``memory_bytes_per_s``; None where memory was short.
    """
    host = _host(job, ranks, cuda=cuda)
    bytes_per_s = ranks.attempt(lambda: _memory_bytes_per_s(job, ranks, cuda=cuda))
    if bytes_per_s is None:
        return None
    values = {**host, "memory_bytes_per_s": bytes_per_s}
    return {key: statistics.median(ranks.gather(value)) for key, value in values.items()}


def tiny_shape(shape: TextShape | ImageShape) -> TextShape | ImageShape:
    """Return a model with the same layers and tensors that hardly compute anything.

    Example:
        >>> from amp_ray.training.shapes import read_shape
        >>> figures = dict(num_layers=4, hidden_size=64, num_heads=8, sequence_length=64)
        >>> tiny_shape(read_shape({"family": "gpt2", "vocab_size": 512, **figures})).hidden_size
        16
    """
    if isinstance(shape, ImageShape):
        last = len(shape.depth) - 1
        hidden = shape.num_heads * SHRINK_FACTOR ** shape.num_shrinkings(last)
        return replace(shape, hidden_size=hidden, bottom_width=1, latent_size=1, window_size=1)
    hidden = HEAD_SIZE * shape.num_heads
    return replace(
        shape,
        hidden_size=hidden,
        head_size=0,
        feed_forward_size=hidden,
        expert_feed_forward_size=min(hidden, shape.expert_feed_forward_size),
        shared_feed_forward_size=min(hidden, shape.shared_feed_forward_size),
        sequence_length=TINY_TOKENS,
        vocab_size=TINY_TOKENS,
    )


def _host(job: Job, ranks: Ranks, *, cuda: bool) -> dict[str, float]:
    """Run the training program itself on a model that hardly computes anything.

    What its layers take is in their own times and so not counted again.
    """
    tiny = replace(job, model=tiny_shape(job.model), zero_stage=0)
    few, many = MICRO_BATCHES
    (step, layers), (longer, _) = (
        _program(tiny, number, ranks, cuda=cuda) for number in MICRO_BATCHES
    )
    few_s, many_s, layers_s = _alternating_s([step, longer, layers], cuda=cuda, meet=ranks.barrier)
    each_s = (many_s - few_s) / (many - few)
    return {
        "host_s_per_micro_batch": max(0.0, each_s - layers_s),
        "host_s_per_iteration": max(0.0, few_s - few * each_s),
    }


def _program(
    job: Job, number: int, ranks: Ranks, *, cuda: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step of so many micro-batches, and the layers alone for one of them."""
    grid = replace(job.grid, micro_batch_size=1, num_micro_batches=number)
    job = replace(job, grid=grid, global_batch_size=grid.dp * number)
    parallel = TensorParallel(rank=0, size=1)
    module = build_module(job, parallel, 0)
    engine = build_engine(job, module, parallel, cuda=cuda)
    batches = list(step_batches(job, 0, Coordinates(pp=0, dp=ranks.rank, tp=0)))
    source, target = (part.to(engine.device) for part in batches[0])
    if source.is_floating_point():
        source = source.to(next(module.parameters()).dtype)

    def step() -> None:
        engine.train_batch(iter(batches))

    def layers() -> None:
        module.loss_fn(module(source), target).backward()

    return step, layers


def _memory_bytes_per_s(job: Job, ranks: Ranks, *, cuda: bool) -> float:
    """Time adding, bucketing and updating gradients, less the same for as many empty tensors."""
    parallel = SwitchedParallel(rank=0, size=1, group=None, spans=Spans(clock=HostClock()))
    block = layer_kinds(job.model).index("block")
    subject = make_subject(
        job, LayerPoint(tp=1, micro_batch_size=1, layer=block), parallel, ranks.device
    )
    sizes = [parameter.numel() for parameter in subject.parameters()]
    copies = max(1, MEMORY_BYTES // (BYTES_PER_ELEMENT * sum(sizes)))
    full, empty = sizes * copies, [1] * len(sizes) * copies
    passes = ACCUMULATION_PASSES + BUCKET_PASSES + UPDATE_PASSES[job.optimizer]
    tasks = [_traffic(job, part, ranks, cuda=cuda) for part in (full, empty)]
    full_s, empty_s = _alternating_s(tasks, cuda=cuda)
    num_bytes = float(passes * BYTES_PER_ELEMENT * sum(full))
    return num_bytes / max(full_s - empty_s, LEAST_TRAFFIC_FRACTION * full_s)


def _traffic(job: Job, sizes: Sequence[int], ranks: Ranks, *, cuda: bool) -> Callable[[], None]:
    """Return one accumulation, one trip through a flat bucket and one update, to be timed."""
    weights = nn.ParameterList(torch.zeros(size, device=ranks.device) for size in sizes)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = build_optimizer(job, weights, fused=cuda)
    gradients = [weight.grad for weight in weights]

    def tail() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            gradient.add_(weight.detach())
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        for gradient, part in zip(gradients, flat.split(list(sizes)), strict=True):
            gradient.copy_(part)
        optimizer.step()

    return tail


def _alternating_s(
    tasks: Sequence[Callable[[], Any]], *, cuda: bool, meet: Callable[[], Any] = lambda: None
) -> tuple[float, ...]:
    """Return the lower quartile of the seconds of each of several tasks.

    They take turns, and of each the less disturbed quarter counts: the differences between them
    are small, and other work on the machine would spoil them. All ranks ``meet`` before each.
    """
    times: list[list[float]] = [[] for _ in tasks]
    for _ in range(WARMUP_STEPS + REPEATS):
        for task, seconds in zip(tasks, times, strict=True):
            meet()
            seconds.append(_seconds(task, cuda=cuda))
    return tuple(statistics.quantiles(seconds[WARMUP_STEPS:], n=4)[0] for seconds in times)


def _seconds(work: Callable[[], Any], *, cuda: bool) -> float:
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
