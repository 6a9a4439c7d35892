"""Recompute by operator: the results of a block that are kept, and the operators that run again.

torchtitan's selective activation checkpoint with option ``op`` keeps the input of a block, the
results of every second matrix product, of attention and of reduce-scatters. It counts products in
the order in which they run. Products of experts, which are grouped, and those of routers are not
counted and always run again (torchtitan, distributed/activation_checkpoint.py). PyTorch stops to
recompute once the last saved tensor exists again (torch.utils.checkpoint, ``early_stop``), so that
no operator from the last one with saved inputs on runs twice.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from amp_ray.models.model import Layer
from amp_ray.models.operator import Elementwise, Gemm, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class PerOperator:
    """What a block keeps and runs again; elements and bytes are per sample."""

    again: tuple[Operator, ...]  # a joined product that is kept in part is as narrow as the rest
    divided_elements: float  # kept results that tensor parallelism divides
    # Kept results of whole rows: of products whose inner dimension or nothing is divided
    summed_elements: float
    plain_elements: float
    scattered_elements: float  # sums over tensor-parallel ranks that a reduce-scatter divides
    divided_bytes: float  # masks and sums of attention

    def kept_bytes(self, tp: int, width: int, *, sequence_parallel: bool) -> float:
        """Return what a rank keeps beside the block's input; elements have ``width`` bytes."""
        divided = self.divided_elements / tp
        scattered = self.scattered_elements / tp if sequence_parallel else 0.0
        plain = self.plain_elements / (tp if sequence_parallel else 1)
        elements = divided + self.summed_elements + plain + scattered
        return width * elements + self.divided_bytes / tp


@lru_cache(maxsize=256)
def per_operator(block: Layer) -> PerOperator:
    """Return what a block keeps and runs again if it recomputes by operator."""
    kept = _kept_columns(block)
    by_shard = dict.fromkeys(("columns", "inner", "none"), 0.0)
    for gemm, columns in kept.items():
        by_shard[gemm.shard] += gemm.rows * columns
    results = [gemm for gemm in block.gemms if gemm.all_reduce == "forward"]
    attention = [op for op in block.elementwise if op.flops]
    return PerOperator(
        again=tuple(_run_again(block, kept)),
        divided_elements=by_shard["columns"] + sum(_attended(block)),
        summed_elements=by_shard["inner"],
        plain_elements=by_shard["none"],
        scattered_elements=float(sum(gemm.rows * gemm.columns for gemm in results)),
        divided_bytes=sum(op.saved_mask_bytes for op in attention),
    )


def _kept_columns(block: Layer) -> dict[Gemm, int]:
    """Return the columns of each counted product whose result is kept."""
    number, kept = 0, {}
    for gemm in block.gemms:
        if gemm.has_weight and not gemm.is_expert and not gemm.keeps_precision:
            parts = gemm.parts or (gemm.columns,)
            kept[gemm] = sum(parts[number % 2 :: 2])
            number += len(parts)
    return kept


def _attended(block: Layer) -> list[float]:
    """Return the elements of attention's results, which the product behind reads."""
    elements, is_behind = [], False
    for op in block.operators:
        if isinstance(op, Elementwise):
            is_behind = is_behind or op.flops > 0
        elif is_behind:
            elements.append(float(op.rows * op.inner))
            is_behind = False
    return elements


def _run_again(block: Layer, kept: dict[Gemm, int]) -> list[Operator]:
    """Return the operators of the second forward pass, with the columns that were not kept."""
    saving = [index for index, op in enumerate(block.operators) if op.saved_elements]
    again: list[Operator] = []
    for op in block.operators[: saving[-1] if saving else 0]:
        if isinstance(op, Gemm):
            columns = op.columns - kept.get(op, 0)
            again += [replace(op, columns=columns)] if columns else []
        elif not op.flops:
            again.append(op)
    return again
