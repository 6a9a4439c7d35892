"""Operators of the transformer layers that all families are built from.

Counts of the saved activations follow Korthikanti et al., arXiv:2205.05198,
section 4.1: 34*s*h + 5*a*s^2 bytes per GPT block in half precision. Traffic of
memory-bound kernels is the sum of the elements that each one reads and writes.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from amp_ray.models.model import Layer
from amp_ray.models.operator import Elementwise, Gemm, Operator, Shard

BYTES_PER_LOG_SUM: Final = 4
"""Bytes that fused attention saves per token and head: the logarithm of the softmax sum in single
precision."""


FLASH_ATTENTION_2_RATE: Final = 0.7
"""Rate of fused attention relative to matrix products: FlashAttention-2 reaches half to three
quarters of an A100's peak, GEMMs 0.8 of it (Dao, arXiv:2307.08691, figures 4 to 6)."""

OLDER_ATTENTION_RATE: Final = 0.4
"""The same for the memory-efficient kernel that PyTorch uses where FlashAttention-2 cannot. It
is the algorithm of FlashAttention-1, which reaches 25 to 40 % of the peak (the same paper,
abstract)."""

RING_BUFFERS: Final = 4
"""Keys and values of one rank that live in a step of a ring: those attended to and those that
arrive, in the backward pass with their gradients (Liu et al., arXiv:2310.01889, algorithm 1)."""

SCALED_ROTATION: Final = (12, 14, 6)
"""Elements that both passes read and write for each rotated element where rotation also scales, and
kernels of the forward pass: ``t * cos + rotate_half(t) * sin``, joined with the part that is not
rotated (Megatron-core 0.16, `_apply_rotary_pos_emb_bshd`, which it uses where YaRN's factor is not
1). Counted by running it under torch's TorchDispatchMode: 24.5 and 28.5 bytes in bf16."""

ROTATION_ADDRESSED: Final = 4.7
"""Elements that these kernels address one by one, in both passes, for each rotated element (see
`addressed_s`): both products, in three dimensions, 132 instructions, the negated half 21, and
joining the halves, one of them strided, 80."""

COMPLEX_ROTATION: Final = (10, 10, 3)
"""The same where each pair of elements is a complex number in single precision: casts, a product
and casts back (torchtitan, `apply_rotary_emb`). Counted by running it under torch's
TorchDispatchMode, 20 bytes in each pass."""

SEPARATE_NORM: Final = (20, 56, 8)
"""The same for each element of a norm that PyTorch composes of kernels in single precision, as on
CUDA before ``aten::_fused_rms_norm``: 40 and 112 bytes in bf16, counted in the same way on torch
2.13's CPU path of `torch.nn.functional.rms_norm`."""

CLAMPS: Final = (8, 15, 3)
"""The same for each element of the result of a gated activation whose inputs are clamped first:
``cat(gate.clamp(max), other.clamp(min, max))`` (Megatron-core 0.16,
`weighted_bias_quick_geglu_impl`, outside of its compiled kernels). 16 and 30 bytes in bf16."""

CLAMPS_ADDRESSED: Final = (2, 5)
"""Elements that these kernels address one by one: the halves are strided, so both clamps and, in
the backward pass, three comparisons and two choices between a gradient and 0."""

ATTENTION_ROWS: Final = 128
"""Queries of a block that one multiprocessor computes at a time (Shah et al., FlashAttention-3,
arXiv:2407.08608, section 4.1; Dao, arXiv:2307.08691, section 3.3)."""

SUM_TRAFFIC: Final = 5
"""Traffic of the sums of the queries' gradients beside the products, in elements of half precision:
zeros in single precision 2, reading the sums 2, writing the gradients 1. Kernels of cuDNN 9 on an
H100: a memset, ``compute_dot_do_o``, ``flash_bprop``, ``convert_dq_to_16bits``."""

CAST_TRAFFIC: Final = 2
"""Traffic of casting an input of attention to 8-bit floats, in elements of half precision: read,
and written twice, along either dimension (Transformer Engine 2.20, `combine_and_quantize`)."""

CAST_KERNELS: Final = 3
"""Kernels of that: queries, keys, values. The backward pass casts the gradient of the result."""

ADDED_PER_STEP: Final = 3
"""Elements read and written to combine the results of two ring steps, per element."""

