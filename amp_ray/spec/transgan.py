"""The TransGAN generator: transformer blocks of several widths with up-sampling between them.

Each level doubles the side of the picture; the last three up-samplings are pixel shuffles,
which divide the width by four (Jiang et al., TransGAN, arXiv:2102.07074).
"""

from dataclasses import replace
from typing import Final

from amp_ray.spec.blocks import UNFUSED, Kernels, Width, gpt_block
from amp_ray.spec.model import Layer, ModelShape
from amp_ray.spec.operator import Elementwise, Gemm
from amp_ray.spec.traits import LayerList

SHRINKING_LEVELS: Final = 3
SHRINK_FACTOR: Final = 4
RGB_CHANNELS: Final = 3

FULL_ATTENTION_WINDOWS: Final = 4
"""A picture narrower than this many windows attends as a whole (64 in the paper's model)."""

PUBLISHED_DEPTH: Final = (12, 0, 0, 0, 0, 12)
PUBLISHED_BETWEEN: Final = (2, 26, 3)
"""No-op entries of the published list after the first layer, between the halves, at the end."""


def transgan_layers(
    shape: ModelShape, layer_list: LayerList, kernels: Kernels = UNFUSED
) -> tuple[Layer, ...]:
    """Build the generator's layers.

    The list ``amp-2022`` has the 56 entries of the published artifact, which fused nothing and
    whose tensor parallelism does not divide attention heads.

    Raises:
        ValueError: If the published list is asked for with another depth, the last level has no
            blocks, or a level's width cannot hold its heads or its picture its windows.
    """
    if not any(shape.depth[-1:]):
        message = f"depth {list(shape.depth)} must end with a level that has blocks"
        raise ValueError(message)
    published = layer_list == "amp-2022"
    if published and shape.depth != PUBLISHED_DEPTH:
        message = (
            f"layer list 'amp-2022' of transgan is known for depth {list(PUBLISHED_DEPTH)}, "
            f"found {list(shape.depth)}"
        )
        raise ValueError(message)
    fused = kernels.fused_attention and not published
    levels = [
        (
            gpt_block(
                replace(_width(shape, level, published=published), fused_attention=fused),
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
    passing_low, passing_high = _passing(low[0]), _passing(high[0])
    return (
        first,
        *(passing_low,) * ahead,
        *low,
        *(passing_low,) * (between - 2),
        *(passing_high,) * 2,
        *high,
        *(passing_high,) * behind,
    )


def _width(shape: ModelShape, level: int, *, published: bool) -> Width:
    """Return the sizes of one level's blocks."""
    first_shrinking = max(0, len(shape.depth) - 1 - SHRINKING_LEVELS)
    hidden = shape.hidden_size // SHRINK_FACTOR ** max(0, level - first_shrinking)
    if hidden % shape.num_heads:
        message = (
            f"width {hidden} of level {level} is not a multiple of num_heads {shape.num_heads}"
        )
        raise ValueError(message)
    side = shape.bottom_width * 2**level
    window = shape.window_size if side >= FULL_ATTENTION_WINDOWS * shape.window_size else side
    if shape.depth[level] and side % window:
        message = f"side {side} of level {level} is not a multiple of window_size {window}"
        raise ValueError(message)
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
    """The linear layer from the random vector to the first feature map."""
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
    """The map from the last level's width to colours, and a loss over the picture."""
    last = _width(shape, len(shape.depth) - 1, published=False)
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


def _passing(block: Layer) -> Layer:
    """A published entry that only changes the memory layout or does nothing."""
    return Layer(name="noop", kind="noop", operators=(), output_elements=block.output_elements)
