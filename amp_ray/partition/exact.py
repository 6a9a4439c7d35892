"""The exact solver: a search over caps on the slowest stage, around a dynamic programme.

Let ``S(c)`` be the smallest sum of a partition whose bottleneck is at most ``c``. It never grows
with ``c``, so every partition whose bottleneck lies in ``[low, high]`` costs at least
``S(high) + (m - 1) * low``. The search keeps the open intervals of bottlenecks with these lower
bounds. Evaluating a cap gives ``S(cap)`` and a partition with some bottleneck ``M``. This settles
all of ``[M, cap]``, and gives the interval below a tighter sum. A cap without a partition settles
all bottlenecks below the next cap that admits more stages.
The search ends when no interval can hold a better partition. There is no tolerance: bounds move
by single floating-point numbers, and all sums use monotone operations, so the answer is the true
minimum of `problem.objective`, rounding included.

Evaluations alternate between the top of the most promising interval and its middle. The top raises
the bound most once the search has the best partition; the middle finds better partitions and
infeasible caps. A search that evaluates only tops can need thousands of evaluations, one that
evaluates only middles hundreds.

References:
    The objective is that of Li et al., AMP, arXiv:2210.07297. Li et al., TeraPipe,
    arXiv:2102.07988, also put a bound on the slowest slice around a dynamic programme; they try
    bounds in ascending order, at fixed distances.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from amp_ray.partition.caps import CapSearch
from amp_ray.partition.kernels import (
    Programme,
    ProgrammeViews,
    Scratch,
    ScratchViews,
    cheapest_chain,
)
from amp_ray.partition.layout import laid_out, scratch_for, views_of
from amp_ray.partition.problem import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionProblem,
    PartitionSolution,
    PrunedPartition,
)

Chain = tuple[float, tuple[int, ...], tuple[int, ...]]
"""A partition: its value, bounds and options."""


def solve(
    problem: PartitionProblem,
    *,
    upper_bound_s: float = math.inf,
    max_evaluations: int | None = None,
    met: list[Chain] | None = None,
    programme: Programme | None = None,
) -> PartitionSolution | InfeasiblePartition | PrunedPartition:
    """Find the partition with the smallest objective.

    Ties go to the smallest bottleneck. Among equal rounded sums they then go, from the last stage
    back, to the lowest final state, the earliest start and the first option in canonical order
    (source state, time row, bottleneck row, cut row, memory row, overhead, fixed cost). So the
    result depends neither on the order of the options nor on ``upper_bound_s``.

    Args:
        problem: Costs, options and micro-batches.
        upper_bound_s: Partitions that cost more are pruned.
        max_evaluations: Stop after this many caps, with the best partition so far and a valid
            lower bound. At least one is evaluated.
        met: Receives every partition of the search: each is the cheapest under some cap.
        programme: Arrays of the problem, if the caller has them; their memory limits replace the
            problem's.

    Returns:
        The best partition; `InfeasiblePartition` with a reason if there is none;
        `PrunedPartition` if all cost more than ``upper_bound_s``.

    Example:
        >>> from amp_ray.partition.problem import chain_problem
        >>> from amp_ray.partition.tables import StageTables
        >>> tables = StageTables(time_prefix_s=np.array([[0.0, 1.0, 3.0, 6.0]]))
        >>> solution = solve(chain_problem(tables, 4, time_row=np.array([0, 0])))
        >>> solution.bounds, solution.value_s
        ((0, 2, 3), 15.0)
    """
    _check_limits(upper_bound_s, max_evaluations)
    order, programme = problem.options.order, programme or laid_out(problem)
    chains: list[Chain] = []
    search = _Search(
        met=None if met is None else chains,
        programme=programme,
        scratch=scratch_for(programme),
        num_later=problem.num_micro_batches - 1,
        upper_bound_s=upper_bound_s,
    )
    search.run(math.inf if max_evaluations is None else max_evaluations)
    if met is not None:
        met += [
            (value_s, (*starts, problem.num_layers), tuple(order[list(options)].tolist()))
            for value_s, starts, options in chains
        ]
    if not search.starts:
        return _why_infeasible(problem, programme)
    lower_bound_s = search.lower_bound_s
    if upper_bound_s < lower_bound_s:
        return PrunedPartition(lower_bound_s=lower_bound_s, num_evaluations=search.num_evaluations)
    return PartitionSolution(
        bounds=(*search.starts, problem.num_layers),
        options=tuple(order[search.options].tolist()),
        value_s=search.value_s,
        slowest_s=search.slowest_s,
        lower_bound_s=lower_bound_s,
        num_evaluations=search.num_evaluations,
    )


def best_chain(programme: Programme, num_micro_batches: int) -> tuple[int, ...] | None:
    """Return the bounds of the best partition of a programme, as `solve` does; None without one."""
    search = _Search(
        met=None,
        programme=programme,
        scratch=scratch_for(programme),
        num_later=num_micro_batches - 1,
    )
    search.run(math.inf)
    num_layers = programme.time_prefix_s.shape[1] - 1
    return (*search.starts, num_layers) if search.starts else None


@dataclass(slots=True, kw_only=True)
class _Search(CapSearch):
    programme: Programme  # the problem, laid out
    scratch: Scratch
    # Every chain so far, with options in canonical order; None if the caller needs none
    met: list[Chain] | None
    starts: list[int] = field(default_factory=list)  # first layers of the best chain's stages
    options: list[int] = field(default_factory=list)  # their options, in canonical order
    views: tuple[ProgrammeViews, ScratchViews] = field(init=False)

    def __post_init__(self) -> None:
        """Lay the arrays out for the kernel."""
        self.views = views_of(self.programme, self.scratch)

    def cheapest(self, cap_s: float) -> tuple[float, float, int, float]:
        chain: tuple[float, float, int, float] = cheapest_chain(cap_s, *self.views)
        sum_s, slowest_s, num_stages, _ = chain
        if num_stages and self.met is not None:
            value_s = sum_s + self.num_later * slowest_s
            starts, options = self._path(num_stages)
            self.met.append((value_s, tuple(starts), tuple(options)))
        return chain

    def keep(self, num_stages: int) -> None:
        """Read the chain from the kernel's arrays."""
        self.starts, self.options = self._path(num_stages)

    def _path(self, num_stages: int) -> tuple[list[int], list[int]]:
        """Return starts and options of the last evaluation's chain, first stage first."""
        places = slice(num_stages - 1, None, -1)
        return self.scratch.path_start[places].tolist(), self.scratch.path_option[places].tolist()


