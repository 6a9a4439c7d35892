"""Swap replicas of a plan, so that those which share a tied weight stand close to each other."""

from collections.abc import Iterator
from itertools import combinations, islice
from typing import Final

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.search.placement.chains import Chains
from amp_ray.spec.strategy import Strategy

MOST_SWAPS: Final = 200
"""Swaps that are tried for one plan: at most a fifth of a second."""


def swap_replicas(chains: Chains, start: Estimate) -> Estimate:
    """Swap replicas from a stage on as long as the plan gets faster.

    The search does not tell which replica of the first stage shares a tied weight with which one
    of the last. A swap changes that, and one cut.

    Args:
        chains: Of the candidate.
        start: Where it cannot run, or no weight is tied, it is left as it is.

    Returns:
        An estimate with the same cuts and the same devices in every stage, never slower.
    """
    candidate = chains.candidate
    tied = chains.cost_model.weights(candidate.tp).tied
    if not start.feasible or tied is None or 1 in (candidate.dp, candidate.pp):
        return start
    best, left = start, MOST_SWAPS
    improved = True
    while improved:
        improved = False
        for placement in islice(_swapped(chains, best.strategy.placement), left):
            left -= 1
            found = chains.estimate(Strategy.uniform(candidate, best.strategy.bounds, placement))
            if found.feasible and found.iteration_time_s < best.iteration_time_s:
                best, improved = found, True
                break
    return best


def _swapped(chains: Chains, placement: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Give the placement with two replicas swapped from some stage on, the last stage first."""
    pp, dp = chains.candidate.pp, chains.candidate.dp
    grid = np.array(placement).reshape(pp, dp, -1)
    node = chains.cost_model.topology.node_of_device[grid[:, :, 0]]
    for stage in range(pp - 1, 0, -1):
        for one, other in combinations(range(dp), 2):
            if (node[stage:, one] != node[stage:, other]).any():
                swapped = grid.copy()
                swapped[stage:, [one, other]] = grid[stage:, [other, one]]
                yield tuple(swapped.ravel().tolist())
