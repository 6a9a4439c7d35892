"""Which operators of Aceso's models read and write a part of the activation on every tp rank.

The published files do not say it. In GPT and T5 it follows from the operators' names: algorithm 0
divides them as Megatron-LM does, algorithm 1 divides rows for columns. In a ResNet it follows from
the sizes: what shrinks with tp is divided.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from amp_ray.formats.aceso_operators import AcesoChain
from amp_ray.spec.operator_profile import BoolArray, FloatArray, OperatorKey, OperatorTable

NUM_ALGORITHMS: Final = 2

_FIRST: Final = ("qkv", "attention-q", "attention-kv", "GEMM-1")
"""Divided by columns at algorithm 0: they read all and write a part."""

_LAST: Final = ("attention-dense", "GEMM-2")
"""Divided by rows at algorithm 0: they read a part and write all."""

_BETWEEN: Final = (
    "attention-score",
    "attention-softmax",
    "attention-dropout",
    "attention-context",
    "gelu",
)
"""They work on a part at both ends: heads, or units of the feed-forward layer."""


def divided_operators(
    chain: AcesoChain, tables: Mapping[OperatorKey, OperatorTable]
) -> tuple[BoolArray, BoolArray]:
    """Return whether tp ranks read and write a part each, shapes ``(2, num_operators)``."""
    if chain.family == "resnet":
        return _by_size(len(chain.names), tables)
    pairs = [
        [_by_name(name, algorithm) for name in chain.names] for algorithm in range(NUM_ALGORITHMS)
    ]
    both = np.array(pairs, dtype=np.bool_)
    return both[..., 0], both[..., 1]


def _by_name(name: str, algorithm: int) -> tuple[bool, bool]:
    """Tell whether an operator of a transformer reads and writes a part.

    Example:
        >>> _by_name("enc-attention-qkv", 0), _by_name("enc-attention-qkv", 1)
        ((False, True), (True, False))
    """
    if "post" in name:
        return False, False
    if any(part in name for part in _BETWEEN):
        return True, True
    if any(part in name for part in _FIRST):
        return algorithm == 1, algorithm == 0
    if any(part in name for part in _LAST):
        return algorithm == 0, algorithm == 1
    return False, False


def _by_size(
    num_operators: int, tables: Mapping[OperatorKey, OperatorTable]
) -> tuple[BoolArray, BoolArray]:
    """Tell what shrinks from tp 1 to the smallest other tp, by more than half of its share."""
    reads = np.zeros((NUM_ALGORITHMS, num_operators), dtype=np.bool_)
    writes = reads.copy()
    for algorithm in range(NUM_ALGORITHMS):
        pairs = [
            (key, OperatorKey(key.micro_batch_size, 1, algorithm))
            for key in sorted(tables, key=lambda key: (key.tp, key.micro_batch_size))
            if key.tp > 1 and key.algorithm == algorithm
        ]
        for divided, whole in pairs:
            if whole in tables:
                few, all_of = tables[divided], tables[whole]
                reads[algorithm] = _shrinks(few.input_bytes, all_of.input_bytes, divided.tp)
                writes[algorithm] = _shrinks(few.output_bytes, all_of.output_bytes, divided.tp)
                break
    return reads, writes


def _shrinks(divided_bytes: FloatArray, whole_bytes: FloatArray, tp: int) -> BoolArray:
    """Tell which sizes are nearer to a part than to the whole."""
    nearer: BoolArray = divided_bytes < (1 + 1 / tp) / 2 * whole_bytes
    return nearer
