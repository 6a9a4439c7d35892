"""Data sheets of devices: memory and rates of an accelerator, and the shipped catalogue."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from amp_ray.units import GIB, GIGA, TERA, Precision, gib_to_bytes

CPU: Final = "cpu"
"""Name of a CPU core in the catalogue."""


_WORDS: Final = ("name", "source")
"""Fields of a data sheet that are not numbers."""


_NO_FLASH_ATTENTION: Final = ("T4", "P100-16", "V100-16", "V100-32")
"""NVIDIA boards below compute capability 8.0, which FlashAttention-2 and cuDNN's fused attention
need (README of flash-attention, "NVIDIA CUDA Support"; `sdp_utils.cpp` of PyTorch)."""

_PCIE_4_BYTES_PER_S: Final = 31.5 * GIGA
"""Rate of 16 lanes of PCIe 4 in one direction."""

_HALF_THE_UNITS: Final = (*_NO_FLASH_ATTENTION, "A30", "A100-40", "A100-80")
"""Boards with 64 units of single precision in a multiprocessor."""

_MEASURED: Final = (
    *("T4", "V100-16", "A100-40", "A100-80", "H100", "H800", "H200", "B200", "B300"),
    *("GB200", "GB300"),
)
"""Boards of the measurements in ``experiments/published``, which `make accuracy` compares."""


_ATTENTION: Final = {
    **dict.fromkeys(("A100-40", "A100-80"), (180, 180)),
    "L40S": (183, 192),
    **dict.fromkeys(("H100", "H800", "GH200"), (522, 659)),
    "H200": (536, 701),
    "B200": (720, 1175),
    "B300": (1099, 1676),
    "GB200": (838, 1423),
    "GB300": (1199, 1894),
}
"""TFLOP/s of fused attention, forward and causal, with heads of up to 64 and of more elements: the
rate in the limit of long sequences in ``experiments/published/kernels.csv``. A100 was measured with
128 alone."""

_SMALL_HEAD: Final = 64

_AMPERE_INSTRUCTIONS: Final = ("A100-40", "A100-80", "L40S")
"""Boards whose own instructions for half precision are those of Ampere (compute capability 8)."""

FLASH_ATTENTION_2_ON_HOPPER: Final = 0.35
"""Share of an H100's peak that FlashAttention-2 reaches with the instructions of Ampere (Shah et
al., FlashAttention-3, arXiv:2407.08608, abstract). Newer boards run them as fast on each of their
multiprocessors."""

_UNALIGNED: Final = {1: 122e12 / 132, 2: 251e12 / 132}
"""Rate of a multiprocessor in products whose operands' rows begin at multiples of so many elements
in half precision, below 8. cuBLAS 13 has kernels for them with the instructions of Turing
(``cutlass_75_tensorop_bf16_s1688gemm_bf16_*_align1``) and of Ampere (``cutlass_80_*_align2``, also
for multiples of 4): on an H200 the three products of GPT-2's head took 64.5 ms with 50,257 columns
and 31.5 ms with 50,258 or 50,260 (experiments/results/one-gpu-h200.json), 12 with 50,304
by their rate."""


def is_cpu(name: str) -> bool:
    """Return whether a name denotes a CPU core: ``cpu``, or ``cpu-`` and any text.

    Example:
        >>> is_cpu("cpu"), is_cpu("CPU-slow"), is_cpu("T4")
        (True, True, False)
    """
    return name.casefold().partition("-")[0] == CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator type, as its data sheet and its driver describe it."""

    name: str  # catalogue name, e.g. ``"A100-80"``; also names its profile file.
    memory_bytes: int  # memory available to processes, below the nominal size
    memory_bytes_per_s: float  # peak bandwidth of the device memory
    num_multiprocessors: int  # units that compute a GEMM's tiles (SMs, cores)
    fp32_flops: float | None = None  # peak rate for single precision; None where it does not matter
    # Dense peak rate for half precision; None where it is not supported
    fp16_flops: float | None = None
    bf16_flops: float | None = None  # dense peak rate for bfloat16; None where it is not supported
    # Dense peak rate for products of 8-bit floats; None where it is not supported
    fp8_flops: float | None = None
    # Share of the peak that library GEMMs sustain within full tiles; below 1 because of power and
    # clock limits, and of operand traffic
    gemm_fraction: float = 0.75
    # Total line rate of its links to the other boards of a node, in one direction; None if the
    # data sheet has none
    link_bytes_per_s: float | None = None
    link_fraction: float = 0.5  # share of it that long all-reduces in a node reach
    # Rate to the host's memory in one direction; 16 lanes of PCIe 4 if nothing else is stated
    host_bytes_per_s: float = _PCIE_4_BYTES_PER_S
    # Memory of a training process before its first tensor; None for GPUs, where the runtime's
    # traits have it
    context_bytes: int | None = None
    # Nominal memory of the board; None if unknown. Only published planners that are based on it
    # use it.
    nominal_bytes: int | None = None
    source: str

    def __post_init__(self) -> None:
        figures = {key: getattr(self, key) for key in self.__slots__ if key not in _WORDS}
        wrong = {
            key: value for key, value in figures.items() if value is not None and not value > 0
        }
        if wrong:
            raise ValueError(f"device {self.name!r}: every figure must be positive, found {wrong}")

    def peak_flops(self, precision: Precision) -> float:
        """Return the dense peak rate; raise ``ValueError`` for an unsupported precision."""
        rates = {
            "fp32": self.fp32_flops,
            "fp16": self.fp16_flops,
            "bf16": self.bf16_flops,
            "fp8": self.fp8_flops,
        }
        rate = rates[precision]
        if rate is None:
            able = ", ".join(key for key, value in rates.items() if value is not None)
            message = f"device {self.name!r} does not compute in {precision}; it can do {able}"
            raise ValueError(message)
        return rate

    @property
    def has_flash_attention(self) -> bool:
        """Whether FlashAttention-2 runs on it."""
        return self.name not in _NO_FLASH_ATTENTION

    def attention_flops(self, head_size: int, *, native: bool) -> float | None:
        """Return the rate of fused attention's forward pass in half precision.

        Args:
            head_size: Elements of a head's keys.
            native: Whether the kernel uses the board's own instructions (cuDNN, FlashAttention-3),
                not those of Ampere, as FlashAttention-2 does on every board.

        Returns:
            Floating-point operations per second; None where nothing was measured.
        """
        rates = _ATTENTION.get(self.name)
        if rates is None:
            return None
        if native or self.name in _AMPERE_INSTRUCTIONS:
            return TERA * rates[head_size > _SMALL_HEAD]
        share = self.num_multiprocessors / CATALOGUE["H100"].num_multiprocessors
        return share * FLASH_ATTENTION_2_ON_HOPPER * CATALOGUE["H100"].peak_flops("bf16")

    def unaligned_flops(self, alignment: int) -> float:
        """Return the rate of cuBLAS's products of unaligned operands in half precision.

        Args:
            alignment: Elements of which the starts of rows are multiples: 1 or 2.

        Returns:
            Floating-point operations per second; 0 if unknown.
        """
        older = (*_NO_FLASH_ATTENTION, *_AMD)  # or without cuBLAS
        is_known = self.name in CATALOGUE and self.name not in older and not is_cpu(self.name)
        return _UNALIGNED[alignment] * self.num_multiprocessors if is_known else 0.0

    @property
    def instructions_per_s(self) -> float | None:
        """Instructions of threads that all multiprocessors issue; None if unknown.

        Each has four schedulers of 32 threads. From Ampere's gaming boards on it has as many units
        of single precision, which compute two operations; before, half as many (the architectures'
        whitepapers).
        """
        if self.fp32_flops is None:
            return None
        return self.fp32_flops / (1 if self.name in _HALF_THE_UNITS else 2)

    @property
    def is_measured(self) -> bool:
        """Whether published measurements of it were compared with our times."""
        return self.name in _MEASURED

    @property
    def reached_link_bytes_per_s(self) -> float | None:
        """Rate that a long all-reduce within a node reaches."""
        rate = self.link_bytes_per_s
        return None if rate is None else self.link_fraction * rate

    @property
    def fabric(self) -> Literal["nvlink", "pcie"] | None:
        """What joins boards in a node (Infinity Fabric counts as NVLink); None if unknown."""
        if self.link_bytes_per_s is None:
            return None
        return "pcie" if self.link_bytes_per_s <= _FASTEST_PCIE else "nvlink"

    @property
    def has_switch(self) -> bool:
        """Whether NVSwitch joins its boards and can add up what they send, from Hopper on."""
        return self.link_bytes_per_s is not None and self.link_fraction == _REACHED

    @property
    def rack_devices(self) -> int:
        """Devices of a rack that its links join; 0 if they join those of one host."""
        return _RACK_DEVICES.get(self.name, 0)

    @property
    def memory_gib(self) -> float:
        """Usable memory in GiB."""
        return self.memory_bytes / GIB


