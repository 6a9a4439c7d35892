"""The pre-norm transformer block of all families: attention and feed-forward part.

A micro-batch may run in slices of its tokens. Attention of a slice reads the keys and values of
earlier slices. The backward pass takes the slices in reverse and sums the gradients of keys and
values from all later slices into the slice that computed them.

References:
    Li et al., TeraPipe, arXiv:2102.07988.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from amp_ray.models.model import ModelShape
from amp_ray.training.context import ContextParallel
from amp_ray.training.parallel import ColumnLinear, LayerWeights, RowLinear, TensorParallel
from amp_ray.training.shapes import head_width, is_image, residual_std, weight_std

ROTARY_BASE: Final = 10000.0
"""Base of the rotary angles (Su et al., RoFormer, arXiv:2104.09864, section 3.2.2)."""

RMS_EPSILON: Final = 1e-6
"""Added to the mean square in a norm (released code of Touvron et al., LLaMA, arXiv:2302.13971)."""


class _Entry(NamedTuple):
    """Keys and values of one slice in one layer, and the copies of them that later slices read."""

    made: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Passed:
    """Keys and values of one micro-batch in one chunk."""

    # Entries by layer and slice index
    entries: dict[int, dict[int, _Entry]] = field(default_factory=lambda: defaultdict(dict))

    def backward_roots(self, token_slice: int) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return a slice's keys and values, and their gradients from later slices."""
        made, gradients = [], []
        for layer in self.entries.values():
            entry = layer.pop(token_slice)
            for tensor, leaf in zip(entry.made, entry.read, strict=True):
                if leaf.grad is not None:
                    made.append(tensor)
                    gradients.append(leaf.grad)
        return made, gradients


