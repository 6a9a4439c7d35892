"""Tensor parallelism: Megatron's sharded layers, their weights and their communication.

A column-parallel layer holds some output features (rows of its weight matrix), a
row-parallel layer some input features (columns). They come in pairs: the input of a
pair is copied to all ranks (its gradient is summed), and the output is summed (its
gradient is copied). With sequence parallelism, ranks divide the tokens between pairs:
the input of a pair is gathered (its gradient is reduced and scattered), and the output
is reduced and scattered (its gradient is gathered).

References:
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.training.clock import HostClock, Spans
from amp_ray.training.grid import shard_range


@dataclass(slots=True)
class TensorParallel:
    """The ranks that share every layer of a stage."""

    rank: int = 0  # index of this process among the ranks
    size: int = 1
    group: Any = None  # process group of the ranks; None if this process is alone
    # Index of each rank in the group; empty if the group has the same order
    order: tuple[int, ...] = ()
    # Whether the ranks divide the tokens of norms and of the residual stream
    divides_tokens: bool = False
    # Records the time of collectives
    spans: Spans = field(default_factory=lambda: Spans(clock=HostClock()))

    def all_reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """Sum a tensor over the ranks in place; with ``largest``, take the maximum instead."""
        if self.size == 1:
            return value
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        with self.spans.span("tensor_parallel"):
            torch.distributed.all_reduce(value, op=operation, group=self.group)
        return value

    def enter(self, value: Tensor) -> Tensor:
        """Return the input of column-parallel layers; its gradient is summed over the ranks.

        If ranks divide the tokens, the input is gathered, and the gradient reduced and scattered.
        """
        if self.divides_tokens:
            return self._exchange(value, self._gather, self._reduce_scatter)
        return self._exchange(value, _same, self._sum)

    def leave(self, value: Tensor) -> Tensor:
        """Sum the partial results of a row-parallel layer; the gradient passes unchanged.

        If ranks divide the tokens, each rank receives the sum for its tokens only.
        """
        if self.divides_tokens:
            return self._exchange(value, self._reduce_scatter, self._gather)
        return self._exchange(value, self._sum, _same)

    def split(self, value: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor that is the same on all ranks."""
        return self._exchange(value, self.own_tokens, self._gather)

    def join(self, value: Tensor) -> Tensor:
        """Gather the tokens of all ranks; the inverse of ``split``."""
        return self._exchange(value, self._gather, self.own_tokens)

    def own_tokens(self, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor along dimension 1, which the ranks divide evenly."""
        part = value.shape[1] // self.size
        return value.narrow(1, self.rank * part, part)

    def _exchange(
        self, value: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[..., Tensor]
    ) -> Tensor:
        passed: Tensor = _Exchange.apply(value, forward, backward) if self.size > 1 else value
        return passed

    def _sum(self, value: Tensor) -> Tensor:
        return self.all_reduce(value.clone(memory_format=torch.contiguous_format))

    def _gather(self, value: Tensor) -> Tensor:
        """Gather the tokens of all ranks in order, along dimension 1."""
        gathered = value.new_empty(self.size, *value.shape)
        with self.spans.span("tensor_parallel"):
            torch.distributed.all_gather_into_tensor(
                gathered.view(-1, *value.shape[1:]), value.contiguous(), group=self.group
            )
        if self.order:
            gathered = gathered[list(self.order)]
        return gathered.transpose(0, 1).flatten(1, 2)

    def _reduce_scatter(self, value: Tensor) -> Tensor:
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
    """Autograd function with one operation for the forward and one for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        value: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return ctx.back(gradients[0]), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Class, arguments and weight sharing of a layer that is not yet built."""

    module: type[Any]  # class of the layer
    arguments: tuple[Any, ...]  # positional arguments
    keywords: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments
    # Layers with the same key share their ``weight``; None if the weight is not shared
    tied_key: str | None = None
    # Function to run instead of the module, with the module as first argument
    forward_fn: Callable[..., Any] | None = None

    def build(self) -> Any:  # noqa: ANN401 - a torch module
        """Build the layer with its initial weights."""
        return self.module(*self.arguments, **self.keywords)


_SEED_BITS = 63
"""Seeds are below 2**63, which all of torch's generators accept."""


def seed_of(*parts: object) -> int:
    """Return a seed derived from the parts' texts, equal on every machine.

    Example:
        >>> seed_of(0, "a") == seed_of(0, "a") != seed_of(0, "b")
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Generates one layer's initial weights; this process keeps shard ``tp_rank``."""

    seed: int
    layer: int
    tp_rank: int
    tp: int

    def whole(self, name: str, shape: Sequence[int], std: float) -> Tensor:
        """Return normally distributed values of mean 0, equal on every rank.

        They are made on torch's default device, and so quickly on a GPU, with other values there.
        """
        generator = torch.Generator(torch.get_default_device())
        generator.manual_seed(seed_of(self.seed, self.layer, name))
        return torch.empty(tuple(shape)).normal_(std=std, generator=generator)

    def shard(self, name: str, shape: Sequence[int], std: float, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of the tensor that ``whole`` returns."""
        first, end = shard_range(shape[dim], self.tp_rank, self.tp)
        return self.whole(name, shape, std).narrow(dim, first, end - first).clone()


def shard_parameter(value: Tensor, parallel: TensorParallel) -> nn.Parameter:
    """Return a parameter flagged as sharded over the tp ranks.

    For the gradient norm, DeepSpeed counts flagged parameters on every rank, and
    all others on the first rank only.
    """
    parameter = nn.Parameter(value)
    parameter.model_parallel = parallel.size > 1
    return parameter


def is_divided(parameter: object) -> bool:
    """Return whether a parameter is sharded over the tp ranks."""
    return bool(getattr(parameter, "model_parallel", False))


class SplitLinear(nn.Module):
    """This rank's shard of a linear layer; the optional bias starts at zero."""

    shard_dim: int

    def __init__(
        self,
        parallel: TensorParallel,
        weights: LayerWeights,
        name: str,
        shape: tuple[int, int],
        std: float,
    ) -> None:
        """Create this rank's shard of the weight ``(outputs, inputs)``, without a bias."""
        super().__init__()
        self.parallel = parallel
        part = weights.shard(name, shape, std, self.shard_dim)
        self.weight = shard_parameter(part, parallel)
        self.bias: nn.Parameter | None = None
        self.product: Callable[..., Tensor] = functional.linear


class ColumnLinear(SplitLinear):
    """The shard of a linear layer that computes a part of the output features.

    The caller passes the input through ``TensorParallel.enter``, once for all
    layers with the same input.
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
    """The shard of a linear layer that reads a part of the input features."""

    shard_dim = 1

    def with_bias(self) -> Self:
        """Add a bias; it is applied once, after the sum over the ranks."""
        self.bias = nn.Parameter(torch.zeros(self.weight.shape[0]))
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return the whole output, ``(..., outputs)``, on every rank."""
        total = self.parallel.leave(self.product(value, self.weight))
        return total if self.bias is None else total + self.bias