# --------------------------------------------------------------------------- catalogue

CPU_CONTEXT_BYTES: Final = 400 * 2**20
"""Memory of a rank on a CPU before its model: 290 MiB for Python, torch and DeepSpeed, and about
100 MiB for gloo and the first steps (measured with torch 2.13, DeepSpeed 0.19)."""

_Row = tuple[str, float, float, int, float, float | None, float | None, float, str]

_CPU_SOURCE: Final = "One core of a server CPU: AVX2 at about 3 GHz, half used"

_AMD: Final = ("MI300X", "MI325X", "MI350X", "MI355X")

_FP8_RATIO: Final = 2
"""Ratio of dense fp8 to bf16 rates in the data sheets of all boards that support fp8."""

_FP8: Final = (
    *("L4", "L40S", "H100", "H800", "H200", "GH200", "B200", "B300", "GB200", "GB300", *_AMD),
    *("RTX4090", "RTX5090"),
)

# Rates are dense (without structured sparsity) and in TFLOP/s, bandwidth in GB/s,
# memory in GiB available to processes; if no such figure is published, the
# nominal size less the usual share of driver and ECC on such boards.
# The GEMM share is the fraction of the peak that cuBLAS sustains in full tiles: 0.8 on boards that
# hold their clock (A100), less where power limits the rate (T4 70 W, L4 72 W, MI300X) or operand
# delivery does (V100, H100). Blackwell's follows from its power: its process (TSMC 4NP) does
# 1.22 times the work of the H100's (4N) per joule (TSMC on N4P against N5, October 2021), so
# that 0.65 x 989 TFLOP/s in 700 W become 1,121 in 1,000 W (B200), 1,233 in 1,100 W (B300), 1,345 in
# 1,200 W (GB200) and 1,569 in 1,400 W (GB300), shares of the dense bf16 rate.
#
# name, GiB, GB/s, multiprocessors, fp32, fp16, bf16 TFLOP/s, GEMM share, source by the maker
_ROWS: Final[tuple[_Row, ...]] = (
    ("T4", 14.75, 320, 40, 8.1, 65, None, 0.45, "T4 data sheet; 14.75 GiB usable of 15"),
    ("P100-16", 15.90, 732, 56, 10.6, 21.2, None, 0.80, "P100 SXM2 data sheet"),
    ("V100-16", 15.78, 900, 80, 15.7, 125, None, 0.65, "V100 SXM2 data sheet; 15.78 GiB usable"),
    ("V100-32", 31.74, 900, 80, 15.7, 125, None, 0.65, "V100 SXM2 data sheet"),
    ("A10", 22.06, 600, 72, 31.2, 125, 125, 0.60, "A10 data sheet; 24 GB with ECC"),
    ("A30", 23.50, 933, 56, 10.3, 165, 165, 0.75, "A30 data sheet"),
    ("A40", 44.43, 696, 84, 37.4, 149.7, 149.7, 0.70, "A40 data sheet; 48 GB with ECC"),
    ("A100-40", 39.39, 1555, 108, 19.5, 312, 312, 0.80, "A100 SXM4 40GB data sheet"),
    ("A100-80", 79.15, 2039, 108, 19.5, 312, 312, 0.80, "A100 SXM4 80GB data sheet"),
    ("L4", 22.03, 300, 58, 30.3, 121, 121, 0.45, "L4 data sheet; dense, 24 GB with ECC"),
    ("L40S", 44.39, 864, 142, 91.6, 362, 362, 0.65, "L40S data sheet; dense, 48 GB with ECC"),
    ("H100", 79.10, 3350, 132, 66.9, 989.4, 989.4, 0.65, "H100 SXM5 80GB data sheet"),
    ("H800", 79.10, 3350, 132, 66.9, 989.4, 989.4, 0.65, "H800 SXM5 80GB data sheet"),
    ("H200", 139.80, 4800, 132, 66.9, 989.4, 989.4, 0.68, "H200 SXM data sheet"),
    ("GH200", 94.50, 4000, 132, 66.9, 989.4, 989.4, 0.65, "GH200 96GB HBM3 data sheet"),
    ("B200", 178.35, 8000, 148, 75, 2250, 2250, 0.50, "HGX B200 data sheet; 180 GB"),
    ("B300", 267.70, 8000, 148, 75, 2250, 2250, 0.55, "HGX B300 data sheet; 288 GB"),
    ("GB200", 184.30, 8000, 152, 80, 2500, 2500, 0.54, "GB200 NVL72 data sheet; 186 GB"),
    ("GB300", 276.80, 8000, 152, 80, 2500, 2500, 0.63, "GB300 NVL72 data sheet; 279 GB"),
    ("MI300X", 191.50, 5300, 304, 163.4, 1307.4, 1307.4, 0.55, "MI300X data sheet"),
    ("MI325X", 255.50, 6000, 304, 163.4, 1307.4, 1307.4, 0.55, "MI325X data sheet"),
    ("MI350X", 287.50, 8000, 256, 144.2, 2309.6, 2309.6, 0.55, "MI350X data sheet"),
    ("MI355X", 287.50, 8000, 256, 157.3, 2516.6, 2516.6, 0.60, "MI355X data sheet"),
    ("RTX3090", 23.68, 936, 82, 35.6, 71.2, 71.2, 0.75, "GA102 whitepaper; fp32 accumulate"),
    ("RTX4090", 23.64, 1008, 128, 82.6, 165.2, 165.2, 0.80, "AD102 whitepaper; fp32 accumulate"),
    ("RTX5090", 31.36, 1792, 170, 104.8, 209.5, 209.5, 0.80, "Blackwell RTX whitepaper"),
    (CPU, 4.0, 10, 1, 0.05, None, 0.025, 0.80, _CPU_SOURCE),
)


