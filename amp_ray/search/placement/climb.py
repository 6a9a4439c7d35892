"""Move the cuts of a plan as long as its simulated time falls."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.search.ranking import speed
from amp_ray.spec.strategy import Strategy, candidate_of

MOST_STAGES_TRIED: Final = 4_000
"""Stages of all cuts that are simulated for one plan: to simulate one takes up to 20 us."""


def climb(cost_model: CostModel, start: Estimate) -> Estimate:
    """Shift neighbouring cuts together by one layer until no shift makes the plan faster.

    Args:
        cost_model: Of the experiment.
        start: A uniform strategy's; where it cannot run, it is left as it is.

    Returns:
        An estimate on the same devices, never slower.
    """
    if not start.feasible or cost_model.experiment.traits.partition == "even-blocks":
        return start
    candidate, placement = candidate_of(start.strategy), start.strategy.placement
    costs = cost_model.costs(candidate, placement)
    best, seen = start, {start.strategy.bounds}
    left = MOST_STAGES_TRIED // candidate.pp
    while True:
        higher = best
        for bounds in _shifted(best.strategy.bounds):
            if bounds in seen:
                continue
            if not left:
                return higher
            left -= 1
            seen.add(bounds)
            found = cost_model.estimate_from(costs, Strategy.uniform(candidate, bounds, placement))
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
