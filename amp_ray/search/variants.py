"""Other experiments whose plans are ranked beside those of the one asked for.

Batches near the one asked for, which the devices may divide better; parts of a cluster, which may
be cheaper than the whole; and clusters in which nodes that differ in one thing are alike.

The last are for the heterogeneous space. A node that is better than others of its kind is a kind of
its own there, so the search covers other plans than without it. Hence plans are also made for the
cluster in which it is as the others are, and for the cluster without one node of several that are
alike: where that is the cluster as it was, better hardware gives no slower answer.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, Protocol, Self

from amp_ray.clusters.cluster import KIND_KEYS, Cluster, Link
from amp_ray.clusters.device import Device
from amp_ray.cost.estimate import Estimate, Reason, Result
from amp_ray.inputs.experiment import Experiment, SearchLimits
from amp_ray.search.candidate_queue import CandidateQueue
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.planner import Candidates, Planner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import other_batches

Plans = Iterable[Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another experiment, and what its plans are to the one asked for."""

    make: Callable[[], Planner]  # may raise ValueError where the variant cannot be planned
    choose: Callable[[Candidates], Candidates]  # which of its candidates are planned
    adopt: Callable[[Sequence[Estimate]], Plans]  # its plans as those of the experiment asked for


def variants_of(
    experiment: Experiment, make: Callable[[Experiment], Planner], effort: SearchEffort = EFFORT
) -> Iterator[Variant]:
    """Give the variants whose plans are ranked together with those of an experiment.

    Within ``batch_tolerance`` they are batches that the devices divide better. Where money counts
    they are parts of the cluster, since fewer nodes may be cheaper.
    """
    if experiment.limits.batch_tolerance and not experiment.limits.launchable:
        yield from batch_variants(experiment, make, effort)
    if experiment.counts_money:
        yield from part_variants(experiment, make, effort)


def plans_of(variants: Iterable[Variant]) -> Iterator[Estimate]:
    """Plan every variant, and give what its plans are to the experiment asked for."""
    for variant in variants:
        with suppress(ValueError):  # nothing may fit the variant, and a profile may lack some
            planner = variant.make()
            candidates = variant.choose(planner.candidates())
            queue = CandidateQueue(candidates.required, candidates.optional, planner.relative_error)
            results = queue.run(planner.plan)
            yield from variant.adopt([result for result in results if isinstance(result, Estimate)])


def batch_variants(
    experiment: Experiment, make: Callable[[Experiment], Planner], effort: SearchEffort = EFFORT
) -> Iterator[Variant]:
    """Give the batches within the tolerance that the devices may divide better."""
    for batch in other_batches(experiment, effort):
        warning = f"global_batch_size {batch} instead of {experiment.global_batch_size}"
        yield Variant(
            make=partial(make, replace(experiment, global_batch_size=batch)),
            choose=lambda candidates: candidates,
            adopt=partial(_with_warning, warning),
        )


def _with_warning(warning: str, plans: Sequence[Estimate]) -> Plans:
    return (replace(plan, warnings=(*plan.warnings, warning)) for plan in plans)


def part_variants(
    experiment: Experiment, make: Callable[[Experiment], Planner], effort: SearchEffort = EFFORT
) -> Iterator[Variant]:
    """Give the parts of the cluster that may be cheaper than the whole."""
    for part in sub_clusters(experiment.cluster, effort):
        yield Variant(
            make=partial(make, replace(experiment, cluster=part, objective="time")),
            choose=lambda candidates: Candidates(required=candidates.required),
            adopt=partial(_on_whole, part, experiment.cluster),
        )


def _on_whole(part: Cluster, whole: Cluster, plans: Sequence[Estimate]) -> Plans:
    """Give plans for part of a cluster as plans for the whole."""
    return (on_cluster(plan, part, whole) for plan in plans)


class ClusterPlanner(Planner, Protocol):
    """A planner that plans for other clusters, too."""

    @property
    def experiment(self) -> Experiment:
        """What is planned."""
        ...

    def on_cluster(self, cluster: Cluster) -> Self:
        """Return a planner for another cluster, whose bounds are not asked for."""
        ...


def plans_for_other_clusters(
    planner: ClusterPlanner, plans: Sequence[Estimate], effort: SearchEffort = EFFORT
) -> Iterator[Estimate]:
    """Give the fastest plans for other clusters, as they are on the real one.

    Args:
        planner: For the real cluster.
        plans: What it made.
        effort: How far to look.
    """
    experiment = planner.experiment
    cluster = experiment.cluster
    if cluster.num_devices > effort.max_levelled_devices:
        return
    limit_s = (1 + effort.near_fraction) * min(
        (plan.iteration_time_s for plan in plans), default=math.inf
    )
    near = {plan.strategy.num_micro_batches for plan in plans if plan.iteration_time_s <= limit_s}
    levelled = [(other, True) for other in levelled_clusters(cluster)]
    fewer = [(other, False) for other in without_a_node(cluster)]
    yield from plans_of(
        Variant(
            make=partial(planner.on_cluster, other),
            choose=partial(_near, near, grids=grids),
            adopt=partial(_scored, planner, other, effort.max_levelled_plans),
        )
        for other, grids in (*levelled, *fewer)
    )


