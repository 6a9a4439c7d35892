"""Memory and traffic of optimizers: data, one record per optimizer."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from amp_ray.units import BYTES_PER_FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and touches per parameter, all of it in single precision."""

    name: str
    num_moments: int  # running averages per parameter

    @property
    def moment_bytes(self) -> int:
        """Memory of the moments; ZeRO-1 shards it over dp."""
        return BYTES_PER_FP32 * self.num_moments

    @property
    def update_traffic_bytes(self) -> int:
        """Traffic of the update: reads the gradient, reads and writes weight and moments."""
        return BYTES_PER_FP32 * (1 + 2 * (1 + self.num_moments))


OPTIMIZERS: Final = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (
            Optimizer(name="adam", num_moments=2),
            Optimizer(name="adamw", num_moments=2),
            Optimizer(name="sgd", num_moments=0),
        )
    }
)
"""Plain SGD: without momentum."""


def find_optimizer(name: str) -> Optimizer:
    """Look an optimizer up by its name; raise ``ValueError`` if it is not known."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not known; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
