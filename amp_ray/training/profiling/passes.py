"""Timing of both passes of single layers and losses, with inputs as in training."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn

from amp_ray.models.model import ModelShape
from amp_ray.training.clock import Spans
from amp_ray.training.grid import shard_range
from amp_ray.training.image import picture_loss
from amp_ray.training.job import Job
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.shapes import RGB_CHANNELS, head_width, input_extent, is_image, layer_kinds
from amp_ray.training.text import CrossEntropy
from amp_ray.training.transformer import TokenWindow
from amp_ray.training.workload import DTYPES, whole_model
from amp_ray.trials.profile.points import LayerPoint


@dataclass(slots=True)
class SwitchedParallel(TensorParallel):
    """Tensor-parallel ranks whose all-reduces can be switched off."""

    # Whether all-reduces are skipped, so that no rank waits for a rank that runs out of memory
    silent: bool = False

    def all_reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """Sum (or take the maximum of) a tensor over the ranks in place; skip it if silent."""
        # super() without arguments does not work here: slots=True replaces the class.
        return value if self.silent else TensorParallel.all_reduce(self, value, largest=largest)


@dataclass(slots=True, kw_only=True)
class Subject:
    """A layer or loss with its input, ready for forward and backward passes."""

    run: Callable[[Tensor], Tensor]
    source: Tensor
    module: nn.Module | None  # the layer; None for a loss
    # Gradient of the output; None for a loss, which is a scalar
    gradient: Tensor | None = field(default=None)

    def forward(self) -> Tensor:
        """Run the forward pass."""
        return self.run(self.source)

    def backward(self, output: Tensor) -> None:
        """Run the backward pass."""
        torch.autograd.backward(output, self.gradient)

    def parameters(self) -> list[Any]:
        """Return the layer's parameters; empty for a loss."""
        return [] if self.module is None else list(self.module.parameters())

    def forget_gradients(self) -> None:
        """Drop all gradients, since their accumulation is not part of the layer's time."""
        for leaf in (self.source, *self.parameters()):
            leaf.grad = None


def make_subject(job: Job, point: LayerPoint, parallel: SwitchedParallel, device: Any) -> Subject:  # noqa: ANN401
    """Build a layer with its inputs, or the loss."""
    dtype = DTYPES[job.precision]
    source = _source(job, point, parallel, device)
    if point.layer == len(layer_kinds(job.model)):
        return Subject(run=_text_loss(job, point, parallel, device), source=source, module=None)
    window = TokenWindow()
    layers, _ = whole_model(job, parallel, window)
    if point.tokens:
        context = _keys_and_values(job.model, point, parallel)
        window.begin_behind(point.layer, context.to(device=device, dtype=dtype))
    spec = layers[point.layer]
    module = spec.build().to(device=device, dtype=dtype)
    # The module of a tied layer is the embedding's table; only the function differs.
    tied = spec.forward_fn

    def run(value: Tensor) -> Tensor:
        if window.passed is not None:
            # Remove the slice's keys and values of the previous run.
            window.passed.entries[point.layer].pop(window.token_slice, None)
        output = module(value) if tied is None else tied(module, value)
        # In the model, the loss of a picture belongs to the last layer.
        return picture_loss(output, targets) if targets is not None else output

    targets: Tensor | None = None
    if is_image(job.model) and point.layer == len(layers) - 1:
        pixels = (point.micro_batch_size, source.shape[1], RGB_CHANNELS)
        targets = torch.rand(pixels, device=device)
        return Subject(run=run, source=source, module=module)
    parallel.silent, silent = True, parallel.silent
    with torch.no_grad():
        gradient = torch.randn_like(run(source))
    parallel.silent = silent
    return Subject(run=run, source=source, module=module, gradient=gradient)


def _source(job: Job, point: LayerPoint, parallel: TensorParallel, device: Any) -> Tensor:  # noqa: ANN401
    shape = job.model
    extent: tuple[int, ...] = (point.micro_batch_size, *input_extent(shape, point.layer))
    if point.layer == len(layer_kinds(shape)):
        first_row, end_row = shard_range(shape.vocab_size, parallel.rank, parallel.size)
        extent = (*extent[:2], end_row - first_row)
    if point.tokens:
        extent = (point.micro_batch_size, point.tokens, *extent[2:])
    first = point.layer == 0
    if first and not is_image(shape):
        return torch.randint(0, shape.vocab_size, extent, device=device)
    dtype = torch.float32 if first else DTYPES[job.precision]
    return torch.randn(extent, device=device, dtype=dtype, requires_grad=not first)


def _text_loss(
    job: Job,
    point: LayerPoint,
    parallel: TensorParallel,
    device: Any,  # noqa: ANN401
) -> Callable[[Tensor], Tensor]:
    """Return the loss function after the last layer, with fixed targets."""
    loss = CrossEntropy(job.model, parallel)
    extent = (point.micro_batch_size, job.model.sequence_length)
    targets = torch.randint(0, job.model.vocab_size, extent, device=device)
    return lambda logits: loss(logits, targets)


def _keys_and_values(shape: ModelShape, point: LayerPoint, parallel: TensorParallel) -> Tensor:
    heads = shape.num_key_value_heads // parallel.size
    return torch.randn(2, point.micro_batch_size, heads, point.context, head_width(shape))


TARGET_S: Final = 0.4
"""Target for the total time of one layer's measured passes, within the limits below."""