def _check_limits(upper_bound_s: float, max_evaluations: int | None) -> None:
    """Raise if a limit is NaN or below 1."""
    if math.isnan(upper_bound_s):
        msg = "upper_bound_s is not a number: leave it out where there is none"
        raise ValueError(msg)
    if max_evaluations is not None and max_evaluations < 1:
        msg = f"max_evaluations is {max_evaluations}, expected at least 1"
        raise ValueError(msg)


def _why_infeasible(problem: PartitionProblem, programme: Programme) -> InfeasiblePartition:
    """Return the reason why no partition exists under any cap."""
    num_stages = int(programme.fewest[list(problem.final_states)].min())
    num_layers = problem.num_layers
    if num_stages >= problem.options.num_states:
        return InfeasiblePartition(
            reason=InfeasibleReason.NO_PATH,
            detail=f"no path of options leads from state 0 to one of {problem.final_states}",
        )
    if num_stages > num_layers:
        return InfeasiblePartition(
            reason=InfeasibleReason.TOO_FEW_LAYERS,
            detail=f"{num_stages} stages or more cannot share {num_layers} layers",
        )
    num_needed = len(set(problem.tables.latest_start.tolist()) - {-1})
    if num_stages > num_needed:
        return InfeasiblePartition(
            reason=InfeasibleReason.NEEDED_LAYERS,
            detail=f"{num_stages} stages or more cannot share {num_needed} layers that each needs",
        )
    return InfeasiblePartition(
        reason=InfeasibleReason.MEMORY, detail=_memory_detail(problem, programme)
    )


def _memory_detail(problem: PartitionProblem, programme: Programme) -> str:
    """Name a layer that fits into no stage, or say that no combination of stages fits."""
    rows = np.unique(programme.option_memory)
    ends = np.arange(1, problem.num_layers + 1)
    homeless = np.flatnonzero((programme.earliest_start[rows, 1:] >= ends).all(axis=0))
    if homeless.size:
        return f"layer {homeless[0]} fits no option's memory, not even alone"
    return f"no stages of the options hold all {problem.num_layers} layers within their memory"
