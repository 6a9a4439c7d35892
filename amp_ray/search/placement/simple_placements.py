"""Simple placements as starts of the search, with their best cuts and objective."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice, permutations

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition import objective
from amp_ray.search.cuts import NO_LIMIT, best_bounds, partition_problem
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.node_moves import node_classes
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, candidate_of

Key = tuple[tuple[int, ...], tuple[int, ...]]


def class_orders(
    cluster: Cluster, candidate: Candidate, effort: SearchEffort = EFFORT
) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices that are used: as listed, then with equal nodes in a row.

    Args:
        cluster: The nodes.
        candidate: Its degrees give the number of devices and the size of groups.
        effort: Limits of the search.
    """
    devices = _group_devices(cluster, candidate)
    classes = node_classes(cluster, 1, pairs_matter=False)
    orders = list(listed_orders(cluster, candidate, effort))
    for order in islice(permutations(classes), effort.max_node_orders):
        placed = [device for part in order for node in part.nodes for device in devices[node]]
        orders.append(tuple(placed[: candidate.num_devices]))
    return tuple(dict.fromkeys(orders))


def listed_orders(
    cluster: Cluster, candidate: Candidate, effort: SearchEffort = EFFORT
) -> tuple[tuple[int, ...], ...]:
    """Return the devices as listed; where some stay idle, also without whole classes of nodes.

    Args:
        cluster: The nodes.
        candidate: Its degrees give the number of devices and the size of groups.
        effort: Limits of the search.

    Returns:
        The first devices of some classes each; that of all classes comes first.
    """
    devices, used = _group_devices(cluster, candidate), candidate.num_devices
    classes = node_classes(cluster, 1, pairs_matter=False)
    orders: dict[tuple[int, ...], None] = {}
    for count in range(len(classes), 0, -1):
        for chosen in combinations(classes, count):
            nodes = sorted(node for part in chosen for node in part.nodes)
            order = [device for node in nodes for device in devices[node]]
            if len(order) >= used and len(orders) < effort.max_node_orders:
                orders.setdefault(tuple(order[:used]))
    return tuple(orders)


def simple_orders(experiment: Experiment, candidate: Candidate) -> tuple[tuple[int, ...], ...]:
    """Return a few orders of devices, the fastest where some stay idle.

    Args:
        experiment: Its cluster, and the precision that tells which devices are fast.
        candidate: Its degrees give the number of devices and the size of groups.

    Returns:
        The devices as listed; those of the fastest devices or networks first, or last, or with the
        second half of the first node behind all others, so that both ends of the pipeline meet.
    """
    cluster = experiment.cluster
    rows = [row for row in _group_devices(cluster, candidate) if row]
    nodes = [cluster.nodes[cluster.node_of_device[row[0]]] for row in rows]
    speeds = [node.device.peak_flops(experiment.precision) for node in nodes]
    rates = [node.inter.bandwidth_bytes_per_s for node in nodes]
    orders = list(listed_orders(cluster, candidate)[:1])
    for key in zip(speeds, rates, strict=True), zip(rates, speeds, strict=True):
        best_first = sorted(zip(key, rows, strict=True), key=lambda entry: entry[0], reverse=True)
        orders += _both_ways([row for _, row in best_first], candidate)
    return tuple(dict.fromkeys(orders))


def _both_ways(rows: Sequence[list[int]], candidate: Candidate) -> list[tuple[int, ...]]:
    """Return the first devices of some nodes in order, in reverse, and with the first node split.

    Args:
        rows: Devices of each node.
        candidate: Its degrees give the number of devices and the size of groups.
    """
    chosen = list(chain.from_iterable(rows))[: candidate.num_devices]
    used = set(chosen)
    reverse = [device for row in reversed(rows) for device in row if device in used]
    size = min(len(rows[0]), len(chosen))
    half = size // (2 * candidate.options.tp) * candidate.options.tp
    split = (*chosen[:half], *chosen[size:], *chosen[half:size])
    return [tuple(chosen), tuple(reverse), split]


def _group_devices(cluster: Cluster, candidate: Candidate) -> list[list[int]]:
    """Return the devices of each node that tensor-parallel groups inside it can use.

    Where these are too few, groups span nodes and can use all.
    """
    devices: list[list[int]] = [[] for _ in cluster.nodes]
    for device, node in enumerate(cluster.node_of_device):
        devices[node].append(device)
    inside = [row[: len(row) // candidate.options.tp * candidate.options.tp] for row in devices]
    return inside if sum(map(len, inside)) >= candidate.num_devices else devices


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """Cuts and estimates placements of one candidate; caches the results."""

    cost_model: CostModel
    candidate: Candidate  # degrees
    effort: SearchEffort = EFFORT
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
            bounds = best_bounds(self.cost_model.experiment, self._costs_on(placement), self.effort)
            self._chains[placement] = Strategy.uniform(self.candidate, bounds, placement)
        return self._chains[placement]

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return the estimate of a strategy of the candidate."""
        key = key_of(strategy)
        if key not in self._estimates:
            costs = self._costs_on(strategy.placement)
            self._estimates[key] = self.cost_model.estimate_from(costs, strategy)
        return self._estimates[key]

    def may_take(self, strategy: Strategy, limit_s: float) -> bool:
        """Return whether a strategy of the candidate may take no longer than a limit."""
        costs = self._costs_on(strategy.placement)
        return self.cost_model.may_take(costs, strategy.bounds, limit_s)

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
    """Return the objective of a placement: closed form of the pipeline, and the step end.

    Args:
        cost_model: Cost model of the experiment.
        strategy: A uniform strategy.
    """
    chains = Chains(cost_model=cost_model, candidate=candidate_of(strategy))
    return chains.objective_s(strategy)


def key_of(strategy: Strategy) -> Key:
    """Return a key that identifies a strategy among those of one candidate."""
    return strategy.placement, strategy.bounds