MIN_REPEATS: Final = 5
MAX_REPEATS: Final = 40
WARMUP_PASSES: Final = 3
LAUNCH_PASSES: Final = 5


SLICE_TARGET_S: Final = 0.2
"""Target for the passes of one slice, which is shorter because there are many slices."""


def repeats_for(pass_s: float, target_s: float = TARGET_S) -> int:
    """Return how often to repeat passes that take ``pass_s`` each.

    Example:
        >>> repeats_for(1e-4), repeats_for(0.02), repeats_for(3.0)
        (40, 20, 5)
    """
    wanted = target_s / max(pass_s, 1e-9)
    return int(min(MAX_REPEATS, max(MIN_REPEATS, wanted)))


def warm_up(subject: Subject, *, cuda: bool) -> float:
    """Run both passes a few times; return the seconds of the last repeat."""
    elapsed_s = 0.0
    for _ in range(WARMUP_PASSES):
        start = time.perf_counter()
        subject.forget_gradients()
        subject.backward(subject.forward())
        _wait(cuda=cuda)
        elapsed_s = time.perf_counter() - start
    return elapsed_s


def time_passes(subject: Subject, spans: Spans, repeats: int, *, cuda: bool) -> dict[str, float]:
    """Time both passes.

    On a GPU they run without a pause, so that the slower of device and host determines the time.
    Tensor-parallel all-reduces record their time in ``spans``.

    Returns:
        Medians ``forward_s`` and ``backward_s`` without all-reduces, ``all_reduce_s`` of both
        passes, and ``spread_s``, the interquartile range of both passes together.
    """
    spans.marks.clear()
    passes = [_one(subject, spans) for _ in range(repeats)]
    _wait(cuda=cuda)
    clock = spans.clock
    forward, backward, talking = [], [], []
    for marks, counts in passes:
        talk = [
            sum(clock.seconds(start, end) for _, _, start, end in spans.marks[first:last])
            for first, last in (counts[:2], counts[1:])
        ]
        forward.append(clock.seconds(marks[0], marks[1]) - talk[0])
        backward.append(clock.seconds(marks[1], marks[2]) - talk[1])
        talking.append(sum(talk))
    spans.marks.clear()
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    low, _, high = statistics.quantiles(both, n=4, method="inclusive")
    return {
        "forward_s": statistics.median(forward),
        "backward_s": statistics.median(backward),
        "all_reduce_s": statistics.median(talking),
        "spread_s": high - low,
    }


def time_launch(subject: Subject, *, cuda: bool) -> dict[str, float]:
    """Time how long the host takes to launch both passes on an idle device.

    On a CPU, where a call returns when its work is done, the launch is the pass itself. The result
    has the medians ``forward_launch_s`` and ``backward_launch_s``, which include all-reduces.
    """
    forward, backward = [], []
    for _ in range(LAUNCH_PASSES):
        subject.forget_gradients()
        _wait(cuda=cuda)
        start = time.perf_counter()
        output = subject.forward()
        forward.append(time.perf_counter() - start)
        _wait(cuda=cuda)
        start = time.perf_counter()
        subject.backward(output)
        backward.append(time.perf_counter() - start)
    _wait(cuda=cuda)
    return {
        "forward_launch_s": statistics.median(forward),
        "backward_launch_s": statistics.median(backward),
    }


def _one(subject: Subject, spans: Spans) -> tuple[tuple[Any, Any, Any], tuple[int, int, int]]:
    """Run both passes once; return the marks around them and the numbers of spans."""
    subject.forget_gradients()
    first, start = len(spans.marks), spans.clock.mark()
    output = subject.forward()
    turn, middle = len(spans.marks), spans.clock.mark()
    subject.backward(output)
    return (start, middle, spans.clock.mark()), (first, turn, len(spans.marks))


def _wait(*, cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def footprint(subject: Subject, *, cuda: bool) -> dict[str, int]:
    """Run both passes once and return their bytes.

    The parameters' gradients already exist, as they do after the first micro-batch of a step.

    Returns:
        ``kept_bytes``: tensors that autograd saves between the passes, including the layer's input
        if it is saved, but not weights. ``temporary_bytes``: peak of all other memory that is
        allocated in both passes.
    """
    subject.forget_gradients()
    for parameter in subject.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = {_place(parameter) for parameter in subject.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        place = _place(value)
        if place not in weights:
            kept[place] = value.untyped_storage().nbytes()
        return value

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            output = subject.forward()
        subject.backward(output)

    peak_bytes = _cuda_peak(both) if cuda else _host_peak(both)
    subject.forget_gradients()
    # The input exists before the layer runs, whether autograd saves it or not.
    made = sum(size for place, size in kept.items() if place != _place(subject.source))
    return {"kept_bytes": sum(kept.values()), "temporary_bytes": max(0, peak_bytes - made)}


def _place(value: Tensor) -> int:
    return int(value.untyped_storage().data_ptr())


def _cuda_peak(both: Any) -> int:  # noqa: ANN401 - a function
    """Return the peak of bytes that ``both`` allocates on the GPU."""
    torch.cuda.synchronize()
    before = int(torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def _host_peak(both: Any) -> int:  # noqa: ANN401 - a function
    """Return the peak on a CPU, from torch's profiler; CPUs have no memory statistics."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        both()
    events: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    sizes = (size for _, size in sorted(events, key=lambda entry: entry[0]))
    return max(accumulate(sizes, initial=0))
