"""GPT-2 and llama-like language models as lists of layers; tp ranks divide the vocabulary."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.models.model import ModelShape
from amp_ray.training.experts import ExpertParallel, MixtureOfExperts
from amp_ray.training.grid import shard_range
from amp_ray.training.parallel import LayerSpec, LayerWeights, TensorParallel, shard_parameter
from amp_ray.training.transformer import Block, TokenWindow, norm

EMBEDDING_STD = 0.02
"""GPT-2's standard deviation of initial token embeddings; half of it is used for positions."""


class TokenEmbedding(nn.Module):
    """Token table, sharded by vocabulary, with learned positions if the family has them.

    The same class is used for the head's copy of a tied table.
    """

    def __init__(
        self,
        shape: ModelShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        *,
        with_positions: bool,
        window: TokenWindow | None = None,
    ) -> None:
        """Create this rank's rows of the table; positions are replicated on every rank."""
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
        vectors = functional.embedding(rows, self.weight)
        if self.parallel.size > 1:
            vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        total = self.parallel.leave(vectors)
        if self.positions is None:
            return total
        places = self.window.positions(tokens.shape[1], tokens.device)
        if self.parallel.divides_tokens:
            places = self.parallel.own_tokens(places.unsqueeze(0)).squeeze(0)
        return total + self.positions[places]


def logits(table: TokenEmbedding, value: Tensor) -> Tensor:
    """Return this rank's part of the logits, ``(batch, sequence, vocabulary / tp)``."""
    return functional.linear(table.parallel.enter(value), table.weight)


class CrossEntropy:
    """Mean cross-entropy over all tokens of a micro-batch, from sharded logits."""

    def __init__(self, shape: ModelShape, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self.first, self.end = shard_range(shape.vocab_size, parallel.rank, parallel.size)

    def __call__(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return a scalar in single precision, equal on all tensor-parallel ranks."""
        loss: Tensor = _ShardedCrossEntropy.apply(values, targets, self)
        return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of sharded logits; all-reduces the largest logit, the sum and the target's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, targets: Tensor, loss: CrossEntropy) -> Tensor:  # noqa: ANN401
        """Compute the loss; save the softmax for the backward pass."""
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
        # Work in place: the softmax is the last stage's largest tensor, and is not needed again.
        softmax.scatter_add_(1, column.unsqueeze(-1), -here.unsqueeze(-1).to(softmax.dtype))
        gradient = softmax.mul_(gradients[0] / softmax.shape[0])
        return gradient.view(ctx.shape).to(ctx.dtype), None, None


TIED_KEY = "token_embedding"


class Head(nn.Module):
    """Head with a separate, untied table."""

    def __init__(self, shape: ModelShape, parallel: TensorParallel, weights: LayerWeights) -> None:
        super().__init__()
        self.table = TokenEmbedding(shape, parallel, weights, with_positions=False)

    def forward(self, value: Tensor) -> Tensor:
        """Return this rank's part of the logits."""
        return logits(self.table, value)


class FinalNorm(nn.Module):
    """The norm between the last block and the head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)

    def forward(self, value: Tensor) -> Tensor:
        """Return the normalised residual stream, in the same shape."""
        return self.norm(value)


def text_layers(
    shape: ModelShape,
    parallel: TensorParallel,
    seed: int,
    window: TokenWindow | None = None,
    spread: ExpertParallel | None = None,
) -> list[LayerSpec]:
    """Return the specs of embedding, blocks, norm and head; stages build their layers from them.

    ``window`` has the tokens of a pass; if it is None, sequences are whole. ``spread`` has the
    ranks that together hold the experts; if it is None, tp divides experts like other weights.
    """
    weights = partial(LayerWeights, seed=seed, tp_rank=parallel.rank, tp=parallel.size)
    positions = shape.family == "gpt2"
    first, last = weights(layer=0), weights(layer=shape.num_layers + 2)
    tied = shape.tied_embedding
    start = LayerSpec(
        module=TokenEmbedding,
        arguments=(shape, parallel, first),
        keywords={"with_positions": positions, "window": window},
        tied_key=TIED_KEY if tied else None,
    )
    end = LayerSpec(module=Head, arguments=(shape, parallel, last))
    if tied:  # both copies begin with layer 0's weights
        end = replace(start, keywords={"with_positions": False}, forward_fn=logits)
    experts = {"make_feed_forward": partial(MixtureOfExperts, spread=spread)}
    blocks = [
        LayerSpec(
            module=Block,
            arguments=(shape, parallel, weights(layer=index + 1), window),
            keywords=experts if shape.num_experts and index >= shape.first_dense_layers else {},
        )
        for index in range(shape.num_layers)
    ]
    return [start, *blocks, LayerSpec(module=FinalNorm, arguments=(shape,)), end]
