"""Local search: simple placements to start from, and moves that make a plan faster.

Moves shift cuts, swap replicas or reorder stages while the simulated time falls.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, combinations, islice, pairwise, permutations, product

import numpy as np

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.verdict import would_fit
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition.problem import objective
from amp_ray.search.cuts import NO_LIMIT, best_bounds, partition_problem
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.placement.node_moves import node_classes
from amp_ray.search.ranking import leader_order, speed
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, candidate_of

Key = tuple[tuple[int, ...], tuple[int, ...]]


def class_orders(
    cluster: Cluster, candidate: Candidate, effort: SearchEffort = EFFORT
) -> tuple[tuple[int, ...], ...]:
    """Return orders of the used devices: hostfile order, then orders with equal nodes adjacent."""
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
    """Return devices in hostfile order; if some stay idle, also without whole classes of nodes.

    There is a list for each choice of classes; all classes come first.
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


def kept_orders(
    cluster: Cluster, candidate: Candidate, effort: SearchEffort = EFFORT
) -> tuple[tuple[int, ...], ...]:
    """Return devices in hostfile order; if some stay idle, for each choice of idle nodes.

    Nodes of a class are interchangeable, so its last ones are idle: a choice is the number of nodes
    that each class keeps, the most of the first class first. The last kept node may be idle in
    part.
    """
    orders = dict.fromkeys(listed_orders(cluster, candidate, effort))
    classes = node_classes(cluster, 1, pairs_matter=False)
    if len(classes) == 1 or candidate.num_devices == cluster.num_devices:
        return tuple(orders)
    devices, used = _group_devices(cluster, candidate), candidate.num_devices
    for counts in product(*(range(len(part.nodes), -1, -1) for part in classes)):
        kept = [
            node
            for part, number in zip(classes, counts, strict=True)
            for node in part.nodes[:number]
        ]
        order = [device for node in sorted(kept) for device in devices[node]]
        if (
            used <= len(order) < used + max(map(len, devices))
            and len(orders) < effort.max_node_orders
        ):
            orders.setdefault(tuple(order[:used]))
    return tuple(orders)


def simple_orders(experiment: Experiment, candidate: Candidate) -> tuple[tuple[int, ...], ...]:
    """Return a few orders of devices; if some stay idle, the fastest are used.

    Returns:
        Hostfile order; then nodes by device speed and by network speed, each with the fastest
        first, with the fastest last, and with the second half of the first node moved to the end,
        so that the first and the last stage share a node.
    """
    cluster = experiment.cluster
    rows = [row for row in _group_devices(cluster, candidate) if row]
    nodes = [cluster.nodes[cluster.node_of_device[row[0]]] for row in rows]
    devices = [node.device for node in nodes]
    speeds = [each.clock_fraction * each.peak_flops(experiment.precision) for each in devices]
    rates = [node.inter.bandwidth_bytes_per_s for node in nodes]
    orders = list(listed_orders(cluster, candidate)[:1])
    for key in zip(speeds, rates, strict=True), zip(rates, speeds, strict=True):
        best_first = sorted(zip(key, rows, strict=True), key=lambda entry: entry[0], reverse=True)
        orders += _both_ways([row for _, row in best_first], candidate)
    return tuple(dict.fromkeys(orders))


