"""The run of one rank of a profile, from the rendezvous to the end."""

import gc
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import deepspeed
import torch
from torch import Tensor, nn

from amp_ray.models.model import ModelShape
from amp_ray.strategies.candidate import StageOptions
from amp_ray.training.clock import DeviceClock, HostClock, Spans
from amp_ray.training.connect import connect, use_cuda
from amp_ray.training.events import EventChannel, cause_of, write_result
from amp_ray.training.executor.chunks import build_chunks
from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job, ProfileJob
from amp_ray.training.loop import ENGINES
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.pipeline import join
from amp_ray.training.profiling.passes import (
    SLICE_TARGET_S,
    TARGET_S,
    Subject,
    SwitchedParallel,
    footprint,
    make_subject,
    repeats_for,
    time_launch,
    time_passes,
    warm_up,
)
from amp_ray.training.shapes import is_image, layer_kinds, level_width
from amp_ray.training.workload import DTYPES, build_optimizer, samples, whole_model
from amp_ray.trials.profile.points import LayerPoint, LinkPoint

SCHEMA: Final = 1

LINK_TARGET_S: Final = 0.25
"""Target for the total time of one message's repeats, within the limits below."""

MIN_REPEATS: Final = 4
MAX_REPEATS: Final = 30
WARMUP_REPEATS: Final = 2
BYTES_PER_ELEMENT: Final = 4

PAIR: Final = 2
"""Number of ranks that exchange messages, and of messages per round trip."""

_T = TypeVar("_T")

WARMUP_STEPS: Final = 3
REPEATS: Final = 12
MICRO_BATCHES: Final = (1, 3)
"""Numbers of micro-batches of two runs; they differ by the time of two micro-batches."""

TINY_TOKENS: Final = 2
HEAD_SIZE: Final = 2
"""Smallest head width that rotary positions allow."""

MEMORY_BYTES: Final = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes of parameters in the test of memory bandwidth: more than caches hold, and on a GPU so many
that it needs longer for them than the host for its launches."""

ACCUMULATION_PASSES: Final = 3
"""Accesses per parameter to accumulate a gradient: two reads and one write."""

BUCKET_PASSES: Final = 4
"""Accesses per parameter to copy to a flat buffer and back: two reads and two writes."""

LEAST_TRAFFIC_FRACTION: Final = 0.5
"""Lower limit for the share of memory traffic in the time of the full pass: on a busy machine, the
difference between the times of the full and the empty pass is unreliable."""

UPDATE_PASSES: Final = {"adam": 7, "adamw": 7, "sgd": 3}
"""Accesses per parameter of an update: one to read the gradient, two per weight and moment."""


class Ranks:
    """The ranks and their groups; all ranks call its methods in the same order."""

    def __init__(self, device: Any, sizes: Iterable[int]) -> None:  # noqa: ANN401 - torch's
        """Create groups of consecutive ranks for each size; all ranks call it."""
        self.device = device
        self.rank = int(torch.distributed.get_rank())
        self.size = int(torch.distributed.get_world_size())
        self._groups: dict[int, Any] = {}
        for size in sorted(set(sizes)):
            for first in range(0, self.size, size):
                group = torch.distributed.new_group(list(range(first, first + size)))
                if first <= self.rank < first + size:
                    self._groups[size] = group

    def group(self, size: int) -> Any:  # noqa: ANN401 - torch's
        """Return this rank's group of ``size`` ranks."""
        return self._groups[size]

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        shared = torch.tensor([value], device=self.device)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
        return int(shared.item())

    def gather(self, value: float) -> list[float]:
        """Return all ranks' values, on every rank."""
        parts = [torch.zeros(1, dtype=torch.float64, device=self.device) for _ in range(self.size)]
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_gather(parts, mine)
        return [float(part.item()) for part in parts]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.largest(0)

    def wait(self) -> None:
        """Wait until this rank's device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """Do local work; return None on all ranks if any rank ran out of memory."""
        result: _T | None = None
        failed = False
        try:
            result = work()
            self.wait()
        except (MemoryError, RuntimeError) as error:
            if cause_of(error) != "out_of_memory":
                raise
            failed = True
        if self.largest(int(failed)):
            result = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        return result


class _Run:
    def __init__(self, job: ProfileJob, channel: EventChannel) -> None:
        self.job, self.channel = job, channel
        self.start = time.monotonic()
        self.cuda = use_cuda(job.trial)
        connect(job.trial, cuda=self.cuda)
        join(job.trial, cuda=self.cuda)
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")
        self.ranks = Ranks(device, job.group_sizes)

    def clock(self) -> HostClock:
        return DeviceClock() if self.cuda else HostClock()

    def tell(self, event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """Send an event from one rank on behalf of all ranks."""
        if self.ranks.rank == 0:
            self.channel.send(event, **values)

    def is_over(self) -> bool:
        """Return whether the time is up for any rank."""
        elapsed_s = time.monotonic() - self.start
        return bool(self.ranks.largest(int(elapsed_s > self.job.seconds)))


def run(job: ProfileJob, channel: EventChannel) -> None:
    """Measure all points within the time limit; rank 0 sends the results."""
    state = _Run(job, channel)
    state.tell("hardware", hardware=hardware(cuda=state.cuda), versions=versions())
    complete = _links(state) and _step(state) and _layers(state)
    if state.ranks.rank == 0:
        elapsed_s = time.monotonic() - state.start
        record = {"schema": SCHEMA, "trial_id": job.trial.trial_id}
        write_result(job.trial.out_dir, {**record, "complete": complete, "elapsed_s": elapsed_s})
    # No rank may exit before the result is on disk: its exit would look like a failure.
    state.ranks.barrier()
    torch.distributed.destroy_process_group()


def _links(state: _Run) -> bool:
    for link in state.job.links:
        if state.is_over():
            return False
        seconds = time_link(link, state.ranks, state.clock())
        if seconds is not None:
            values = {"num_ranks": link.num_ranks, "bytes": link.num_bytes, "seconds": seconds}
            state.tell("link", what=link.what, **values)
    return True


def _step(state: _Run) -> bool:
    """Measure a step's costs outside the layers; return whether this was done within the time."""
    if state.job.step:
        if state.is_over():
            return False
        figures = time_step(state.job.trial, state.ranks, cuda=state.cuda)
        if figures is not None:
            state.tell("step", **figures)
    return True


