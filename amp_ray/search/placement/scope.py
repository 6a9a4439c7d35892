"""How many placements are looked at: all, or fewer and fewer where a cluster has too many."""

from dataclasses import dataclass
from typing import Literal

Parts = Literal["any", "even", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which placements are looked at, and what of them counts.

    Args:
        parts: How equal nodes are taken: in any parts; in equal parts, all that have given
            something being alike; or in a row, one node after the other, by a common divisor of
            dp and the node.
        pure: Whether a stage takes a part of one class's units at most, and else all that is left.
        pairs: Whether links of single pairs of nodes count.
        ends: Whether it counts which nodes the first and the last stage share.
        max_options: Give up beyond so many options of all stages.
    """

    parts: Parts = "any"
    pure: bool = False
    pairs: bool = True
    ends: bool = False
    max_options: int

    @property
    def is_whole(self) -> bool:
        """Whether no placement is left out, and none is charged too much."""
        return self.pairs and self.parts == "any" and not self.pure
