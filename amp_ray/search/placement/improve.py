"""Move the cuts of a plan, swap its replicas and reorder its stages while its time falls."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, combinations, islice, pairwise, permutations

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.simple_placements import Chains
from amp_ray.search.ranking import leader_order, speed
from amp_ray.strategies.strategy import Strategy


def climb(
    cost_model: CostModel, start: Estimate, *, most_stages: int = EFFORT.max_climbed_stages
) -> Estimate:
    """Shift neighbouring cuts together by one layer until no shift makes the plan faster.

    Args:
        cost_model: Cost model of the experiment.
        start: Returned unchanged if it cannot run.
        most_stages: Limit on simulated stages, summed over all cuts.

    Returns:
        An estimate on the same devices, never slower.
    """
    if not start.feasible or cost_model.experiment.traits.partition == "even-blocks":
        return start
    costs = cost_model.stage_costs(PlacedStages.of_strategy(start.strategy))
    best, seen = start, {start.strategy.bounds}
    remaining = most_stages // start.strategy.pp
    while True:
        higher = best
        for bounds in _shifted(best.strategy.bounds):
            if bounds in seen:
                continue
            if not remaining:
                return higher
            remaining -= 1
            seen.add(bounds)
            if not cost_model.may_take(costs, bounds, higher.iteration_time_s):
                continue
            estimate = cost_model.estimate_from(costs, start.strategy.with_bounds(bounds))
            if speed(estimate) < speed(higher):
                higher = estimate
        if higher is best:
            return best
        best = higher


def _shifted(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all bounds with neighbouring cuts moved by one layer; single cuts first."""
    num_cuts = len(bounds) - 2
    for length in range(1, num_cuts + 1):
        for first in range(1, num_cuts + 2 - length):
            for step in (-1, 1):
                moved = (bound + step for bound in bounds[first : first + length])
                shifted = (*bounds[:first], *moved, *bounds[first + length :])
                if all(start < end for start, end in pairwise(shifted)):
                    yield shifted


