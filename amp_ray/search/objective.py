"""Plans for money as well as for time: limits on both, and parts of a cluster that cost less."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final

from amp_ray.clusters.cluster import Cluster, Node
from amp_ray.cost.estimate import Estimate, Reason, Result
from amp_ray.inputs.experiment import Experiment, SearchLimits

MOST_SUB_CLUSTERS: Final = 64
"""Parts of a cluster that are planned for; of larger clusters not every number of nodes is one."""


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


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Give the parts of a cluster that may be cheaper than the whole, the whole not among them.

    Nodes that differ only in their names are taken in their order. Of each kind every number is
    tried where that makes few clusters, else powers of two.
    """
    kinds = cluster.alike_nodes(lambda node: node.nameless)
    sizes = list(map(len, kinds))
    for counts in product(*_counts(sizes)):
        if 0 < sum(counts) < sum(sizes):
            taken = [
                node for nodes, count in zip(kinds, counts, strict=True) for node in nodes[:count]
            ]
            yield part_of(cluster, sorted(taken))


def part_of(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """Return the cluster of some nodes, in the given order."""
    position = {node: index for index, node in enumerate(nodes)}
    pairs = {
        (min(position[low], position[high]), max(position[low], position[high])): link
        for (low, high), link in cluster.pair_links.items()
        if low in position and high in position
    }
    return replace(cluster, nodes=tuple(cluster.nodes[node] for node in nodes), pair_links=pairs)


def on_cluster(plan: Estimate, part: Cluster, whole: Cluster) -> Estimate:
    """Return a plan for part of a cluster as one for the whole, where other nodes stay idle."""
    places = zip(whole.node_of_device, whole.slot_of_device, strict=True)
    devices = {(whole.nodes[node].name, slot): device for device, (node, slot) in enumerate(places)}
    placement = tuple(
        devices[_node(part, device).name, part.slot_of_device[device]]
        for device in plan.strategy.placement
    )
    return replace(plan, strategy=replace(plan.strategy, placement=placement))


def _node(cluster: Cluster, device: int) -> Node:
    """Return the node of a device."""
    return cluster.nodes[cluster.node_of_device[device]]


def _counts(sizes: Sequence[int]) -> list[list[int]]:
    """Return, for each kind of nodes, the numbers of them that are tried."""
    every = [list(range(size + 1)) for size in sizes]
    powers = [
        sorted({0, size, *(2**power for power in range(size.bit_length()))}) for size in sizes
    ]
    for counts in (every, powers):
        if prod(map(len, counts)) <= MOST_SUB_CLUSTERS:
            return counts
    return [[0, size] for size in sizes]


def money_key(experiment: Experiment) -> str:
    """Name what makes money count in an experiment."""
    if experiment.objective == "time":
        return "search.max_cost_per_iteration"
    return f"objective {experiment.objective!r}"
