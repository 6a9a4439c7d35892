"""Points to measure for a profile, shared by the controller and the program on the hosts."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LayerPoint:
    """A layer, or the loss, at one tp and micro-batch size; smaller points sort first."""

    micro_batch_size: int
    tp: int
    layer: int  # position of the first equal layer; for the loss, the number of layers
    tokens: int = 0  # tokens per slice; 0 for whole sequences
    context: int = 0  # earlier tokens that the slice attends to

    def to_json(self) -> dict[str, int]:
        """Return the point as it is written in jobs and events."""
        return asdict(self)

    def is_as_large_as(self, other: Self) -> bool:
        """Return whether this point needs at least as much memory as ``other``."""
        tokens, others = (point.tokens or math.inf for point in (self, other))
        return (
            self.tp == other.tp
            and self.micro_batch_size >= other.micro_batch_size
            and tokens >= others
            and self.context >= other.context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """A message or an all-reduce of one size."""

    what: Literal["p2p", "all_reduce"]
    num_ranks: int
    num_bytes: int  # size of the message or of the reduced tensor

    def to_json(self) -> dict[str, Any]:
        """Return the point as it is written in jobs."""
        return {"what": self.what, "num_ranks": self.num_ranks, "bytes": self.num_bytes}
