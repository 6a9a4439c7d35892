"""Matrix products of the blocks' linear layers and experts in 8-bit floats.

Both operands are scaled by their largest value; the format is E4M3 in the forward pass and E5M2
for gradients. Sums and results have more bits. Stored weights, activations and gradients keep their
data types.

References:
    Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.training.experts import MixtureOfExperts
from amp_ray.training.job import UnfitError
from amp_ray.training.parallel import SplitLinear

FP8_MULTIPLE: Final = 16
"""Required divisor of all dimensions of a product; rows are padded."""

_FORWARD: Final = torch.float8_e4m3fn
_BACKWARD: Final = torch.float8_e5m2

_TINY: Final = 1e-12
"""Lower limit of a tensor's largest value, for tensors of zeros."""


def fp8_linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear``, with its one forward and two backward products in 8-bit floats."""
    rows = value.flatten(0, -2)
    if not rows.shape[0]:  # an expert without tokens
        return functional.linear(value, weight, bias)
    missing = -rows.shape[0] % FP8_MULTIPLE
    if missing:  # padding copies
        rows = functional.pad(rows, (0, 0, 0, missing))
    product: Tensor = _Linear.apply(rows, weight)
    product = product[: rows.shape[0] - missing].unflatten(0, value.shape[:-1])
    return product if bias is None else product + bias


class _Linear(torch.autograd.Function):
    """``rows @ weight.T``; the number of rows must be a multiple that the kernels support."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        """Save the rows in 8 bits, and the weight for the backward pass."""
        kept, scale = _cast(rows, _FORWARD)
        ctx.save_for_backward(kept, scale, weight)
        return _product((kept, scale), _cast(weight, _FORWARD), rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        kept, scale, weight = ctx.saved_tensors
        gradient, dtype = _cast(gradients[0], _BACKWARD), gradients[0].dtype
        of_rows = _product(gradient, _turned(_cast(weight, _FORWARD)), dtype)
        return of_rows, _product(_turned(gradient), _turned((kept, scale)), dtype)


def use_fp8(modules: nn.Module) -> None:
    """Make linear layers and experts of ``modules`` compute in 8-bit floats.

    Raises:
        UnfitError: If the kernels do not support the width of a weight.
    """
    for module in modules.modules():
        if isinstance(module, SplitLinear | MixtureOfExperts):
            module.product = fp8_linear
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1 and any(size % FP8_MULTIPLE for size in weight.shape[-2:]):
                    raise UnfitError(
                        f"precision fp8 needs widths that are multiples of {FP8_MULTIPLE} on every "
                        f"rank, found a weight of {tuple(weight.shape)}; choose another tp, or bf16"
                    )


def _cast(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in 8 bits, and its scale."""
    largest = torch.linalg.vector_norm(value, ord=float("inf"), dtype=torch.float32)
    scale = largest.clamp(min=_TINY) / torch.finfo(dtype).max
    return (value / scale).to(dtype), scale


def _turned(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0].t().contiguous(), operand[1]


def _product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    per_tensor = functional.ScalingType.TensorWise
    return functional.scaled_mm(
        left[0],
        right[0].t(),
        left[1],
        per_tensor,
        right[1],
        per_tensor,
        output_dtype=dtype,
    )
