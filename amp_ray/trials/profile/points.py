"""Points of a profile, as the controller sends them and the program on the hosts reads them."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LayerPoint:
    """One layer, or the loss, at one tp and micro-batch size; smaller sizes come first."""

    micro_batch_size: int
    tp: int
    layer: int  # first position of the layer among its equals; the number of layers for the loss
    tokens: int = 0  # of a slice of the sequences; 0 for whole sequences
    context: int = 0  # tokens before the slice that it attends to

    def to_json(self) -> dict[str, int]:
        """Return the object that jobs and events hold."""
        return asdict(self)

    def is_as_large_as(self, other: Self) -> bool:
        """Tell whether this point needs at least as much memory as another one."""
        tokens, others = (point.tokens or math.inf for point in (self, other))
        return (
            self.tp == other.tp
            and self.micro_batch_size >= other.micro_batch_size
            and tokens >= others
            and self.context >= other.context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One message, or all-reduce, of one size."""

    what: Literal["p2p", "all_reduce"]
    num_ranks: int
    num_bytes: int  # size of the message or of the reduced tensor

    def to_json(self) -> dict[str, Any]:
        """Return the object that jobs hold."""
        return {"what": self.what, "num_ranks": self.num_ranks, "bytes": self.num_bytes}
