"""A model as a plain list of blocks, of which only totals are known."""

from typing import Final

from amp_ray.models.model import BlockFigures, Layer, ModelShape
from amp_ray.models.operator import Elementwise, Gemm, Operator

PRODUCT_SIDE: Final = 1024
"""A block's operations are timed as one product with a square matrix of this side: large enough
for full tiles of every device, as usual layers are."""


def block_list_layers(shape: ModelShape) -> tuple[Layer, ...]:
    """Build a layer per block."""
    return tuple(layer for block in shape.blocks for layer in (_layer(block),) * block.repeat)


def _layer(block: BlockFigures) -> Layer:
    """Return one block: its operations, and the traffic of what it keeps and hands on.

    Tensor-parallel ranks of a sharded block add its result in the forward pass and the gradient of
    its input, taken to be as large, in the backward pass.
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
    """Return a product of as many operations; its matrix is none of the block's parameters."""
    return Gemm(
        name="product",
        rows=max(1, round(block.forward_flops / (2 * PRODUCT_SIDE**2))),
        columns=PRODUCT_SIDE,
        inner=PRODUCT_SIDE,
        shard="rows" if block.sharded else "none",
        has_weight=False,
    )
