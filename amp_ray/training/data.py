"""Synthetic data: a sample depends on the seed and its index, not on the strategy."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job
from amp_ray.training.layer_spec import seed_of
from amp_ray.training.shapes import RGB_CHANNELS, ImageShape, TextShape

MicroBatch = tuple[Tensor, Tensor]

_FOLLOW_FACTOR: Final = 3
_FOLLOW_STEP: Final = 1
"""Each second token is 3 * its predecessor + 1, so that the loss can decrease."""


def step_batches(job: Job, step: int, place: Coordinates) -> Iterator[MicroBatch]:
    """Yield the micro-batches (inputs and targets) of one replica in one step, counted from 0.

    Replica ``d`` takes the ``d``-th contiguous part of the global batch, independent of the
    micro-batch size. Text: tokens ``(micro_batch_size, sequence_length)`` twice. Images:
    ``(micro_batch_size, latent_size)`` and ``(micro_batch_size, side**2, 3)``.
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
    if isinstance(job.model, ImageShape):
        return _picture(job.model, generator)
    return _text(job.model, generator)


def _text(shape: TextShape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, shape.vocab_size, (shape.sequence_length + 1,), generator=generator)
    leading = tokens[0::2][: tokens[1::2].numel()]
    tokens[1::2] = (leading * _FOLLOW_FACTOR + _FOLLOW_STEP) % shape.vocab_size
    return tokens[:-1], tokens[1:]


def _picture(shape: ImageShape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a latent vector and a smooth picture in [-1, 1] that depends on it."""
    latent = torch.randn(shape.latent_size, generator=generator)
    side = shape.side(len(shape.depth) - 1)
    phase = torch.arange(side**2).unsqueeze(1) / side + latent[:1]
    colour = torch.arange(1, RGB_CHANNELS + 1)
    return latent, torch.sin(phase * colour)
