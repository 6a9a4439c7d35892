"""The best groups and cuts: bounded without their neighbours, then joined where it may matter."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.cost.topology import IntArray
from amp_ray.partition.tails import TailedSolution, solve_tailed
from amp_ray.partition.useful import among_options, useful_options
from amp_ray.search.heterogeneous.problem import GroupsProblem
from amp_ray.spec.strategy import Strategy

FIRST_SLACK: Final = 0.02
"""Share by which the best plan is first supposed to cost more than its bound."""

MANY_STEPS: Final = 10_000
"""Options of a joined problem above which those that cannot be part of the best are left out."""

MOST_BOXES: Final = 60
"""Ranges of tails that are solved at once; then the bound is what is proven so far."""

WIDER: Final = 4.0
"""By which that share grows where no such plan was found."""

MOST_NEIGHBOURS: Final = 400_000
"""Pairs of neighbouring groups that are posed at once: a second or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestGroups:
    """The best plan that a problem has, as far as it is known.

    Args:
        strategy: The plan.
        value_s: Its objective, without what is the same for all.
        lower_bound_s: No plan has a smaller one.
    """

    strategy: Strategy
    value_s: float
    lower_bound_s: float


def best_groups(problem: GroupsProblem, *, upper_bound_s: float) -> BestGroups | None:
    """Find the best plan.

    Without its neighbours, a group's cuts are bounded. What can then be part of a plan within some
    limit is posed again with them; if the best of that is within the limit, there is none better,
    and else its own value is a limit that it is within.

    Args:
        problem: Not joined.
        upper_bound_s: Only plans that cost no more are of interest.

    Returns:
        The plan; None where there is none of interest.
    """
    relaxed = solve_tailed(problem.problem, upper_bound_s=upper_bound_s)
    if not isinstance(relaxed, TailedSolution):
        return None
    search = _Search(problem=problem, relaxed=relaxed, upper_bound_s=upper_bound_s)
    search.run()
    return search.best


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best plan so far, and what none undercuts.

    Attributes:
        problem: Not joined.
        relaxed: Its solution.
        upper_bound_s: Only plans that cost no more are of interest.
        best: The best plan so far.
        bound_s: No plan costs less.
    """

    problem: GroupsProblem
    relaxed: TailedSolution
    upper_bound_s: float
    best: BestGroups | None = None
    bound_s: float = 0.0

    def run(self) -> None:
        """Look at more and more plans, until the best is proven or there are too many."""
        self.bound_s = self.relaxed.lower_bound_s
        self._join(np.unique(self.problem.steps.choice[list(self.relaxed.options)]))
        slack = FIRST_SLACK
        while self.bound_s < self._known_s():
            limit_s = min(self._known_s(), self.bound_s * (1 + slack))
            chosen = self._useful(limit_s)
            if self._size(chosen) > MOST_NEIGHBOURS:
                break
            proven_s = self._join(chosen)
            self.bound_s = max(self.bound_s, min(limit_s, proven_s))
            if proven_s < min(limit_s, self._known_s()):
                break
            slack *= WIDER
        if self.best is not None:
            bound_s = min(self.bound_s, self.best.value_s)
            self.best = replace(self.best, lower_bound_s=bound_s)

    def _known_s(self) -> float:
        """Return the most that a plan of interest may cost."""
        return self.upper_bound_s if self.best is None else self.best.value_s

    def _useful(self, limit_s: float) -> IntArray:
        """Return the choices that may be part of a plan within a limit."""
        marked = useful_options(self.problem.problem, limit_s)
        return np.unique(self.problem.steps.choice[marked])

    def _size(self, chosen: IntArray) -> int:
        """Return how many neighbours would be posed."""
        positions = self.problem.limits.num_positions if self.problem.counted else 1
        return self.problem.choices.among(chosen).num_neighbours * positions

    def _join(self, chosen: IntArray) -> float:
        """Keep the best plan of some choices, if it is better; return what none undercuts."""
        if not len(chosen):
            return self._known_s()
        joined = replace(self.problem, choices=self.problem.choices.among(chosen), joined=True)
        posed, kept = joined.problem, np.arange(len(joined.steps.choice))
        if len(kept) > MANY_STEPS:
            kept = np.flatnonzero(useful_options(posed, self._known_s()))
            fewer = among_options(posed, kept)
            if fewer is None:
                return self._known_s()
            posed = fewer
        solution = solve_tailed(posed, upper_bound_s=self._known_s(), most_boxes=MOST_BOXES)
        if not isinstance(solution, TailedSolution):
            return self._known_s()
        if self.best is None or solution.value_s < self.best.value_s:
            options = tuple(kept[list(solution.options)].tolist())
            self.best = BestGroups(
                strategy=joined.strategy(solution.bounds, options),
                value_s=solution.value_s,
                lower_bound_s=self.relaxed.lower_bound_s,
            )
        return solution.lower_bound_s
