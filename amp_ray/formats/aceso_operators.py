"""Which operators Aceso's models consist of, and what its names say about their memory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.spec.operator_profile import BoolArray, FloatArray, OperatorFamily
from amp_ray.units import counted

_LAYER_LENGTHS: Final[dict[OperatorFamily, tuple[int, ...]]] = {"gpt": (13,), "t5": (13, 21)}
"""Operators of a layer: of GPT; of T5's encoder and decoder."""

_NUM_OTHERS: Final[dict[OperatorFamily, int]] = {"gpt": 3, "t5": 5}
"""Operators outside of the layers: embeddings, final norms, the output layer with its loss."""

_BOTTLENECK_LENGTH: Final = 8
"""Operators of a bottleneck of a ResNet."""

_BLOCK_NAME: Final = re.compile(r"(?P<group>.*?)[-._]?\d*[-._]?downsample")

_MASK_SHARE: Final = 1.5
"""Dropout of attention keeps a mask beside its output: half as much again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcesoChain:
    """The operators of a model in the order of the forward pass."""

    family: OperatorFamily
    names: tuple[str, ...]
    # Shape ``(num_operators,)``. Row of the profile's files that each operator stands in.
    rows: NDArray[np.int64]
    # See `amp_ray.spec.operator_profile.OperatorProfile`, as for all that follow
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