@dataclass(slots=True)
class TokenWindow:
    """The slice of tokens that the layers of a rank currently process."""

    first: int = 0  # number of tokens before the slice
    token_slice: int = 0  # index of the slice
    # Keys and values of the slice's micro-batch; None if sequences are whole
    passed: Passed | None = None
    # Ranks that divide every sequence; None if the context parallel degree is 1
    context: ContextParallel | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the current tokens in their sequence."""
        if self.context is not None:
            return self.context.positions(tokens, device)
        return torch.arange(self.first, self.first + tokens, device=device)

    def own_tokens(self, value: Tensor) -> Tensor:
        """Return this rank's tokens of whole sequences."""
        return value if self.context is None else self.context.own_tokens(value)

    def begin_behind(self, layer: int, context: Tensor) -> None:
        """Set the window to the slice after ``context``, or to the first one if that is empty.

        The context has the keys and values of earlier tokens, shape ``(2, batch, heads, tokens,
        head_size)``.
        """
        self.first, self.token_slice, self.passed = 0, 0, Passed()
        if context.shape[3]:
            self.extend(layer, *context)
            self.first, self.token_slice = context.shape[3], 1

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values with those of earlier slices in front, along dimension 2.

        Recomputation in the backward pass gets the same result as the forward pass.
        """
        if self.passed is None:
            return key, value
        entries = self.passed.entries[layer]
        if self.token_slice not in entries:
            leaves = key.detach().requires_grad_(), value.detach().requires_grad_()
            entries[self.token_slice] = _Entry((key, value), leaves)
        if self.token_slice == 0:
            return key, value
        earlier = [entries[index].read for index in range(self.token_slice)]
        return (
            torch.cat([*(entry[0] for entry in earlier), key], dim=2),
            torch.cat([*(entry[1] for entry in earlier), value], dim=2),
        )


def visible(tokens: int, before: int, device: torch.device) -> Tensor:
    """Return the causal mask, shape ``(tokens, before + tokens)``, of queries and keys."""
    everything = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device)
    return everything.tril(diagonal=before)


def norm(shape: ModelShape) -> nn.Module:
    """Return the norm of a family; its weights are replicated on every rank."""
    if shape.family == "llama":
        return nn.RMSNorm(shape.hidden_size, eps=RMS_EPSILON)
    return nn.LayerNorm(shape.hidden_size)


class Attention(nn.Module):
    """Self-attention over a sequence or a slice of it; tp ranks divide the heads.

    The rows of the joint projection are ordered by key-value head: its query heads,
    then its key, then its value. So a contiguous shard has whole heads for any tp.
    """

    def __init__(
        self,
        shape: ModelShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        window: TokenWindow,
    ) -> None:
        super().__init__()
        self.shape, self.parallel = shape, parallel
        self.recompute_core = False
        self.window, self.layer = window, weights.layer
        width = head_width(shape)
        rows = (shape.num_heads + 2 * shape.num_key_value_heads) * width
        hidden, mixed = shape.hidden_size, shape.num_heads * width
        self.qkv = ColumnLinear(parallel, weights, "qkv", (rows, hidden), weight_std(shape))
        self.out = RowLinear(parallel, weights, "attention", (hidden, mixed), residual_std(shape))
        if shape.family != "llama":
            self.qkv.with_bias()
            self.out.with_bias()

    def forward(self, value: Tensor) -> Tensor:
        """Return the output for an input ``(batch, tokens, hidden)``, in the same shape."""
        shape = self.shape
        groups = shape.num_key_value_heads // self.parallel.size
        queries = shape.num_heads // shape.num_key_value_heads
        joint = self.qkv(self.parallel.enter(value))
        batch, tokens, _ = joint.shape
        joint = joint.view(batch, tokens, groups, queries + 2, head_width(shape))
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
        if self.window.context is not None:
            return self.window.context.attend
        return partial(
            functional.scaled_dot_product_attention,
            attn_mask=visible(tokens, before, device) if before else None,
            is_causal=not is_image(self.shape) and not before,
            enable_gqa=self.shape.num_heads > self.shape.num_key_value_heads,
        )


def recomputed(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - torch's form
    """Run a function, and run it again in the backward pass; it must be deterministic."""
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

    def __init__(self, shape: ModelShape, parallel: TensorParallel, weights: LayerWeights) -> None:
        super().__init__()
        self.parallel = parallel
        wide, hidden = shape.feed_forward_size, shape.hidden_size
        self.up = ColumnLinear(parallel, weights, "up", (wide, hidden), weight_std(shape))
        self.down = RowLinear(parallel, weights, "down", (hidden, wide), residual_std(shape))
        self.gate: ColumnLinear | None = None
        if shape.family == "llama":
            self.gate = ColumnLinear(parallel, weights, "gate", (wide, hidden), weight_std(shape))
        else:
            self.up.with_bias()
            self.down.with_bias()

    def forward(self, value: Tensor) -> Tensor:
        """Return the output for an input ``(batch, tokens, hidden)``, in the same shape."""
        entered = self.parallel.enter(value)
        if self.gate is None:
            return self.down(functional.gelu(self.up(entered)))
        return self.down(functional.silu(self.gate(entered)) * self.up(entered))


class Block(nn.Module):
    """Attention and feed-forward part, each after a norm and added to the residual stream."""

    def __init__(
        self,
        shape: ModelShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        window: TokenWindow | None = None,
        make_feed_forward: Callable[..., nn.Module] = FeedForward,
    ) -> None:
        """Create both parts; if ``window`` is None, sequences are whole."""
        super().__init__()
        self.attention_norm, self.feed_forward_norm = norm(shape), norm(shape)
        self.attention = Attention(shape, parallel, weights, window or TokenWindow())
        self.feed_forward = make_feed_forward(shape, parallel, weights)

    @property
    def attention_layer(self) -> Attention:
        """The attention module, whose core selective recompute runs again."""
        return self.attention

    def forward(self, value: Tensor) -> Tensor:
        """Return the output for an input ``(batch, tokens, hidden)``, in the same shape."""
        value = value + self.attention(self.attention_norm(value))
        return value + self.feed_forward(self.feed_forward_norm(value))
