"""Layers at the ends of a language model: embedding, final norm, output embedding, loss."""

from amp_ray.spec.blocks import norm
from amp_ray.spec.model import Layer, ModelShape
from amp_ray.spec.operator import Elementwise, Gemm, Operator
from amp_ray.spec.width import Width


def token_embedding(width: Width, shape: ModelShape, *, positions: int, dropout: bool) -> Layer:
    """Build the input embedding: a vocabulary-parallel table and learned positions."""
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
                replicated_parameters=positions * width.hidden,
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
    """Return the GEMM of the output embedding; its weight is tied or its own."""
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
    """Return the loss over the vocabulary; runtimes compute it in single precision."""
    return Elementwise(
        name="cross-entropy",
        forward_elements=0,
        backward_elements=0,
        num_kernels=8,
        sharded=True,
        logits=width.tokens * vocab_size,
        is_layer=False,
    )


def to_single_precision(width: Width, vocab_size: int) -> Elementwise:
    """Return the cast of logits to single precision: reads two bytes, writes four."""
    logits = width.tokens * vocab_size
    return Elementwise(
        name="cast", forward_elements=3 * logits, backward_elements=3 * logits, sharded=True
    )
