"""Lower bounds on the cost of any partition that uses an option.

Options whose bound is above the best known cost can be dropped.
"""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.kernels import cheapest_chain, least_values
from amp_ray.partition.layout import scratch_for
from amp_ray.partition.programme import Programme, Scratch, StepEndArrays
from amp_ray.partition.step_end import StepEndProblem

NUM_CAPS: Final = 16
"""Caps that are tried to bound the bottleneck of all partitions from below."""

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
    order = problem.uncapped.options.order
    least_s = np.array([term.least_s for term in problem.terms])
    programme, num_later = problem.programme, problem.problem.num_micro_batches - 1
    scratch = scratch_for(programme)
    left_s = limit_s * (1 + ROUNDING) - float(least_s.sum())
    limits_s = _limits_s(programme, scratch, num_later, left_s)
    values = np.full(len(order), np.inf)
    if limits_s is not None:
        values[order] = least_values(
            limits_s,
            num_later,
            programme,
            scratch,
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


def _limits_s(
    programme: Programme, scratch: Scratch, num_later: int, limit_s: float
) -> FloatArray | None:
    """Return what `least_values` wants to know of chains up to a limit; None without any."""
    sum_s, _, num_stages, _ = cheapest_chain(math.inf, programme, scratch)
    if not num_stages or sum_s > limit_s:
        return None
    if limit_s == math.inf or not num_later:
        return np.array([0.0, math.inf, limit_s])
    highest_s = (limit_s - sum_s) / num_later
    low_s, high_s = 0.0, highest_s
    for _ in range(NUM_CAPS):
        cap_s = low_s + (high_s - low_s) / 2
        _, slowest_s, num_stages, next_cap_s = cheapest_chain(cap_s, programme, scratch)
        if num_stages:
            high_s = slowest_s
        else:
            low_s = min(next_cap_s, high_s)
    return np.array([low_s, highest_s, limit_s - num_later * low_s])
