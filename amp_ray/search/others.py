"""What the heterogeneous space ranks beside the plans of its candidates: grids, and levelled plans.

A node that is better than others of its kind is a kind of its own, and other plans are looked at
than before it was. So plans are also made for the cluster in which it is as the others are: where
that is the cluster as it was, better hardware cannot give a slower answer.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from amp_ray.cost.estimate import Estimate
from amp_ray.search.objective import within_limits
from amp_ray.search.planner import AmpRayPlanner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import candidates_of, has_groups, optional_candidates
from amp_ray.search.stage_groups.kinds import NODE_KEYS
from amp_ray.search.wanted import MOST_GRID_DEVICES, OptionalCandidates, Wanted
from amp_ray.spec.cluster import Cluster, Link
from amp_ray.spec.device import Device

MOST_DEVICES_LEVELLED: Final = 32
"""Devices up to which plans are made for levelled clusters, too: each is a search of its own."""

MOST_LEVELLED: Final = 4
"""Plans for a levelled cluster that are scored on the real one, the fastest first."""


def optional_of(planner: AmpRayPlanner) -> OptionalCandidates:
    """Return what a planner looks at only where it may be fast, and how it makes plans faster."""
    groups = has_groups(planner.experiment)
    return OptionalCandidates(
        candidates=optional_candidates(planner.experiment),
        least_s=planner.least_s,
        expected_s=planner.expected_s,
        improve=planner.improve,
        most_devices=MOST_GRID_DEVICES if groups else None,
        others=lambda: list(levelled_plans(planner)) if groups else [],
    )


def levelled_plans(planner: AmpRayPlanner) -> Iterator[Estimate]:
    """Give the fastest plans for levelled clusters, as they are on the real one."""
    given = planner.experiment
    for cluster in levelled_clusters(given.cluster):
        own = AmpRayPlanner(experiment=replace(given, cluster=cluster))
        wanted = Wanted(
            candidates_of(own.experiment),
            replace(optional_of(own), others=list),
            own.relative_error,
        )
        found = [each for each in wanted.run(own.plan) if isinstance(each, Estimate)]
        for each in sorted(found, key=leader_order)[:MOST_LEVELLED]:
            scored = within_limits(planner.score(each.strategy), given.limits)
            if isinstance(scored, Estimate) and scored.feasible:
                yield scored


def levelled_clusters(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with one thing made equal in all nodes that differ in nothing else.

    That is their device, their links within or their interface. Each of these nodes gets what most
    of them have, and of what equally many have the slower.

    Args:
        cluster: Its nodes.

    Returns:
        A cluster for each of the three that changes something.
    """
    if cluster.num_devices > MOST_DEVICES_LEVELLED:
        return []
    found = []
    for name in ("device", "intra", "inter"):
        held: dict[object, Counter[Any]] = {}
        keys = [
            tuple(getattr(node, other) for other in NODE_KEYS if other != name)
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