def _both_ways(rows: Sequence[list[int]], candidate: Candidate) -> list[tuple[int, ...]]:
    """Return the first devices of some nodes in order, reversed, and with the first node split."""
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
    memory_scale: float = 1.0  # every device's memory is multiplied by it
    _chains: dict[tuple[int, ...], Strategy] = field(init=False, default_factory=dict)
    # These do not depend on the scale, so copies for another one share them
    _costs: dict[tuple[int, ...], StageCosts] = field(default_factory=dict)
    _estimates: dict[Key, Estimate] = field(default_factory=dict)
    _objectives_s: dict[Key, float] = field(default_factory=dict)

    def best(self, placement: tuple[int, ...]) -> Strategy:
        """Return the strategy with the best cuts for a placement, ignoring the step end."""
        if placement not in self._chains:
            bounds = best_bounds(
                self.cost_model.experiment,
                self._costs_on(placement),
                memory_scale=self.memory_scale,
            )
            self._chains[placement] = Strategy.uniform(self.candidate, bounds, placement)
        return self._chains[placement]

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return the estimate of a strategy of the candidate."""
        key = key_of(strategy)
        if key not in self._estimates:
            costs = self._costs_on(strategy.placement)
            self._estimates[key] = self.cost_model.estimate_from(costs, strategy)
        return self._estimates[key]

    @property
    def estimates(self) -> Collection[Estimate]:
        """All estimates so far."""
        return self._estimates.values()

    def fits(self, strategy: Strategy) -> bool:
        """Return whether a strategy of the candidate can run with this part of the memory."""
        estimate = self.estimate(strategy)
        return would_fit(estimate) and estimate.memory_share <= self.memory_scale

    def may_take(self, strategy: Strategy, limit_s: float) -> bool:
        """Return False only if a strategy certainly takes longer than a limit."""
        costs = self._costs_on(strategy.placement)
        return self.cost_model.may_take(costs, strategy.bounds, limit_s)

    def objective_s(self, strategy: Strategy) -> float:
        """Return the objective of a strategy: closed form of the pipeline plus step end."""
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
        if placement not in self._costs:
            self._costs[placement] = self.cost_model.costs(self.candidate, placement)
        return self._costs[placement]


def objective_s(cost_model: CostModel, strategy: Strategy) -> float:
    """Return the objective of a placement: closed form of the pipeline, and the step end."""
    chains = Chains(cost_model=cost_model, candidate=candidate_of(strategy))
    return chains.objective_s(strategy)


def key_of(strategy: Strategy) -> Key:
    """Return a key that identifies a strategy among those of one candidate."""
    return strategy.placement, strategy.bounds


def climb(
    cost_model: CostModel,
    start: Estimate,
    *,
    most_stages: int = EFFORT.max_climbed_stages,
    counts: Callable[[Estimate], bool] | None = None,
    steps: Sequence[int] = (1,),
) -> Estimate:
    """Shift neighbouring cuts together by as many layers until no shift makes the plan faster.

    A plan that lacks more than memory is returned unchanged. ``counts`` tells whether a plan may
    take the place of a slower one; by default one that fits may, unless it is likelier to run out
    of memory. Each of ``steps``, numbers of layers, is tried where all shifts by those before are
    slower; ``most_stages`` limits the simulated stages, summed over all cuts. The result is on the
    same devices, and never slower.
    """
    if not would_fit(start) or cost_model.experiment.traits.partition != "exact":
        return start
    costs = cost_model.stage_costs(PlacedStages.of_strategy(start.strategy))
    best, seen = start, {start.strategy.bounds}
    remaining = most_stages // start.strategy.pp
    number = 0
    while number < len(steps):
        higher = best
        for bounds in _shifted(best.strategy.bounds, steps[number]):
            if bounds in seen:
                continue
            if not remaining:
                return higher
            remaining -= 1
            seen.add(bounds)
            if not cost_model.may_take(costs, bounds, higher.iteration_time_s):
                continue
            estimate = cost_model.estimate_from(costs, start.strategy.with_bounds(bounds))
            able = would_fit(estimate) and speed(estimate) < speed(higher)
            if counts is not None:
                able = counts(estimate) and speed(estimate)[1] < speed(higher)[1]
            if able:
                higher = estimate
        number = number + 1 if higher is best else 0
        best = higher
    return best


def _shifted(bounds: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Yield all bounds with neighbouring cuts moved by ``size`` layers; single cuts first."""
    num_cuts = len(bounds) - 2
    for length in range(1, num_cuts + 1):
        for first in range(1, num_cuts + 2 - length):
            for step in (-size, size):
                moved = (bound + step for bound in bounds[first : first + length])
                shifted = (*bounds[:first], *moved, *bounds[first + length :])
                if all(start < end for start, end in pairwise(shifted)):
                    yield shifted


def reorder(cost_model: CostModel, start: Estimate, effort: SearchEffort = EFFORT) -> Estimate:
    """Reorder the stages of a plan as long as it gets faster.

    Every stage keeps its devices and options, and at first its number of layers. This covers orders
    that the search skips, since it takes devices kind after kind. A plan that cannot run is
    returned unchanged.
    """
    if not start.feasible or cost_model.experiment.traits.partition != "exact":
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
    """Return kind and number of layers of every stage; new kinds are added to ``alike``."""
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
    """Return kind and end of every stage; strategies with equal values take about as long."""
    kinds, layers = zip(*(uses[index] for index in order), strict=True)
    return tuple(zip(kinds, accumulate(layers), strict=True))


def swap_replicas(chains: Chains, start: Estimate) -> Estimate:
    """Swap two replicas in some stage and all later ones, as long as the plan gets faster.

    The search does not choose which replicas of the first and the last stage share a tied weight. A
    swap changes these pairs, and one cut. The plan is returned unchanged if it lacks more than
    memory, or no weight is tied.
    """
    candidate = chains.candidate
    tied = chains.cost_model.weights(candidate.options.tp).tied
    if not would_fit(start) or tied is None or 1 in (candidate.options.dp, candidate.pp):
        return start
    best, remaining = start, chains.effort.max_swaps
    improved = True
    while improved:
        improved = False
        for placement in islice(_swapped(chains, best.strategy.placement), remaining):
            remaining -= 1
            estimate = chains.estimate(Strategy.uniform(candidate, best.strategy.bounds, placement))
            if would_fit(estimate) and estimate.iteration_time_s < best.iteration_time_s:
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
