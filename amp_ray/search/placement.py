"""The space of placements: a uniform candidate on the devices that suit each stage best.

Uniform tp, dp and pp, with any assignment of devices to ranks. The order of nodes over stages, the
cuts and the memory are chosen together: `plan_placement` poses all orders, up to equal nodes, as
one partition problem, and judges the best answers by the simulated schedule.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Final

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.topology import IntArray
from amp_ray.partition import objective
from amp_ray.search.cuts import (
    NO_LIMIT,
    best_bounds,
    even_block_bounds,
    last_with_parameters,
    partition_problem,
)
from amp_ray.search.placement_graph import Grower
from amp_ray.search.placement_nodes import ClassMoves, Scope, class_moves, node_classes
from amp_ray.search.placement_prices import Prices
from amp_ray.search.placement_problem import PlacementProblem, StageNeeds
from amp_ray.search.placement_ranks import Walk
from amp_ray.search.placement_tail import Placed, TailSearch, without_limits
from amp_ray.search.ranking import SIGNIFICANT_DIGITS
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy, candidate_of

MOST_WORK_PER_CAP: Final = 12_000_000
"""Options of one problem times layers that a stage can end at: about 0.15 s per cap on the beat."""

MOST_OPTIONS: Final = 300_000
"""Options of one problem: to pose as many takes about as long."""

MOST_OPTIONS_WITH_ENDS: Final = 60_000
"""Options where it counts which nodes both ends share; many more are needed to tell."""

MOST_LEADERS: Final = 6
"""Placements that are simulated, the best by the objective first."""

MOST_ORDERS: Final = 24
"""Orders of whole nodes that are looked at in any case: all of up to four classes."""

ROUNDING: Final = 1e-9
"""Share by which an objective may differ from itself, added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """The placements that are best by the objective: closed form of the pipeline, and the tail.

    Args:
        leaders: Complete strategies, best first.
        value_s: Objective of the first; None where nothing fits.
        lower_bound_s: No placement with tensor-parallel groups inside nodes has a smaller
            objective; None where not all of them were looked at.
    """

    leaders: tuple[Strategy, ...]
    value_s: float | None = None
    lower_bound_s: float | None = None


def plan_placement(cost_model: CostModel, candidate: Candidate) -> Estimate:
    """Choose devices and cuts of a candidate, and estimate the result.

    Never worse than the candidate with rank ``r`` on device ``r``: that is among what is judged.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.

    Returns:
        The best estimate. Where nothing fits, the one that would be best without limits.
    """
    solution = solve_placement(cost_model, candidate)
    leaders = {_key(leader): leader for leader in solution.leaders}
    for leader in solution.leaders:
        refined = _cut(cost_model, candidate, leader.placement)
        leaders.setdefault(_key(refined), refined)
    return min((cost_model.estimate(leader) for leader in leaders.values()), key=_order)


def solve_placement(cost_model: CostModel, candidate: Candidate) -> PlacementSolution:
    """Find the placements that are best by the objective.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.
    """
    seeds = tuple(
        _cut(cost_model, candidate, placement)
        for placement in class_orders(cost_model.experiment.cluster, candidate.num_devices)
    )
    problem, scope = _problem(cost_model, candidate)
    if problem is None:
        return _ordered(cost_model, seeds, seeds, bound_s=None)
    feasible = [seed for seed in seeds if cost_model.estimate(seed).feasible]
    known_s = min((objective_s(cost_model, seed) for seed in feasible), default=math.inf)
    search = TailSearch(problem=problem, upper_bound_s=known_s * (1 + ROUNDING))
    search.run()
    if not search.found and not feasible:
        placed = without_limits(problem)
        roomy = () if placed is None else (_strategy(problem, placed),)
        return PlacementSolution(leaders=(*roomy, *seeds))
    best = sorted(search.found, key=lambda placed: (placed.value_s, placed.tail_s))
    found = tuple(_strategy(problem, placed) for placed in best[:MOST_LEADERS])
    bound_s = search.lower_bound_s if scope.is_whole else None
    return _ordered(cost_model, (*found, *feasible), (*found, *seeds), bound_s=bound_s)


def objective_s(cost_model: CostModel, strategy: Strategy) -> float:
    """Return what placements are compared by: closed form of the pipeline, and the tail.

    Args:
        cost_model: Of the experiment.
        strategy: A uniform strategy.
    """
    costs = cost_model.costs(candidate_of(strategy), strategy.placement)
    problem = partition_problem(costs, cost_model.experiment.traits, NO_LIMIT)
    pipeline = objective(problem, strategy.bounds, tuple(range(strategy.pp)))
    breakdown = cost_model.estimate_cut(costs, strategy).breakdown
    assert breakdown is not None
    return pipeline.value_s + (breakdown.gradient_sync_s + breakdown.optimizer_s)


