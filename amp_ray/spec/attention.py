"""Operators of self-attention, kernel by kernel or as one."""

from typing import Final

from amp_ray.spec.operator import Elementwise, Gemm, Operator, Shard
from amp_ray.spec.width import Width

BYTES_PER_LOG_SUM: Final = 4
"""Fused attention keeps one single-precision number per token and head: the logarithm of the
softmax's sum."""


def attention(width: Width, *, bias: bool, dropout: bool) -> tuple[Operator, ...]:
    """Return self-attention from the projections to the output projection.

    Attention as one kernel has no dropout.
    """
    columns = width.hidden + 2 * width.key_value_size
    return (
        Gemm(
            name="qkv",
            rows=width.tokens,
            columns=columns,
            inner=width.hidden,
            shard="columns",
            bias=columns if bias else 0,
            saved_elements=width.stream,
            all_reduce="backward",
        ),
        *(
            (_fused_attention(width),)
            if width.fused_attention
            else _attention_core(width, dropout=dropout)
        ),
        Elementwise(
            name="heads",
            forward_elements=2 * width.stream,
            backward_elements=11 * width.stream,
            num_kernels=2,
            sharded=width.shards_heads,
        ),
        Gemm(
            name="projection",
            rows=width.tokens,
            columns=width.hidden,
            inner=width.hidden,
            shard="inner",
            bias=width.hidden if bias else 0,
            saved_elements=width.stream,
            saved_sharded=True,
            all_reduce="forward",
        ),
    )


def _fused_attention(width: Width) -> Elementwise:
    """Scores, softmax and context as one kernel: it reads and keeps its three inputs."""
    key_values = width.tokens * width.key_value_size
    products = 2 * 2.0 * width.tokens * width.attended * width.hidden
    return Elementwise(
        name="attention",
        forward_elements=2 * width.stream + 2 * key_values,
        backward_elements=4 * width.stream + 4 * key_values,
        flops=products / (2 if width.causal else 1),
        sharded=width.shards_heads,
        saved_elements=width.stream + 2 * key_values,
        saved_mask_bytes=BYTES_PER_LOG_SUM * width.heads * width.tokens,
    )


def _attention_core(width: Width, *, dropout: bool) -> tuple[Operator, ...]:
    """Scores, softmax, dropout and context, window by window."""
    sharded, scores = width.shards_heads, width.scores
    shard: Shard = "batch" if sharded else "none"
    batch = width.heads * width.tokens // width.attended
    drop = Elementwise(
        name="attention-dropout",
        forward_elements=2.5 * scores,
        backward_elements=2.5 * scores,
        sharded=sharded,
        saved_elements=scores,
        saved_mask_bytes=scores,
    )
    return (
        Gemm(
            name="scores",
            rows=width.attended,
            columns=width.attended,
            inner=width.head_size,
            batch=batch,
            shard=shard,
            has_weight=False,
            saved_elements=width.stream + width.tokens * width.key_value_size,
            saved_sharded=sharded,
        ),
        Elementwise(
            name="softmax",
            forward_elements=(2 if width.fused else 6) * scores,
            backward_elements=(3 if width.fused else 6) * scores,
            num_kernels=1 if width.fused else 4,
            sharded=sharded,
            saved_elements=scores,
        ),
        *((drop,) if dropout else ()),
        Gemm(
            name="context",
            rows=width.attended,
            columns=width.head_size,
            inner=width.attended,
            batch=batch,
            shard=shard,
            has_weight=False,
            saved_elements=width.tokens * width.key_value_size,
            saved_sharded=sharded,
        ),
    )
