"""The best placement by closed form and step end: a search over caps on the step end.

Gradient sync and optimizer step take as long as in the stage where they take longest. Let ``P(c)``
be the shortest pipeline in which no stage's step end takes longer than ``c``. It never grows with
``c``, so a step end in ``[low, high]`` goes with a time of at least ``P(high) + low``. A solution
whose step end takes ``t`` settles all caps from ``t`` on; intervals whose bound is no better than
the best placement are dropped.
"""

import math
from dataclasses import dataclass, field
from heapq import heappop
from typing import Final, NamedTuple

from amp_ray.partition import InfeasiblePartition, PartitionSolution, PrunedPartition, solve
from amp_ray.partition.best_first import BestFirst
from amp_ray.search.placement.problem import PlacementProblem

MOST_WORK: Final = 60_000_000
"""Options times layers that their stages can end at, summed over caps on the bottleneck, after
which the best so far is kept: half a second."""

FEWEST_EVALUATIONS: Final = 3
"""Caps on the bottleneck that are tried for the first cap on the step end, whatever they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlacement:
    """One placement with its cuts."""

    value_s: float  # closed form of the pipeline, and the step end
    step_end_s: float  # the step end in it
    bounds: tuple[int, ...]
    options: tuple[int, ...]  # of the stages


class Interval(NamedTuple):
    """Step ends that are not settled yet, for one time of the tied weights."""

    bound_s: float  # no placement with such a step end costs less
    low_s: float
    high_s: float
    pipeline_s: float  # no pipeline with such a step end is shorter
    tied_s: float  # what the tied weights take at most, and are charged


@dataclass(slots=True, kw_only=True)
class StepEndSearch(BestFirst[Interval]):
    """Intervals of step ends that are still open, and the placements found."""

    problem: PlacementProblem
    most_work: float = MOST_WORK  # what may be spent, as in `MOST_WORK`
    found: list[FoundPlacement] = field(default_factory=list)

    def run(self) -> None:
        """Search until the best is proven or the work is done; without result if none fits."""
        least_s = self.problem.least_step_end_s
        *others_s, longest_s = self.problem.tied_times_s.tolist()
        self._open_interval(max(least_s, longest_s), math.inf, 0.0, longest_s)
        shortest_s = self._try(heappop(self.open), math.inf)
        for tied_s in others_s:
            self._open_interval(max(least_s, tied_s), math.inf, shortest_s, tied_s)
        at_top = True
        while self.open and self.open[0].bound_s < self.limit_s:
            if self.most_work <= 0 and self.found:
                return
            interval = heappop(self.open)
            high_s = min(interval.high_s, self.limit_s - interval.pipeline_s)
            middle_s = interval.low_s + (high_s - interval.low_s) / 2
            self._try(interval, high_s if at_top else middle_s)
            at_top = not at_top

    @property
    def lower_bound_s(self) -> float:
        """No placement has a smaller objective, where one is found or none was of interest."""
        return min(self.limit_s, self.open_s, self.unwanted_s)

    def _try(self, interval: Interval, cap_s: float) -> float:
        """Solve for one cap in an interval, open what it does not settle, and bound pipelines."""
        low_s, high_s, tied_s = interval.low_s, interval.high_s, interval.tied_s
        size = self.problem.work
        solution = solve(
            self.problem.problem,
            programme=self.problem.capped(cap_s, tied_s),
            upper_bound_s=max(self.limit_s - low_s, 0.0),
            max_evaluations=max(FEWEST_EVALUATIONS, math.ceil(self.most_work / size)),
        )
        self._open_interval(math.nextafter(cap_s, math.inf), high_s, interval.pipeline_s, tied_s)
        if isinstance(solution, InfeasiblePartition):
            self.most_work -= size
            return math.inf
        self.most_work -= solution.num_evaluations * size
        # What the interval knew still holds where the solver has stopped early.
        pipeline_s = max(solution.lower_bound_s, interval.pipeline_s)
        if isinstance(solution, PrunedPartition):
            self.unwanted_s = min(self.unwanted_s, pipeline_s + low_s)
            return pipeline_s
        placed = _found(self.problem, solution, tied_s)
        self.found.append(placed)
        self.value_s = min(self.value_s, placed.value_s)
        self._open_interval(low_s, math.nextafter(placed.step_end_s, -math.inf), pipeline_s, tied_s)
        # Settled only as far as the solver has proved it.
        self.unwanted_s = min(self.unwanted_s, pipeline_s + placed.step_end_s)
        return pipeline_s

    def _open_interval(self, low_s: float, high_s: float, pipeline_s: float, tied_s: float) -> None:
        """Open an interval, unless it is empty."""
        if low_s <= high_s and low_s < math.inf:
            self.offer(Interval(pipeline_s + low_s, low_s, high_s, pipeline_s, tied_s))


def _found(problem: PlacementProblem, solution: PartitionSolution, tied_s: float) -> FoundPlacement:
    """Cost a solution with its step end."""
    step_end_s = problem.step_end_s(solution.bounds, solution.options, tied_s)
    return FoundPlacement(
        value_s=solution.value_s + step_end_s,
        step_end_s=step_end_s,
        bounds=solution.bounds,
        options=solution.options,
    )