def _layers(state: _Run) -> bool:
    too_large: list[LayerPoint] = []
    for point in state.job.points:
        if any(map(point.is_as_large_as, too_large)):
            continue
        if state.is_over():
            return False
        state.tell("begin", **asdict(point))
        figures = _layer(state, point)
        gc.collect()
        if figures is None:
            too_large.append(point)
            state.tell("oom", **asdict(point))
        else:
            state.tell("slice" if point.tokens else "layer", **asdict(point), **figures)
    return True


def _layer(state: _Run, point: LayerPoint) -> dict[str, float] | None:
    """Measure one layer; return None if it does not fit into memory."""
    ranks, cuda = state.ranks, state.cuda
    spans = Spans(clock=state.clock())
    parallel = SwitchedParallel(
        rank=ranks.rank % point.tp, size=point.tp, group=ranks.group(point.tp), spans=spans
    )
    made = ranks.attempt(lambda: _rehearse(state, point, parallel))
    if made is None:
        return None
    subject, sizes = made
    parallel.silent = False
    target_s = SLICE_TARGET_S if point.tokens else TARGET_S
    repeats = ranks.largest(repeats_for(warm_up(subject, cuda=cuda), target_s))
    launch = {} if point.tokens else time_launch(subject, cuda=cuda)
    times = time_passes(subject, spans, repeats, cuda=cuda)
    medians = {
        key: statistics.median(ranks.gather(value)) for key, value in {**times, **launch}.items()
    }
    most = {key: float(ranks.largest(value)) for key, value in sizes.items()}
    return {**medians, **most, "repeats": repeats}


def _rehearse(
    state: _Run, point: LayerPoint, parallel: SwitchedParallel
) -> tuple[Subject, dict[str, int]]:
    """Build a layer and run it; without communication, so that no rank hangs if memory runs out."""
    parallel.silent = True
    subject = make_subject(state.job.trial, point, parallel, state.ranks.device)
    subject.backward(subject.forward())
    return subject, footprint(subject, cuda=state.cuda)


def hardware(*, cuda: bool) -> str:
    """Return the name of this rank's device."""
    if cuda:
        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return f"{name}, {torch.get_num_threads()} of {len(models)} threads per rank"


def versions() -> str:
    """Return the software versions that a measurement depends on, as text."""
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}{cuda}, "
        f"DeepSpeed {deepspeed.__version__}"
    )


def time_link(point: LinkPoint, ranks: Ranks, clock: HostClock) -> float | None:
    """Time a round trip between pairs of ranks, or an all-reduce within groups.

    All groups communicate at the same time, as in training. Return the median over repeats and
    groups in seconds; None if the tensor does not fit into memory.
    """
    value = ranks.attempt(
        lambda: torch.zeros(point.num_bytes // BYTES_PER_ELEMENT, device=ranks.device)
    )
    if value is None:
        return None
    once_s = max(_times(point, ranks, clock, value, WARMUP_REPEATS))
    repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, LINK_TARGET_S / max(once_s, 1e-9))))
    repeats = ranks.largest(repeats)
    times = _times(point, ranks, clock, value, repeats)
    share = PAIR if point.what == "p2p" else 1
    return statistics.median(ranks.gather(statistics.median(times) / share))


def _times(
    point: LinkPoint, ranks: Ranks, clock: HostClock, value: Tensor, repeats: int
) -> list[float]:
    ranks.barrier()
    marks = []
    for _ in range(repeats):
        start = clock.mark()
        if point.what == "p2p":
            _there_and_back(ranks, value)
        else:
            torch.distributed.all_reduce(value, group=ranks.group(point.num_ranks))
        marks.append((start, clock.mark()))
    ranks.wait()
    return [clock.seconds(start, end) for start, end in marks]


