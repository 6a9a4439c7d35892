"""Where the stages of a strategy run, in a few words."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy

_LONG_RUN: Final = 3
"""Nodes from which on only the ends of a run are named."""


def is_in_order(strategy: Strategy) -> bool:
    """Tell whether a strategy is one grid on the devices as they are listed."""
    return strategy.is_uniform and strategy.placement == tuple(range(len(strategy.placement)))


def places_text(strategy: Strategy, cluster: Cluster) -> str:
    """Name the nodes of each stage, in pipeline order; where stages differ, their tp and dp too.

    ``node3 x4, node0+node1, node4..node7`` means four stages on node3, one on two nodes, one on
    four that are listed one after the other.
    """
    stages = [_place(strategy, index, cluster) for index in range(strategy.pp)]
    runs = [(text, len(list(run))) for text, run in groupby(stages)]
    return ", ".join(text if length == 1 else f"{text} x{length}" for text, length in runs)


def _place(strategy: Strategy, index: int, cluster: Cluster) -> str:
    """Name the nodes of one stage, with its degrees where stages differ."""
    nodes = dict.fromkeys(cluster.node_of_device[device] for device in strategy.devices(index))
    names = "+".join(_run_text(run, cluster) for run in _runs(tuple(nodes)))
    if strategy.is_uniform:
        return names
    stage = strategy.stages[index]
    return f"tp{stage.tp} dp{stage.dp} on {names}"


def _runs(nodes: Sequence[int]) -> list[list[int]]:
    """Cut nodes where the next one is not the next in the cluster."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _run_text(run: Sequence[int], cluster: Cluster) -> str:
    """Name the nodes of a run, or its ends where it is long."""
    names = [cluster.nodes[node].name for node in run]
    return "+".join(names) if len(names) < _LONG_RUN else f"{names[0]}..{names[-1]}"
