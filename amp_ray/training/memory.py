"""Peak memory of one rank: of the device on CUDA, of the process on a CPU."""

from pathlib import Path
from typing import Final

import torch

_BYTES_PER_KIB: Final = 1024
_RESET_PEAK: Final = "5"
"""Written to ``/proc/self/clear_refs`` it sets VmHWM back to the present size (proc(5))."""


class PeakMemory:
    """Measures from just before the model is built.

    On a CPU, starting weights are made whole before they are sliced. ``built``
    forgets that peak, where the kernel allows it: it belongs to this program and
    not to the strategy.
    """

    def __init__(self, *, cuda: bool) -> None:
        """Remember the memory that the program takes without a model."""
        self.cuda = cuda
        self.base_bytes = 0 if cuda else _status_bytes("VmRSS")
        if cuda:
            torch.cuda.reset_peak_memory_stats()

    def built(self) -> None:
        """Call once the model's weights exist."""
        if not self.cuda:
            try:
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
            except OSError:
                # Not allowed: the peak then includes the build and is too high, never too low.
                return

    def peak(self) -> dict[str, int]:
        """Return bytes: ``peak_memory_bytes`` and what it is made of."""
        if self.cuda:
            return {
                "peak_memory_bytes": int(torch.cuda.max_memory_allocated()),
                "reserved_memory_bytes": int(torch.cuda.max_memory_reserved()),
                "base_memory_bytes": 0,
            }
        top = _status_bytes("VmHWM")
        return {
            "peak_memory_bytes": max(0, top - self.base_bytes),
            "reserved_memory_bytes": top,
            "base_memory_bytes": self.base_bytes,
        }


def _status_bytes(key: str) -> int:
    """Return one size from ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * _BYTES_PER_KIB
    message = f"/proc/self/status has no {key}; memory of a CPU rank is measured on Linux only"
    raise OSError(message)