_LINKS: Final = {
    15.75: ("T4",),  # PCIe 3, 16 lanes
    31.5: ("A10", "A30", "A40", "L4", "L40S", "RTX3090", "RTX4090"),  # PCIe 4
    63.0: ("RTX5090",),  # PCIe 5
    80.0: ("P100-16",),  # NVLink 1
    150.0: ("V100-16", "V100-32"),  # NVLink 2
    300.0: ("A100-40", "A100-80"),  # NVLink 3
    450.0: ("H100", "H200", "GH200"),  # NVLink 4
    200.0: ("H800",),  # eight of its 18 links
    900.0: ("B200", "B300", "GB200", "GB300"),  # NVLink 5
    448.0: ("MI300X", "MI325X"),  # seven links of Infinity Fabric
    537.6: ("MI350X", "MI355X"),
}
"""Boards by the total GB/s of their links in one direction, from the same data sheets; for NVLink
and Infinity Fabric these state the sum of both directions."""

_HOST_LINKS: Final = {
    15.75: ("T4", "P100-16", "V100-16", "V100-32"),  # PCIe 3, 16 lanes
    63.0: ("RTX5090", "H100", "H200", "B200", "B300", *_AMD),  # PCIe 5
    225.0: ("GB200", "GB300"),  # NVLink-C2C: 900 GB/s of both directions and of two boards
    450.0: ("GH200",),  # NVLink-C2C
}
"""Boards by GB/s to the host's memory in one direction, from the same data sheets; all others have
PCIe 4."""