REORDER_TRAFFIC: Final = 6
"""Elements read and written around an all-to-all of heads for each element: heads of one rank are
put together, parts of the sequence put together, and these put into order, since a rank's tokens
are a piece of its front and one of its end (Transformer Engine 2.12, `flash_attn_a2a_communicate`
and `reorder_seq_chunks_for_a2a_before_attn` in pytorch/attention/dot_product_attention)."""

REORDER_KERNELS: Final = 8
"""Kernels of that, three for each of four tensors in each pass; backward passes count twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A program's kernels for layers common to several families; see `RuntimeTraits`."""

    fused_attention: bool = False  # whether all of attention between the projections is one kernel
    attention_rate: float = FLASH_ATTENTION_2_RATE  # its rate relative to matrix products
    native_attention: bool = False  # whether it uses the board's own instructions
    fp8_attention: bool = False  # whether its products run in 8-bit floats
    compiled_attention: bool = False  # whether Triton compiles it
    dropout: bool = True
    # Traffic of the loss, relative to separate kernels in single precision
    loss_fraction: float = 1.0
    # Parts of the tokens that have logits one after the other; 0 for `few_chunks`
    loss_chunks: int = 1
    # Earlier tokens, from previous slices, to which the tokens attend; not with a window
    context: int = 0
    cp: int = 1  # ranks that divide every sequence; the tokens of a layer are those of one rank
    # Consecutive ones of them that divide attention's heads, each with the tokens of all
    head_ranks: int = 1
    # Whether context-parallel ranks gather all keys and values before attention
    gathers_context: bool = False
    # Whether gated activations and backward passes of norms are one kernel each, and attention
    # reads queries, keys and values where their product wrote them
    fused_pointwise: bool = False
    rotates_complex: bool = False  # whether rotation is a product of complex numbers
    separate_norms: bool = False  # whether norms are separate kernels in single precision
    # Whether attention copies queries, keys and values to separate tensors, then keys and values
    # into one tensor for the rotary kernel, and finally its result
    packs_heads: bool = False
    # Whether an activation of experts is kept before and after its product with the router's weight
    weighs_activations: bool = False
    # Whether a kernel computes a product of all experts and the activation, and casts its result
    fused_experts: bool = False
    # Whether a token is sent once to each rank that has experts for it, straight from the stream
    sends_tokens_once: bool = False
    fused_router: bool = True  # whether a router's scores, choice and loss are one kernel each


