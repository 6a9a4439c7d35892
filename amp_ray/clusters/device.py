"""Data sheets of devices: memory and rates of an accelerator, and the shipped catalogue."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from amp_ray.shipped import Table, Words
from amp_ray.units import GIB, GIGA, TERA, Precision, gib_to_bytes

CPU: Final = "cpu"
"""Name of a CPU core in the catalogue."""


_WORDS: Final = ("name", "source")
"""Fields of a data sheet that are not numbers."""


_Figure = int | float  # a whole figure stays an integer, which JSON shows


class _Catalogue(Table):
    """The file `devices.yaml`, which describes its fields."""

    file = "clusters/devices.yaml"
    boards: dict[
        str, tuple[_Figure, _Figure, int, _Figure, _Figure | None, _Figure | None, float, str]
    ]
    power: dict[str, _Figure]
    amd: Words
    fp8: Words
    nvfp4: dict[str, tuple[_Figure, float]]
    block_scales: Words
    links: dict[float, Words]
    switched_links: tuple[float, ...]
    host_links: dict[float, Words]
    rack_devices: dict[str, int]
    attention: dict[str, tuple[_Figure, _Figure]]
    no_flash_attention: Words
    before_turing: Words
    ampere_instructions: Words
    half_the_units: Words
    measured: Words


_TABLE: Final = _Catalogue.shipped()

_PCIE_4_BYTES_PER_S: Final = 31.5 * GIGA
"""Rate of 16 lanes of PCIe 4 in one direction."""

_SMALL_HEAD: Final = 64

FLASH_ATTENTION_2_ON_HOPPER: Final = 0.35
"""Share of an H100's peak that FlashAttention-2 reaches with the instructions of Ampere (Shah et
al., FlashAttention-3, arXiv:2407.08608, abstract). Newer boards run them as fast on each of their
multiprocessors."""

_TRITON: Final = 1.3 / 2.7
"""Rate of attention that Triton compiles over that of cuDNN, from Hopper on: FlashAttention-4 is up
to 1.3 times as fast as cuDNN 9.13 on a B200, and up to 2.7 times as fast as Triton (Zadouri et al.,
arXiv:2603.05451, abstract). On an H100 that is .92 of FlashAttention-2, as on Ampere."""

_TRITON_ON_AMPERE: Final = 0.9
"""The same over that of FlashAttention-2 (PyTorch, "FlexAttention: The Flexibility of PyTorch with
the Performance of FlashAttention", August 2024: .9 forward, .85 backward)."""

_UNALIGNED: Final = {1: 122e12 / 33.45e12, 2: 251e12 / 33.45e12}
"""Operations for each instruction that an H200 issues (`Device.instructions_per_s`) in products
whose operands' rows begin at multiples of so many elements in half precision, below 8. cuBLAS 13
has kernels for them with the instructions of Turing
(``cutlass_75_tensorop_bf16_s1688gemm_bf16_*_align1``) and of Ampere (``cutlass_80_*_align2``, also
for multiples of 4): on an H200 the three products of GPT-2's head took 64.5 ms with 50,257 columns
and 31.5 ms with 50,258 or 50,260 (experiments/results/one-gpu-h200.json), 12 with 50,304 by their
rate. They copy operands by instructions for a few elements each, which set their pace."""


STATIC_POWER: Final = 0.19
"""Share of a board's power that no clock changes (leakage, memory, links), and so the least limit:
the least that an H200 and a GB200 drew in any measured product, 131 of 700 and 223 of 1,200 W
(ai-dynamo/aiconfigurator's tables, ``power_w``)."""

_POWER_EXPONENT: Final = 1 / 3
"""Clock by the power above that: switching takes ``f V^2``, and near the top voltage rises with the
clock. The same tables agree: in products of 3 ms and more at the limit, a multiprocessor of a GB200
(1,200 W) was 1.05 times as fast as that of a B200 (1,000 W) in half precision (median of 132), and
1.12 times in 4 bits (55); this law says 1.08."""

_NVFP4_FRACTION: Final = 0.4
"""Share of the peak in NVFP4 on boards outside of the catalogue, where it is .36 to .54."""


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
    nvfp4_flops: float | None = None  # the same for products in NVFP4
    # Share of the peak that library GEMMs sustain within full tiles; below 1 because of power and
    # clock limits, and of operand traffic
    gemm_fraction: float = 0.75
    nvfp4_fraction: float = _NVFP4_FRACTION  # the same for products in NVFP4
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
    board_power_w: float | None = None  # the most that it draws; None if unknown
    power_limit_w: float | None = None  # a lower limit that is set on it; None if none is
    source: str

    def __post_init__(self) -> None:
        figures = {key: getattr(self, key) for key in self.__slots__ if key not in _WORDS}
        wrong = {
            key: value for key, value in figures.items() if value is not None and not value > 0
        }
        if wrong:
            raise ValueError(f"device {self.name!r}: every figure must be positive, found {wrong}")

        if self.power_limit_w is not None:
            self._check_limit(self.power_limit_w)

    def _check_limit(self, limit_w: float) -> None:
        """Refuse a limit above the board's power, or below what it draws at any clock."""
        if self.board_power_w is None:
            raise ValueError(
                f"the catalogue has no power of device {self.name!r}; without power_w it runs at "
                "its usual clock"
            )
        least_w = STATIC_POWER * self.board_power_w
        if not least_w < limit_w <= self.board_power_w:
            raise ValueError(
                f"found {limit_w:g} W; device {self.name!r} takes more than {least_w:.0f} W and at "
                f"most {self.board_power_w:g}"
            )

    @property
    def clock_fraction(self) -> float:
        """Clock under its power limit over that at its data sheet's power, in long products."""
        if self.power_limit_w is None or self.board_power_w is None:
            return 1.0
        share = self.power_limit_w / self.board_power_w
        return float(((share - STATIC_POWER) / (1 - STATIC_POWER)) ** _POWER_EXPONENT)

    def peak_flops(self, precision: Precision) -> float:
        """Return the dense peak rate; raise ``ValueError`` for an unsupported precision."""
        rates = {
            "fp32": self.fp32_flops,
            "fp16": self.fp16_flops,
            "bf16": self.bf16_flops,
            "fp8": self.fp8_flops,
            "nvfp4": self.nvfp4_flops,
        }
        rate = rates[precision]
        if rate is None:
            able = ", ".join(key for key, value in rates.items() if value is not None)
            message = f"device {self.name!r} does not compute in {precision}; it can do {able}"
            raise ValueError(message)
        return rate

    def product_flops(self, precision: Precision) -> float:
        """Return the rate of library GEMMs in full tiles; ``ValueError`` as of `peak_flops`."""
        fraction = self.nvfp4_fraction if precision == "nvfp4" else self.gemm_fraction
        return self.peak_flops(precision) * fraction * self.clock_fraction

    @property
    def has_flash_attention(self) -> bool:
        """Whether FlashAttention-2 runs on it."""
        return self.name not in _TABLE.no_flash_attention

    @property
    def scales_blocks(self) -> bool:
        """Whether it multiplies 8-bit floats with a scale for each block of 32 (MXFP8)."""
        return self.name in _TABLE.block_scales

    def attention_flops(
        self, head_size: int, *, native: bool, compiled: bool = False
    ) -> float | None:
        """Return the rate of fused attention's forward pass in half precision.

        Args:
            head_size: Elements of a head's keys.
            native: Whether the kernel uses the board's own instructions (cuDNN, FlashAttention-3),
                not those of Ampere, as FlashAttention-2 does on every board.
            compiled: Whether Triton compiles it for the board.

        Returns:
            Floating-point operations per second; None where nothing was measured.
        """
        rates = _TABLE.attention.get(self.name)
        if rates is None:
            return None
        has_ampere = self.name in _TABLE.ampere_instructions
        rate = self.clock_fraction * TERA * rates[head_size > _SMALL_HEAD]
        if compiled:
            return rate * (_TRITON_ON_AMPERE if has_ampere else _TRITON)
        if native or has_ampere:
            return rate
        share = self.num_multiprocessors / CATALOGUE["H100"].num_multiprocessors
        share *= self.clock_fraction
        return share * FLASH_ATTENTION_2_ON_HOPPER * CATALOGUE["H100"].peak_flops("bf16")

    def unaligned_flops(self, alignment: int) -> float:
        """Return the rate of cuBLAS's products of unaligned operands in half precision.

        Args:
            alignment: Elements of which the starts of rows are multiples: 1 or 2.

        Returns:
            Floating-point operations per second; 0 if unknown, as on boards without cuBLAS or
            without the instructions of its kernels.
        """
        lacks = self.name in _TABLE.amd or self.name in _TABLE.before_turing or is_cpu(self.name)
        if lacks or self.name not in CATALOGUE or self.instructions_per_s is None:
            return 0.0
        return _UNALIGNED[alignment] * self.instructions_per_s

    @property
    def instructions_per_s(self) -> float | None:
        """Instructions of threads that all multiprocessors issue; None if unknown.

        Each has four schedulers of 32 threads. From Ampere's gaming boards on it has as many units
        of single precision, which compute two operations; before, half as many (the architectures'
        whitepapers).
        """
        if self.fp32_flops is None:
            return None
        units = 1 if self.name in _TABLE.half_the_units else 2
        return self.clock_fraction * self.fp32_flops / units

    @property
    def is_measured(self) -> bool:
        """Whether published measurements of it were compared with our times."""
        return self.name in _TABLE.measured

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
        return _TABLE.rack_devices.get(self.name, 0)

    @property
    def memory_gib(self) -> float:
        """Usable memory in GiB."""
        return self.memory_bytes / GIB


# --------------------------------------------------------------------------- catalogue

CPU_CONTEXT_BYTES: Final = 400 * 2**20
"""Memory of a rank on a CPU before its model: 290 MiB for Python, torch and DeepSpeed, and about
100 MiB for gloo and the first steps (measured with torch 2.13, DeepSpeed 0.19)."""

_FP8_RATIO: Final = 2
"""Ratio of dense fp8 to bf16 rates in the data sheets of all boards that support fp8."""

_FASTEST_PCIE: Final = 63.0 * GIGA

_LINK_OF: Final = {name: rate for rate, names in _TABLE.links.items() for name in names}
_HOST_LINK_OF: Final = {
    name: rate * GIGA for rate, names in _TABLE.host_links.items() for name in names
}

_REACHED: Final = 0.79
"""Share of a switched link's rate that long all-reduces reach: 238 of 300 GB/s on A100 (NCCL
benchmark of vTrain, arXiv:2312.12391). Over direct links it depends on the ring: on V100, .15 with
two ranks, .57 with four, .9 with eight (the same benchmark)."""


def _device(name: str) -> Device:
    """Convert one row of the table to a data sheet in SI units."""
    gib, gbyte, units, fp32, fp16, bf16, gemm_fraction, source = _TABLE.boards[name]
    nvfp4, nvfp4_fraction = _TABLE.nvfp4.get(name, (None, _NVFP4_FRACTION))
    return Device(
        context_bytes=CPU_CONTEXT_BYTES if name == CPU else None,
        name=name,
        memory_bytes=gib_to_bytes(gib),
        memory_bytes_per_s=gbyte * GIGA,
        num_multiprocessors=units,
        fp32_flops=fp32 * TERA,
        fp16_flops=None if fp16 is None else fp16 * TERA,
        bf16_flops=None if bf16 is None else bf16 * TERA,
        fp8_flops=None if bf16 is None or name not in _TABLE.fp8 else _FP8_RATIO * bf16 * TERA,
        nvfp4_flops=None if nvfp4 is None else nvfp4 * TERA,
        gemm_fraction=gemm_fraction,
        nvfp4_fraction=nvfp4_fraction,
        link_bytes_per_s=_LINK_OF[name] * GIGA if name in _LINK_OF else None,
        link_fraction=_REACHED if _LINK_OF.get(name) in _TABLE.switched_links else 0.5,
        host_bytes_per_s=_HOST_LINK_OF.get(name, _PCIE_4_BYTES_PER_S),
        board_power_w=_TABLE.power.get(name),
        source=source if name == CPU else f"{'AMD' if name in _TABLE.amd else 'NVIDIA'} {source}",
    )


CATALOGUE: Final[dict[str, Device]] = {name: _device(name) for name in _TABLE.boards}

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
