"""Wide residual networks: a stem, bottlenecks in four groups, and a classifier.

Groups of a ResNet: He et al., arXiv:1512.03385, table 1; wider inner convolutions: Zagoruyko and
Komodakis, arXiv:1605.07146. The stride is in the 3 x 3 convolution, as torchvision has it.
A convolution is counted as the matrix product of its unrolled input (im2col).
"""

from functools import partial
from typing import Final, Literal

from amp_ray.models.model import Layer, ModelShape
from amp_ray.models.operator import AllReduce, Elementwise, Gemm, Operator

GROUPS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottlenecks of every group, by the number of layers with weights."""

EXPANSION: Final = 4  # output channels of a bottleneck over those of its group

IMAGE_CHANNELS: Final = 3
STEM_KERNEL: Final = 7

_HALVINGS: Final = 5  # the stem halves a picture twice, and every group but the first once


def wide_resnet_layers(shape: ModelShape) -> tuple[Layer, ...]:
    """Build the layers; raise ``ValueError`` for an unknown depth or too small a picture."""
    if shape.num_layers not in GROUPS:
        depths = ", ".join(map(str, GROUPS))
        message = f"num_layers {shape.num_layers} is no wide_resnet of bottlenecks; known: {depths}"
        raise ValueError(message)
    if shape.image_size < 2**_HALVINGS:
        message = f"image_size {shape.image_size} is too small; expected at least {2**_HALVINGS}"
        raise ValueError(message)
    channels, side = shape.base_channels, _half(_half(shape.image_size))
    layers = [_stem(shape)]
    for group, num_blocks in enumerate(GROUPS[shape.num_layers]):
        inner = shape.base_channels * 2**group
        for block in range(num_blocks):
            stride = 2 if group and not block else 1
            layers.append(_bottleneck(shape, group, channels, side, stride))
            channels, side = EXPANSION * inner, _half(side) if stride > 1 else side
    return (*layers, _head(shape, channels, side))


def _half(side: int) -> int:
    """Return the side of a picture after a padded convolution or pooling of stride 2."""
    return (side - 1) // 2 + 1


def _convolution(
    name: str,
    side: int,
    channels: tuple[int, int],
    *,
    kernel: int = 1,
    read: int,
    shard: Literal["none", "columns", "inner"] = "none",
) -> Gemm:
    """Return a convolution; ``side`` is that of its result, ``read`` its input's elements."""
    reduces: dict[str, AllReduce] = {"none": "none", "columns": "backward", "inner": "forward"}
    return Gemm(
        name=name,
        rows=side**2,
        columns=channels[1],
        inner=kernel**2 * channels[0],
        shard=shard,
        saved_elements=read,
        saved_sharded=shard == "inner",
        all_reduce=reduces[shard],
    )


def _batch_norm(name: str, side: int, channels: int, *, sharded: bool = False) -> Elementwise:
    """Return a batch norm, which reads its input twice and keeps it."""
    elements = side**2 * channels
    return Elementwise(
        name=name,
        forward_elements=3 * elements,
        backward_elements=5 * elements,
        sharded=sharded,
        sharded_parameters=2 * channels if sharded else 0,
        replicated_parameters=0 if sharded else 2 * channels,
        saved_elements=elements,
    )


def _relu(name: str, side: int, channels: int, *, sharded: bool = False) -> Elementwise:
    elements = side**2 * channels
    return Elementwise(
        name=name,
        forward_elements=2 * elements,
        backward_elements=3 * elements,
        sharded=sharded,
    )


def _stem(shape: ModelShape) -> Layer:
    """Return a 7 x 7 convolution and a pooling; each halves the picture."""
    channels, side = shape.base_channels, _half(shape.image_size)
    before, pooled = side**2 * channels, _half(side) ** 2 * channels
    read = IMAGE_CHANNELS * shape.image_size**2
    operators = (
        _convolution("conv", side, (IMAGE_CHANNELS, channels), kernel=STEM_KERNEL, read=read),
        _batch_norm("norm", side, channels),
        _relu("relu", side, channels),
        Elementwise(
            name="max-pool",
            forward_elements=before + pooled,
            backward_elements=before + pooled,
            saved_elements=before,
        ),
    )
    return Layer(name="stem", kind="other", operators=operators, output_elements=pooled)


def _bottleneck(shape: ModelShape, group: int, channels: int, side: int, stride: int) -> Layer:
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, added to the input or to its projection.

    Tensor parallelism divides the inner channels between the first and the second convolution,
    which hold most weights; the rest is replicated.
    """
    planes = shape.base_channels * 2**group
    inner, out = planes * shape.width_factor, planes * EXPANSION
    after = _half(side) if stride > 1 else side
    read = side**2 * channels
    convolution = partial(_convolution, read=read)
    operators: tuple[Operator, ...] = (
        convolution("conv-1", side, (channels, inner), shard="columns"),
        _batch_norm("norm-1", side, inner, sharded=True),
        _relu("relu-1", side, inner, sharded=True),
        convolution("conv-2", after, (inner, inner), kernel=3, read=side**2 * inner, shard="inner"),
        _batch_norm("norm-2", after, inner),
        _relu("relu-2", after, inner),
        convolution("conv-3", after, (inner, out), read=after**2 * inner),
        _batch_norm("norm-3", after, out),
    )
    if channels != out:
        projection = convolution("downsample", after, (channels, out), read=0)
        operators += (projection, _batch_norm("downsample-norm", after, out))
    elements = after**2 * out
    residual = Elementwise(
        name="residual", forward_elements=3 * elements, backward_elements=3 * elements
    )
    return Layer(
        name=f"block-{group + 1}",
        kind="block",
        operators=(*operators, residual, _relu("relu-3", after, out)),
        output_elements=elements,
    )


def _head(shape: ModelShape, channels: int, side: int) -> Layer:
    """Pooling over the picture, the classifier, and the loss."""
    elements = side**2 * channels
    operators = (
        Elementwise(name="average-pool", forward_elements=elements, backward_elements=elements),
        Gemm(
            name="classes",
            rows=1,
            columns=shape.num_classes,
            inner=channels,
            bias=shape.num_classes,
            saved_elements=channels,
        ),
        Elementwise(
            name="cross-entropy",
            forward_elements=0,
            backward_elements=0,
            num_kernels=8,
            logits=shape.num_classes,
            is_layer=False,
        ),
    )
    return Layer(name="head", kind="head", operators=operators, output_elements=shape.num_classes)
