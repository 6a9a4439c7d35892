"""Which options can be part of a partition that is good enough: the others need not be posed."""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from amp_ray.partition.arrays import BoolArray, FloatArray, IntArray
from amp_ray.partition.exact import solve
from amp_ray.partition.layout import canonical_order, laid_out
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.programme import TailArrays
from amp_ray.partition.solution import PartitionSolution
from amp_ray.partition.tails import TailedProblem
from amp_ray.partition.useful.kernels import mark_useful

MANY_MICRO_BATCHES: Final = 1_000_000
"""With so many, the value of a partition tells its slowest beat."""

ROUNDING: Final = 1e-9
"""Share by which sums may differ, added up in another order."""


def useful_options(problem: TailedProblem, limit_s: float) -> BoolArray:
    """Mark the options that may be part of a partition within a limit.

    Every partition that costs no more consists of marked options. Not every marked option is
    part of one: sums, slowest beat and tails are bounded one by one.

    Args:
        problem: The problem.
        limit_s: Of objective and tails.

    Returns:
        Shape ``(E,)``.
    """
    order = canonical_order(problem.problem.options)
    num_later = problem.problem.num_micro_batches - 1
    limit_s *= 1 + ROUNDING
    least_s = np.array([tail.least_s for tail in problem.tails])
    beats_s = _beats_s(problem.problem, limit_s - float(least_s.sum()))
    useful = np.zeros(len(order), np.bool_)
    if beats_s is not None:
        useful[order] = mark_useful(
            beats_s,
            limit_s,
            num_later,
            laid_out(problem.problem, order),
            TailArrays(
                weight_prefix=np.array([tail.weight_prefix for tail in problem.tails]),
                s_per_weight=np.array([tail.s_per_weight[order] for tail in problem.tails]),
                fixed_s=np.array([tail.fixed_s[order] for tail in problem.tails]),
                least_s=least_s,
            ),
        )
    return useful


def among_options(problem: TailedProblem, chosen: IntArray) -> TailedProblem | None:
    """Return a problem with some of its options.

    Args:
        problem: The problem.
        chosen: Their indices.

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
    tails = tuple(
        replace(tail, s_per_weight=tail.s_per_weight[chosen], fixed_s=tail.fixed_s[chosen])
        for tail in problem.tails
    )
    return TailedProblem(
        problem=replace(partition, options=fewer, final_states=final_states), tails=tails
    )


def _beats_s(problem: PartitionProblem, limit_s: float) -> FloatArray | None:
    """Return the slowest beats that partitions up to a limit can have; None if there are none."""
    num_later = problem.num_micro_batches - 1
    cheapest, most = (
        solve(replace(problem, num_micro_batches=number)) for number in (1, MANY_MICRO_BATCHES)
    )
    if not isinstance(cheapest, PartitionSolution) or not isinstance(most, PartitionSolution):
        return None
    spare_s = limit_s - cheapest.value_s
    highest_s = spare_s / num_later if num_later else math.inf
    lowest_s = max(0.0, (most.value_s - limit_s) / (MANY_MICRO_BATCHES - 1))
    return None if spare_s < 0 else np.array([lowest_s, highest_s])
