"""Find the best groups and cuts by branch and bound.

The cost of a cut depends on the groups on both sides. A first problem charges every cut its lower
bound, which gives lower bounds for plans with each group. Only groups that may belong to a better
plan than the best so far are solved again, with the exact costs of their pairs.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition import InfeasiblePartition, PrunedPartition
from amp_ray.partition.exact import Chain
from amp_ray.partition.step_end import (
    StepEndSolution,
    among_options,
    option_values,
    solve_with_step_end,
)
from amp_ray.search.stage_groups.groups_problem import GroupsProblem
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class BestGroups:
    """The best plan of a problem so far."""

    lower_bound_s: float  # on the objective of any plan, without host time
    value_s: float = math.inf  # the objective of the plan; infinite without one
    strategy: Strategy | None = None  # the plan; None if there is none below the upper bound
    chosen: tuple[int, ...] = ()  # its choices, from the first stage
    # Further plans of the search, and their objectives
    other_plans: tuple[tuple[float, Strategy], ...] = ()


def best_groups(problem: GroupsProblem, *, upper_bound_s: float) -> BestGroups:
    """Find the best plan.

    The first problem ignores neighbours, so it gives a lower bound for plans with each group. The
    groups with the smallest bounds are solved with exact cuts, which gives a good plan; then all
    groups whose bound is below the cost of that plan.

    Args:
        problem: Not joined.
        upper_bound_s: Plans that cost more are pruned.

    Returns:
        The plan; if all are pruned, a lower bound, which may be as low as the upper bound.
    """
    relaxed = solve_with_step_end(
        problem.problem,
        upper_bound_s=upper_bound_s,
        most_boxes=problem.effort.max_relaxed_boxes,
    )
    if isinstance(relaxed, InfeasiblePartition):
        return BestGroups(lower_bound_s=math.inf)
    if isinstance(relaxed, PrunedPartition):
        return BestGroups(lower_bound_s=relaxed.lower_bound_s)
    search = _Search(
        problem=problem,
        relaxed=relaxed,
        upper_bound_s=upper_bound_s,
        bound_s=relaxed.lower_bound_s,
        best=BestGroups(lower_bound_s=relaxed.lower_bound_s),
    )
    search.run()
    return search.best


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best plan so far, and a lower bound of all plans."""

    problem: GroupsProblem
    relaxed: StepEndSolution
    upper_bound_s: float  # plans that cost more are pruned
    bound_s: float  # no plan costs less
    best: BestGroups  # the best plan so far

    def run(self) -> None:
        """Solve joined problems: first few groups for a good plan, then all that may be better."""
        effort, choices = self.problem.effort, self.problem.choices
        self._join(np.unique(self.problem.steps.choice[list(self.relaxed.options)]))
        values = plan_values(self.problem, self._known_s())
        if self.bound_s < self._known_s() and not choices.graph.is_small:
            is_aligned = choices.graph.aligned[choices.edge]
            aligned = np.where(is_aligned, values, math.inf)
            most = effort.max_neighbours
            limit_s = self._known_s()
            self._join(cheapest_choices(self.problem, aligned, limit_s=limit_s, most=most)[0])
        for most in (effort.few_neighbours, effort.max_neighbours):
            limit_s = self._known_s()
            if self.bound_s >= limit_s:
                break
            chosen, left_s = cheapest_choices(self.problem, values, limit_s=limit_s, most=most)
            proven_s = self._join(chosen)
            self.bound_s = max(self.bound_s, min(left_s, proven_s))
        self.best = replace(self.best, lower_bound_s=min(self.bound_s, self.best.value_s))

    def _known_s(self) -> float:
        """Return the cost above which plans are pruned."""
        return min(self.upper_bound_s, self.best.value_s)

    def _join(self, chosen: IntArray) -> float:
        """Solve for some choices; keep a better plan, and return their lower bound."""
        if not len(chosen):
            return self._known_s()
        joined = replace(self.problem, choices=self.problem.choices.among(chosen), joined=True)
        pairs, kept = joined.problem, np.arange(len(joined.steps.choice))
        if len(kept) > self.problem.effort.few_neighbours:
            kept = np.flatnonzero(option_values(pairs, self._known_s()) < math.inf)
            fewer = among_options(pairs, kept)
            if fewer is None:
                return self._known_s()
            pairs = fewer
        met: list[Chain] = []
        solution = solve_with_step_end(
            pairs,
            upper_bound_s=self._known_s(),
            most_boxes=self.problem.effort.max_boxes,
            met=met,
        )
        other_plans = *self.best.other_plans, *plans_of(joined, met, kept)
        self.best = replace(self.best, other_plans=other_plans)
        if not isinstance(solution, StepEndSolution):
            return self._known_s()
        if solution.value_s < self.best.value_s:
            options = tuple(kept[list(solution.options)].tolist())
            self.best = BestGroups(
                strategy=joined.strategy(solution.bounds, options),
                chosen=tuple(chosen[list(joined.chosen(options))].tolist()),
                value_s=solution.value_s,
                lower_bound_s=self.relaxed.lower_bound_s,
                other_plans=other_plans,
            )
        return solution.lower_bound_s


def plans_of(
    joined: GroupsProblem, met: Iterable[Chain], kept: IntArray
) -> Iterator[tuple[float, Strategy]]:
    """Yield plans of a solver's chains with their objectives, smallest first.

    Args:
        joined: The problem.
        met: Chains of the solver.
        kept: Option of the problem for each option of the solver.
    """
    for value_s, bounds, options in islice(sorted(set(met)), joined.effort.max_met_plans):
        yield value_s, joined.strategy(bounds, tuple(kept[list(options)].tolist()))


def plan_values(problem: GroupsProblem, limit_s: float) -> FloatArray:
    """Return a lower bound of the cost of plans with each choice; infinite above the limit.

    Args:
        problem: Not joined.
        limit_s: Plans that cost more are pruned.
    """
    values = np.full(len(problem.choices.edge), np.inf)
    np.minimum.at(values, problem.steps.choice, option_values(problem.problem, limit_s))
    return values


def cheapest_choices(
    problem: GroupsProblem, values: FloatArray, *, limit_s: float, most: int
) -> tuple[IntArray, float]:
    """Return the choices with the smallest values, and a lower bound of plans with others.

    Args:
        problem: Not joined.
        values: Result of `plan_values`.
        limit_s: Plans that cost more are pruned.
        most: Pairs of neighbours.
    """
    order = np.argsort(values, kind="stable")
    order = order[values[order] <= limit_s]
    positions = problem.limits.num_positions if problem.counted else 1
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if problem.choices.among(order[:middle]).num_neighbours * positions <= most:
            low = middle
        else:
            high = middle - 1
    left_s = float(values[order[low]]) if low < len(order) else math.inf
    return np.sort(order[:low]), left_s
