"""Tensor parallelism: the two communication points of Megatron's layers, and the layers.

Column-parallel layers keep rows of the weight (output features), row-parallel
ones columns (input features). What enters a pair of them is copied to all ranks
(its gradient is summed), what leaves it is summed (its gradient is copied).

References:
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.training.clock import HostClock, Spans
from amp_ray.training.weights import LayerWeights


@dataclass(slots=True)
class TensorParallel:
    """The ranks that share every layer of a stage.

    Args:
        rank: Index of this process among them.
        group: Their process group; None if this process is alone.
        spans: Where the time of the all-reduces is noted.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
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
        """Hand a tensor to column-parallel layers; its gradient is summed over the ranks."""
        entered: Tensor = _Enter.apply(value, self) if self.size > 1 else value
        return entered

    def leave(self, value: Tensor) -> Tensor:
        """Sum the partial results of a row-parallel layer; the gradient passes as it is."""
        left: Tensor = _Leave.apply(value, self) if self.size > 1 else value
        return left


class _Enter(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parallel: TensorParallel) -> Tensor:  # noqa: ANN401
        """Pass on."""
        ctx.parallel = parallel
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Sum the gradients of all ranks."""
        own = gradients[0].clone(memory_format=torch.contiguous_format)
        return ctx.parallel.all_reduce(own), None


class _Leave(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parallel: TensorParallel) -> Tensor:  # noqa: ANN401, ARG004
        """Sum the values of all ranks."""
        return parallel.all_reduce(value.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401, ARG004
        """Pass on."""
        return gradients[0], None


def shard_parameter(value: Tensor, parallel: TensorParallel) -> nn.Parameter:
    """Return a parameter of which every tp rank holds another part.

    DeepSpeed counts parameters flagged so on every rank when it takes the norm of
    the gradients, and all others on the first rank only.
    """
    parameter = nn.Parameter(value)
    parameter.model_parallel = parallel.size > 1
    return parameter


class _SplitLinear(nn.Module):
    """A linear layer of which this rank holds a part; its bias, if any, starts at zero."""

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


class ColumnLinear(_SplitLinear):
    """A linear layer of which this rank computes some of the output features.

    The caller passes its input through ``TensorParallel.enter``, once for all
    layers that share it.
    """

    shard_dim = 0

    def with_bias(self) -> Self:
        """Add a bias of which this rank holds its own features' part."""
        self.bias = shard_parameter(torch.zeros(self.weight.shape[0]), self.parallel)
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return this rank's output features, ``(..., outputs / tp)``."""
        return functional.linear(value, self.weight, self.bias)


class RowLinear(_SplitLinear):
    """A linear layer of which this rank holds some of the input features."""

    shard_dim = 1

    def with_bias(self) -> Self:
        """Add a bias that is added once: after the sum over the ranks."""
        self.bias = nn.Parameter(torch.zeros(self.weight.shape[0]))
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return the whole output, ``(..., outputs)``, on every rank."""
        total = self.parallel.leave(functional.linear(value, self.weight))
        return total if self.bias is None else total + self.bias
