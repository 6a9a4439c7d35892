"""The optimizer of a trial: torch's own; DeepSpeed's would be compiled on first use."""

from collections.abc import Iterable
from typing import Any, Final

import torch

from amp_ray.training.job import Job

ADAMW_WEIGHT_DECAY: Final = 0.01
"""Loshchilov and Hutter's and torch's own default."""


def build_optimizer(job: Job, parameters: Iterable[Any], *, fused: bool) -> Any:  # noqa: ANN401
    """Return SGD, Adam or AdamW for parameters; ``fused`` passes once over their memory."""
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=job.learning_rate, fused=fused or None)
    decay = ADAMW_WEIGHT_DECAY if job.optimizer == "adamw" else 0.0
    return torch.optim.AdamW(
        parameters, lr=job.learning_rate, weight_decay=decay, fused=fused or None
    )
