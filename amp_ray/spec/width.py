"""Sizes of a transformer block, and how a program computes one."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How a program computes what the families have in common.

    Args:
        fused_attention: Whether attention is one kernel (scaled_dot_product_attention), which
            writes and keeps no scores.
        dropout: Whether language models that were published with dropout train with it.
    """

    fused_attention: bool = False
    dropout: bool = True


UNFUSED: Final = Kernels()
"""Attention kernel by kernel, with dropout: the programs of the published measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Sizes of one transformer block.

    Args:
        tokens: Tokens per sample.
        hidden: Width of the residual stream.
        shards_heads: Whether tensor parallelism divides the attention core.
        window: Tokens that one token attends to; None means all.
        fused: Whether activation and softmax run as one kernel each; else every arithmetic step
            of theirs reads, writes and keeps its own tensor.
        fused_attention: Whether all of attention between the projections is one kernel.
        causal: Whether a token sees only those before it, which one kernel need not compute.
    """

    tokens: int
    hidden: int
    heads: int
    key_value_heads: int
    feed_forward: int
    shards_heads: bool = True
    window: int | None = None
    fused: bool = True
    fused_attention: bool = False
    causal: bool = True

    @property
    def attended(self) -> int:
        """Tokens that one token attends to."""
        return self.tokens if self.window is None else self.window

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def key_value_size(self) -> int:
        """Width of all keys, or of all values."""
        return self.head_size * self.key_value_heads

    @property
    def stream(self) -> int:
        """Elements of the residual stream, per sample."""
        return self.tokens * self.hidden

    @property
    def scores(self) -> int:
        """Elements of the attention matrix of all heads, per sample."""
        return self.heads * self.tokens * self.attended
