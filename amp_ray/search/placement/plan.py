"""Plan a candidate on any devices: the best placements by the objective, judged by simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.partition import PartitionSolution
from amp_ray.search.cuts import without_limits
from amp_ray.search.placement.build_problem import build_problem
from amp_ray.search.placement.chains import (
    Chains,
    class_orders,
    key_of,
    listed_orders,
    simple_orders,
)
from amp_ray.search.placement.improve import climb, swap_replicas
from amp_ray.search.placement.problem import PlacementProblem
from amp_ray.search.placement.ranks import Walk
from amp_ray.search.placement.step_end import FoundPlacement, StepEndSearch
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import has_groups
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy


def plan_placement(
    cost_model: CostModel, candidate: Candidate, start: Estimate | None = None
) -> Estimate:
    """Choose devices and cuts of a candidate, and estimate the result.

    Never worse than the candidate with rank ``r`` on device ``r``: that is among what is judged.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.
        start: The best of its `simple_plans`, which is then the only one to start from.

    Returns:
        The best estimate. Where nothing fits, the one that would be best without limits.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate)
    solution = solve_chains(chains, () if start is None else (start.strategy,))
    leaders = {key_of(leader): leader for leader in solution.leaders}
    for leader in solution.leaders:
        refined = chains.best(leader.placement)
        leaders.setdefault(key_of(refined), refined)
    best = min((chains.estimate(leader) for leader in leaders.values()), key=leader_order)
    if not has_groups(cost_model.experiment):  # where grids stand beside others, the fastest only
        best = climb(cost_model, swap_replicas(chains, best))
    return replace(best, lower_bound_s=solution.lower_bound_s)


def plan_listed(cost_model: CostModel, candidate: Candidate) -> Estimate:
    """Cut a candidate on the devices as they are listed, and estimate it.

    Where devices stay idle, those of whole classes of nodes and the last ones of the others.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.

    Returns:
        The best estimate. Where nothing fits, one that would be good without limits.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate)
    orders = listed_orders(cost_model.experiment.cluster, candidate)
    return min((chains.estimate(chains.best(order)) for order in orders), key=leader_order)


def simple_plans(cost_model: CostModel, candidate: Candidate) -> list[Estimate]:
    """Estimate a few simple placements, but for those that are slower than one that fits.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate)
    found: list[Estimate] = []
    limit_s = math.inf
    for order in simple_orders(cost_model.experiment, candidate):
        strategy = chains.best(order)
        if found and not chains.may_take(strategy, limit_s):
            continue
        found.append(chains.estimate(strategy))
        if found[-1].feasible:
            limit_s = min(limit_s, found[-1].iteration_time_s)
    return found


MOST_LEADERS: Final = 6
"""Placements of the search that are simulated, the best by the objective first."""

ROUNDING: Final = 1e-9
"""Share by which an objective may differ from itself, added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """The placements that are best by the objective."""

    leaders: tuple[Strategy, ...]  # complete strategies, best first
    # Least objective of those that fit the memory; None where nothing fits
    value_s: float | None = None
    # No placement with tensor-parallel groups inside nodes has a smaller objective; None where not
    # all of them were looked at
    lower_bound_s: float | None = None


def solve_placement(cost_model: CostModel, candidate: Candidate) -> PlacementSolution:
    """Find the placements that are best by the objective.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees that the model can be divided by.
    """
    return solve_chains(Chains(cost_model=cost_model, candidate=candidate))


def solve_chains(chains: Chains, starts: Sequence[Strategy] = ()) -> PlacementSolution:
    """Find the placements that are best, as `solve_placement` does.

    Args:
        chains: Of the candidate; what is judged stays known there.
        starts: Placements to start from; by default those of all orders of equal nodes.
    """
    cluster = chains.cost_model.experiment.cluster
    seeds = list(starts) or [chains.best(own) for own in class_orders(cluster, chains.candidate)]
    feasible = [seed for seed in seeds if chains.estimate(seed).feasible]
    built = build_problem(chains.cost_model, chains.candidate)
    if built is None:
        return _ordered(chains, feasible, seeds, bound_s=None)
    known_s = min((chains.objective_s(seed) for seed in feasible), default=math.inf)
    search = StepEndSearch(problem=built.problem, upper_bound_s=known_s * (1 + ROUNDING))
    search.run()
    if not search.found and not feasible:
        solution = without_limits(built.problem.problem)
        roomy = () if solution is None else (_strategy(built.problem, solution),)
        return PlacementSolution(leaders=(*roomy, *seeds))
    best = sorted(search.found, key=lambda placed: (placed.value_s, placed.step_end_s))
    found = [_strategy(built.problem, placed) for placed in best[:MOST_LEADERS]]
    bound_s = search.lower_bound_s if built.scope.is_whole else None
    return _ordered(chains, [*found, *feasible], [*found, *seeds], bound_s=bound_s)


def _ordered(
    chains: Chains,
    fitting: Sequence[Strategy],
    strategies: Sequence[Strategy],
    *,
    bound_s: float | None,
) -> PlacementSolution:
    """Order strategies by the objective; the value is the best one's that fits the memory."""
    leaders = {key_of(leader): leader for leader in strategies}
    order = sorted(leaders, key=lambda key: (chains.objective_s(leaders[key]), key))
    value_s = min((chains.objective_s(leader) for leader in fitting), default=None)
    return PlacementSolution(
        leaders=tuple(leaders[key] for key in order), value_s=value_s, lower_bound_s=bound_s
    )


def _strategy(problem: PlacementProblem, placed: FoundPlacement | PartitionSolution) -> Strategy:
    """Give a solution its devices."""
    steps, cut_rows = problem.graph.path(placed.options)
    walk = Walk(moves=problem.moves, prices=problem.prices)
    placement = walk.placement(steps, cut_rows)
    return Strategy.uniform(problem.prices.candidate, placed.bounds, placement)
