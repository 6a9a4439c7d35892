"""Sizes that follow from a model's figures, without torch: layers, blocks, levels of pictures.

TransGAN's generator has levels of transformer blocks with up-sampling between them. Every level
doubles the side of the picture. The last three up-samplings are pixel shuffles, which divide the
width by 4; earlier ones keep it.

References:
    Jiang et al., TransGAN, arXiv:2102.07074.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, Literal

from amp_ray.models.model import ModelShape

LayerKind = Literal["embedding", "input", "block", "norm", "head"]

FEED_FORWARD_FACTOR: Final = 4
"""Width of a TransGAN feed-forward layer, as a multiple of the hidden size."""

FULL_ATTENTION_WINDOWS: Final = 4
"""Pictures narrower than this many windows use full attention (below 64 in the paper's model)."""

NUM_SHRINKING_LEVELS: Final = 3
SHRINK_FACTOR: Final = 4
RGB_CHANNELS: Final = 3

WEIGHT_STD: Final = 0.02
"""Standard deviation of initial weights of language models, as in GPT-2."""


def read_shape(model: Mapping[str, Any]) -> ModelShape:
    """Read the model of a job file, which has all figures of its family."""
    depth = tuple(model.get("depth", ()))
    shape = ModelShape(**{"num_layers": sum(depth), **model, "depth": depth})
    if shape.family == "llama" and head_width(shape) % 2:
        raise ValueError(
            f"rotary positions need an even head size, found {head_width(shape)}; change "
            "head_size, or hidden_size or num_heads"
        )
    return shape


def is_image(shape: ModelShape) -> bool:
    """Return whether the model makes pictures (TransGAN); all others are language models."""
    return shape.family == "transgan"


def head_width(shape: ModelShape) -> int:
    """Return the width of one attention head."""
    return shape.head_size or shape.hidden_size // shape.num_heads


def weight_std(shape: ModelShape) -> float:
    """Return the standard deviation of a block's initial weights.

    Pictures use Glorot and Bengio's rule for a square weight, as TransGAN does.
    """
    return float(shape.hidden_size**-0.5) if is_image(shape) else WEIGHT_STD


def residual_std(shape: ModelShape) -> float:
    """Return the standard deviation of initial weights that write to the residual stream."""
    return float(weight_std(shape) / (2 * shape.num_layers) ** 0.5)


def layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Return the kinds of the trained layers; ``bounds`` index this list.

    Example:
        >>> layer_kinds(read_shape({"family": "transgan", "depth": [1, 1]}))
        ('input', 'block', 'block', 'head')
    """
    block: tuple[LayerKind, ...] = ("block",)
    if is_image(shape):
        return ("input", *block * shape.num_layers, "head")
    return ("embedding", *block * shape.num_layers, "norm", "head")


def input_extent(shape: ModelShape, layer: int) -> tuple[int, ...]:
    """Return the sizes of one sample of a layer's input.

    Example:
        >>> llama = {"family": "llama", "num_layers": 2, "hidden_size": 8, "num_heads": 2}
        >>> input_extent(read_shape({**llama, "sequence_length": 4}), 1)
        (4, 8)
    """
    if not is_image(shape):
        tokens = (shape.sequence_length,)
        return tokens if layer == 0 else (*tokens, shape.hidden_size)
    if layer == 0:
        return (shape.latent_size,)
    # Output of the previous block; the first block and the input belong to the lowest level.
    before = layer - 2
    level = level_of_block(shape, before) if before >= 0 else 0
    return level_side(shape, level) ** 2, level_width(shape, level)


def level_width(shape: ModelShape, level: int) -> int:
    """Return the hidden size of a level."""
    first = max(0, len(shape.depth) - 1 - NUM_SHRINKING_LEVELS)
    return int(shape.hidden_size // SHRINK_FACTOR ** max(0, level - first))


def level_side(shape: ModelShape, level: int) -> int:
    """Return the side of a level's picture in tokens."""
    return int(shape.bottom_width * 2**level)


def level_window(shape: ModelShape, level: int) -> int:
    """Return the side of a level's attention windows; the picture's side if it is small."""
    side = level_side(shape, level)
    return shape.window_size if side >= FULL_ATTENTION_WINDOWS * shape.window_size else side


def level_of_block(shape: ModelShape, block: int) -> int:
    """Return the level of a block, both counted from 0."""
    return next(level for level, end in enumerate(accumulate(shape.depth)) if block < end)


def level_shape(shape: ModelShape, level: int) -> ModelShape:
    """Return the shape of the blocks of a level."""
    width = level_width(shape, level)
    return replace(
        shape,
        hidden_size=width,
        num_key_value_heads=shape.num_heads,
        feed_forward_size=FEED_FORWARD_FACTOR * width,
    )
