"""Blocks of current decoders: llama-like, with the changes of newer models.

Latent attention is that of DeepSeek-V2 (arXiv:2405.04434, section 2.1): keys and values of all
heads are computed from one narrow latent per token, queries from another. A part of each head is
rotated; all heads share it for keys. Shared experts follow DeepSeekMoE (arXiv:2401.06066).
"""

from dataclasses import replace

from amp_ray.models.blocks import (
    Width,
    after_projections,
    gated,
    gated_feed_forward,
    gelu,
    gelu_feed_forward,
    gpt_block,
    llama_block,
    rotary,
    rotary_attention,
)
from amp_ray.models.experts import Experts
from amp_ray.models.model import Layer, ModelShape
from amp_ray.models.operator import Elementwise, Gemm, Operator


def decoder_blocks(shape: ModelShape, width: Width) -> tuple[Layer, ...]:
    """Build all blocks of a llama-like decoder.

    Args:
        shape: Sizes of the model.
        width: Sizes of a dense block without windows.
    """
    windows = shape.attention_windows or (0,)
    kinds = [
        (
            windows[index % len(windows)],
            bool(shape.num_experts) and index >= shape.first_dense_layers,
        )
        for index in range(shape.num_layers)
    ]
    built = {
        kind: _block(shape, width, window=kind[0], has_experts=kind[1])
        for kind in dict.fromkeys(kinds)
    }
    return tuple(built[kind] for kind in kinds)


def gpt_blocks(shape: ModelShape, width: Width, *, dropout: bool) -> tuple[Layer, ...]:
    """Build all blocks of a GPT-2, those with experts last; experts have no biases.

    Args:
        shape: Sizes of the model.
        width: Sizes of a block.
        dropout: Whether it trains with dropout.
    """
    dense = gpt_block(width, name="block", dropout=dropout)
    if not shape.num_experts:
        return (dense,) * shape.num_layers
    experts = _experts(shape, gelu(1, fused=width.fused), is_gated=False)
    shared: tuple[Operator, ...] = ()
    if shape.shared_feed_forward_size:
        shared = gelu_feed_forward(replace(width, feed_forward=shape.shared_feed_forward_size))
    feed_forward = (*_named_shared(shared), *experts.operators())
    spread = gpt_block(width, name="moe-block", dropout=dropout, feed_forward=feed_forward)
    num_dense = min(shape.first_dense_layers, shape.num_layers)
    with_experts = (replace(spread, experts=experts),) * (shape.num_layers - num_dense)
    return (*(dense,) * num_dense, *with_experts)


def _block(shape: ModelShape, width: Width, *, window: int, has_experts: bool) -> Layer:
    """Build one block; without the options of newer models it is a llama block."""
    block_width = replace(width, sliding=window or None)
    if shape.key_value_rank:
        attended = latent_attention(block_width, shape)
    else:
        attended = rotary_attention(block_width)
        if shape.attention_bias:
            attended = tuple(
                replace(op, bias=op.columns) if isinstance(op, Gemm) and op.name == "qkv" else op
                for op in attended
            )
        if shape.query_key_norm:
            attended = (*attended, head_norms(block_width))
    experts = None
    if has_experts:
        activation = gated("gated-silu", 1, fused=block_width.fused_pointwise)
        experts = _experts(shape, activation, is_gated=True)
    feed_forward: tuple[Operator, ...] = ()
    if experts is not None:
        feed_forward = (*_shared_experts(shape, block_width), *experts.operators())
    block = llama_block(
        block_width,
        name="moe-block" if experts else "block",
        attended=attended,
        feed_forward=feed_forward,
        post_norms=shape.post_norms,
    )
    return replace(block, experts=experts)


def _experts(shape: ModelShape, activation: Elementwise, *, is_gated: bool) -> Experts:
    return Experts(
        tokens=shape.sequence_length,
        hidden=shape.hidden_size,
        feed_forward=shape.expert_feed_forward_size,
        num_experts=shape.num_experts,
        per_token=shape.experts_per_token,
        activation=activation,
        is_gated=is_gated,
    )


def _shared_experts(shape: ModelShape, width: Width) -> tuple[Operator, ...]:
    """Return the shared experts, which process all tokens, as one feed-forward part."""
    if not shape.shared_feed_forward_size:
        return ()
    shared = replace(width, feed_forward=shape.shared_feed_forward_size)
    return _named_shared(gated_feed_forward(shared))


def _named_shared(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Rename operators of shared experts, so that names within a block differ."""
    return tuple(replace(op, name=f"shared-{op.name}") for op in operators)


def head_norms(width: Width) -> Elementwise:
    """Return the norms of queries and keys, head by head."""
    elements = width.attention_stream + width.key_values
    return Elementwise(
        name="query-key-norm",
        forward_elements=2 * elements,
        backward_elements=5 * elements,
        num_kernels=2,
        sharded=width.shards_heads,
        replicated_parameters=2 * width.head_size,
        saved_elements=elements,
    )


def latent_attention(width: Width, shape: ModelShape) -> tuple[Operator, ...]:
    """Return attention with keys, values and (if they have a rank) queries from latents."""
    latent = replace(
        width,
        own_head_size=shape.head_size + shape.rotary_head_size,
        own_value_size=shape.value_head_size,
        key_value_heads=width.heads,
    )
    made = shape.head_size + shape.value_head_size
    queries = _from_latent("query", latent, shape.query_rank, latent.head_size, rotated=0)
    rotated = width.tokens * shape.rotary_head_size * (width.heads + 1)
    copied = latent.key_values
    return (
        *queries,
        *_from_latent(
            "key-value", latent, shape.key_value_rank, made, rotated=shape.rotary_head_size
        ),
        *after_projections(latent, bias=False, dropout=False),
        rotary(latent, rotated),
        Elementwise(
            name="keys",
            forward_elements=2 * copied,
            backward_elements=2 * copied,
            sharded=latent.shards_heads,
        ),
    )


def _from_latent(
    name: str, width: Width, rank: int, head_size: int, *, rotated: int
) -> tuple[Operator, ...]:
    """Return products to ``head_size`` columns per head via a latent of ``rank``, 0 for none.

    The product to the latent, with the ``rotated`` part of keys, is replicated on every rank.
    """
    heads = Gemm(
        name=name,
        rows=width.tokens,
        columns=width.heads * head_size,
        inner=rank or width.hidden,
        shard="columns",
        saved_elements=width.tokens * (rank or width.hidden),
        all_reduce="backward",
    )
    if not rank:
        return (heads,)
    latent = width.tokens * rank
    return (
        Gemm(
            name=f"{name}-latent",
            rows=width.tokens,
            columns=rank + rotated,
            inner=width.hidden,
            saved_elements=width.stream if rotated else 0.0,
        ),
        Elementwise(
            name=f"{name}-norm",
            forward_elements=2 * latent,
            backward_elements=5 * latent,
            replicated_parameters=rank,
            saved_elements=latent,
        ),
        heads,
    )