_HOST_LINK_OF: Final = {name: rate * GIGA for rate, names in _HOST_LINKS.items() for name in names}

_FASTEST_PCIE: Final = 63.0 * GIGA

_LINK_OF: Final = {name: rate for rate, names in _LINKS.items() for name in names}

_SWITCHED_LINKS: Final = (200.0, 300.0, 450.0, 900.0)
"""Link rates of boards behind a switch (NVSwitch since A100), where a ring can use all links."""

_RACK_DEVICES: Final = {"GB200": 72, "GB300": 72}
"""Devices of an NVLink domain of several hosts: 18 trays of four behind NVLink switches, with
900 GB/s of each device in one direction (NVIDIA GB200 NVL72 and GB300 NVL72 data sheets)."""

_REACHED: Final = 0.79
"""Share of a switched link's rate that long all-reduces reach: 238 of 300 GB/s on A100 (NCCL
benchmark of vTrain, arXiv:2312.12391). Over direct links it depends on the ring: on V100, .15 with
two ranks, .57 with four, .9 with eight (the same benchmark)."""


def _device(row: _Row) -> Device:
    """Convert one row of the table to a data sheet in SI units."""
    name, gib, gbyte, units, fp32, fp16, bf16, gemm_fraction, source = row
    return Device(
        context_bytes=CPU_CONTEXT_BYTES if name == CPU else None,
        name=name,
        memory_bytes=gib_to_bytes(gib),
        memory_bytes_per_s=gbyte * GIGA,
        num_multiprocessors=units,
        fp32_flops=fp32 * TERA,
        fp16_flops=None if fp16 is None else fp16 * TERA,
        bf16_flops=None if bf16 is None else bf16 * TERA,
        fp8_flops=None if bf16 is None or name not in _FP8 else _FP8_RATIO * bf16 * TERA,
        gemm_fraction=gemm_fraction,
        link_bytes_per_s=_LINK_OF[name] * GIGA if name in _LINK_OF else None,
        link_fraction=_REACHED if _LINK_OF.get(name) in _SWITCHED_LINKS else 0.5,
        host_bytes_per_s=_HOST_LINK_OF.get(name, _PCIE_4_BYTES_PER_S),
        source=source if name == CPU else f"{'AMD' if name in _AMD else 'NVIDIA'} {source}",
    )


