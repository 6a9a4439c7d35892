"""Best-first search over intervals of a maximum over stages, such as the bottleneck.

The rest of the objective can only fall as the cap on that maximum rises. So an interval of caps, or
a box of several, is bounded by the smallest rest at its top plus the maximum at its bottom. The
interval with the least bound is searched next; the search ends when no interval can hold a better
solution.
"""

import math
from dataclasses import dataclass, field
from heapq import heappush
from typing import Generic, TypeVar

Interval = TypeVar("Interval", bound=tuple[object, ...])


@dataclass(slots=True, kw_only=True)
class BestFirst(Generic[Interval]):
    """Intervals that are still open, and the least value so far."""

    upper_bound_s: float = math.inf  # only what costs no more is of interest
    value_s: float = math.inf  # the least value found; infinite without one
    # The least that anything may cost that was dropped for the upper bound
    unwanted_s: float = math.inf
    # A heap; the first figure of an interval is its bound
    open: list[Interval] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        """The most that anything of interest may cost."""
        return min(self.value_s, self.upper_bound_s)

    @property
    def open_s(self) -> float:
        """Bound of the most promising interval; infinite without one."""
        bound_s = self.open[0][0] if self.open else math.inf
        assert isinstance(bound_s, float)
        return bound_s

    @property
    def lower_bound_s(self) -> float:
        """Nothing costs less."""
        return min(self.value_s, self.open_s, self.unwanted_s)

    def offer(self, interval: Interval) -> None:
        """Open an interval."""
        heappush(self.open, interval)
