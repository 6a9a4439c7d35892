"""Operators of the transformer layers that all families are built from.

Counts of the saved activations follow Korthikanti et al., arXiv:2205.05198,
section 4.1: 34*s*h + 5*a*s^2 bytes per GPT block in half precision. Traffic of
the memory-bound kernels is counted from what each one reads and writes.
"""

from amp_ray.spec.attention import attention
from amp_ray.spec.model import Layer
from amp_ray.spec.operator import Elementwise, Gemm
from amp_ray.spec.width import Width


def gpt_block(width: Width, *, name: str, dropout: bool = True) -> Layer:
    """Build a pre-norm GPT block: attention, then a GELU feed-forward part of two GEMMs."""
    stream, inner = width.stream, width.tokens * width.feed_forward
    operators = (
        norm("norm-1", width, bias=True),
        *attention(width, bias=True, dropout=dropout),
        _residual("residual-1", width, dropout=dropout),
        norm("norm-2", width, bias=True),
        Gemm(
            name="feed-forward-in",
            rows=width.tokens,
            columns=width.feed_forward,
            inner=width.hidden,
            shard="columns",
            bias=width.feed_forward,
            saved_elements=stream,
            all_reduce="backward",
        ),
        _gelu(inner, fused=width.fused),
        _feed_forward_out(width, bias=width.hidden),
        _residual("residual-2", width, dropout=dropout),
    )
    return Layer(name=name, kind="block", operators=operators, output_elements=stream)


def llama_block(width: Width, *, name: str) -> Layer:
    """Build a pre-norm block with RMS norm, rotary embedding and a gated feed-forward part."""
    stream, inner = width.stream, width.tokens * width.feed_forward
    rotated = width.tokens * width.head_size * (width.heads + width.key_value_heads)
    operators = (
        norm("norm-1", width, bias=False),
        *attention(width, bias=False, dropout=False),
        Elementwise(
            name="rotary",
            forward_elements=2 * rotated,
            backward_elements=2 * rotated,
            num_kernels=2,
            sharded=width.shards_heads,
        ),
        _residual("residual-1", width, dropout=False),
        norm("norm-2", width, bias=False),
        Gemm(
            name="feed-forward-in",
            rows=width.tokens,
            columns=2 * width.feed_forward,
            inner=width.hidden,
            shard="columns",
            saved_elements=stream,
            all_reduce="backward",
        ),
        Elementwise(
            name="gated-silu",
            forward_elements=5 * inner,
            backward_elements=8 * inner,
            num_kernels=2,
            sharded=True,
            saved_elements=3 * inner,
        ),
        _feed_forward_out(width, bias=0),
        _residual("residual-2", width, dropout=False),
    )
    return Layer(name=name, kind="block", operators=operators, output_elements=stream)


def norm(name: str, width: Width, *, bias: bool) -> Elementwise:
    """Layer norm or RMS norm: reads and writes the stream, keeps its input."""
    return Elementwise(
        name=name,
        forward_elements=2 * width.stream,
        backward_elements=5 * width.stream,
        replicated_parameters=width.hidden * (2 if bias else 1),
        saved_elements=width.stream,
    )


def _gelu(inner: int, *, fused: bool) -> Elementwise:
    """GELU: one fused kernel, or five steps around the error function."""
    if fused:
        return Elementwise(
            name="gelu",
            forward_elements=2 * inner,
            backward_elements=4 * inner,
            sharded=True,
            saved_elements=inner,
        )
    return Elementwise(
        name="gelu",
        forward_elements=11 * inner,
        backward_elements=15 * inner,
        num_kernels=5,
        sharded=True,
        saved_elements=3 * inner,
    )


def _residual(name: str, width: Width, *, dropout: bool) -> Elementwise:
    """Bias, dropout and the addition to the residual stream."""
    return Elementwise(
        name=name,
        forward_elements=3.5 * width.stream if dropout else 3 * width.stream,
        backward_elements=6.5 * width.stream if dropout else 3 * width.stream,
        saved_mask_bytes=width.stream if dropout else 0,
    )


def _feed_forward_out(width: Width, *, bias: int) -> Gemm:
    """Return the row-parallel GEMM back to the residual stream."""
    return Gemm(
        name="feed-forward-out",
        rows=width.tokens,
        columns=width.hidden,
        inner=width.feed_forward,
        shard="inner",
        bias=bias,
        saved_elements=width.tokens * width.feed_forward,
        saved_sharded=True,
        all_reduce="forward",
    )
