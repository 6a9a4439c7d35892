"""Tensor parallelism: the two communication points of Megatron's layers, and the layers.

Column-parallel layers keep rows of the weight (output features), row-parallel
ones columns (input features). What enters a pair of them is copied to all ranks
(its gradient is summed), what leaves it is summed (its gradient is copied). With
sequence parallelism ranks divide the tokens between such pairs: what enters is
gathered (its gradient is reduced and scattered), what leaves is reduced and
scattered (its gradient is gathered).

References:
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.training.clock import HostClock, Spans
from amp_ray.training.layer_spec import LayerWeights


@dataclass(slots=True)
class TensorParallel:
    """The ranks that share every layer of a stage."""

    rank: int = 0  # index of this process among them
    size: int = 1
    group: Any = None  # their process group; None if this process is alone
    # Place of each of them in the group; empty where they stand there in their order
    order: tuple[int, ...] = ()
    # Whether they divide the tokens of norms and of the residual stream
    divides_tokens: bool = False
    # Where the time of what they exchange is noted
    spans: Spans = field(default_factory=lambda: Spans(clock=HostClock()))

    def all_reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """Sum a tensor over the ranks, or take its largest values, in place."""
        if self.size == 1:
            return value
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        with self.spans.span("tensor_parallel"):
            torch.distributed.all_reduce(value, op=operation, group=self.group)
        return value

    def enter(self, value: Tensor) -> Tensor:
        """Hand a tensor to column-parallel layers; its gradient is summed over the ranks.

        Where ranks divide the tokens, they gather them, and each keeps the sum for its own.
        """
        if self.divides_tokens:
            return self._exchange(value, self._gather, self._reduce_scatter)
        return self._exchange(value, _same, self._sum)

    def leave(self, value: Tensor) -> Tensor:
        """Sum the partial results of a row-parallel layer; the gradient passes as it is.

        Where ranks divide the tokens, each gets the sum for its own.
        """
        if self.divides_tokens:
            return self._exchange(value, self._reduce_scatter, self._gather)
        return self._exchange(value, self._sum, _same)

    def split(self, value: Tensor) -> Tensor:
        """Take this rank's tokens of a tensor that all ranks have."""
        return self._exchange(value, self.own_tokens, self._gather)

    def join(self, value: Tensor) -> Tensor:
        """Give all ranks the tokens of all; the inverse of ``split``."""
        return self._exchange(value, self._gather, self.own_tokens)

    def own_tokens(self, value: Tensor) -> Tensor:
        """Return this rank's part of dimension 1, which the ranks divide evenly."""
        part = value.shape[1] // self.size
        return value.narrow(1, self.rank * part, part)

    def _exchange(
        self, value: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[..., Tensor]
    ) -> Tensor:
        """Let a tensor pass one operation, and its gradient another."""
        passed: Tensor = _Exchange.apply(value, forward, backward) if self.size > 1 else value
        return passed

    def _sum(self, value: Tensor) -> Tensor:
        return self.all_reduce(value.clone(memory_format=torch.contiguous_format))

    def _gather(self, value: Tensor) -> Tensor:
        """Put the tokens of all ranks together, in their order, along dimension 1."""
        gathered = value.new_empty(self.size, *value.shape)
        with self.spans.span("tensor_parallel"):
            torch.distributed.all_gather_into_tensor(
                gathered.view(-1, *value.shape[1:]), value.contiguous(), group=self.group
            )
        if self.order:
            gathered = gathered[list(self.order)]
        return gathered.transpose(0, 1).flatten(1, 2)

    def _reduce_scatter(self, value: Tensor) -> Tensor:
        """Sum over the ranks; each keeps its own tokens."""
        parts = value.unflatten(1, (self.size, -1)).transpose(0, 1)
        if self.order:
            parts = parts[[self.order.index(place) for place in range(self.size)]]
        parts = parts.contiguous()
        reduced = torch.empty_like(parts[0])
        with self.spans.span("tensor_parallel"):
            torch.distributed.reduce_scatter_tensor(reduced, parts.flatten(0, 1), group=self.group)
        return reduced


def _same(value: Tensor) -> Tensor:
    return value.view_as(value)


class _Exchange(torch.autograd.Function):
    """One operation forward, another backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        value: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Do the first one."""
        ctx.back = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Do the other one."""
        return ctx.back(gradients[0]), None, None


def shard_parameter(value: Tensor, parallel: TensorParallel) -> nn.Parameter:
    """Return a parameter that is divided over the tp ranks.

    DeepSpeed counts parameters flagged so on every rank when it takes the norm of
    the gradients, and all others on the first rank only.
    """
    parameter = nn.Parameter(value)
    parameter.model_parallel = parallel.size > 1
    return parameter


def is_divided(parameter: object) -> bool:
    """Return whether every tp rank holds another part of a parameter."""
    return bool(getattr(parameter, "model_parallel", False))


class SplitLinear(nn.Module):
    """A part of a linear layer; its bias, if any, starts at zero."""

    shard_dim: int

    def __init__(
        self,
        parallel: TensorParallel,
        weights: LayerWeights,
        name: str,
        shape: tuple[int, int],
        std: float,
    ) -> None:
        """Make the weight ``(outputs, inputs)`` and keep this rank's part; no bias yet."""
        super().__init__()
        self.parallel = parallel
        part = weights.shard(name, shape, std, self.shard_dim)
        self.weight = shard_parameter(part, parallel)
        self.bias: nn.Parameter | None = None
        self.product: Callable[..., Tensor] = functional.linear


class ColumnLinear(SplitLinear):
    """The part of a linear layer that computes some of the output features.

    The caller passes its input through ``TensorParallel.enter``, once for all
    layers that share it.
    """

    shard_dim = 0

    def with_bias(self) -> Self:
        """Add a bias for this rank's output features."""
        self.bias = shard_parameter(torch.zeros(self.weight.shape[0]), self.parallel)
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return this rank's output features, ``(..., outputs / tp)``."""
        return self.product(value, self.weight, self.bias)


class RowLinear(SplitLinear):
    """The part of a linear layer that reads some of the input features."""

    shard_dim = 1

    def with_bias(self) -> Self:
        """Add a bias that is added once: after the sum over the ranks."""
        self.bias = nn.Parameter(torch.zeros(self.weight.shape[0]))
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return the whole output, ``(..., outputs)``, on every rank."""
        total = self.parallel.leave(self.product(value, self.weight))
        return total if self.bias is None else total + self.bias