def reorder(cost_model: CostModel, start: Estimate, effort: SearchEffort = EFFORT) -> Estimate:
    """Put the stages of a plan in another order as long as that makes it faster.

    Every stage keeps its devices and options, and at first its number of layers. This covers orders
    that the search skips, since it takes devices kind after kind.

    Args:
        cost_model: Cost model of the experiment.
        start: Where it cannot run, it is left as it is.
        effort: Limits of the search.

    Returns:
        An estimate, never slower.
    """
    if not start.feasible or cost_model.experiment.traits.partition == "even-blocks":
        return start
    best = climb(cost_model, start, most_stages=effort.max_climbed_stages)
    alike: dict[object, int] = {}
    uses = _uses(cost_model, best.strategy, alike)
    seen = {_signature(uses, range(len(uses)))}
    while len(seen) < effort.max_orders:
        orders = []
        for order in _orders(best.strategy.pp):
            if len(seen) >= effort.max_orders:
                break
            signature = _signature(uses, order)
            if signature not in seen:
                seen.add(signature)
                orders.append(_in_order(best.strategy, order))
        fastest = _fastest(cost_model, orders, effort.max_climbed_orders)
        summits = [
            climb(cost_model, estimate, most_stages=effort.max_climbed_stages // 4)
            for estimate in fastest
        ]
        highest = min(summits, key=leader_order, default=best)
        if speed(highest) >= speed(best):
            break
        best, uses = highest, _uses(cost_model, highest.strategy, alike)
    return best


def _fastest(cost_model: CostModel, strategies: Sequence[Strategy], most: int) -> list[Estimate]:
    fastest: list[Estimate] = []
    for strategy in strategies:
        limit_s = fastest[-1].iteration_time_s if len(fastest) == most else math.inf
        costs = cost_model.stage_costs(PlacedStages.of_strategy(strategy))
        if not cost_model.may_take(costs, strategy.bounds, limit_s):
            continue
        estimate = cost_model.estimate_from(costs, strategy)
        if estimate.feasible:
            fastest = sorted([*fastest, estimate], key=leader_order)[:most]
    return fastest


def _orders(pp: int) -> Iterator[tuple[int, ...]]:
    """Yield orders with two stages swapped, all stages reversed, or one stage moved."""
    stages = tuple(range(pp))
    for one, other in combinations(stages, 2):
        swapped = list(stages)
        swapped[one], swapped[other] = other, one
        yield tuple(swapped)
    yield stages[::-1]
    for one, place in permutations(stages, 2):
        rest = (*stages[:one], *stages[one + 1 :])
        yield (*rest[:place], one, *rest[place:])


def _in_order(strategy: Strategy, order: Sequence[int]) -> Strategy:
    reordered = [strategy.stages[index] for index in order]
    bounds = [0, *accumulate(stage.end_layer - stage.first_layer for stage in reordered)]
    stages = (
        replace(stage, first_layer=first, end_layer=end)
        for stage, (first, end) in zip(reordered, pairwise(bounds), strict=True)
    )
    devices = chain.from_iterable(strategy.devices(index) for index in order)
    return replace(strategy, stages=tuple(stages), placement=tuple(devices))


def _uses(
    cost_model: CostModel, strategy: Strategy, alike: dict[object, int]
) -> list[tuple[int, int]]:
    """Return the kind and the number of layers of every stage.

    Args:
        cost_model: Cost model of the experiment.
        strategy: Its stages.
        alike: Kinds of stages so far, by the properties that define them; new ones are added.
    """
    cluster = cost_model.experiment.cluster
    uses = []
    for index, stage in enumerate(strategy.stages):
        places = tuple(
            (node.device, node.intra, node.inter, cluster.slot_of_device[device])
            for device in strategy.devices(index)
            for node in (cluster.nodes[cluster.node_of_device[device]],)
        )
        kind = alike.setdefault((stage.options, stage.shares, places), len(alike))
        uses.append((kind, stage.end_layer - stage.first_layer))
    return uses


def _signature(
    uses: Sequence[tuple[int, int]], order: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return kinds and ends of stages: strategies that share them take about as long."""
    kinds, layers = zip(*(uses[index] for index in order), strict=True)
    return tuple(zip(kinds, accumulate(layers), strict=True))


def swap_replicas(chains: Chains, start: Estimate) -> Estimate:
    """Swap replicas from a stage on as long as the plan gets faster.

    The search does not choose which replicas of the first and the last stage share a tied weight. A
    swap changes these pairs, and one cut.

    Args:
        chains: Chains of the candidate.
        start: Returned unchanged if it cannot run, or no weight is tied.

    Returns:
        An estimate with the same cuts and the same devices in every stage, never slower.
    """
    candidate = chains.candidate
    tied = chains.cost_model.weights(candidate.options.tp).tied
    if not start.feasible or tied is None or 1 in (candidate.options.dp, candidate.pp):
        return start
    best, remaining = start, chains.effort.max_swaps
    improved = True
    while improved:
        improved = False
        for placement in islice(_swapped(chains, best.strategy.placement), remaining):
            remaining -= 1
            estimate = chains.estimate(Strategy.uniform(candidate, best.strategy.bounds, placement))
            if estimate.feasible and estimate.iteration_time_s < best.iteration_time_s:
                best, improved = estimate, True
                break
    return best


def _swapped(chains: Chains, placement: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield placements with two replicas swapped from some stage on, last stage first."""
    pp, dp = chains.candidate.pp, chains.candidate.options.dp
    grid = np.array(placement).reshape(pp, dp, -1)
    node = chains.cost_model.topology.node_of_device[grid[:, :, 0]]
    for stage in range(pp - 1, 0, -1):
        for one, other in combinations(range(dp), 2):
            if (node[stage:, one] != node[stage:, other]).any():
                swapped = grid.copy()
                swapped[stage:, [one, other]] = grid[stage:, [other, one]]
                yield tuple(swapped.ravel().tolist())
