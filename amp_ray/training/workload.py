"""Work of a job: layers, loss, optimizer, and synthetic data.

A sample of the data depends on the seed and its index, not on the strategy.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from amp_ray.models.model import ModelShape
from amp_ray.training.experts import ExpertParallel
from amp_ray.training.grid import Coordinates
from amp_ray.training.image import image_layers, picture_loss
from amp_ray.training.job import Job
from amp_ray.training.parallel import LayerSpec, TensorParallel, seed_of
from amp_ray.training.shapes import RGB_CHANNELS, is_image, level_side
from amp_ray.training.text import CrossEntropy, text_layers
from amp_ray.training.transformer import TokenWindow


def whole_model(
    job: Job,
    parallel: TensorParallel,
    window: TokenWindow | None = None,
    spread: ExpertParallel | None = None,
) -> tuple[list[LayerSpec], Callable[[Tensor, Tensor], Tensor]]:
    """Return the specs of all layers, and the loss function of outputs and targets.

    ``window`` has the tokens of a pass; if it is None, sequences are whole. ``spread`` has the
    ranks that together hold the experts; if it is None, tp divides each expert.
    """
    if is_image(job.model):
        return image_layers(job.model, parallel, job.seed), picture_loss
    layers = text_layers(job.model, parallel, job.seed, window, spread)
    return layers, CrossEntropy(job.model, parallel)


DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Data type of weights and activations; with fp8, only products in blocks are narrower."""

ADAMW_WEIGHT_DECAY: Final = 0.01
"""Default weight decay of Loshchilov and Hutter, and of torch."""


def build_optimizer(job: Job, parameters: Iterable[Any], *, fused: bool) -> Any:  # noqa: ANN401
    """Return SGD, Adam or AdamW; ``fused`` updates all parameters in one pass over memory."""
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=job.learning_rate, fused=fused or None)
    decay = ADAMW_WEIGHT_DECAY if job.optimizer == "adamw" else 0.0
    return torch.optim.AdamW(
        parameters, lr=job.learning_rate, weight_decay=decay, fused=fused or None
    )


MicroBatch = tuple[Tensor, Tensor]

_FOLLOW_FACTOR: Final = 3
_FOLLOW_STEP: Final = 1
"""Each second token is 3 * its predecessor + 1, so that the loss can decrease."""


def step_batches(job: Job, step: int, place: Coordinates) -> Iterator[MicroBatch]:
    """Yield the micro-batches (inputs and targets) of one replica in one step, counted from 0.

    Replica ``d`` takes the ``d``-th contiguous part of the global batch, independent of the
    micro-batch size. Inputs and targets of text are tokens ``(micro_batch_size, sequence_length)``;
    of images, latent vectors ``(micro_batch_size, latent_size)`` and pictures
    ``(micro_batch_size, side**2, 3)``.
    """
    grid = job.grid
    share = job.global_batch_size // grid.dp
    first = step * job.global_batch_size + place.dp * share
    for start in range(first, first + share, grid.micro_batch_size):
        yield samples(job, start, start + grid.micro_batch_size)


def samples(job: Job, first: int, end: int) -> MicroBatch:
    """Return inputs and targets of a range of samples."""
    sources, targets = zip(*(_sample(job, index) for index in range(first, end)), strict=True)
    return torch.stack(sources), torch.stack(targets)


def _sample(job: Job, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator()
    generator.manual_seed(seed_of(job.seed, "sample", index))
    if is_image(job.model):
        return _picture(job.model, generator)
    return _text(job.model, generator)


def _text(shape: ModelShape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, shape.vocab_size, (shape.sequence_length + 1,), generator=generator)
    leading = tokens[0::2][: tokens[1::2].numel()]
    tokens[1::2] = (leading * _FOLLOW_FACTOR + _FOLLOW_STEP) % shape.vocab_size
    return tokens[:-1], tokens[1:]


def _picture(shape: ModelShape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a latent vector and a smooth picture in [-1, 1] that depends on it."""
    latent = torch.randn(shape.latent_size, generator=generator)
    side = level_side(shape, len(shape.depth) - 1)
    phase = torch.arange(side**2).unsqueeze(1) / side + latent[:1]
    colour = torch.arange(1, RGB_CHANNELS + 1)
    return latent, torch.sin(phase * colour)
