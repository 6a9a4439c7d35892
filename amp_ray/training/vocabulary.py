"""Embedding and loss with the vocabulary sharded over the tensor-parallel ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.training.parallel import TensorParallel, shard_parameter
from amp_ray.training.ranks import shard_range
from amp_ray.training.shapes import TextShape
from amp_ray.training.token_window import TokenWindow
from amp_ray.training.weights import LayerWeights

EMBEDDING_STD = 0.02
"""GPT-2's, for token embeddings; its positions start at half of it."""


class TokenEmbedding(nn.Module):
    """Token table, sharded by vocabulary, and learned positions where there are any.

    It also stands for the table at the other end of the model where the head shares it.
    """

    def __init__(
        self,
        shape: TextShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        *,
        with_positions: bool,
        window: TokenWindow | None = None,
    ) -> None:
        """Keep this rank's rows of the table; positions are whole on every rank."""
        super().__init__()
        self.parallel, self.window = parallel, window or TokenWindow()
        self.first, self.end = shard_range(shape.vocab_size, parallel.rank, parallel.size)
        table = weights.shard("tokens", (shape.vocab_size, shape.hidden_size), EMBEDDING_STD, 0)
        self.weight = shard_parameter(table, parallel)
        self.positions: nn.Parameter | None = None
        if with_positions:
            extent = (shape.sequence_length, shape.hidden_size)
            self.positions = nn.Parameter(weights.whole("positions", extent, EMBEDDING_STD / 2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, sequence, hidden)`` for tokens of shape ``(batch, sequence)``."""
        elsewhere = (tokens < self.first) | (tokens >= self.end)
        rows = (tokens - self.first).masked_fill(elsewhere, 0)
        found = functional.embedding(rows, self.weight)
        if self.parallel.size > 1:
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        total = self.parallel.leave(found)
        if self.positions is None:
            return total
        own = self.window.positions(tokens.shape[1], tokens.device)
        if self.parallel.divides_tokens:
            own = self.parallel.own_tokens(own.unsqueeze(0)).squeeze(0)
        return total + self.positions[own]


def logits(table: TokenEmbedding, value: Tensor) -> Tensor:
    """Return this rank's part of the logits, ``(batch, sequence, vocabulary / tp)``."""
    return functional.linear(table.parallel.enter(value), table.weight)


class CrossEntropy:
    """Mean cross-entropy over all tokens of a micro-batch, from sharded logits."""

    def __init__(self, shape: TextShape, parallel: TensorParallel) -> None:
        """Remember which part of the vocabulary this rank has."""
        self.parallel = parallel
        self.first, self.end = shard_range(shape.vocab_size, parallel.rank, parallel.size)

    def __call__(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return a scalar in single precision, equal on all tensor-parallel ranks."""
        loss: Tensor = _ShardedCrossEntropy.apply(values, targets, self)
        return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    """Softmax over shards: the largest logit, the sum and the target's logit are all-reduced."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, targets: Tensor, loss: CrossEntropy) -> Tensor:  # noqa: ANN401
        """Compute the loss; keep the softmax for the backward pass."""
        flat, wanted = values.flatten(0, -2), targets.flatten()
        largest = loss.parallel.all_reduce(flat.amax(dim=-1).float(), largest=True)
        shifted = flat.float() - largest.unsqueeze(-1)
        here = (wanted >= loss.first) & (wanted < loss.end)
        column = (wanted - loss.first).masked_fill(~here, 0)
        at_target = shifted.gather(1, column.unsqueeze(-1)).squeeze(-1) * here
        softmax = shifted.exp_()
        sums = loss.parallel.all_reduce(torch.stack((softmax.sum(dim=-1), at_target)))
        ctx.save_for_backward(softmax.div_(sums[0].unsqueeze(-1)), column, here)
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Return ``(softmax - one-hot) / tokens`` for this rank's part of the vocabulary."""
        softmax, column, here = ctx.saved_tensors
        # In place: the softmax is the largest tensor of the last stage and nobody needs it again.
        softmax.scatter_add_(1, column.unsqueeze(-1), -here.unsqueeze(-1).to(softmax.dtype))
        gradient = softmax.mul_(gradients[0] / softmax.shape[0])
        return gradient.view(ctx.shape).to(ctx.dtype), None, None
