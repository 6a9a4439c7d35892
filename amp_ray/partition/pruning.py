"""Lower bounds on the cost of any partition that uses an option.

Options whose bound is above the best known cost can be dropped.
"""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from amp_ray.partition.arrays import FloatArray, IntArray
from amp_ray.partition.exact import solve
from amp_ray.partition.kernels import least_values
from amp_ray.partition.layout import laid_out
from amp_ray.partition.problem import PartitionProblem, PartitionSolution
from amp_ray.partition.programme import StepEndArrays
from amp_ray.partition.step_end import StepEndProblem

MANY_MICRO_BATCHES: Final = 1_000_000
"""So many that the bottleneck can be read off the value of a partition."""

ROUNDING: Final = 1e-9
"""Share by which sums may differ, added up in another order."""


def option_values(problem: StepEndProblem, limit_s: float) -> FloatArray:
    """Bound what partitions with each option cost.

    Sum, bottleneck and step end are bounded one by one, so that a partition may cost more than
    the bounds of all of its options.

    Args:
        problem: The problem.
        limit_s: Only partitions that cost no more, step end included, are of interest.

    Returns:
        Shape ``(E,)``. No partition of interest with the option costs less; infinite where there
        is none.
    """
    order = problem.problem.options.order
    least_s = np.array([term.least_s for term in problem.terms])
    limits_s = _limits_s(problem.problem, limit_s * (1 + ROUNDING) - float(least_s.sum()))
    values = np.full(len(order), np.inf)
    if limits_s is not None:
        values[order] = least_values(
            limits_s,
            problem.problem.num_micro_batches - 1,
            laid_out(problem.problem),
            StepEndArrays(
                weight_prefix=np.array([term.weight_prefix for term in problem.terms]),
                s_per_weight=np.array([term.s_per_weight[order] for term in problem.terms]),
                fixed_s=np.array([term.fixed_s[order] for term in problem.terms]),
                least_s=least_s,
            ),
        )
    values[values > limit_s * (1 + ROUNDING)] = np.inf
    return values * (1 - ROUNDING)


def among_options(problem: StepEndProblem, chosen: IntArray) -> StepEndProblem | None:
    """Return a problem with some of its options.

    Returns:
        The problem, in which option ``e`` is ``chosen[e]``; None where no option leads to an end.
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


def _limits_s(problem: PartitionProblem, limit_s: float) -> FloatArray | None:
    """Return bottlenecks of partitions up to a limit for `least_values`; None without any."""
    num_later = problem.num_micro_batches - 1
    cheapest = solve(replace(problem, num_micro_batches=1))
    if not isinstance(cheapest, PartitionSolution) or cheapest.value_s > limit_s:
        return None
    highest_s = (limit_s - cheapest.value_s) / num_later if num_later else math.inf
    if limit_s == math.inf or not num_later:
        return np.array([0.0, highest_s, limit_s])
    evened = solve(replace(problem, num_micro_batches=MANY_MICRO_BATCHES))
    assert isinstance(evened, PartitionSolution)
    lowest_s = max(0.0, (evened.value_s - limit_s) / (MANY_MICRO_BATCHES - 1))
    return np.array([lowest_s, highest_s, min(highest_s, limit_s)])
