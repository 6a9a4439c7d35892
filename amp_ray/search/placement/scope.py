"""How many placements are looked at: all, or fewer and fewer where a cluster has too many."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which placements are looked at, and what of them counts.

    Args:
        even: Whether parts of nodes are taken in equal parts only.
        pure: Whether a stage takes a part of one class's units at most, and else all that is left.
        pairs: Whether links of single pairs of nodes count.
        ends: Whether it counts which nodes the first and the last stage share.
        max_options: Give up beyond so many options of all stages.
    """

    even: bool = False
    pure: bool = False
    pairs: bool = True
    ends: bool = False
    max_options: int

    @property
    def is_whole(self) -> bool:
        """Whether no placement is left out, and none is charged too much."""
        return self.pairs and not self.even and not self.pure
