"""Best-first search over intervals of a maximum over stages, such as the bottleneck.

A higher cap on that maximum never raises the other terms of the objective. This gives a lower bound
for every interval of caps: the smallest sum of the other terms at its top, plus the maximum at its
bottom. Several maxima form a box of caps, with the same bound. The search next takes the interval
with the least bound, and ends when no interval can hold a better solution.

`CapSearch` is the search over caps on the slowest stage, for any dynamic programme under a cap;
`amp_ray.partition.exact` explains the method.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

Interval = TypeVar("Interval", bound=tuple[object, ...])

Bottlenecks = tuple[float, float, float, float]
"""An interval of bottlenecks: lower bound of the objective, low, high, smallest sum."""


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


@dataclass(slots=True, kw_only=True)
class CapSearch(BestFirst[Bottlenecks], ABC):
    """Open intervals of bottlenecks, and the best chain so far."""

    num_later: int  # micro-batches after the first
    slowest_s: float = math.inf  # bottleneck of the best chain
    num_evaluations: int = 0  # caps tried

    @abstractmethod
    def cheapest(self, cap_s: float) -> tuple[float, float, int, float]:
        """Evaluate a cap; return a result like `kernels.cheapest_chain`."""

    @abstractmethod
    def keep(self, num_stages: int) -> None:
        """Store the chain of the last evaluation as the best so far."""

    def run(self, max_evaluations: float) -> None:
        """Evaluate caps until the best partition is proven, or the budget is spent."""
        self._evaluate(0.0, math.inf, math.inf, -math.inf)
        while self.open and self.num_evaluations < max_evaluations:
            bound_s, low_s, high_s, sum_s = self.open[0]
            if bound_s > self.limit_s:
                return
            heappop(self.open)
            if bound_s < self.value_s or low_s < self.slowest_s:
                high_s = min(high_s, self._highest_cap_s(sum_s, high_s))
                at_top = self.num_evaluations % 2 == 1
                cap_s = high_s if at_top else low_s + (high_s - low_s) / 2
                self._evaluate(low_s, cap_s, high_s, sum_s)

    def _highest_cap_s(self, sum_s: float, high_s: float) -> float:
        """Return the largest bottleneck with which partitions of sum ``sum_s`` may still be best.

        Rounding of the objective can hide half a unit in the last place; a margin of four is safe
        and costs nothing.
        """
        limit_s = self.limit_s
        if self.num_later == 0:
            return high_s
        cap_s = (limit_s - sum_s + 4 * math.ulp(limit_s)) / self.num_later
        if cap_s < high_s and limit_s < self.value_s:
            self.unwanted_s = math.nextafter(limit_s, math.inf)
        return cap_s

    def _evaluate(self, low_s: float, cap_s: float, high_s: float, sum_s: float) -> None:
        """Evaluate one cap in an interval, and open the parts that it does not settle."""
        self.num_evaluations += 1
        cheapest_s, slowest_s, num_stages, next_cap_s = self.cheapest(cap_s)
        if num_stages:
            self._keep_best(cheapest_s, slowest_s, num_stages)
            self._open(low_s, math.nextafter(slowest_s, -math.inf), cheapest_s)
            next_cap_s = math.nextafter(cap_s, math.inf)
        self._open(next_cap_s, high_s, sum_s)

    def _open(self, low_s: float, high_s: float, sum_s: float) -> None:
        if low_s <= high_s < math.inf:
            self.offer((sum_s + self.num_later * low_s, low_s, high_s, sum_s))

    def _keep_best(self, sum_s: float, slowest_s: float, num_stages: int) -> None:
        value_s = sum_s + self.num_later * slowest_s
        if (value_s, slowest_s) < (self.value_s, self.slowest_s):
            self.value_s, self.slowest_s = value_s, slowest_s
            self.keep(num_stages)
