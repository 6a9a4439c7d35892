"""Partitions with a step end after the pipeline, such as gradient sync and optimizer step.

Each term of the step end takes as long as in its slowest stage, so a partition costs::

    objective + the largest first term of any stage + the largest second term + ...

A cap on a term limits where a stage may start, as memory does. So `solve` can find the best
partition under one cap per term, and the search runs over boxes of such caps. The solution at the
top of a box is the best of all its partitions whose terms are each at least as long as the
solution's. Every other partition in the box has a shorter term, so each term opens one smaller box.
`option_values` returns a lower bound on the partitions with each option, so that a caller with a
good partition can drop options before the search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop
from itertools import pairwise
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.caps import BestFirst
from amp_ray.partition.exact import Chain, solve
from amp_ray.partition.kernels import (
    Programme,
    ProgrammeViews,
    ScratchViews,
    StepEndViews,
    cheapest_chain,
    fill_least_values,
)
from amp_ray.partition.layout import laid_out, limited, scratch_for, views_of
from amp_ray.partition.problem import (
    InfeasiblePartition,
    PartitionProblem,
    PartitionSolution,
    PrunedPartition,
)
from amp_ray.partition.rows import distinct_rows
from amp_ray.partition.tables import frozen_times

NUM_CAPS: Final = 16
"""Number of caps to try for a lower bound on the bottleneck of all partitions."""

ROUNDING: Final = 1e-9
"""Relative difference between sums of the same terms in another order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEndTerm:
    """Seconds of one term of the step end: affine in the weight of a stage's layers.

    Raises:
        ValueError: If a value is negative or not finite, or the weights decrease.
    """

    weight_prefix: FloatArray  # shape ``(L + 1,)``. Prefix sums of the layers' weights.
    s_per_weight: FloatArray  # shape ``(E,)``. By option.
    fixed_s: FloatArray  # shape ``(E,)``. By option, independent of its layers.

    def __post_init__(self) -> None:
        """Check and freeze."""
        for name in ("weight_prefix", "s_per_weight", "fixed_s"):
            object.__setattr__(self, name, frozen_times(name, getattr(self, name), 1))
        if (np.diff(self.weight_prefix) < 0).any():
            msg = f"weight_prefix is {self.weight_prefix}, expected not descending"
            raise ValueError(msg)

    def stage_s(self, start: int, end: int, option: int) -> float:
        """Return the term of one stage."""
        weight = self.weight_prefix[end] - self.weight_prefix[start]
        return float(self.fixed_s[option] + self.s_per_weight[option] * weight)

    @cached_property
    def least_s(self) -> float:
        """Lower bound on the term of any partition: some stage holds the heaviest layer."""
        heaviest = float(np.diff(self.weight_prefix).max())
        return float((self.fixed_s + self.s_per_weight * heaviest).min())

    @cached_property
    def kinds(self) -> tuple[FloatArray, IntArray]:
        """Distinct (fixed_s, s_per_weight), shape ``(C, 2)``, and the index of each option's."""
        ranks = [
            np.unique(column, return_inverse=True)[1].reshape(-1)
            for column in (self.fixed_s, self.s_per_weight)
        ]
        first, kind = distinct_rows(ranks)
        return np.stack([self.fixed_s[first], self.s_per_weight[first]], axis=1), kind

    def earliest_starts(self, cap_s: float) -> IntArray:
        """Return, per kind and end, the smallest start with a term of at most ``cap_s``."""
        kinds, _ = self.kinds
        weight = self.weight_prefix[None, :] - self.weight_prefix[:, None]  # [start, end]
        over = kinds[:, 0, None, None] + kinds[:, 1, None, None] * weight > cap_s
        ends = np.arange(len(weight))
        starts: IntArray = np.minimum(over.sum(axis=1), ends)
        return starts


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEndProblem:
    """A partition problem with a step end."""

    problem: PartitionProblem
    terms: tuple[StepEndTerm, ...]  # any number

    def terms_s(self, bounds: Sequence[int], options: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of each term of a partition."""
        stages = list(zip(pairwise(bounds), options, strict=True))
        return tuple(
            max(term.stage_s(start, end, option) for (start, end), option in stages)
            for term in self.terms
        )

    def capped(self, caps_s: Sequence[float]) -> Programme:
        """Return the programme of `uncapped` with only the stages whose terms obey the caps."""
        starts = self.uncapped.tables.earliest_start
        for kind, term, cap_s in zip(self._limits[0], self.terms, caps_s, strict=True):
            if cap_s < math.inf:
                starts = np.maximum(starts, term.earliest_starts(cap_s)[kind])
        return limited(self.programme, starts)

    @property
    def uncapped(self) -> PartitionProblem:
        """The problem without step end, with separate memory rows for each kind of term."""
        return self._limits[1]

    @cached_property
    def programme(self) -> Programme:
        """The programme of `uncapped`."""
        return laid_out(self.uncapped)

    @cached_property
    def _limits(self) -> tuple[list[IntArray], PartitionProblem]:
        """The kind of each term by memory row, and the problem with these memory rows."""
        tables, options = self.problem.tables, self.problem.options
        columns = [options.memory_row, *(term.kinds[1] for term in self.terms)]
        distinct, row = distinct_rows(columns)
        memory_row, *kinds = (column[distinct] for column in columns)
        nowhere = np.zeros((1, tables.num_layers + 1), np.int64)
        starts = np.vstack([tables.earliest_start, nowhere])[memory_row]
        uncapped = replace(
            self.problem,
            tables=replace(tables, earliest_start=starts),
            options=replace(options, memory_row=row),
        )
        return kinds, uncapped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEndSolution:
    """The best partition with a step end."""

    bounds: tuple[int, ...]  # as in `PartitionSolution`
    options: tuple[int, ...]  # as in `PartitionSolution`
    value_s: float
    terms_s: tuple[float, ...]
    lower_bound_s: float  # no partition costs less; equals ``value_s`` once proven
    num_solved: int  # number of solved boxes


Box = tuple[float, tuple[float, ...], tuple[float, ...], float]
"""Lower bound of the value, least terms, largest terms, lower bound of the pipeline."""


def solve_with_step_end(
    problem: StepEndProblem,
    *,
    upper_bound_s: float = math.inf,
    most_boxes: int | None = None,
    met: list[Chain] | None = None,
) -> StepEndSolution | InfeasiblePartition | PrunedPartition:
    """Find the partition with the smallest sum of objective and step end.

    Partitions that cost more than ``upper_bound_s`` are pruned. The search stops after
    ``most_boxes`` boxes, at least one, with the best partition so far and a valid lower bound;
    ``met`` receives all its partitions, with their values.

    Returns:
        The best partition; `InfeasiblePartition` if there is none; `PrunedPartition` if all cost
        more than ``upper_bound_s``.
    """
    limit_s = math.nextafter(upper_bound_s, math.inf)
    search = _BoxSearch(problem=problem, upper_bound_s=limit_s, met=met)
    search.run(math.inf if most_boxes is None else most_boxes)
    if search.best is not None and search.lower_bound_s <= upper_bound_s:
        bounds, options, terms_s = search.best
        return StepEndSolution(
            bounds=bounds,
            options=options,
            value_s=search.value_s,
            terms_s=terms_s,
            lower_bound_s=search.lower_bound_s,
            num_solved=search.num_solved,
        )
    if search.best is None and search.infeasible and search.unwanted_s == math.inf:
        return search.infeasible
    return PrunedPartition(lower_bound_s=search.lower_bound_s, num_evaluations=search.num_solved)


@dataclass(slots=True, kw_only=True)
class _BoxSearch(BestFirst[Box]):
    problem: StepEndProblem
    met: list[Chain] | None
    best: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]] | None = None
    infeasible: InfeasiblePartition | None = None
    num_solved: int = 0

    def run(self, most_boxes: float) -> None:
        """Solve boxes until the best partition is proven."""
        least = tuple(term.least_s for term in self.problem.terms)
        self._offer(least, (math.inf,) * len(least), 0.0)
        while self.open and self.num_solved < most_boxes and self.open[0][0] < self.limit_s:
            self._solve(heappop(self.open))

    def _solve(self, box: Box) -> None:
        """Solve one box at its top, and open the parts that remain."""
        self.num_solved += 1
        _, low_s, high_s, pipeline_s = box
        spare_s = self.limit_s - pipeline_s - sum(low_s)
        caps_s = tuple(min(high, low + spare_s) for low, high in zip(low_s, high_s, strict=True))
        limit_s = self.limit_s - sum(low_s)
        met: list[Chain] = []
        solution = solve(
            self.problem.uncapped,
            programme=self.problem.capped(caps_s),
            upper_bound_s=limit_s,
            met=None if self.met is None else met,
        )
        self._note(met)
        if caps_s != high_s:  # a longer term alone exceeds the limit
            self.unwanted_s = min(self.unwanted_s, self.limit_s)
        if isinstance(solution, InfeasiblePartition):
            self.infeasible = self.infeasible or solution
            return
        if isinstance(solution, PrunedPartition):
            self.unwanted_s = min(self.unwanted_s, solution.lower_bound_s + sum(low_s))
            return
        terms_s = self.problem.terms_s(solution.bounds, solution.options)
        value_s = solution.value_s + sum(terms_s)
        if value_s < self.value_s:
            self.value_s = value_s
            self.best = (solution.bounds, solution.options, terms_s)
        self._split(low_s, caps_s, terms_s, solution)

    def _note(self, chains: Sequence[Chain]) -> None:
        """Record partitions, with their step end, if the caller wants them."""
        if self.met is not None:
            self.met += [
                (value_s + sum(self.problem.terms_s(bounds, options)), bounds, options)
                for value_s, bounds, options in chains
            ]

    def _split(
        self,
        low_s: tuple[float, ...],
        high_s: tuple[float, ...],
        terms_s: tuple[float, ...],
        solution: PartitionSolution,
    ) -> None:
        """Open the parts of a box in which one term is shorter than that of its solution."""
        for index, term_s in enumerate(terms_s):
            below_s = math.nextafter(term_s, -math.inf)
            low = (*(max(pair) for pair in zip(terms_s, low_s, strict=True)),)[:index]
            low += low_s[index:]
            high = (*high_s[:index], min(below_s, high_s[index]), *high_s[index + 1 :])
            self._offer(low, high, solution.value_s)

    def _offer(
        self, low_s: tuple[float, ...], high_s: tuple[float, ...], pipeline_s: float
    ) -> None:
        if all(low <= high for low, high in zip(low_s, high_s, strict=True)):
            self.offer((pipeline_s + sum(low_s), low_s, high_s, pipeline_s))


def option_values(problem: StepEndProblem, limit_s: float) -> FloatArray:
    """Return a lower bound on the cost of partitions with each option.

    Sum, bottleneck and step end are bounded separately, so a partition may cost more than the
    bounds of all of its options. Partitions above ``limit_s``, step end included, are ignored. The
    bounds have shape ``(E,)``; infinite if no partition within the limit uses the option.
    """
    order = problem.uncapped.options.order
    least_s = np.array([term.least_s for term in problem.terms])
    programme, num_later = problem.programme, problem.problem.num_micro_batches - 1
    views = views_of(programme, scratch_for(programme))
    left_s = limit_s * (1 + ROUNDING) - float(least_s.sum())
    limits_s = _limits_s(views, num_later, left_s)
    values = np.full(len(order), np.inf)
    if limits_s is not None:
        terms = StepEndViews(
            weight_prefix=np.array([term.weight_prefix for term in problem.terms]),
            s_per_weight=np.array([term.s_per_weight[order] for term in problem.terms]),
            fixed_s=np.array([term.fixed_s[order] for term in problem.terms]),
            least_s=least_s,
        )
        behind_s = np.full((programme.is_final.size, programme.time_prefix_s.shape[1]), np.inf)
        of_options = np.full(len(order), np.inf)
        fill_least_values(limits_s, num_later, *views, terms, behind_s, of_options)
        values[order] = of_options
    values[values > limit_s * (1 + ROUNDING)] = np.inf
    return values * (1 - ROUNDING)


def among_options(problem: StepEndProblem, chosen: IntArray) -> StepEndProblem | None:
    """Return the problem with a subset of its options.

    Returns:
        The problem with option ``e`` being ``chosen[e]``; None if no option leads to a final state.
    """
    partition = problem.problem
    options = partition.options
    ends = set(options.to_state[chosen].tolist())
    final_states = tuple(state for state in partition.final_states if state in ends)
    if not final_states:
        return None
    names = options.__dataclass_fields__
    fewer = replace(options, **{name: getattr(options, name)[chosen] for name in names})
    terms = tuple(
        replace(term, s_per_weight=term.s_per_weight[chosen], fixed_s=term.fixed_s[chosen])
        for term in problem.terms
    )
    return StepEndProblem(
        problem=replace(partition, options=fewer, final_states=final_states), terms=terms
    )


def _limits_s(
    views: tuple[ProgrammeViews, ScratchViews], num_later: int, limit_s: float
) -> FloatArray | None:
    """Return the ``limits_s`` of `fill_least_values`; None if no chain is within the limit."""
    sum_s, _, num_stages, _ = cheapest_chain(math.inf, *views)
    if not num_stages or sum_s > limit_s:
        return None
    if limit_s == math.inf or not num_later:
        return np.array([0.0, math.inf, limit_s])
    highest_s = (limit_s - sum_s) / num_later
    low_s, high_s = 0.0, highest_s
    for _ in range(NUM_CAPS):
        cap_s = low_s + (high_s - low_s) / 2
        _, slowest_s, num_stages, next_cap_s = cheapest_chain(cap_s, *views)
        if num_stages:
            high_s = slowest_s
        else:
            low_s = min(next_cap_s, high_s)
    return np.array([low_s, highest_s, limit_s - num_later * low_s])