UNFUSED: Final = Kernels()
"""Separate attention kernels with dropout, as in the programs of the published measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Width(Kernels):
    """Sizes of one transformer block, and its kernels."""

    tokens: int  # tokens per sample
    hidden: int  # width of the residual stream
    heads: int
    key_value_heads: int
    feed_forward: int
    shards_heads: bool = True  # whether tensor parallelism divides the attention core
    window: int | None = None  # tokens that a token attends to; None for all
    # Whether activation and softmax are one kernel each; else each of their arithmetic steps reads,
    # writes and saves a separate tensor
    fused: bool = True
    # Whether a token attends only to earlier tokens; fused attention skips the other pairs
    causal: bool = True
    own_head_size: int | None = None  # width of one head; None for ``hidden / heads``
    # Tokens of the other sequence in cross attention
    source_tokens: int | None = None
    # Whether a learned bias per head and distance is added to the scores (T5)
    position_bias: bool = False
    # Sliding window: earlier tokens that a token attends to; fused attention skips the others
    sliding: int | None = None
    own_value_size: int | None = None  # width of a head's values; None for that of its keys

    @property
    def attended(self) -> int:
        """Number of tokens that one token attends to."""
        if self.source_tokens is not None:
            return self.source_tokens
        return self.tokens + self.context if self.window is None else self.window

    @property
    def attending(self) -> int:
        """Number of tokens that attend to the same tokens."""
        return self.tokens if self.window is None else self.window

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.own_head_size or self.hidden // self.heads

    @property
    def attention_size(self) -> int:
        """Width of all queries."""
        return self.head_size * self.heads

    @property
    def attention_stream(self) -> int:
        """Elements of all queries, per sample."""
        return self.tokens * self.attention_size

    @property
    def key_values(self) -> int:
        """Elements of all keys per sample, or of all values of the same width."""
        return (self.source_tokens or self.tokens) * self.key_value_size

    @property
    def values(self) -> int:
        """Elements of all values, per sample."""
        return self.key_values // self.head_size * self.value_size

    @property
    def value_size(self) -> int:
        """Width of the values of one head."""
        return self.own_value_size or self.head_size

    @property
    def result_size(self) -> int:
        """Width of the attention result of all heads together."""
        return self.value_size * self.heads

    @property
    def pairs(self) -> float:
        """Pairs of tokens that fused attention computes, per sample and head."""
        whole = self.tokens * self.cp
        if self.sliding is not None and self.sliding < whole:
            return self.sliding * (whole - self.sliding / 2) / self.cp
        return self.tokens * (self.attended - (self.attending / 2 if self.causal else 0))

    @property
    def key_value_size(self) -> int:
        """Width of all keys, or of all values."""
        return self.head_size * self.key_value_heads

    @property
    def stream(self) -> int:
        """Elements of the residual stream, per sample."""
        return self.tokens * self.hidden

    @property
    def ring_ranks(self) -> int:
        """Ranks of a sequence that have the same heads, and exchange keys and values."""
        return self.cp // self.head_ranks

    @property
    def context_read(self) -> float:
        """Earlier tokens of other ranks or slices whose keys and values attention reads."""
        if self.cp == 1:
            return self.context
        return self.tokens * (self.ring_ranks - 1) / 2

    @property
    def block_pairs(self) -> int:
        """The most pairs of tokens that one multiprocessor computes, for a block of queries."""
        longest = self.attended + self.tokens * (self.head_ranks - 1) // 2
        reach = longest if self.sliding is None else min(self.sliding, longest)
        return min(ATTENTION_ROWS, self.attending) * reach

    @property
    def scores(self) -> int:
        """Elements of the attention matrix of all heads, per sample."""
        return self.heads * self.tokens * self.attended


def gpt_block(
    width: Width, *, name: str, dropout: bool = True, feed_forward: tuple[Operator, ...] = ()
) -> Layer:
    """Build a pre-norm GPT block: attention and ``feed_forward``, by default with GELU."""
    operators = (
        norm("norm-1", width, bias=True),
        *attention(width, bias=True, dropout=dropout),
        residual("residual-1", width, dropout=dropout),
        norm("norm-2", width, bias=True),
        *(feed_forward or gelu_feed_forward(width)),
        residual("residual-2", width, dropout=dropout),
    )
    return Layer(name=name, kind="block", operators=operators, output_elements=width.stream)


def gelu_feed_forward(width: Width) -> tuple[Operator, ...]:
    """Return a feed-forward part: two products with biases, and GELU between them."""
    return (
        Gemm(
            name="feed-forward-in",
            rows=width.tokens,
            columns=width.feed_forward,
            inner=width.hidden,
            shard="columns",
            bias=width.feed_forward,
            saved_elements=width.stream,
            all_reduce="backward",
        ),
        gelu(width.tokens * width.feed_forward, fused=width.fused),
        feed_forward_out(width, bias=width.hidden),
    )


def llama_block(
    width: Width,
    *,
    name: str,
    attended: tuple[Operator, ...] = (),
    feed_forward: tuple[Operator, ...] = (),
    post_norms: bool = False,
) -> Layer:
    """Build a pre-norm block with RMS norm, rotary embedding and a gated feed-forward part.

    By default its attention is `rotary_attention`; ``post_norms`` also norms the results of both
    parts.
    """
    first, second = (
        ((norm(f"post-norm-{number}", width, bias=False),) if post_norms else ())
        for number in (1, 2)
    )
    operators = (
        norm("norm-1", width, bias=False),
        *(attended or rotary_attention(width)),
        *first,
        residual("residual-1", width, dropout=False),
        norm("norm-2", width, bias=False),
        *(feed_forward or gated_feed_forward(width)),
        *second,
        residual("residual-2", width, dropout=False),
    )
    return Layer(name=name, kind="block", operators=operators, output_elements=width.stream)


def rotary_attention(width: Width, *, scaled: bool = False) -> tuple[Operator, ...]:
    """Return self-attention with rotary positions and without biases."""
    rotated = width.tokens * width.head_size * (width.heads + width.key_value_heads)
    return (*attention(width, bias=False, dropout=False), rotary(width, rotated, scaled=scaled))


def rotary(width: Width, rotated: int, *, scaled: bool = False) -> Elementwise:
    """Return the rotary embedding of ``rotated`` elements of queries and keys.

    Kernels that rotate in one pass do not scale; separate ones are `SCALED_ROTATION`, or
    `COMPLEX_ROTATION`, in whose factors the scale is.
    """
    forward, backward, kernels = SCALED_ROTATION if scaled else (2, 2, 1)
    if width.rotates_complex:
        forward, backward, kernels, scaled = *COMPLEX_ROTATION, False
    addressed = ROTATION_ADDRESSED * rotated if scaled else 0.0
    return Elementwise(
        name="rotary",
        forward_elements=forward * rotated,
        backward_elements=backward * rotated,
        addressed=(addressed, addressed),
        num_kernels=2 * kernels,
        sharded=width.shards_heads,
    )


def gated_feed_forward(width: Width) -> tuple[Operator, ...]:
    """Return a gated feed-forward part: the halves of the first product are multiplied."""
    return (
        Gemm(
            name="feed-forward-in",
            rows=width.tokens,
            columns=2 * width.feed_forward,
            parts=(width.feed_forward, width.feed_forward),
            inner=width.hidden,
            shard="columns",
            saved_elements=width.stream,
            all_reduce="backward",
        ),
        gated("gated-silu", width.tokens * width.feed_forward, fused=width.fused_pointwise),
        feed_forward_out(width, bias=0),
    )


def t5_encoder_block(width: Width, *, dropout: bool, is_gated: bool) -> Layer:
    """Build T5's pre-norm encoder block: attention with position biases, products without bias."""
    operators = (
        *_t5_attention(width, dropout=dropout),
        *_t5_feed_forward(width, dropout=dropout, is_gated=is_gated),
    )
    return Layer(
        name="encoder-block", kind="block", operators=operators, output_elements=width.stream
    )


