"""Data sheet of a device: memory and rates of one accelerator."""

from dataclasses import dataclass
from typing import Final

from amp_ray.units import GIB, Precision

CPU: Final = "cpu"
"""Name of a CPU core in the catalogue."""


_WORDS: Final = ("name", "source")
"""Fields of a data sheet that are not numbers."""


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
    def reached_link_bytes_per_s(self) -> float | None:
        """Rate that a long all-reduce within a node reaches."""
        rate = self.link_bytes_per_s
        return None if rate is None else self.link_fraction * rate

    @property
    def memory_gib(self) -> float:
        """Usable memory in GiB."""
        return self.memory_bytes / GIB
