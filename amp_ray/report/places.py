"""Where the stages of a strategy run, in a few words."""

from itertools import groupby

from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy


def is_in_order(strategy: Strategy) -> bool:
    """Tell whether a strategy is one grid on the devices as they are listed."""
    return strategy.is_uniform and strategy.placement == tuple(range(len(strategy.placement)))


def places_text(strategy: Strategy, cluster: Cluster) -> str:
    """Name the nodes of each stage, in pipeline order; where stages differ, their tp and dp too.

    Args:
        strategy: On devices of the cluster.
        cluster: Gives nodes their names.

    Returns:
        Text such as ``node3 x4, node0+node1, node2``: four stages on node3, one on two nodes.
    """
    stages = [_place(strategy, index, cluster) for index in range(strategy.pp)]
    runs = [(text, len(list(run))) for text, run in groupby(stages)]
    return ", ".join(text if length == 1 else f"{text} x{length}" for text, length in runs)


def _place(strategy: Strategy, index: int, cluster: Cluster) -> str:
    """Name the nodes of one stage, with its degrees where stages differ."""
    nodes = dict.fromkeys(cluster.node_of_device[device] for device in strategy.devices(index))
    names = "+".join(cluster.nodes[node].name for node in nodes)
    if strategy.is_uniform:
        return names
    stage = strategy.stages[index]
    return f"tp{stage.tp} dp{stage.dp} on {names}"
