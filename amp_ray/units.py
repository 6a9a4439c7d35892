"""Every conversion and every physical constant that more than one module needs.

Inside the package all quantities are SI: seconds, bytes, bytes per second,
floating-point operations per second. File keys may speak of GB, Gbit/s or ms;
they are converted here and nowhere else. The module also formats counts in messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Precision = Literal["fp16", "bf16", "fp32", "fp8", "nvfp4"]

BYTES_PER_ELEMENT: Final[dict[Precision, int]] = {
    "fp16": 2,
    "bf16": 2,
    "fp32": 4,
    "fp8": 2,
    "nvfp4": 2,
}
"""Bytes per element of activations, weights and messages: with the formats of `NARROW` they all
stay in bf16, and only the inputs of products are cast."""

BYTES_PER_FP8: Final = 1

BYTES_PER_NVFP4: Final = 4 / 8 + 1 / 16
"""Four bits, and a scale of eight bits for each 16 elements (NVIDIA, Pretraining Large Language
Models with NVFP4, arXiv:2509.25149, section 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowFormat:
    """A format of the operands of products beside bf16, as Transformer Engine computes with it."""

    num_bytes: float  # of an element, with its share of the scales of blocks
    # Bytes of a weight's copies, as it is and transposed; None where the runtime's record has them
    copy_bytes: float | None = None
    # Whether operands are always read for the largest element before they are cast, also those
    # that a norm has written; else the runtime's record says so
    reads_for_scales: bool = False
    # Whether kernels of fused experts write their results in it; else these are cast afterwards
    written_by_products: bool = False

    @property
    def cast_bytes(self) -> float:
        """Traffic of casting an element: read in bf16, written twice, as it is and transposed.

        Products in narrow formats want both operands along the inner dimension (Transformer
        Engine's documentation, "FP8 primer"). Weights are cast once per step.
        """
        return BYTES_PER_ELEMENT["bf16"] + 2 * self.num_bytes


NARROW: Final[Mapping[Precision, NarrowFormat]] = MappingProxyType(
    {
        "fp8": NarrowFormat(num_bytes=BYTES_PER_FP8, written_by_products=True),
        "nvfp4": NarrowFormat(
            num_bytes=BYTES_PER_NVFP4, copy_bytes=2 * BYTES_PER_NVFP4, reads_for_scales=True
        ),
    }
)
"""Formats in which products with weights of blocks can run while all else is bf16.

NVFP4 as in Transformer Engine 2.12 (``NVFP4BlockScaling`` in common/recipe, ``NVFP4Quantizer`` in
pytorch/csrc/quantizer.cpp): all three products of a weight run in it. Besides the scales of blocks
each tensor has one in single precision, for which one kernel reads it: the largest element as it
is, and transposed after a random Hadamard transform, which a norm cannot find. Another kernel reads
it again, rounds it and its transform, and writes both. Weights have blocks of 16 x 16.
"""

BYTES_PER_FP32: Final = 4
"""Loss, master weights and optimizer moments are kept in IEEE single precision."""

BITS_PER_BYTE: Final = 8
MEGA: Final = 10**6
GIGA: Final = 10**9
TERA: Final = 10**12
MIB: Final = 2**20
GIB: Final = 2**30

SECONDS_PER_HOUR: Final = 3600
SECONDS_PER_DAY: Final = 24 * SECONDS_PER_HOUR
MICROSECONDS_PER_SECOND: Final = 10**6
MILLISECONDS_PER_SECOND: Final = 10**3


def gbit_per_s_to_bytes_per_s(gbit_per_s: float) -> float:
    """Convert a link rate as network vendors write it (10^9 bits per second).

    Example:
        >>> gbit_per_s_to_bytes_per_s(8)
        1000000000.0
    """
    return gbit_per_s * GIGA / BITS_PER_BYTE


def gib_to_bytes(gib: float) -> int:
    """Convert gibibytes, the unit in which device memory is reported.

    Example:
        >>> gib_to_bytes(1.5)
        1610612736
    """
    return round(gib * GIB)


def microseconds_to_s(microseconds: float) -> float:
    """Convert microseconds, the unit in which latencies are written in files."""
    return microseconds / MICROSECONDS_PER_SECOND


def milliseconds_to_s(milliseconds: float) -> float:
    """Convert milliseconds, the unit of times in other planners' files.

    Example:
        >>> milliseconds_to_s(250)
        0.25
    """
    return milliseconds / MILLISECONDS_PER_SECOND


def counted(number: int, one: str, many: str | None = None) -> str:
    """Count things in a message.

    Example:
        >>> counted(1, "trial"), counted(2, "trial"), counted(2, "strategy", "strategies")
        ('1 trial', '2 trials', '2 strategies')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


_NO_DECIMALS: Final = 1000  # figures have no decimals from this value on


def figure_text(value: float | None, num_digits: int = 4) -> str:
    """Write a figure with a few digits, never with an exponent; a dash if it is unknown.

    Example:
        >>> figure_text(1049.6), figure_text(15.4382), figure_text(0.00001), figure_text(None)
        ('1,050', '15.44', '0.00001', '-')
    """
    if value is None:
        return "-"
    text = f"{value:,.0f}" if round(abs(value), 1) >= _NO_DECIMALS else f"{value:.{num_digits}g}"
    return f"{value:.12f}".rstrip("0") if "e" in text else text
