"""The best placement by closed form and tail: a search over caps on the tail around the solver.

What follows the pipeline, gradient sync and optimizer step, takes as long as its slowest stage.
That is a second bottleneck beside the slowest beat, so it is searched in the same way: let ``P(c)``
be the shortest pipeline whose tails stay within ``c``. It never grows with ``c``; a solution with
tail ``t`` settles all caps from ``t`` on, and intervals that cannot hold a better sum are dropped.
"""

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final

from amp_ray.partition import PartitionSolution, PrunedPartition, solve
from amp_ray.search.cuts import EVALUATIONS_TO_TELL, NO_LIMIT
from amp_ray.search.placement_problem import PlacementProblem

MOST_WORK: Final = 2_000_000
"""Options times solved caps after which the best so far is kept: about a second."""

FEWEST_CAPS: Final = 3
"""Caps that are tried whatever they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One placement with its cuts.

    Args:
        value_s: Closed form of the pipeline, and the tail.
        tail_s: The tail in it.
        bounds: Of the stages.
        options: Of the stages.
    """

    value_s: float
    tail_s: float
    bounds: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class TailSearch:
    """Intervals of tails that are still open, and the placements found.

    Args:
        problem: All placements.
        most_work: Options times solved caps that may be spent.
    """

    problem: PlacementProblem
    most_work: int = MOST_WORK
    found: list[Placed] = field(default_factory=list)
    _open: list[tuple[float, float, float, float]] = field(default_factory=list)
    _unwanted_s: float = math.inf

    def run(self) -> None:
        """Search until the best is proven or the work is done; without result if none fits."""
        self._try(self.problem.least_tail_s, math.inf, math.inf, 0.0)
        num_caps, each = 1, len(self.problem.problem.options.time_row)
        while self._open and (num_caps < FEWEST_CAPS or num_caps * each < self.most_work):
            bound_s, low_s, high_s, pipeline_s = self._open[0]
            if bound_s >= self.value_s:
                return
            heappop(self._open)
            cap_s = high_s if num_caps % 2 else low_s + (high_s - low_s) / 2
            self._try(low_s, cap_s, high_s, pipeline_s)
            num_caps += 1

    @property
    def value_s(self) -> float:
        """The least objective found so far."""
        return min((placed.value_s for placed in self.found), default=math.inf)

    @property
    def lower_bound_s(self) -> float:
        """No placement has a smaller objective."""
        open_s = self._open[0][0] if self._open else math.inf
        return min(self.value_s, open_s, self._unwanted_s)

    def _try(self, low_s: float, cap_s: float, high_s: float, pipeline_s: float) -> None:
        """Solve for one cap in an interval, and open what it does not settle."""
        upper_s = self.value_s - low_s
        solution = solve(self.problem.capped(cap_s), upper_bound_s=max(upper_s, 0.0))
        if isinstance(solution, PartitionSolution):
            tail_s = self.problem.tail_s(solution.bounds, solution.options)
            self.found.append(
                Placed(
                    value_s=solution.value_s + tail_s,
                    tail_s=tail_s,
                    bounds=solution.bounds,
                    options=solution.options,
                )
            )
            self._offer(low_s, math.nextafter(tail_s, -math.inf), solution.value_s)
        elif isinstance(solution, PrunedPartition):
            self._unwanted_s = min(self._unwanted_s, solution.lower_bound_s + low_s)
        self._offer(math.nextafter(cap_s, math.inf), high_s, pipeline_s)

    def _offer(self, low_s: float, high_s: float, pipeline_s: float) -> None:
        """Open an interval, unless it is empty."""
        if low_s <= high_s < math.inf:
            heappush(self._open, (pipeline_s + low_s, low_s, high_s, pipeline_s))


def without_limits(problem: PlacementProblem) -> Placed | None:
    """Return a good placement that ignores memory, to tell by how much a candidate fails.

    Args:
        problem: One in which nothing fits.
    """
    posed = problem.problem
    roomy = replace(posed, options=replace(posed.options, memory_row=NO_LIMIT))
    free = replace(roomy, tables=replace(roomy.tables, latest_start=NO_LIMIT))
    for unlimited in (roomy, free):
        solution = solve(unlimited, max_evaluations=EVALUATIONS_TO_TELL)
        if isinstance(solution, PartitionSolution):
            tail_s = problem.tail_s(solution.bounds, solution.options)
            return Placed(
                value_s=solution.value_s + tail_s,
                tail_s=tail_s,
                bounds=solution.bounds,
                options=solution.options,
            )
    return None
