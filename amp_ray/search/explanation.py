"""Why a plan takes as long as it does: stage by stage, cut by cut, and against another plan."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.strategies.strategy import Strategy


def stage_records(cost_model: CostModel, estimate: Estimate) -> list[dict[str, Any]]:
    """Return what each stage takes for a micro-batch, and holds.

    Times are those of the part of the samples that takes longest; the bottleneck is the stage with
    the longest passes. A strategy whose layers count operators has no such times.
    """
    strategy, cluster = estimate.strategy, cost_model.experiment.cluster
    passes_s, longest_s = None, np.zeros(strategy.pp)
    if not strategy.has_operators:
        stages = PlacedStages.of_strategy(strategy)
        passes_s, _ = cost_model.seconds(stages, strategy.chunk_bounds or strategy.bounds)
        chunks = (3, strategy.virtual_stages, strategy.pp, -1)
        passes_s = passes_s.reshape(chunks).sum(axis=1)  # of a stage, all its chunks
        longest_s = (passes_s[0] + passes_s[1]).max(axis=1)
    records = []
    for index, stage in enumerate(strategy.stages):
        record: dict[str, Any] = {
            "layers": [stage.first_layer, stage.end_layer],
            "nodes": _node_names(strategy.devices(index), cluster),
            "peak_memory_bytes": round(estimate.peak_memory_bytes[index]),
            "memory_limit_bytes": round(estimate.memory_limit_bytes[index]),
        }
        if passes_s is not None:
            part = int((passes_s[0, index] + passes_s[1, index]).argmax())
            forward_s, backward_s, talk_s = map(float, passes_s[:, index, part])
            record |= {
                "forward_s": forward_s,
                "backward_s": backward_s,
                "tensor_parallel_s": talk_s,
                "is_bottleneck": index == int(longest_s.argmax()),
            }
        records.append(record)
    return records


def link_records(cost_model: CostModel, strategy: Strategy) -> list[dict[str, Any]]:
    """Return the links that messages meet: across cuts, within layers, and for gradients."""
    cluster = cost_model.experiment.cluster
    records: list[dict[str, Any]] = []
    if strategy.pp > 1 and not strategy.has_operators:
        stages = PlacedStages.of_strategy(strategy)
        _, sends_s = cost_model.seconds(stages, strategy.chunk_bounds or strategy.bounds)
        sends_s = sends_s[:, : strategy.pp - 1]
        for cut, seconds in enumerate(sends_s.max(axis=2).T.tolist()):
            devices = [*strategy.devices(cut), *strategy.devices(cut + 1)]
            records.append(
                {
                    "what": "activations and gradients",
                    "from_stage": cut,
                    "to_stage": cut + 1,
                    "scope": _scope(devices, cluster),
                    "activation_s": seconds[0],
                    "gradient_s": seconds[1],
                }
            )
    for what, groups in _groups(strategy).items():
        if groups and len(groups[0]) > 1:
            across = sum(_scope(group, cluster) == "between nodes" for group in groups)
            scope = "within nodes" if not across else "between nodes"
            records.append({"what": what, "num_groups": len(groups), "scope": scope})
    return records


def difference(one: Estimate, other: Estimate) -> dict[str, float]:
    """Return how much longer each part of an iteration takes in the other plan, in seconds."""
    seconds = {"iteration_time": other.iteration_time_s - one.iteration_time_s}
    if one.breakdown is None or other.breakdown is None:
        return seconds
    own, its = one.breakdown.to_json(), other.breakdown.to_json()
    return seconds | {part: its[part] - own[part] for part in own}


def _groups(strategy: Strategy) -> dict[str, list[list[int]]]:
    """Return the devices of every group that a collective runs in."""
    tensor, data = [], []
    for grid in PlacedStages.of_strategy(strategy).grids:
        tensor += grid.tolist()
        data += grid.T.tolist()
    return {"tensor parallel groups": tensor, "data parallel groups": data}


def _scope(devices: Sequence[int], cluster: Cluster) -> str:
    """Tell whether devices are on one node."""
    nodes = {cluster.node_of_device[device] for device in devices}
    return "within nodes" if len(nodes) == 1 else "between nodes"


def _node_names(devices: Sequence[int], cluster: Cluster) -> list[str]:
    """Name the nodes of some devices."""
    nodes = dict.fromkeys(cluster.node_of_device[device] for device in devices)
    return [cluster.nodes[node].name for node in nodes]