def t5_decoder_block(width: Width, *, source: Width, dropout: bool, is_gated: bool) -> Layer:
    """Build T5's decoder block: self-attention, cross attention to the encoder, feed-forward."""
    across = replace(width, source_tokens=source.tokens, causal=False, position_bias=False)
    operators = (
        *_t5_attention(width, dropout=dropout),
        norm("norm-cross", width, bias=False),
        *(replace(op, name=f"cross-{op.name}") for op in cross_attention(across, dropout=dropout)),
        residual("residual-cross", width, dropout=dropout),
        *_t5_feed_forward(width, dropout=dropout, is_gated=is_gated),
    )
    return Layer(
        name="decoder-block", kind="block", operators=operators, output_elements=width.stream
    )


def _t5_attention(width: Width, *, dropout: bool) -> tuple[Operator, ...]:
    return (
        norm("norm-1", width, bias=False),
        *attention(width, bias=False, dropout=dropout),
        residual("residual-1", width, dropout=dropout),
    )


def _t5_feed_forward(width: Width, *, dropout: bool, is_gated: bool) -> tuple[Operator, ...]:
    """Return norm, feed-forward part with ReLU or (version 1.1) gated GELU, and residual."""
    inner = width.tokens * width.feed_forward
    relu = Elementwise(
        name="relu",
        forward_elements=2 * inner,
        backward_elements=3 * inner,
        sharded=True,
    )
    return (
        norm("norm-2", width, bias=False),
        Gemm(
            name="feed-forward-in",
            rows=width.tokens,
            columns=(2 if is_gated else 1) * width.feed_forward,
            inner=width.hidden,
            shard="columns",
            saved_elements=width.stream,
            all_reduce="backward",
        ),
        gated("gated-gelu", inner) if is_gated else relu,
        feed_forward_out(width, bias=0),
        residual("residual-2", width, dropout=dropout),
    )


def norm(name: str, width: Width, *, bias: bool) -> Elementwise:
    """Return a layer norm or RMS norm, which reads and writes the stream and saves its input."""
    forward, backward, kernels = 2, 3 if width.fused_pointwise else 5, 1
    if width.separate_norms and not bias:
        forward, backward, kernels = SEPARATE_NORM
    return Elementwise(
        name=name,
        forward_elements=forward * width.stream,
        backward_elements=backward * width.stream,
        num_kernels=kernels,
        replicated_parameters=width.hidden * (2 if bias else 1),
        saved_elements=width.stream,
    )


def gelu(inner: int, *, fused: bool) -> Elementwise:
    """Return GELU as one fused kernel or as five elementwise kernels."""
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


