"""Layers and losses that are timed alone, with inputs as they are in training."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_ray.training.image import picture_loss
from amp_ray.training.job import Job
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.profiling.job import Point
from amp_ray.training.ranks import shard_range
from amp_ray.training.shapes import RGB_CHANNELS, ImageShape, TextShape, input_extent, layer_kinds
from amp_ray.training.token_window import TokenWindow
from amp_ray.training.vocabulary import CrossEntropy
from amp_ray.training.whole_model import whole_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class SwitchedParallel(TensorParallel):
    """Tensor-parallel ranks that can be told not to talk."""

    # Whether an all-reduce does nothing, so that a rank that runs out of memory leaves no other
    # waiting
    silent: bool = False

    def all_reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """Sum a tensor over the ranks, or take its largest values, in place, unless silent."""
        # Not super(): slots=True makes a new class, which super() without arguments misses.
        return value if self.silent else TensorParallel.all_reduce(self, value, largest=largest)


@dataclass(slots=True, kw_only=True)
class Subject:
    """A forward pass and its backward pass, ready to run."""

    run: Callable[[Tensor], Tensor]
    source: Tensor
    module: nn.Module | None  # whose parameters get gradients; None for a loss
    # What comes back from the next layer; None for a loss, a scalar
    gradient: Tensor | None = field(default=None)

    def forward(self) -> Tensor:
        """Run the forward pass."""
        return self.run(self.source)

    def backward(self, output: Tensor) -> None:
        """Run the backward pass."""
        torch.autograd.backward(output, self.gradient)

    def parameters(self) -> list[Any]:
        """Return the layer's parameters."""
        return [] if self.module is None else list(self.module.parameters())

    def forget_gradients(self) -> None:
        """Drop all gradients: adding to earlier ones is not the layer's own work."""
        for leaf in (self.source, *self.parameters()):
            leaf.grad = None


def make_subject(job: Job, point: Point, parallel: SwitchedParallel, device: Any) -> Subject:  # noqa: ANN401
    """Build a layer with its inputs, or the loss."""
    dtype = DTYPES[job.precision]
    source = _source(job, point, parallel, device)
    if point.layer == len(layer_kinds(job.model)):
        return Subject(run=_text_loss(job, point, parallel, device), source=source, module=None)
    image = isinstance(job.model, ImageShape)
    window = TokenWindow()
    layers, _ = whole_model(job, parallel, window)
    if point.tokens and not isinstance(job.model, ImageShape):
        context = _keys_and_values(job.model, point, parallel)
        window.begin_behind(point.layer, context.to(device=device, dtype=dtype))
    spec = layers[point.layer]
    module = spec.build().to(device=device, dtype=dtype)
    # A tied layer is the table at the other end, used by a function of its own.
    tied = spec.forward_fn

    def run(value: Tensor) -> Tensor:
        if window.passed is not None:
            # What the run before left of the slice itself.
            window.passed.entries[point.layer].pop(window.token_slice, None)
        output = module(value) if tied is None else tied(module, value)
        # The plan counts a picture's loss among the operators of the last layer.
        return picture_loss(output, targets) if targets is not None else output

    targets: Tensor | None = None
    if image and point.layer == len(layers) - 1:
        pixels = (point.micro_batch_size, source.shape[1], RGB_CHANNELS)
        targets = torch.rand(pixels, device=device)
        return Subject(run=run, source=source, module=module)
    parallel.silent, silent = True, parallel.silent
    with torch.no_grad():
        gradient = torch.randn_like(run(source))
    parallel.silent = silent
    return Subject(run=run, source=source, module=module, gradient=gradient)


def _source(job: Job, point: Point, parallel: TensorParallel, device: Any) -> Tensor:  # noqa: ANN401
    """Return what goes into a layer."""
    shape = job.model
    extent: tuple[int, ...] = (point.micro_batch_size, *input_extent(shape, point.layer))
    if isinstance(shape, TextShape) and point.layer == len(layer_kinds(shape)):
        first_row, end_row = shard_range(shape.vocab_size, parallel.rank, parallel.size)
        extent = (*extent[:2], end_row - first_row)
    if point.tokens:
        extent = (point.micro_batch_size, point.tokens, *extent[2:])
    if isinstance(job.model, TextShape) and point.layer == 0:
        return torch.randint(0, job.model.vocab_size, extent, device=device)
    first = point.layer == 0
    dtype = torch.float32 if first else DTYPES[job.precision]
    return torch.randn(extent, device=device, dtype=dtype, requires_grad=not first)


def _text_loss(
    job: Job,
    point: Point,
    parallel: TensorParallel,
    device: Any,  # noqa: ANN401
) -> Callable[[Tensor], Tensor]:
    """Return the loss behind the last layer, with targets."""
    assert isinstance(job.model, TextShape)
    loss = CrossEntropy(job.model, parallel)
    extent = (point.micro_batch_size, job.model.sequence_length)
    targets = torch.randint(0, job.model.vocab_size, extent, device=device)
    return lambda logits: loss(logits, targets)


def _keys_and_values(shape: TextShape, point: Point, parallel: TensorParallel) -> Tensor:
    """Return keys and values of a context, those of this rank's heads."""
    heads = shape.num_key_value_heads // parallel.size
    head_size = shape.head_size or shape.hidden_size // shape.num_heads
    return torch.randn(2, point.micro_batch_size, heads, point.context, head_size)
