"""What the heterogeneous space ranks beside the plans of its candidates: grids, and other plans.

A node that is better than others of its kind is a kind of its own, and other plans are looked at
than before it was. So plans are also made for the cluster in which it is as the others are, and for
the cluster without one node of several that are alike: where that is the cluster as it was, better
hardware gives no slower answer.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from amp_ray.cost.estimate import Estimate
from amp_ray.search.objective import on_cluster, part_of, within_limits
from amp_ray.search.planner import AmpRayPlanner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import candidates_of, has_groups, optional_candidates
from amp_ray.search.wanted import MOST_GRID_DEVICES, OptionalCandidates, Wanted
from amp_ray.spec.cluster import KIND_KEYS, Cluster, Link
from amp_ray.spec.device import Device

MOST_DEVICES: Final = 32
"""Devices up to which plans are made for other clusters, too: each is a search of its own."""

MOST_SCORED: Final = 4
"""Plans for another cluster that are scored on the real one, the fastest first."""

NEAR: Final = 0.1
"""Numbers of micro-batches whose best plan takes so much more than the fastest are not tried on
other clusters."""


def optional_of(planner: AmpRayPlanner) -> OptionalCandidates:
    """Return what a planner looks at only where it may be fast, and how it makes plans faster."""
    # Plans of operators use all devices, and their bound is one of such plans
    groups = has_groups(planner.experiment) and not planner.experiment.cuts_operators
    return OptionalCandidates(
        candidates=optional_candidates(planner.experiment),
        least_s=planner.least_s,
        expected_s=planner.expected_s,
        improve=planner.improve,
        most_devices=MOST_GRID_DEVICES if groups else None,
        others=lambda found: list(other_plans(planner, found)) if groups else [],
    )


def other_plans(planner: AmpRayPlanner, found: Sequence[Estimate]) -> Iterator[Estimate]:
    """Give the fastest plans for other clusters, as they are on the real one.

    Args:
        planner: For the real cluster.
        found: What it found.
    """
    given = planner.experiment
    if given.cluster.num_devices > MOST_DEVICES:
        return
    limit_s = (1 + NEAR) * min((each.iteration_time_s for each in found), default=math.inf)
    near = {each.strategy.num_micro_batches for each in found if each.iteration_time_s <= limit_s}
    levelled = [(cluster, True) for cluster in levelled_clusters(given.cluster)]
    fewer = [(cluster, False) for cluster in without_a_node(given.cluster)]
    for cluster, grids in (*levelled, *fewer):
        # Bounds for another cluster say nothing of this one
        own = AmpRayPlanner(experiment=replace(given, cluster=cluster), bounded=False)
        optional = optional_of(own)
        # A grid that leaves a node idle is one of the real cluster's
        candidates = optional.candidates if grids else ()
        wanted = Wanted(
            [
                each
                for each in candidates_of(own.experiment)
                if each.num_micro_batches in near or not near
            ],
            replace(optional, candidates=candidates, others=lambda _: []),
            own.relative_error,
        )
        plans = [each for each in wanted.run(own.plan) if isinstance(each, Estimate)]
        for each in sorted(plans, key=leader_order)[:MOST_SCORED]:
            placed = on_cluster(each, cluster, given.cluster)
            assert isinstance(placed, Estimate)
            scored = within_limits(planner.score(placed.strategy), given.limits)
            if isinstance(scored, Estimate) and scored.feasible:
                yield scored


def without_a_node(cluster: Cluster) -> list[Cluster]:
    """Return the cluster without one of several nodes that are alike, once for each such kind."""
    return [
        part_of(cluster, [index for index in range(len(cluster.nodes)) if index != nodes[-1]])
        for nodes in cluster.alike_nodes(lambda node: node.kind)
        if len(nodes) > 1
    ]


def levelled_clusters(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with one thing made equal in all nodes that differ in nothing else.

    That is their device, their links within or their interface. Each of these nodes gets what most
    of them have, and of what equally many have the slower.

    Args:
        cluster: Its nodes.

    Returns:
        A cluster for each of the three that changes something.
    """
    found = []
    for name in ("device", "intra", "inter"):
        held: dict[object, Counter[Any]] = {}
        keys = [
            tuple(getattr(node, other) for other in KIND_KEYS if other != name)
            for node in cluster.nodes
        ]
        for key, node in zip(keys, cluster.nodes, strict=True):
            held.setdefault(key, Counter())[getattr(node, name)] += 1
        common: dict[object, Any] = {
            key: min(own, key=partial(_rank, own)) for key, own in held.items()
        }
        nodes = tuple(
            replace(node, **{name: common[key]})
            for key, node in zip(keys, cluster.nodes, strict=True)
        )
        if nodes != cluster.nodes:
            found.append(replace(cluster, nodes=nodes))
    return found


def _rank(held: Counter[Any], part: Device | Link) -> tuple[float, ...]:
    """Order devices or links: what most nodes have first, then the slower."""
    if isinstance(part, Link):
        return -held[part], part.bandwidth_bytes_per_s, -part.latency_s
    return -held[part], part.memory_bytes_per_s, part.memory_bytes