CATALOGUE: Final[dict[str, Device]] = {row[0]: _device(row) for row in _ROWS}

ALIASES: Final[dict[str, str]] = {"A100": "A100-40", "V100": "V100-16", "P100": "P100-16"}
"""Aliases: a name without a memory size means the smaller board, so that no plan runs out."""


def find_device(name: str) -> Device:
    """Look up a device by name, ignoring case; a ``ValueError`` lists the valid names."""
    by_folded_name = {key.casefold(): key for key in CATALOGUE}
    by_folded_name |= {key.casefold(): value for key, value in ALIASES.items()}
    try:
        return CATALOGUE[by_folded_name[name.casefold()]]
    except KeyError:
        alike = [board for board in CATALOGUE if resembles(board, name)]
        sizes = re.findall(r"[0-9]+", name)
        meant = [board for board in alike if board.partition("-")[2] in sizes] or alike
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"known: {', '.join(CATALOGUE)}."
        raise ValueError(
            f"device {name!r} is not in the catalogue; {hint} "
            "Describe another one as {name, memory_gib, fp16_tflops, memory_gbyte_per_s}"
        ) from None


def resembles(planned: str, driver_name: str) -> bool:
    """Return whether a driver's name for a GPU means the catalogue's device ``planned``.

    Example:
        >>> resembles("A100-40", "NVIDIA A100-SXM4-40GB"), resembles("A10", "NVIDIA A100-SXM4-40GB")
        (True, False)
        >>> resembles("RTX3090", "NVIDIA GeForce RTX 3090"), resembles("H200", "NVIDIA GH200 480GB")
        (True, False)
    """
    series = planned.partition("-")[0]
    parts = re.findall(r"[A-Za-z]+|\d+", series)
    shape = r"[\s-]?".join(map(re.escape, parts))
    return (
        re.search(rf"(?<![A-Za-z0-9]){shape}(?![A-Za-z0-9])", driver_name, re.IGNORECASE)
        is not None
    )