def _near(near: set[int], candidates: Candidates, *, grids: bool) -> Candidates:
    """Choose the candidates of some numbers of micro-batches.

    Args:
        near: The numbers; all if there is none.
        candidates: For another cluster.
        grids: Whether optional candidates count: one that leaves a node idle is a candidate of the
            real cluster.
    """
    required = [
        candidate
        for candidate in candidates.required
        if candidate.num_micro_batches in near or not near
    ]
    grid_candidates = candidates.optional.candidates if grids else ()
    optional = replace(candidates.optional, candidates=grid_candidates, extra_plans=lambda _: [])
    return Candidates(required=tuple(required), optional=optional)


def _scored(planner: ClusterPlanner, other: Cluster, most: int, plans: Sequence[Estimate]) -> Plans:
    """Score the fastest plans for another cluster on the real one, and give those that can run."""
    experiment = planner.experiment
    for plan in sorted(plans, key=leader_order)[:most]:
        on_real = on_cluster(plan, other, experiment.cluster)
        scored = within_limits(planner.score(on_real.strategy), experiment.limits)
        if isinstance(scored, Estimate) and scored.feasible:
            yield scored


def without_a_node(cluster: Cluster) -> list[Cluster]:
    """Return the cluster without one of several nodes that are alike, once for each such kind."""
    return [
        cluster.part([index for index in range(len(cluster.nodes)) if index != nodes[-1]])
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
    """Order devices or links: what most nodes have first, then the slower."""
    if isinstance(part, Link):
        return -held[part], part.bandwidth_bytes_per_s, -part.latency_s
    return -held[part], part.memory_bytes_per_s, part.memory_bytes


def sub_clusters(cluster: Cluster, effort: SearchEffort = EFFORT) -> Iterator[Cluster]:
    """Give the parts of a cluster that may be cheaper than the whole, the whole not among them.

    Nodes that differ only in their names are taken in their order. Of each kind every number is
    tried where that makes few clusters, else powers of two.
    """
    kinds = cluster.alike_nodes(lambda node: node.nameless)
    sizes = list(map(len, kinds))
    for counts in product(*_counts(sizes, effort.max_sub_clusters)):
        if 0 < sum(counts) < sum(sizes):
            taken = [
                node for nodes, count in zip(kinds, counts, strict=True) for node in nodes[:count]
            ]
            yield cluster.part(sorted(taken))


def on_cluster(plan: Estimate, part: Cluster, whole: Cluster) -> Estimate:
    """Return a plan for part of a cluster as one for the whole, where other nodes stay idle."""
    places = zip(whole.node_of_device, whole.slot_of_device, strict=True)
    devices = {(whole.nodes[node].name, slot): device for device, (node, slot) in enumerate(places)}
    placement = tuple(
        devices[part.nodes[part.node_of_device[device]].name, part.slot_of_device[device]]
        for device in plan.strategy.placement
    )
    return replace(plan, strategy=replace(plan.strategy, placement=placement))


def _counts(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return, for each kind of nodes, the numbers of them that are tried."""
    every = [list(range(size + 1)) for size in sizes]
    powers = [
        sorted({0, size, *(2**power for power in range(size.bit_length()))}) for size in sizes
    ]
    for counts in (every, powers):
        if prod(map(len, counts)) <= most:
            return counts
    return [[0, size] for size in sizes]


def within_limits(result: Result, limits: SearchLimits) -> Result:
    """Return a result, with a reason more where it costs too much or is too slow."""
    if not isinstance(result, Estimate):
        return result
    reasons = list(result.reasons)
    most, least = limits.max_cost_per_iteration, limits.min_tokens_per_s
    if most is not None and result.cost is not None and result.cost.per_iteration > most:
        detail = f"{result.cost.per_iteration:.6g} per iteration, at most {most:g}"
        reasons.append(Reason(kind="over max_cost_per_iteration", detail=detail))
    if least is not None and result.tokens_per_s is not None and result.tokens_per_s < least:
        detail = f"{result.tokens_per_s:.6g} tokens/s, at least {least:g}"
        reasons.append(Reason(kind="below min_tokens_per_s", detail=detail))
    if len(reasons) == len(result.reasons):
        return result
    return replace(result, reasons=tuple(reasons))
