"""Move the cuts of a plan, and swap its replicas, as long as its simulated time falls."""

from collections.abc import Iterator
from itertools import combinations, islice, pairwise
from typing import Final

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.search.placement.chains import Chains
from amp_ray.search.ranking import speed
from amp_ray.spec.strategy import Strategy

MOST_STAGES_TRIED: Final = 4_000
"""Stages of all cuts that are simulated for one plan: to simulate one takes up to 20 us."""


def climb(
    cost_model: CostModel, start: Estimate, *, most_stages: int = MOST_STAGES_TRIED
) -> Estimate:
    """Shift neighbouring cuts together by one layer until no shift makes the plan faster.

    Args:
        cost_model: Of the experiment.
        start: Where it cannot run, it is left as it is.
        most_stages: Of all cuts that are simulated.

    Returns:
        An estimate on the same devices, never slower.
    """
    if not start.feasible or cost_model.experiment.traits.partition == "even-blocks":
        return start
    costs = cost_model.stage_costs(PlacedStages.of_strategy(start.strategy))
    best, seen = start, {start.strategy.bounds}
    left = most_stages // start.strategy.pp
    while True:
        higher = best
        for bounds in _shifted(best.strategy.bounds):
            if bounds in seen:
                continue
            if not left:
                return higher
            left -= 1
            seen.add(bounds)
            found = cost_model.estimate_from(costs, start.strategy.with_bounds(bounds))
            if speed(found) < speed(higher):
                higher = found
        if higher is best:
            return best
        best = higher


def _shifted(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Give all bounds with a run of cuts moved by one layer; single cuts first."""
    num_cuts = len(bounds) - 2
    for length in range(1, num_cuts + 1):
        for first in range(1, num_cuts + 2 - length):
            for step in (-1, 1):
                moved = (bound + step for bound in bounds[first : first + length])
                shifted = (*bounds[:first], *moved, *bounds[first + length :])
                if all(start < end for start, end in pairwise(shifted)):
                    yield shifted


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
    tied = chains.cost_model.weights(candidate.options.tp).tied
    if not start.feasible or tied is None or 1 in (candidate.options.dp, candidate.pp):
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
    pp, dp = chains.candidate.pp, chains.candidate.options.dp
    grid = np.array(placement).reshape(pp, dp, -1)
    node = chains.cost_model.topology.node_of_device[grid[:, :, 0]]
    for stage in range(pp - 1, 0, -1):
        for one, other in combinations(range(dp), 2):
            if (node[stage:, one] != node[stage:, other]).any():
                swapped = grid.copy()
                swapped[stage:, [one, other]] = grid[stage:, [other, one]]
                yield tuple(swapped.ravel().tolist())