def gated(name: str, inner: int, *, fused: bool = False, is_weighed: bool = False) -> Elementwise:
    """Return the activation of one half of the inner width, times the other half.

    If fused, one kernel reads both halves (backward: and the gradient) and saves only them. Where
    the router's weight multiplies the result, another one reads them again for the gradient of that
    weight: a sum, which torch.compile does not join with a kernel of the width of both halves
    (Megatron-core 0.16, `weighted_swiglu_back`; torch 2.13, `cat` in _inductor/lowering.py).
    """
    if fused:
        return Elementwise(
            name=name,
            forward_elements=3 * inner,
            backward_elements=(8 if is_weighed else 5) * inner,
            sharded=True,
            saved_elements=2 * inner,
        )
    return Elementwise(
        name=name,
        forward_elements=5 * inner,
        backward_elements=8 * inner,
        num_kernels=2,
        sharded=True,
        saved_elements=3 * inner,
    )


def clamps(inner: int) -> Elementwise:
    """Return the clamps of what a gated activation of ``inner`` elements reads, which it keeps."""
    forward, backward, kernels = CLAMPS
    return Elementwise(
        name="clamps",
        forward_elements=forward * inner,
        backward_elements=backward * inner,
        addressed=(CLAMPS_ADDRESSED[0] * inner, CLAMPS_ADDRESSED[1] * inner),
        num_kernels=kernels,
        sharded=True,
        saved_elements=2 * inner,
    )


def residual(name: str, width: Width, *, dropout: bool) -> Elementwise:
    """Return bias, dropout and the addition to the residual stream."""
    return Elementwise(
        name=name,
        forward_elements=3.5 * width.stream if dropout else 3 * width.stream,
        backward_elements=6.5 * width.stream if dropout else 3 * width.stream,
        saved_mask_bytes=width.stream if dropout else 0,
    )


def feed_forward_out(width: Width, *, bias: int) -> Gemm:
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


def attention(width: Width, *, bias: bool, dropout: bool) -> tuple[Operator, ...]:
    """Return self-attention from the projections to the output projection.

    Fused attention has no dropout.
    """
    columns = width.attention_size + 2 * width.key_value_size
    return (
        Gemm(
            name="qkv",
            rows=width.tokens,
            columns=columns,
            parts=(width.attention_size, width.key_value_size, width.key_value_size),
            inner=width.hidden,
            shard="columns",
            bias=columns if bias else 0,
            saved_elements=width.stream,
            all_reduce="backward",
        ),
        *after_projections(width, bias=bias, dropout=dropout),
    )


def cross_attention(width: Width, *, dropout: bool) -> tuple[Operator, ...]:
    """Return attention to another sequence of ``source_tokens``, as wide as this one; no biases.

    All layers share that sequence, so it is not counted in a layer's saved activations.
    """
    project = partial(Gemm, inner=width.hidden, shard="columns", all_reduce="backward")
    return (
        project(
            name="query",
            rows=width.tokens,
            columns=width.attention_size,
            saved_elements=width.stream,
        ),
        project(name="key-value", rows=width.attended, columns=2 * width.key_value_size),
        *after_projections(width, bias=False, dropout=dropout),
    )


def after_projections(width: Width, *, bias: bool, dropout: bool) -> tuple[Operator, ...]:
    """Return the attention core, the layout of heads, and the output projection."""
    return (
        *((_exchanged_heads(width),) if width.head_ranks > 1 else ()),
        *(
            (_fused_attention(width),)
            if width.fused_attention
            else _attention_core(width, dropout=dropout)
        ),
        _heads(width),
        Gemm(
            name="projection",
            rows=width.tokens,
            columns=width.hidden,
            inner=width.result_size,
            shard="inner",
            bias=width.hidden if bias else 0,
            saved_elements=width.tokens * width.result_size,
            saved_sharded=True,
            all_reduce="forward",
        ),
    )


def _heads(width: Width) -> Elementwise:
    """Return the copies that bring queries, keys, values and the result into the heads' layout.

    With ``packs_heads``, the forward pass separates all three, copies keys and values into one
    tensor, and copies the result. The backward pass first joins the gradients of the parts, at both
    places.
    """
    result = width.tokens * width.result_size
    inputs = width.attention_stream + width.key_values + width.values
    pair = width.key_values + width.values
    forward, backward, kernels = 2 * result, 11 * result, 2
    if width.fused_pointwise:
        forward, backward, kernels = 0, 2 * inputs, 1
    elif width.packs_heads:
        forward, kernels = 2 * (inputs + 2 * pair + result), 4
        backward = 2 * (2 * inputs + 2 * pair + result)
    return Elementwise(
        name="heads",
        forward_elements=forward,
        backward_elements=backward,
        num_kernels=kernels,
        sharded=width.shards_heads,
    )


