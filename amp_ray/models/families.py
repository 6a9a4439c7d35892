"""Model families: conversion of a shape to the chain of layers that a runtime trains.

TransGAN's generator has transformer blocks of several widths with up-sampling between them. Each
level doubles the side of the picture; the last three up-samplings are pixel shuffles, which divide
the width by four (Jiang et al., TransGAN, arXiv:2102.07074).

Latent attention is that of DeepSeek-V2 (arXiv:2405.04434, section 2.1): keys and values of all
heads are computed from one narrow latent per token, queries from another. A part of each head is
rotated; all heads share it for keys. Shared experts follow DeepSeekMoE (arXiv:2401.06066).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import ceil, log2
from typing import Final

from amp_ray.models.blocks import (
    UNFUSED,
    Kernels,
    Width,
    after_projections,
    clamps,
    gated,
    gated_feed_forward,
    gelu,
    gelu_feed_forward,
    gpt_block,
    llama_block,
    norm,
    residual,
    rotary,
    rotary_attention,
    t5_decoder_block,
    t5_encoder_block,
)
from amp_ray.models.model import BlockFigures, Layer, LayerList, Model, ModelShape
from amp_ray.models.operator import Elementwise, Experts, Gemm, Operator
from amp_ray.models.wide_resnet import wide_resnet_layers

SHRINKING_LEVELS: Final = 3
SHRINK_FACTOR: Final = 4
RGB_CHANNELS: Final = 3

FULL_ATTENTION_WINDOWS: Final = 4
"""Pictures narrower than this many windows use full attention (below 64 in the paper's model)."""

DISTANCE_BUCKETS: Final = 32
"""Rows of T5's table of position biases (Raffel et al., arXiv:1910.10683, section 2.1)."""

LOSS_KERNELS: Final = 8
"""Kernels of a loss in its forward pass."""

PRODUCT_SIDE: Final = 1024
"""Side of the square matrix whose product stands for a block's operations; it is large enough for
full tiles on every device, as usual layers are."""

PUBLISHED_DEPTH: Final = (12, 0, 0, 0, 0, 12)
PUBLISHED_BETWEEN: Final = (2, 26, 3)
"""No-ops in the published list: after the first layer, between the halves, and at the end."""

_Build = Callable[[ModelShape, LayerList, Kernels], tuple[Layer, ...]]


def build_model(
    shape: ModelShape,
    *,
    layer_list: LayerList,
    vocabulary_multiple: int = 1,
    kernels: Kernels = UNFUSED,
) -> Model:
    """Build the chain of layers of a shape; the model keeps the shape as given, without padding.

    Args:
        shape: The model's figures; inconsistent ones raise a `ValueError`.
        layer_list: ``runtime`` for embedding, blocks, final norm, head with loss; ``amp-2022``
            for the lists of the published artifact (30 entries for GPT-2 with 24 blocks, 56 for
            TransGAN), which the published bounds count in.
        vocabulary_multiple: The vocabulary is padded up to a multiple of this.
        kernels: Operations that the program fuses or leaves out.
    """
    builders: Mapping[str, _Build] = {
        "gpt2": _gpt2,
        "llama": _llama,
        "transgan": transgan_layers,
        "t5": _t5,
        "wide_resnet": lambda shape, _list, _kernels: wide_resnet_layers(shape),
        "vit": _vit,
        "blocks": lambda shape, _list, _kernels: block_list_layers(shape),
    }
    if shape.family not in builders:
        raise ValueError(f"model family {shape.family!r} is unknown; known: {', '.join(builders)}")
    if layer_list != "runtime" and shape.family not in {"gpt2", "transgan"}:
        raise ValueError(
            f"layer list {layer_list!r} exists for gpt2 and transgan only, not for {shape.family}"
        )
    if shape.num_heads:
        _check_heads(shape)
    padded = -(-shape.vocab_size // vocabulary_multiple) * vocabulary_multiple
    build = builders[shape.family]
    plain = build(shape, layer_list, replace(UNFUSED, fused_attention=True))
    return Model(
        name=shape.family,
        shape=shape,
        layers=build(replace(shape, vocab_size=padded), layer_list, kernels),
        forward_flops=sum(layer.forward_flops for layer in plain),
    )


def _check_heads(shape: ModelShape) -> None:
    if shape.hidden_size % shape.num_heads and not shape.head_size:
        raise ValueError(
            f"hidden_size {shape.hidden_size} is not a multiple of num_heads {shape.num_heads}"
        )
    if shape.num_heads % shape.num_key_value_heads:
        raise ValueError(
            f"num_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_key_value_heads}"
        )


def _width(shape: ModelShape, kernels: Kernels) -> Width:
    return Width(
        tokens=shape.sequence_length,
        hidden=shape.hidden_size,
        heads=shape.num_heads,
        key_value_heads=shape.num_key_value_heads,
        feed_forward=shape.feed_forward_size,
        own_head_size=shape.head_size or None,
        **asdict(kernels),
    )


def _gpt2(shape: ModelShape, layer_list: LayerList, kernels: Kernels) -> tuple[Layer, ...]:
    """Build GPT-2: learned positions, layer norm, GELU, dropout, tied output embedding."""
    width, dropout = _width(shape, kernels), kernels.dropout
    embedding = token_embedding(width, shape, positions=shape.sequence_length, dropout=dropout)
    blocks = _gpt_blocks(shape, width, dropout=dropout)
    tail = (
        final_norm(width, bias=True),
        *_output(width, shape, split_loss=layer_list == "amp-2022"),
    )
    if layer_list == "runtime":
        return (embedding, *blocks, *tail)
    passing = _noop(width.stream)
    return (embedding, passing, *blocks, passing, *tail)


def _llama(shape: ModelShape, _list: LayerList, kernels: Kernels) -> tuple[Layer, ...]:
    """Build a llama-like model: rotary positions, RMS norm, gated SiLU, no dropout."""
    width = _width(shape, kernels)
    blocks = _decoder_blocks(shape, width)
    return (
        token_embedding(width, shape, positions=0, dropout=False),
        *blocks,
        *(_next_token_module(blocks[-1], width, shape),) * shape.mtp_layers,
        final_norm(width, bias=False),
        *_output(width, shape, split_loss=False),
    )


def _decoder_blocks(shape: ModelShape, width: Width) -> tuple[Layer, ...]:
    """Build all blocks of a llama-like decoder; a dense block without windows has ``width``."""
    windows = shape.attention_windows or (0,)
    kinds = [
        (
            windows[index % len(windows)],
            bool(shape.num_experts) and index >= shape.first_dense_layers,
        )
        for index in range(shape.num_layers)
    ]
    built = {
        kind: _decoder_block(shape, width, window=kind[0], has_experts=kind[1])
        for kind in dict.fromkeys(kinds)
    }
    return tuple(built[kind] for kind in kinds)


def _next_token_module(block: Layer, width: Width, shape: ModelShape) -> Layer:
    """Build a module that predicts one more token: a block between a projection and a loss.

    It joins the stream with the embedding of the next tokens. Its tables are those of the model;
    their parameters, and copies on another stage, are not counted.

    References:
        DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.2.
    """
    projection = Gemm(
        name="mtp-projection",
        rows=width.tokens,
        columns=width.hidden,
        inner=2 * width.hidden,
        shard="columns",
        saved_elements=2 * width.stream,
        all_reduce="backward",
    )
    look_up = Elementwise(
        name="mtp-look-up",
        forward_elements=2 * width.stream,
        backward_elements=2 * width.stream,
    )
    (logits,) = output_operators(width, shape.vocab_size)
    assert isinstance(logits, Gemm)
    operators = (
        look_up,
        *(norm(f"mtp-norm-{number}", width, bias=False) for number in (1, 2)),
        projection,
        *block.operators,
        norm("mtp-final-norm", width, bias=False),
        replace(logits, name="mtp-logits", has_weight=False),
        replace(cross_entropy(width, shape.vocab_size), name="mtp-cross-entropy"),
    )
    return replace(block, name="mtp", operators=operators)


def _gpt_blocks(shape: ModelShape, width: Width, *, dropout: bool) -> tuple[Layer, ...]:
    """Build all blocks of a GPT-2, blocks with experts last; experts have no biases."""
    dense = gpt_block(width, name="block", dropout=dropout)
    if not shape.num_experts:
        return (dense,) * shape.num_layers
    activation = replace(gelu(1, fused=width.fused), name="activation")
    if width.weighs_activations:
        activation = replace(activation, saved_elements=activation.saved_elements + 1)
    experts = _experts(shape, (activation,), is_gated=False)
    shared: tuple[Operator, ...] = ()
    if shape.shared_feed_forward_size:
        shared = gelu_feed_forward(replace(width, feed_forward=shape.shared_feed_forward_size))
    feed_forward = (*_named_shared(shared), *experts.operators())
    spread = gpt_block(width, name="moe-block", dropout=dropout, feed_forward=feed_forward)
    num_dense = min(shape.first_dense_layers, shape.num_layers)
    with_experts = (replace(spread, experts=experts),) * (shape.num_layers - num_dense)
    return (*(dense,) * num_dense, *with_experts)


def _decoder_block(shape: ModelShape, width: Width, *, window: int, has_experts: bool) -> Layer:
    block_width = replace(width, sliding=window or None)
    if shape.key_value_rank:
        attended = latent_attention(block_width, shape)
    else:
        attended = rotary_attention(block_width, scaled=shape.scaled_rotation)
        if shape.attention_bias:
            attended = tuple(
                replace(op, bias=op.columns) if isinstance(op, Gemm) and op.name == "qkv" else op
                for op in attended
            )
        if shape.query_key_norm:
            attended = (*attended, head_norms(block_width))
    if shape.extra_parameters:
        attended = (*attended, _without_work(shape.extra_parameters))
    experts = None
    if has_experts:
        activation = gated(
            "activation",
            1,
            fused=block_width.fused_pointwise,
            is_weighed=block_width.weighs_activations,
        )
        before = (clamps(1),) if shape.clamped_activation else ()
        experts = replace(
            _experts(shape, (*before, activation), is_gated=True),
            is_fused=block_width.fused_experts,
            is_sent_once=block_width.sends_tokens_once,
            has_fused_router=block_width.fused_router,
        )
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


def _experts(shape: ModelShape, activations: tuple[Elementwise, ...], *, is_gated: bool) -> Experts:
    return Experts(
        tokens=shape.sequence_length,
        hidden=shape.hidden_size,
        feed_forward=shape.expert_feed_forward_size,
        num_experts=shape.num_experts,
        per_token=shape.experts_per_token,
        activations=activations,
        is_gated=is_gated,
        has_bias=shape.expert_bias,
    )


def _shared_experts(shape: ModelShape, width: Width) -> tuple[Operator, ...]:
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


def _without_work(num_parameters: int) -> Elementwise:
    return Elementwise(
        name="extra-parameters",
        forward_elements=0,
        backward_elements=0,
        num_kernels=0,
        replicated_parameters=num_parameters,
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


def _t5(shape: ModelShape, _list: LayerList, kernels: Kernels) -> tuple[Layer, ...]:
    """Build T5: an encoder, and a decoder with cross attention to the encoder's result.

    That result passes through every boundary from the encoder's end to the last block of the
    decoder. Both halves have a table of position biases, counted with their embedding.
    """
    encoder = replace(_width(shape, kernels), causal=False, position_bias=True)
    decoder = replace(encoder, tokens=shape.decoder_sequence_length, causal=True)
    dropout, is_gated = kernels.dropout, shape.gated_feed_forward
    inputs = tuple(
        replace(
            token_embedding(
                width,
                shape,
                positions=0,
                dropout=dropout,
                replicated=DISTANCE_BUCKETS * width.heads,
            ),
            name=name,
            tied_parameters=shape.vocab_size * shape.hidden_size,
        )
        for name, width in (("embedding", encoder), ("decoder-embedding", decoder))
    )
    passed = t5_decoder_block(decoder, source=encoder, dropout=dropout, is_gated=is_gated)
    both = float(encoder.stream + decoder.stream)
    return (
        inputs[0],
        *(t5_encoder_block(encoder, dropout=dropout, is_gated=is_gated),) * shape.num_layers,
        replace(final_norm(encoder, bias=False), name="encoder-norm"),
        replace(inputs[1], output_elements=both),
        *(replace(passed, output_elements=both),) * (shape.num_decoder_layers - 1),
        passed,
        final_norm(decoder, bias=False),
        *_output(decoder, shape, split_loss=False),
    )


def _vit(shape: ModelShape, _list: LayerList, kernels: Kernels) -> tuple[Layer, ...]:
    """Build ViT: patches and a class token, GPT-2 blocks without causal mask, a classifier.

    Dosovitskiy et al., An image is worth 16x16 words, arXiv:2010.11929.
    """
    width = replace(_width(shape, kernels), causal=False)
    hidden, inner = shape.hidden_size, RGB_CHANNELS * shape.patch_size**2
    patches = Gemm(
        name="patches",
        rows=shape.sequence_length - 1,
        columns=hidden,
        inner=inner,
        bias=hidden + hidden * (1 + shape.sequence_length),
        saved_elements=(shape.sequence_length - 1) * inner,
    )
    classes = Gemm(
        name="classes",
        rows=1,
        columns=shape.num_classes,
        inner=hidden,
        bias=shape.num_classes,
        saved_elements=hidden,
    )
    return (
        Layer(
            name="embedding",
            kind="embedding",
            operators=(patches, residual("positions", width, dropout=kernels.dropout)),
            output_elements=width.stream,
        ),
        *(gpt_block(width, name="block", dropout=kernels.dropout),) * shape.num_layers,
        final_norm(width, bias=True),
        Layer(name="head", kind="head", operators=(classes,), output_elements=shape.num_classes),
    )


def _output(width: Width, shape: ModelShape, *, split_loss: bool) -> tuple[Layer, ...]:
    """Return output embedding and loss, as one layer or (published list) as two."""
    tied = shape.vocab_size * width.hidden if shape.tied_embedding else 0
    logits = float(width.tokens * shape.vocab_size)
    operators = output_operators(width, shape.vocab_size)
    loss = cross_entropy(width, shape.vocab_size)
    head = Layer(
        name="head",
        kind="head",
        operators=operators if split_loss else (*operators, loss),
        output_elements=logits,
        output_sharded=True,
        tied_parameters=tied,
    )
    if not split_loss:
        return (head,)
    cast = to_single_precision(width, shape.vocab_size)
    return (
        head,
        Layer(
            name="loss",
            kind="loss",
            operators=(cast, loss),
            output_elements=logits,
            output_sharded=True,
        ),
    )


def _noop(elements: float) -> Layer:
    return Layer(name="noop", kind="noop", operators=(), output_elements=elements)


def token_embedding(
    width: Width, shape: ModelShape, *, positions: int, dropout: bool, replicated: int = 0
) -> Layer:
    """Build the input embedding: a vocabulary-parallel table and learned positions.

    ``replicated`` is the number of additional parameters on every rank.
    """
    stream = width.stream
    return Layer(
        name="embedding",
        kind="embedding",
        operators=(
            Elementwise(
                name="look-up",
                forward_elements=(7.5 if dropout else 5) * stream,
                backward_elements=(6.5 if dropout else 4) * stream,
                num_kernels=2,
                sharded_parameters=shape.vocab_size * width.hidden,
                replicated_parameters=positions * width.hidden + replicated,
                saved_mask_bytes=stream if dropout else 0,
                all_reduce="forward",
                all_reduce_elements=stream,
            ),
        ),
        output_elements=stream,
        tied_parameters=shape.vocab_size * width.hidden if shape.tied_embedding else 0,
    )


def final_norm(width: Width, *, bias: bool) -> Layer:
    """Build the norm before the output embedding."""
    return Layer(
        name="final-norm",
        kind="norm",
        operators=(norm("norm", width, bias=bias),),
        output_elements=width.stream,
    )


def output_operators(width: Width, vocab_size: int) -> tuple[Operator, ...]:
    """Return the GEMM of the output embedding, whose weight may be tied."""
    return (
        Gemm(
            name="logits",
            rows=width.tokens,
            columns=vocab_size,
            inner=width.hidden,
            shard="columns",
            saved_elements=width.stream,
            all_reduce="backward",
        ),
    )


def cross_entropy(width: Width, vocab_size: int) -> Elementwise:
    """Return the loss over the vocabulary; runtimes compute it in single precision.

    Chunks compute logits, loss and their gradients one after the other, so that logits are made
    once, by a product for each chunk.
    """
    chunks = min(width.loss_chunks or few_chunks(width, vocab_size), width.tokens)
    return Elementwise(
        name="cross-entropy",
        forward_elements=0,
        backward_elements=0,
        num_kernels=LOSS_KERNELS + (chunks - 1) * (LOSS_KERNELS + 1),
        chunks=chunks,
        sharded=True,
        logits=width.tokens * vocab_size,
        loss_fraction=width.loss_fraction,
        is_layer=False,
    )


def few_chunks(width: Width, vocab_size: int) -> int:
    """Return the fewest chunks, a power of two, with which logits are no more than the stream.

    Larger products run at a better rate, and fewer logits save hardly any memory beside the stream
    (Hsu et al., Liger Kernel, arXiv:2410.10989, section 3.2: chunks of ``tokens x hidden /
    vocabulary`` tokens, rounded up to a power of two).
    """
    return 1 << ceil(log2(max(1, vocab_size / width.hidden)))


def to_single_precision(width: Width, vocab_size: int) -> Elementwise:
    """Return the cast of logits to single precision: reads two bytes, writes four."""
    logits = width.tokens * vocab_size
    return Elementwise(
        name="cast", forward_elements=3 * logits, backward_elements=3 * logits, sharded=True
    )


def transgan_layers(
    shape: ModelShape, layer_list: LayerList, kernels: Kernels = UNFUSED
) -> tuple[Layer, ...]:
    """Build the layers of the TransGAN generator; inconsistent figures raise a ``ValueError``.

    The list ``amp-2022`` has the 56 entries of the published artifact, which fused nothing and
    whose tensor parallelism does not divide attention heads.
    """
    if not any(shape.depth[-1:]):
        raise ValueError(f"depth {list(shape.depth)} must end with a level that has blocks")
    published = layer_list == "amp-2022"
    if published and shape.depth != PUBLISHED_DEPTH:
        raise ValueError(
            f"layer list 'amp-2022' of transgan is known for depth {list(PUBLISHED_DEPTH)}, "
            f"found {list(shape.depth)}"
        )
    fused = kernels.fused_attention and not published
    levels = [
        (
            gpt_block(
                replace(
                    _level_width(shape, level, published=published),
                    fused_attention=fused,
                    attention_rate=kernels.attention_rate,
                    native_attention=kernels.native_attention,
                    compiled_attention=kernels.compiled_attention,
                ),
                name=f"block-{level}",
                dropout=False,
            ),
        )
        * num_blocks
        for level, num_blocks in enumerate(shape.depth)
    ]
    first = _input(shape)
    if not published:
        blocks = [block for blocks in levels for block in blocks]
        return (first, *blocks, _head(shape))
    low, high = levels[0], levels[-1]
    ahead, between, behind = PUBLISHED_BETWEEN
    passing_low, passing_high = _noop(low[0].output_elements), _noop(high[0].output_elements)
    return (
        first,
        *(passing_low,) * ahead,
        *low,
        *(passing_low,) * (between - 2),
        *(passing_high,) * 2,
        *high,
        *(passing_high,) * behind,
    )


def _level_width(shape: ModelShape, level: int, *, published: bool) -> Width:
    first_shrinking = max(0, len(shape.depth) - 1 - SHRINKING_LEVELS)
    hidden = shape.hidden_size // SHRINK_FACTOR ** max(0, level - first_shrinking)
    if hidden % shape.num_heads:
        raise ValueError(
            f"width {hidden} of level {level} is not a multiple of num_heads {shape.num_heads}"
        )
    side = shape.bottom_width * 2**level
    window = shape.window_size if side >= FULL_ATTENTION_WINDOWS * shape.window_size else side
    if shape.depth[level] and side % window:
        raise ValueError(f"side {side} of level {level} is not a multiple of window_size {window}")
    return Width(
        tokens=side**2,
        hidden=hidden,
        heads=shape.num_heads,
        key_value_heads=shape.num_heads,
        feed_forward=4 * hidden,
        shards_heads=not published,
        fused=not published,
        window=window**2,
        causal=False,
    )


def _input(shape: ModelShape) -> Layer:
    """Return the linear layer from the random vector to the first feature map."""
    stream = shape.bottom_width**2 * shape.hidden_size
    gemm = Gemm(
        name="latent",
        rows=1,
        columns=stream,
        inner=shape.latent_size,
        bias=stream,
        saved_elements=shape.latent_size,
    )
    return Layer(name="input", kind="other", operators=(gemm,), output_elements=stream)


def _head(shape: ModelShape) -> Layer:
    """Return the layer from the last level's width to colours, with a loss over the picture."""
    last = _level_width(shape, len(shape.depth) - 1, published=False)
    pixels = last.tokens * RGB_CHANNELS
    operators = (
        Gemm(
            name="colours",
            rows=last.tokens,
            columns=RGB_CHANNELS,
            inner=last.hidden,
            bias=RGB_CHANNELS,
            saved_elements=last.stream,
        ),
        Elementwise(name="loss", forward_elements=2 * pixels, backward_elements=2 * pixels),
    )
    return Layer(name="head", kind="head", operators=operators, output_elements=pixels)


def block_list_layers(shape: ModelShape) -> tuple[Layer, ...]:
    """Build a layer per block."""
    return tuple(layer for block in shape.blocks for layer in (_listed(block),) * block.repeat)


def _listed(block: BlockFigures) -> Layer:
    """Return one block: its operations, and the traffic of saved and output activations.

    Tensor-parallel ranks of a sharded block all-reduce its result in the forward pass, and the
    gradient of its input, assumed to be as large, in the backward pass.
    """
    moved = 2 * (block.activation_elements + block.boundary_elements)
    operators: tuple[Operator, ...] = (
        Elementwise(
            name="traffic",
            forward_elements=moved,
            backward_elements=moved,
            sharded=block.sharded,
            sharded_parameters=block.parameters if block.sharded else 0,
            replicated_parameters=0 if block.sharded else block.parameters,
            saved_elements=block.activation_elements,
            all_reduce="forward" if block.sharded else "none",
            all_reduce_elements=block.boundary_elements if block.sharded else 0,
        ),
    )
    if block.forward_flops:
        operators += (_product(block),)
    if block.sharded:
        gradient = Elementwise(
            name="input-gradient",
            forward_elements=0,
            backward_elements=0,
            num_kernels=0,
            all_reduce="backward",
            all_reduce_elements=block.boundary_elements,
        )
        operators += (gradient,)
    return Layer(
        name=block.name,
        kind="block",
        operators=operators,
        output_elements=block.boundary_elements,
    )


def _product(block: BlockFigures) -> Gemm:
    """Return a product with the block's number of operations and without parameters."""
    return Gemm(
        name="product",
        rows=max(1, round(block.forward_flops / (2 * PRODUCT_SIDE**2))),
        columns=PRODUCT_SIDE,
        inner=PRODUCT_SIDE,
        shard="rows" if block.sharded else "none",
        has_weight=False,
    )
