"""What Aceso's files do not say of its models: it follows from names and sizes of operators.

Which operators a model consists of, what of their memory they keep, and which read and write a part
of the activation on every tp rank. In GPT and T5 the latter follows from the operators' names:
algorithm 0 divides them as Megatron-LM does, algorithm 1 divides rows for columns. In a ResNet it
follows from the sizes: what shrinks with tp is divided.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.inputs.operator_profile import OperatorFamily, OperatorKey, OperatorTable
from amp_ray.units import counted

_LAYER_LENGTHS: Final[dict[OperatorFamily, tuple[int, ...]]] = {"gpt": (13,), "t5": (13, 21)}
"""Operators of a layer: of GPT; of T5's encoder and decoder."""

_NUM_OTHERS: Final[dict[OperatorFamily, int]] = {"gpt": 3, "t5": 5}
"""Operators outside of the layers: embeddings, final norms, the output layer with its loss."""

_BOTTLENECK_LENGTH: Final = 8  # operators of a bottleneck of a ResNet

_BLOCK_NAME: Final = re.compile(r"(?P<group>.*?)[-._]?\d*[-._]?downsample")

_MASK_SHARE: Final = 1.5  # dropout of attention keeps a mask beside its output: half as much again


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcesoChain:
    """The operators of a model in the order of the forward pass."""

    family: OperatorFamily
    names: tuple[str, ...]
    # Shape ``(num_operators,)``. Row of the profile's files that each operator stands in.
    rows: NDArray[np.int64]
    # See `amp_ray.inputs.operator_profile.OperatorProfile`, as for all that follow
    layer_bounds: tuple[int, ...]
    starts_block: BoolArray
    kept_share: FloatArray


def family_of(model: str) -> OperatorFamily:
    """Return the family of a model by its name: ``gpt_...``, ``t5_...`` or ``..resnet_...``.

    Example:
        >>> family_of("wide_resnet_2B"), family_of("t5_770M"), family_of("gpt_1_3B")
        ('resnet', 't5', 'gpt')
    """
    if "resnet" in model.casefold():
        return "resnet"
    return "t5" if model.casefold().startswith("t5") else "gpt"


def aceso_chain(rows: Sequence[str], *, family: OperatorFamily, num_layers: int) -> AcesoChain:
    """Spread the rows of an operator file over a model with so many layers.

    GPT has ``13 L + 3`` operators and T5 ``34 L + 5``: one layer stands in the file, of T5 one of
    the encoder and one of the decoder. The operators of a ResNet are the rows as they are.

    Raises:
        ValueError: If the rows are not those of the family.
    """
    layers = _bottlenecks(rows) if family == "resnet" else _repeated(rows, family, num_layers)
    order = [row for layer in layers for row in layer]
    names = tuple(rows[row] for row in order)
    return AcesoChain(
        family=family,
        names=names,
        rows=np.array(order, dtype=np.int64),
        layer_bounds=(0, *accumulate(map(len, layers))),
        starts_block=np.array([_starts_block(name, family) for name in names]),
        kept_share=np.array(_kept_shares(names)),
    )


def _repeated(rows: Sequence[str], family: OperatorFamily, num_layers: int) -> list[list[int]]:
    """Return the rows of every layer, the one of each kind in the file so many times."""
    starts = [row for row, name in enumerate(rows) if _starts_block(name, family)]
    lengths = _LAYER_LENGTHS[family]
    num_others = len(rows) - sum(lengths)
    layers = _blocks(rows, dict(zip(starts, lengths, strict=False)))
    kinds = tuple(len(layer) for layer in layers if len(layer) > 1)
    if len(starts) != len(lengths) or kinds != lengths or num_others != _NUM_OTHERS[family]:
        raise ValueError(
            f"found {counted(len(rows), 'operator')}, {len(starts)} of them a 1st-layernorm; a "
            f"model of family {family} has layers of {' and '.join(map(str, lengths))} operators, "
            f"which start with one, and {_NUM_OTHERS[family]} others (embeddings, final norms, "
            "post-process)"
        )
    return [layer for each in layers for layer in [each] * (num_layers if len(each) > 1 else 1)]


def _bottlenecks(rows: Sequence[str]) -> list[list[int]]:
    """Return the rows of every bottleneck of a ResNet, and of each operator outside of them."""
    starts = (row for row, name in enumerate(rows) if _starts_block(name, "resnet"))
    return _blocks(rows, dict.fromkeys(starts, _BOTTLENECK_LENGTH))


def _blocks(rows: Sequence[str], lengths: Mapping[int, int]) -> list[list[int]]:
    """Divide rows into blocks, given their length by first row, and single ones between them."""
    blocks: list[list[int]] = []
    end = 0
    for row in range(len(rows)):
        if row in lengths or row >= end:
            blocks.append([row])
            end = row + lengths.get(row, 1)
        else:
            blocks[-1].append(row)
    return blocks


def _starts_block(name: str, family: OperatorFamily) -> bool:
    """Tell whether a block begins with an operator."""
    return name.endswith("-conv1") if family == "resnet" else "1st-layernorm" in name


def _kept_shares(names: Sequence[str]) -> list[float]:
    """Return what of each operator's activations stays allocated until the backward pass."""
    shares = []
    groups: set[str] = set()
    for name in names:
        match = _BLOCK_NAME.fullmatch(name)
        shares.append(_kept_share(name, is_first=match is None or match["group"] not in groups))
        if match is not None:
            groups.add(match["group"])
    return shares


def _kept_share(name: str, *, is_first: bool) -> float:
    """Return one operator's share; a downsampling that is not the first of its group keeps none."""
    if "attention-dropout" in name and "post" not in name:
        return _MASK_SHARE
    shares_buffer = "attention-softmax" in name or name == "bn1" or name.endswith("-bn3")
    return 0.0 if shares_buffer or not is_first else 1.0


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