def _fused_attention(width: Width) -> Elementwise:
    """Return fused attention, one kernel that reads and saves queries, keys and values.

    Each multiprocessor takes a block of queries, reads keys and values along its products, and
    writes the result. In the backward pass it takes a block of keys and values, and adds to the
    gradients of the queries in single precision; kernels before and after it multiply the result by
    its gradient, write zeros for these sums, and round them (Dao, arXiv:2307.08691, algorithm 2).
    """
    stream, key_values = width.attention_stream, width.key_values + width.values
    result = width.tokens * width.result_size
    streams = stream + result
    read = key_values + 2 * width.context_read * width.key_value_size
    outer = 2 * result + SUM_TRAFFIC * stream + 2 * read
    cast = (CAST_TRAFFIC * (stream + key_values), CAST_TRAFFIC * result)
    if not width.fp8_attention:
        cast = 0, 0
    steps = 1 if width.gathers_context else width.ring_ranks
    buffers = 2 * width.cp if width.gathers_context else RING_BUFFERS
    has_ring = width.ring_ranks > 1
    return Elementwise(
        name="attention",
        forward_elements=streams + read + ADDED_PER_STEP * (steps - 1) * result + cast[0],
        backward_elements=outer + streams + ADDED_PER_STEP * (steps - 1) * stream + cast[1],
        flops=2.0 * width.pairs * (width.attention_size + width.result_size),
        block_flops=2.0 * width.block_pairs * (width.head_size + width.value_size),
        outer_elements=(streams + cast[0], outer + cast[1]),
        rate_fraction=width.attention_rate,
        head_size=width.head_size,
        native=width.native_attention,
        compiled=width.compiled_attention,
        in_fp8=width.fp8_attention,
        num_kernels=steps + (CAST_KERNELS if width.fp8_attention else 0),
        sharded=width.shards_heads,
        context_elements=key_values if has_ring else 0.0,
        buffer_elements=buffers * key_values if has_ring else 0.0,
        saved_elements=stream + key_values,
        saved_mask_bytes=BYTES_PER_LOG_SUM * width.heads * width.tokens,
        core="input",
    )


def _exchanged_heads(width: Width) -> Elementwise:
    """Return the all-to-alls that give each rank all tokens of some heads, with their copies.

    Queries, keys and values go there and the result comes back; gradients go the other way. What
    arrived and the result are kept for attention's backward pass, beside the result that went back,
    which the projection keeps (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509).
    """
    result = float(width.tokens * width.result_size)
    moved = (width.attention_stream, width.key_values, width.values, result)
    copied = REORDER_TRAFFIC * sum(moved)
    return Elementwise(
        name="exchanged-heads",
        forward_elements=copied,
        backward_elements=copied,
        num_kernels=REORDER_KERNELS,
        sharded=width.shards_heads,
        head_exchanges=moved,
        buffer_elements=sum(moved[:3]),
        saved_elements=result,
        core="inner",
    )


def _position_bias(width: Width) -> Elementwise:
    return Elementwise(
        name="position-bias",
        forward_elements=2 * width.scores,
        backward_elements=width.scores,
        sharded=width.shards_heads,
        core="inner",
    )


def _attention_core(width: Width, *, dropout: bool) -> tuple[Operator, ...]:
    """Return scores, softmax, dropout and weighted values, for each window."""
    sharded, scores = width.shards_heads, width.scores
    shard: Shard = "batch" if sharded else "none"
    batch = width.heads * width.tokens // width.attending
    product = partial(
        Gemm, batch=batch, shard=shard, has_weight=False, saved_sharded=sharded, core="input"
    )
    drop = Elementwise(
        name="attention-dropout",
        forward_elements=2.5 * scores,
        backward_elements=2.5 * scores,
        sharded=sharded,
        saved_elements=scores,
        saved_mask_bytes=scores,
        core="inner",
    )
    return (
        product(
            name="scores",
            rows=width.attending,
            columns=width.attended,
            inner=width.head_size,
            saved_elements=width.attention_stream + width.key_values,
        ),
        *((_position_bias(width),) if width.position_bias else ()),
        Elementwise(
            name="softmax",
            forward_elements=(2 if width.fused else 6) * scores,
            backward_elements=(3 if width.fused else 6) * scores,
            num_kernels=1 if width.fused else 4,
            sharded=sharded,
            saved_elements=scores,
            core="inner",
        ),
        *((drop,) if dropout else ()),
        product(
            name="context",
            rows=width.attending,
            columns=width.value_size,
            inner=width.attended,
            saved_elements=width.values,
        ),
    )