def _there_and_back(ranks: Ranks, value: Tensor) -> None:
    """Do a round trip with the neighbour, even ranks first; an unpaired last rank skips it."""
    even = ranks.rank % PAIR == 0
    partner = ranks.rank + 1 if even else ranks.rank - 1
    if partner == ranks.size:
        return
    send: Any = torch.distributed.send
    receive: Any = torch.distributed.recv
    for exchange in (send, receive) if even else (receive, send):
        exchange(value, partner)


def time_step(job: Job, ranks: Ranks, *, cuda: bool) -> dict[str, float] | None:
    """Measure an optimizer step without its layers, on all ranks at once.

    Returns:
        Medians over the ranks of ``host_s_per_micro_batch``, ``host_s_per_iteration`` and
        ``memory_bytes_per_s``; None if memory ran out.
    """
    host = _host(job, ranks, cuda=cuda)
    bytes_per_s = ranks.attempt(lambda: _memory_bytes_per_s(job, ranks, cuda=cuda))
    if bytes_per_s is None:
        return None
    values = {**host, "memory_bytes_per_s": bytes_per_s}
    return {key: statistics.median(ranks.gather(value)) for key, value in values.items()}


def tiny_shape(shape: ModelShape) -> ModelShape:
    """Return a model with the same layers but minimal sizes, to measure the host's time.

    Example:
        >>> shape = ModelShape(family="gpt2", num_layers=4, hidden_size=64, num_heads=8)
        >>> tiny_shape(shape).hidden_size
        16
    """
    if is_image(shape):
        # The least width that leaves the last level one feature per head
        shrinking = shape.hidden_size // level_width(shape, len(shape.depth) - 1)
        hidden = shape.num_heads * shrinking
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
    """Measure the host's time per micro-batch and iteration with a tiny model.

    The time of the model's layers is subtracted, because layers are measured separately.
    """
    # Kernels for 8-bit floats refuse such widths
    precision = "bf16" if job.precision == "fp8" else job.precision
    tiny = replace(job, model=tiny_shape(job.model), zero_stage=0, precision=precision)
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
    """Return a function that runs a step of ``number`` micro-batches, and one for a layer pass."""
    grid = replace(job.grid, micro_batch_size=1, num_micro_batches=number)
    job = replace(job, grid=grid, global_batch_size=grid.dp * number)
    place, spans = Coordinates(pp=0, dp=ranks.rank, tp=0), Spans(clock=HostClock())
    runtime: Any = importlib.import_module(ENGINES[job.runtime])
    engine = runtime.start_engine(job, place, spans, lambda: None, cuda=cuda)
    batches = engine.load(0)
    specs, loss = whole_model(job, TensorParallel(rank=0, size=1))
    (chunk,) = build_chunks(specs, [(0, len(specs))], StageOptions(tp=1, dp=1))
    chunk.modules.to(device=ranks.device, dtype=DTYPES[job.precision])
    source, target = (part.to(ranks.device) for part in samples(job, 0, 1))
    if source.is_floating_point():
        source = source.to(DTYPES[job.precision])

    def step() -> None:
        engine.train(batches)
        spans.marks.clear()

    def layers() -> None:
        value = source
        for layer in chunk.run:
            value = layer(value)
        loss(value, target).backward()

    return step, layers


def _memory_bytes_per_s(job: Job, ranks: Ranks, *, cuda: bool) -> float:
    """Measure the memory rate of gradient operations.

    On a CPU their time with tiny tensors is subtracted. A GPU works while the host launches.
    """
    parallel = SwitchedParallel(rank=0, size=1, group=None, spans=Spans(clock=HostClock()))
    block = layer_kinds(job.model).index("block")
    subject = make_subject(
        job, LayerPoint(tp=1, micro_batch_size=1, layer=block), parallel, ranks.device
    )
    sizes = [parameter.numel() for parameter in subject.parameters()]
    copies = max(1, MEMORY_BYTES[ranks.device.type] // (BYTES_PER_ELEMENT * sum(sizes)))
    full, empty = [size * copies for size in sizes], [1] * len(sizes)
    passes = ACCUMULATION_PASSES + BUCKET_PASSES + UPDATE_PASSES[job.optimizer]
    tasks = [_traffic(job, part, ranks, cuda=cuda) for part in ((full,) if cuda else (full, empty))]
    full_s, *empty_s = _alternating_s(tasks, cuda=cuda)
    num_bytes = float(passes * BYTES_PER_ELEMENT * sum(full))
    return num_bytes / max(full_s - sum(empty_s), LEAST_TRAFFIC_FRACTION * full_s)


def _traffic(job: Job, sizes: Sequence[int], ranks: Ranks, *, cuda: bool) -> Callable[[], None]:
    """Return a function that accumulates and copies gradients and updates weights, like a step."""
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
    """Return the lower quartile of the seconds of each task.

    Differences between tasks are small compared with the disturbance by other work on the machine.
    So tasks alternate, and the quartile excludes disturbed runs. All ranks call ``meet`` before
    each task.
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
