"""TransGAN's generator as a list of layers, with up-sampling between levels."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.models.model import ModelShape
from amp_ray.training.grid import shard_range
from amp_ray.training.parallel import LayerSpec, LayerWeights, RowLinear, TensorParallel
from amp_ray.training.shapes import (
    RGB_CHANNELS,
    WEIGHT_STD,
    level_of_block,
    level_shape,
    level_side,
    level_width,
    level_window,
)
from amp_ray.training.transformer import Attention, Block


class Input(nn.Module):
    """One linear layer from the latent vector to the tokens of the lowest picture."""

    def __init__(self, shape: ModelShape, parallel: TensorParallel, weights: LayerWeights) -> None:
        """Shard the weight over the latent features; positions are replicated."""
        super().__init__()
        self.tokens = level_side(shape, 0) ** 2
        self.first, self.end = shard_range(shape.latent_size, parallel.rank, parallel.size)
        outputs = self.tokens * shape.hidden_size
        std = shape.latent_size**-0.5
        self.linear = RowLinear(
            parallel, weights, "input", (outputs, shape.latent_size), std
        ).with_bias()
        extent = (self.tokens, shape.hidden_size)
        self.positions = nn.Parameter(weights.whole("positions", extent, WEIGHT_STD))

    def forward(self, latent: Tensor) -> Tensor:
        """Return ``(batch, tokens, hidden)`` for latent vectors ``(batch, latent_size)``."""
        part = latent[:, self.first : self.end].to(self.linear.weight.dtype)
        return self.linear(part).view(latent.shape[0], self.tokens, -1) + self.positions


def up_sample(tokens: Tensor, shape: ModelShape, level: int) -> Tensor:
    """Double the side of a picture by pixel shuffle or bilinear interpolation.

    Tokens of the level below, shape ``(batch, side**2, width)``, become ``(batch, (2 * side)**2,
    width)``; a pixel shuffle divides the width by 4.
    """
    side = level_side(shape, level - 1)
    picture = tokens.transpose(1, 2).unflatten(2, (side, side))
    if level_width(shape, level) < level_width(shape, level - 1):
        picture = functional.pixel_shuffle(picture, 2)
    else:
        picture = functional.interpolate(
            picture, scale_factor=2.0, mode="bilinear", align_corners=False
        )
    return picture.flatten(2).transpose(1, 2).contiguous()


def to_windows(tokens: Tensor, side: int, window: int) -> Tensor:
    """Cut ``(batch, side**2, width)`` into windows ``(batch * count, window**2, width)``."""
    batch, _, width = tokens.shape
    count = side // window
    cut = tokens.view(batch, count, window, count, window, width).transpose(2, 3)
    return cut.reshape(batch * count**2, window**2, width)


def from_windows(tokens: Tensor, side: int, window: int) -> Tensor:
    """Join windows into pictures; the inverse of ``to_windows``."""
    count, width = side // window, tokens.shape[-1]
    cut = tokens.view(-1, count, count, window, window, width).transpose(2, 3)
    return cut.reshape(-1, side**2, width)


class ImageBlock(nn.Module):
    """A transformer block; the first block of a level also up-samples and adds positions."""

    def __init__(
        self, shape: ModelShape, parallel: TensorParallel, weights: LayerWeights, block: int
    ) -> None:
        """Build block number ``block``, and positions if it is the first of its level."""
        super().__init__()
        self.shape, self.level = shape, level_of_block(shape, block)
        self.below = level_of_block(shape, block - 1) if block else 0
        self.side, self.window = level_side(shape, self.level), level_window(shape, self.level)
        sizes = level_shape(shape, self.level)
        self.block = Block(sizes, parallel, weights)
        self.positions: nn.Parameter | None = None
        if self.below < self.level:
            extent = (self.side**2, sizes.hidden_size)
            self.positions = nn.Parameter(weights.whole("positions", extent, WEIGHT_STD))

    @property
    def attention_layer(self) -> Attention:
        """The attention module, whose core selective recompute runs again."""
        return self.block.attention

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens of this block's level, ``(batch, side**2, width)``."""
        for level in range(self.below + 1, self.level + 1):
            tokens = up_sample(tokens, self.shape, level)
        if self.positions is not None:
            tokens = tokens + self.positions
        if self.window == self.side:
            return self.block(tokens)
        # The feed-forward part treats tokens separately, so the whole block may run in windows.
        return from_windows(
            self.block(to_windows(tokens, self.side, self.window)), self.side, self.window
        )


class ImageHead(nn.Module):
    """The linear layer from the last level's tokens to colours."""

    def __init__(self, shape: ModelShape, weights: LayerWeights) -> None:
        """Create the layer, replicated on every rank as it is small."""
        super().__init__()
        extent = (RGB_CHANNELS, level_width(shape, len(shape.depth) - 1))
        self.weight = nn.Parameter(weights.whole("rgb", extent, extent[1] ** -0.5))
        self.bias = nn.Parameter(torch.zeros(RGB_CHANNELS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, side**2, 3)``."""
        return functional.linear(tokens, self.weight, self.bias)


def picture_loss(pictures: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error against synthetic pictures, in single precision.

    It replaces the discriminator, which is not trained here, nor in the published trials.
    """
    return functional.mse_loss(pictures.float(), targets.float())


def image_layers(shape: ModelShape, parallel: TensorParallel, seed: int) -> list[LayerSpec]:
    """Return the specs of input, blocks and head; each stage builds its layers from them."""
    weights = partial(LayerWeights, seed=seed, tp_rank=parallel.rank, tp=parallel.size)
    num_blocks = sum(shape.depth)
    blocks = (
        LayerSpec(module=ImageBlock, arguments=(shape, parallel, weights(layer=index + 1), index))
        for index in range(num_blocks)
    )
    return [
        LayerSpec(module=Input, arguments=(shape, parallel, weights(layer=0))),
        *blocks,
        LayerSpec(module=ImageHead, arguments=(shape, weights(layer=num_blocks + 1))),
    ]
