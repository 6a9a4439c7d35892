"""Placements that are given: simple ones to start from, their best cuts, their objective."""

from itertools import islice, permutations
from typing import Final

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
from amp_ray.search.placement.nodes import node_classes
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy, candidate_of

MOST_ORDERS: Final = 24
"""Orders of whole nodes that are looked at in any case: all of up to four classes."""

Key = tuple[tuple[int, ...], tuple[int, ...]]


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


def best_chain(cost_model: CostModel, candidate: Candidate, placement: tuple[int, ...]) -> Strategy:
    """Return the cuts that are best for one placement, by the pipeline alone.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees.
        placement: Device of every rank.
    """
    given = cost_model.experiment
    if given.traits.partition == "even-blocks":
        bounds = even_block_bounds(given.model, candidate.pp)
    else:
        costs = cost_model.costs(candidate, placement)
        bounds = best_bounds(costs, given.traits, latest_starts(cost_model))
    return Strategy.uniform(candidate, bounds, placement)


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


def latest_starts(cost_model: CostModel) -> IntArray:
    """Return where stages must start at the latest to have parameters, if they need any."""
    needed = cost_model.experiment.traits.fails_without_parameters
    return last_with_parameters(cost_model.experiment.model) if needed else NO_LIMIT


def key_of(strategy: Strategy) -> Key:
    """Return what tells strategies of one candidate apart."""
    return strategy.placement, strategy.bounds
