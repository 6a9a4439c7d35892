"""Weights and gradients of a rank as flat vectors: one message each, one optimizer step.

Gradients are added up in single precision. In half precision the optimizer works on weights in
single precision, from which those of the layers are rounded.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from amp_ray.training.executor.layout import RowRange
from amp_ray.training.executor.messages import Messages

FIRST_SCALE: Final = 2.0**16
GROWTH_STEPS: Final = 1000
"""Of the loss in fp16: DeepSpeed's initial scale, and the steps after which it doubles."""


class FlatParameters:
    """Parameters that are synchronised over one group.

    Args:
        parameters: Their data becomes part of a flat vector.
        dtype: Of the layers' weights.
        group: Of the ranks that hold the same; None for a rank alone.
        shards: Whether every replica steps and keeps optimizer state for a part only (ZeRO-1).
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,  # noqa: ANN401 - a process group
        shards: bool,
    ) -> None:
        """Move the weights into flat vectors."""
        self.parameters, self.group = parameters, group
        self.index, self.num_replicas = 0, 1
        if group is not None:
            self.index = torch.distributed.get_rank(group)
            self.num_replicas = torch.distributed.get_world_size(group)
        num_shards = self.num_replicas if shards else 1
        size = sum(parameter.numel() for parameter in parameters)
        self.size = -(-size // num_shards) * num_shards
        self.weights = torch.zeros(self.size, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.size, dtype=torch.float32, device=device)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            self.weights[begin:end].copy_(parameter.detach().flatten())
            parameter.data = self.weights[begin:end].view(parameter.shape)
            total = self.gradients[begin:end].view(parameter.shape)
            if dtype == torch.float32:
                parameter.grad = total
            else:
                parameter.total = total
                parameter.register_post_accumulate_grad_hook(_add_up)
            begin = end
        part = self.size // num_shards
        first = self.index * part if num_shards > 1 else 0
        self.shard = slice(first, first + part)
        own = self.weights[self.shard]
        self.master = nn.Parameter(own if dtype == torch.float32 else own.float())
        self.master.grad = self.gradients[self.shard]

    @property
    def is_divided(self) -> bool:
        """Whether every tp rank has another part of them, not a copy."""
        return bool(getattr(self.parameters[0], "model_parallel", False))

    def reduce(self) -> None:
        """Sum the gradients over the replicas; each of them has counted its own samples."""
        if self.num_replicas > 1:
            torch.distributed.all_reduce(self.gradients, group=self.group)

    def updated(self) -> None:
        """Hand the step's weights to the layers, and forget the gradients."""
        own = self.weights[self.shard]
        if self.master.dtype != own.dtype:
            own.copy_(self.master.detach())
        if own.numel() < self.size:
            torch.distributed.all_gather_into_tensor(self.weights, own.clone(), group=self.group)
        self.gradients.zero_()


def _add_up(parameter: Any) -> None:  # noqa: ANN401 - a torch parameter
    """Add a micro-batch's gradient in half precision to the sum in single precision."""
    parameter.total.add_(parameter.grad)
    parameter.grad = None


class TiedTable:
    """A table that the first and the last stage both hold: its gradients are added up over both.

    Args:
        gradient: Of this rank's rows, complete over its own stage's replicas.
        receives: Rows that come from the other stage.
        sends: Rows that go there.
    """

    def __init__(
        self, gradient: Tensor, receives: Sequence[RowRange], sends: Sequence[RowRange]
    ) -> None:
        """Remember with whom to exchange what."""
        self.gradient, self.receives, self.sends = gradient, receives, sends

    def reduce(self, messages: Messages) -> None:
        """Add what the other stage has. Both ends add the same two numbers, so they stay equal."""
        own = self.gradient.clone()
        arriving = [
            (rows, messages.receive_rows(own[rows.first : rows.end], rows.process))
            for rows in self.receives
        ]
        for rows in self.sends:
            messages.send_rows(own[rows.first : rows.end], rows.process)
        for rows, incoming in arriving:
            self.gradient[rows.first : rows.end] += incoming.wait()


class LossScale:
    """Keeps fp16 gradients in range: halves after an overflow, doubles after many good steps."""

    def __init__(self, *, active: bool) -> None:
        """Begin with DeepSpeed's initial scale, or 1."""
        self.active = active
        self.value = FIRST_SCALE if active else 1.0
        self.num_good = 0

    def accept(self, *, finite: bool) -> bool:
        """Take note of a step's gradients; tell whether to step."""
        if not self.active:
            return True
        self.num_good = self.num_good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.num_good % GROWTH_STEPS == 0:
            self.value *= 2
        return finite
