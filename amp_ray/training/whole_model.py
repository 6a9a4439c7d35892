"""Layers, loss and optimizer of a job's model."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from amp_ray.training.experts import ExpertParallel
from amp_ray.training.image import image_layers, picture_loss
from amp_ray.training.job import Job
from amp_ray.training.layer_spec import LayerSpec
from amp_ray.training.parallel import TensorParallel
from amp_ray.training.shapes import ImageShape
from amp_ray.training.text import CrossEntropy, text_layers
from amp_ray.training.token_window import TokenWindow


def whole_model(
    job: Job,
    parallel: TensorParallel,
    window: TokenWindow | None = None,
    spread: ExpertParallel | None = None,
) -> tuple[list[LayerSpec], Callable[[Tensor, Tensor], Tensor]]:
    """Return the specs of all layers, and the loss function of outputs and targets.

    Args:
        job: Has the model and the seed.
        parallel: This rank's tensor-parallel group.
        window: Tokens of a pass; None if sequences are whole.
        spread: Ranks that together hold the experts; None if tp divides them.
    """
    if isinstance(job.model, ImageShape):
        return image_layers(job.model, parallel, job.seed), picture_loss
    layers = text_layers(job.model, parallel, job.seed, window, spread)
    return layers, CrossEntropy(job.model, parallel)


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