def class_orders(cluster: Cluster, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices: as they are listed, then those with equal nodes in a row.

    Args:
        cluster: The nodes.
        num_devices: That are used.
    """
    devices: dict[int, list[int]] = {}
    for device, node in enumerate(cluster.node_of_device):
        devices.setdefault(node, []).append(device)
    classes = node_classes(cluster, 1, pairs_matter=False)
    orders = [tuple(range(num_devices))]
    for order in islice(permutations(classes), MOST_ORDERS):
        placed = [device for part in order for node in part.nodes for device in devices[node]]
        orders.append(tuple(placed[:num_devices]))
    return tuple(dict.fromkeys(orders))


def _ordered(
    cost_model: CostModel,
    running: Sequence[Strategy],
    strategies: Sequence[Strategy],
    *,
    bound_s: float | None,
) -> PlacementSolution:
    """Order strategies by the objective; the value is the best one's that fits the memory."""
    value_s = {_key(leader): objective_s(cost_model, leader) for leader in strategies}
    leaders = {_key(leader): leader for leader in strategies}
    order = sorted(leaders, key=lambda key: (value_s[key], key))
    best_s = min((value_s[_key(leader)] for leader in running), default=None)
    return PlacementSolution(
        leaders=tuple(leaders[key] for key in order), value_s=best_s, lower_bound_s=bound_s
    )


def _strategy(problem: PlacementProblem, placed: Placed) -> Strategy:
    """Give a solution its devices."""
    steps, cut_rows = problem.path(placed.options)
    walk = Walk(moves=problem.moves, prices=problem.prices)
    placement = walk.placement(steps, cut_rows)
    return Strategy.uniform(problem.prices.candidate, placed.bounds, placement)


def _scopes(cost_model: CostModel, candidate: Candidate) -> Iterator[Scope]:
    """Give the ways to look at placements, from all of them to fewer and fewer."""
    pairs = bool(cost_model.experiment.cluster.pair_links)
    tied = cost_model.costs(candidate).memory.weights.tied is not None and candidate.pp > 1
    num_ends = cost_model.experiment.model.num_layers + 1 - candidate.pp
    most = min(MOST_OPTIONS, MOST_WORK_PER_CAP // num_ends)
    for even, pure in ((False, False), (True, False), (True, True)):
        for exact in dict.fromkeys((True, not pairs)):
            scope = Scope(even=even, pure=pure, pairs=exact, max_options=most)
            if tied:
                yield replace(scope, ends=True, max_options=min(most, MOST_OPTIONS_WITH_ENDS))
            yield scope


def _problem(cost_model: CostModel, candidate: Candidate) -> tuple[PlacementProblem | None, Scope]:
    """Pose as many placements of a candidate as there may be; None where there is no way."""
    scope = Scope(max_options=0)
    if any(node.num_slots % candidate.tp for node in cost_model.experiment.cluster.nodes):
        return None, scope
    for scope in _scopes(cost_model, candidate):
        problem = _posed(cost_model, candidate, scope)
        if problem is not None:
            return problem, scope
    return None, scope


def _posed(cost_model: CostModel, candidate: Candidate, scope: Scope) -> PlacementProblem | None:
    """Pose the placements of a candidate within a scope; None where there are too many."""
    cluster = cost_model.experiment.cluster
    classes = node_classes(cluster, candidate.tp, pairs_matter=scope.pairs)
    moves: list[ClassMoves] = []
    for node_class in classes:
        own = class_moves(node_class, candidate.dp, scope)
        if own is None:
            return None
        moves.append(own)
    prices = Prices(cost_model=cost_model, candidate=candidate, classes=classes)
    grower = Grower(moves=tuple(moves), dp=candidate.dp, cut_rows=prices.cut_rows, scope=scope)
    levels = grower.levels(candidate.pp)
    if levels is None:
        return None
    return PlacementProblem(
        levels=levels,
        moves=tuple(moves),
        prices=prices,
        needs=_needs(cost_model, candidate, tied_counts=scope.ends),
        blocking=cost_model.experiment.traits.blocking_transfers,
    )


def _needs(cost_model: CostModel, candidate: Candidate, *, tied_counts: bool) -> StageNeeds:
    """Return what stages need, whatever they run on."""
    model, traits = cost_model.experiment.model, cost_model.experiment.traits
    memory = cost_model.costs(candidate).memory
    sizes = {float(device.memory_bytes) for device in cost_model.experiment.cluster.device_types}
    starts = {size: memory.earliest_starts(np.full(candidate.pp, size)) for size in sorted(sizes)}
    if traits.partition == "even-blocks":
        bounds = even_block_bounds(model, candidate.pp)
        starts = {size: _only(bounds, start) for size, start in starts.items()}
    parameters = memory.weights.prefix.copy()
    if memory.weights.tied is not None and candidate.pp == 1:
        parameters[-1] -= memory.weights.tied.parameters
    return StageNeeds(
        earliest_start=starts,
        latest_start=_latest_start(cost_model),
        parameters=parameters,
        tied_counts=tied_counts,
    )


def _only(bounds: Sequence[int], earliest_start: IntArray) -> IntArray:
    """Let every stage end where it must."""
    ends = np.arange(earliest_start.shape[1])
    allowed = ends == np.array(bounds[1:])[:, None]
    return np.where(allowed, np.maximum(earliest_start, np.array(bounds[:-1])[:, None]), ends)


def _latest_start(cost_model: CostModel) -> IntArray:
    """Return where stages must start at the latest to have parameters, if they need any."""
    needed = cost_model.experiment.traits.fails_without_parameters
    return last_with_parameters(cost_model.experiment.model) if needed else NO_LIMIT


def _cut(cost_model: CostModel, candidate: Candidate, placement: tuple[int, ...]) -> Strategy:
    """Return the cuts that are best for one placement, by the pipeline alone."""
    given = cost_model.experiment
    if given.traits.partition == "even-blocks":
        bounds = even_block_bounds(given.model, candidate.pp)
    else:
        costs = cost_model.costs(candidate, placement)
        bounds = best_bounds(costs, given.traits, _latest_start(cost_model))
    return Strategy.uniform(candidate, bounds, placement)


def _key(strategy: Strategy) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what tells strategies of one candidate apart."""
    return strategy.placement, strategy.bounds


def _order(estimate: Estimate) -> tuple[object, ...]:
    """Order estimates: what runs first, then by time, then by value."""
    time_s = float(f"{estimate.iteration_time_s:.{SIGNIFICANT_DIGITS}g}")
    return (not estimate.feasible, time_s, estimate.strategy.bounds, estimate.strategy.placement)
