"""Best-first search over intervals of a maximum over stages, such as the bottleneck.

The other terms of the objective never rise with the cap on that maximum. So a lower bound of an
interval of caps, or a box of several, is the smallest sum of the other terms at its top plus the
maximum at its bottom. The search takes the interval with the least bound next, and ends when no
interval can hold a better solution.
"""

import math
from dataclasses import dataclass, field
from heapq import heappush
from typing import Generic, TypeVar

Interval = TypeVar("Interval", bound=tuple[object, ...])


@dataclass(slots=True, kw_only=True)
class BestFirst(Generic[Interval]):
    """Open intervals, and the least value so far."""

    upper_bound_s: float = math.inf  # solutions that cost more are pruned
    value_s: float = math.inf  # least value so far; infinite without one
    # Least lower bound of the intervals that were pruned by the upper bound
    unwanted_s: float = math.inf
    # A heap of intervals; each starts with its lower bound
    open: list[Interval] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        """Value above which solutions are pruned."""
        return min(self.value_s, self.upper_bound_s)

    @property
    def open_s(self) -> float:
        """Least lower bound of the open intervals; infinite without one."""
        bound_s = self.open[0][0] if self.open else math.inf
        assert isinstance(bound_s, float)
        return bound_s

    @property
    def lower_bound_s(self) -> float:
        """Proven lower bound on the value of any solution."""
        return min(self.value_s, self.open_s, self.unwanted_s)

    def offer(self, interval: Interval) -> None:
        """Open an interval."""
        heappush(self.open, interval)
