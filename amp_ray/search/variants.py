"""Variants of an experiment, whose plans are ranked together with its plans.

Variants change the global batch, which the devices may divide better; use a part of the cluster,
which may be cheaper; or make nodes equal that differ in one property.

Clusters with equal nodes are for the heterogeneous space. There, a node with better hardware than
similar ones is a separate kind, so the search covers other plans than without the improvement.
Hence the search also plans for the cluster in which this node equals the others, and for the
cluster without one of several equal nodes. So upgrading or adding a node never makes the best plan
slower.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, Protocol, Self

from amp_ray.clusters.cluster import KIND_KEYS, Cluster, Link
from amp_ray.clusters.device import Device
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.candidate_queue import CandidateQueue
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.planner import Candidates, Planner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import other_batches


def plans_of_variants(
    experiment: Experiment, make: Callable[[Experiment], Planner]
) -> Iterator[Estimate]:
    """Plan the variants of an experiment, and yield their plans for the experiment itself.

    With ``batch_tolerance``, the variants have global batches that the devices divide better. If
    cost is minimised, they are parts of the cluster, since fewer nodes may be cheaper. Variants
    that cannot be planned are skipped, e.g. if nothing fits or the profile lacks a measurement.
    """
    batches = other_batches(experiment) if experiment.varies_batch else ()
    for batch in batches:
        warning = f"global_batch_size {batch} instead of {experiment.global_batch_size}"
        with suppress(ValueError):
            planner = make(replace(experiment, global_batch_size=batch))
            for plan in _planned(planner, planner.candidates()):
                yield replace(plan, warnings=(*plan.warnings, warning))
    parts = sub_clusters(experiment.cluster) if experiment.counts_money else ()
    for part in parts:
        with suppress(ValueError):
            planner = make(replace(experiment, cluster=part, objective="time"))
            candidates = Candidates(required=planner.candidates().required)
            for plan in _planned(planner, candidates):
                yield on_cluster(plan, part, experiment.cluster)


def _planned(planner: Planner, candidates: Candidates) -> list[Estimate]:
    queue = CandidateQueue(candidates.required, candidates.optional)
    return [result for result in queue.run(planner.plan) if isinstance(result, Estimate)]


class ClusterPlanner(Planner, Protocol):
    """A planner that can also plan for other clusters."""

    @property
    def experiment(self) -> Experiment:
        """The experiment to plan."""
        ...

    def on_cluster(self, cluster: Cluster) -> Self:
        """Return a planner for another cluster."""
        ...

    def within_limits(self, result: Result) -> Result:
        """Return the result, with an added reason if it exceeds the user's limits."""
        ...


def plans_for_other_clusters(
    planner: ClusterPlanner, plans: Sequence[Estimate], effort: SearchEffort = EFFORT
) -> Iterator[Estimate]:
    """Yield the fastest plans for similar clusters, scored on the real one."""
    experiment = planner.experiment
    cluster = experiment.cluster
    if cluster.num_devices > effort.max_levelled_devices:
        return
    limit_s = (1 + effort.near_fraction) * min(
        (plan.iteration_time_s for plan in plans), default=math.inf
    )
    near = {plan.strategy.num_micro_batches for plan in plans if plan.iteration_time_s <= limit_s}
    levelled = [(other, True) for other in levelled_clusters(cluster)]
    idle = experiment.limits.idle_devices is not False
    fewer = [(other, False) for other in without_a_node(cluster) if idle]
    for other, grids in (*levelled, *fewer):
        with suppress(ValueError):  # the profile may lack a measurement
            planner_there = planner.on_cluster(other)
            candidates = _near(near, planner_there.candidates(), grids=grids)
            fastest = sorted(_planned(planner_there, candidates), key=leader_order)
            for plan in fastest[: effort.max_levelled_plans]:
                strategy = on_cluster(plan, other, cluster).strategy
                scored = planner.within_limits(planner.score(strategy))
                if isinstance(scored, Estimate) and scored.feasible:
                    yield scored


def _near(near: set[int], candidates: Candidates, *, grids: bool) -> Candidates:
    """Keep the candidates with certain numbers of micro-batches.

    Without numbers in ``near``, all are kept. A cluster without a node needs no optional candidates
    (``grids``): the real cluster has them as candidates with idle devices.
    """
    required = [
        candidate
        for candidate in candidates.required
        if candidate.num_micro_batches in near or not near
    ]
    grid_candidates = candidates.optional.candidates if grids else ()
    optional = replace(candidates.optional, candidates=grid_candidates, extra_plans=lambda _: [])
    return Candidates(required=tuple(required), optional=optional)


def without_a_node(cluster: Cluster) -> list[Cluster]:
    """Return the cluster without one of several equal nodes, once per kind of such nodes."""
    return [
        cluster.part([index for index in range(len(cluster.nodes)) if index != nodes[-1]])
        for nodes in cluster.alike_nodes(lambda node: node.kind)
        if len(nodes) > 1
    ]


def levelled_clusters(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with one property made equal in nodes that differ only in it.

    The property is the device, the intra-node link or the network interface. All such nodes get the
    most frequent value, and the slower one in a tie. There is one cluster for each of the three
    properties that changes a node.
    """
    levelled = []
    for name in ("device", "intra", "inter"):
        held: dict[object, Counter[Any]] = {}
        keys = [
            tuple(getattr(node, other) for other in KIND_KEYS if other != name)
            for node in cluster.nodes
        ]
        for key, node in zip(keys, cluster.nodes, strict=True):
            held.setdefault(key, Counter())[getattr(node, name)] += 1
        common: dict[object, Any] = {
            key: min(counts, key=partial(_rank, counts)) for key, counts in held.items()
        }
        nodes = tuple(
            replace(node, **{name: common[key]})
            for key, node in zip(keys, cluster.nodes, strict=True)
        )
        if nodes != cluster.nodes:
            levelled.append(replace(cluster, nodes=nodes))
    return levelled


def _rank(held: Counter[Any], part: Device | Link) -> tuple[float, ...]:
    """Return the sort key of devices or links: most frequent first, then slowest."""
    if isinstance(part, Link):
        return -held[part], part.bandwidth_bytes_per_s, -part.latency_s
    return -held[part], part.memory_bytes_per_s, part.memory_bytes


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the proper parts of a cluster that may be cheaper than the whole.

    A part has the first of equal nodes. If that makes few clusters, all numbers of nodes of each
    kind are tried; otherwise only powers of two.
    """
    kinds = cluster.alike_nodes(lambda node: node.nameless)
    sizes = list(map(len, kinds))
    for counts in product(*_counts(sizes, EFFORT.max_sub_clusters)):
        if 0 < sum(counts) < sum(sizes):
            taken = [
                node for nodes, count in zip(kinds, counts, strict=True) for node in nodes[:count]
            ]
            yield cluster.part(sorted(taken))


def on_cluster(plan: Estimate, part: Cluster, whole: Cluster) -> Estimate:
    """Convert a plan for a part of a cluster to the whole, where other nodes stay idle."""
    devices = {place: device for device, place in enumerate(whole.places)}
    placement = tuple(devices[part.places[device]] for device in plan.strategy.placement)
    return replace(plan, strategy=replace(plan.strategy, placement=placement))


def _counts(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return the numbers of nodes to try, for each kind."""
    every = [list(range(size + 1)) for size in sizes]
    powers = [
        sorted({0, size, *(2**power for power in range(size.bit_length()))}) for size in sizes
    ]
    for counts in (every, powers):
        if prod(map(len, counts)) <= most:
            return counts
    return [[0, size] for size in sizes]
