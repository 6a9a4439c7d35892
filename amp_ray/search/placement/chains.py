"""Placements that are given: simple ones to start from, their best cuts, their objective."""

from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Final

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.partition import objective
from amp_ray.search.cuts import NO_LIMIT, best_bounds, partition_problem
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """Judges placements of one candidate, each once.

    Args:
        candidate: Degrees.
    """

    cost_model: CostModel
    candidate: Candidate
    _costs: dict[tuple[int, ...], StageCosts] = field(init=False, default_factory=dict)
    _chains: dict[tuple[int, ...], Strategy] = field(init=False, default_factory=dict)
    _estimates: dict[Key, Estimate] = field(init=False, default_factory=dict)
    _objectives_s: dict[Key, float] = field(init=False, default_factory=dict)

    def best(self, placement: tuple[int, ...]) -> Strategy:
        """Return the cuts that are best for one placement, by the pipeline alone.

        Args:
            placement: Device of every rank.
        """
        if placement not in self._chains:
            bounds = best_bounds(self.cost_model.experiment, self._costs_on(placement))
            self._chains[placement] = Strategy.uniform(self.candidate, bounds, placement)
        return self._chains[placement]

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return what the cost model says of a strategy of the candidate."""
        key = key_of(strategy)
        if key not in self._estimates:
            costs = self._costs_on(strategy.placement)
            self._estimates[key] = self.cost_model.estimate_from(costs, strategy)
        return self._estimates[key]

    def objective_s(self, strategy: Strategy) -> float:
        """Return closed form and step end of a strategy of the candidate."""
        key = key_of(strategy)
        if key not in self._objectives_s:
            costs, traits = self._costs_on(strategy.placement), self.cost_model.experiment.traits
            problem = partition_problem(costs, traits, NO_LIMIT)
            pipeline = objective(problem, strategy.bounds, tuple(range(strategy.pp)))
            breakdown = self.estimate(strategy).breakdown
            assert breakdown is not None
            step_end_s = breakdown.gradient_sync_s + breakdown.optimizer_s
            self._objectives_s[key] = pipeline.value_s + step_end_s
        return self._objectives_s[key]

    def _costs_on(self, placement: tuple[int, ...]) -> StageCosts:
        """Return the costs of a placement that do not depend on its cuts."""
        if placement not in self._costs:
            self._costs[placement] = self.cost_model.costs(self.candidate, placement)
        return self._costs[placement]


def objective_s(cost_model: CostModel, strategy: Strategy) -> float:
    """Return what placements are compared by: closed form of the pipeline, and the step end.

    Args:
        cost_model: Of the experiment.
        strategy: A uniform strategy.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate_of(strategy))
    return chains.objective_s(strategy)


def key_of(strategy: Strategy) -> Key:
    """Return a key in which strategies of one candidate differ."""
    return strategy.placement, strategy.bounds
