"""The pre-norm transformer block of all families: attention and feed-forward part."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from amp_ray.training.layer_spec import LayerWeights
from amp_ray.training.parallel import ColumnLinear, RowLinear, TensorParallel
from amp_ray.training.shapes import BlockShape
from amp_ray.training.token_window import TokenWindow, visible

ROTARY_BASE: Final = 10000.0
"""Su et al., RoFormer, arXiv:2104.09864, section 3.2.2."""

RMS_EPSILON: Final = 1e-6
"""Touvron et al., LLaMA, arXiv:2302.13971 (its released code)."""


def norm(shape: BlockShape) -> nn.Module:
    """Return the norm of a family; its weights are replicated on every rank."""
    if shape.family == "llama":
        return nn.RMSNorm(shape.hidden_size, eps=RMS_EPSILON)
    return nn.LayerNorm(shape.hidden_size)


class Attention(nn.Module):
    """Self-attention over a sequence or a slice of it, heads sharded over the tp ranks.

    The rows of the joint projection are ordered by key-value head: its query
    heads, then its key, then its value. So a contiguous shard has whole heads
    for any tp.
    """

    def __init__(
        self,
        shape: BlockShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        window: TokenWindow,
    ) -> None:
        """Create the joint projection and the output projection."""
        super().__init__()
        self.shape, self.parallel = shape, parallel
        self.recompute_core = False
        self.window, self.layer = window, weights.layer
        rows = (shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_width
        hidden, mixed = shape.hidden_size, shape.num_heads * shape.head_width
        self.qkv = ColumnLinear(parallel, weights, "qkv", (rows, hidden), shape.std)
        self.out = RowLinear(parallel, weights, "attention", (hidden, mixed), shape.residual_std)
        if shape.family == "gpt2":
            self.qkv.with_bias()
            self.out.with_bias()

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(batch, tokens, hidden)`` for the same shape."""
        shape = self.shape
        groups = shape.num_key_value_heads // self.parallel.size
        queries = shape.num_heads // shape.num_key_value_heads
        joint = self.qkv(self.parallel.enter(value))
        batch, tokens, _ = joint.shape
        joint = joint.view(batch, tokens, groups, queries + 2, shape.head_width)
        query, key, content = joint.split((queries, 1, 1), dim=3)
        query, key, content = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, content))
        if shape.family == "llama":
            positions = self.window.positions(tokens, value.device)
            query, key = rotate(query, positions), rotate(key, positions)
        key, content = self.window.extend(self.layer, key, content)
        core = self._core(tokens, key.shape[2] - tokens, value.device)
        parts = query, key, content
        mixed = recomputed(core, *parts) if self.recompute_core else core(*parts)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))

    def _core(self, tokens: int, before: int, device: torch.device) -> Callable[..., Tensor]:
        """Return the attention function of ``tokens`` tokens with ``before`` earlier tokens."""
        if self.window.context is not None:
            return self.window.context.attend
        return partial(
            functional.scaled_dot_product_attention,
            attn_mask=visible(tokens, before, device) if before else None,
            is_causal=self.shape.causal and not before,
            enable_gqa=self.shape.num_heads > self.shape.num_key_value_heads,
        )


def recomputed(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - torch's form
    """Run a function, and run it again in the backward pass; it must not be random."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def rotate(value: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of features by an angle that grows with the position.

    In ``(batch, heads, tokens, head_size)``, feature ``i`` is paired with ``i + head_size / 2``
    (Su et al., RoFormer, arXiv:2104.09864).
    """
    half = value.shape[3] // 2
    device = value.device
    speed = ROTARY_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.outer(positions.to(torch.float32), speed)
    cosine, sine = angle.cos().to(value.dtype), angle.sin().to(value.dtype)
    low, high = value[..., :half], value[..., half:]
    return torch.cat((low * cosine - high * sine, low * sine + high * cosine), dim=-1)


class FeedForward(nn.Module):
    """Two linear layers around a GELU, or three around a gated SiLU."""

    def __init__(self, shape: BlockShape, parallel: TensorParallel, weights: LayerWeights) -> None:
        """Create the linear layers of the model's family."""
        super().__init__()
        self.parallel = parallel
        wide, hidden = shape.feed_forward_size, shape.hidden_size
        self.up = ColumnLinear(parallel, weights, "up", (wide, hidden), shape.std)
        self.down = RowLinear(parallel, weights, "down", (hidden, wide), shape.residual_std)
        self.gate: ColumnLinear | None = None
        if shape.family == "llama":
            self.gate = ColumnLinear(parallel, weights, "gate", (wide, hidden), shape.std)
        else:
            self.up.with_bias()
            self.down.with_bias()

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(batch, tokens, hidden)`` for the same shape."""
        entered = self.parallel.enter(value)
        if self.gate is None:
            return self.down(functional.gelu(self.up(entered)))
        return self.down(functional.silu(self.gate(entered)) * self.up(entered))


class Block(nn.Module):
    """Attention and feed-forward part, each after a norm and added to the residual stream."""

    def __init__(
        self,
        shape: BlockShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        window: TokenWindow | None = None,
        make_feed_forward: Callable[..., nn.Module] = FeedForward,
    ) -> None:
        """Create both parts; without a window sequences are whole."""
        super().__init__()
        self.attention_norm, self.feed_forward_norm = norm(shape), norm(shape)
        self.attention = Attention(shape, parallel, weights, window or TokenWindow())
        self.feed_forward = make_feed_forward(shape, parallel, weights)

    @property
    def attention_layer(self) -> Attention:
        """The attention module, whose core selective recompute runs again."""
        return self.attention

    def forward(self, value: Tensor) -> Tensor:
        """Return ``(batch, tokens, hidden)`` for the same shape."""
        value = value + self.attention(self.attention_norm(value))
        return value + self.feed_forward(self.feed_forward_norm(value))
