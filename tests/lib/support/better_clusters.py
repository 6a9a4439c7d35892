"""Pairs of mixed clusters, for tests that the better cluster never gives a slower plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from amp_ray.clusters.cluster import Link, Node
from amp_ray.inputs.experiment import Experiment
from support.experiments import experiment_from

DEVICES = ("T4", "P100-16", "V100-16", "V100-32", "A100-40", "A100-80", "H100")
MODELS = (
    "family: gpt2, num_layers: 12, hidden_size: 1024, num_heads: 16, sequence_length: 512",
    "family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024",
    "family: gpt2, num_layers: 16, hidden_size: 1536, num_heads: 16, sequence_length: 2048",
)


def _more_memory(node: Node) -> Node:
    device = node.device
    roomy = replace(device, name="roomy", memory_bytes=int(device.memory_bytes * 1.5))
    return replace(node, device=roomy)


def _faster_device(node: Node) -> Node:
    device, rate = node.device, node.device.fp16_flops
    assert rate is not None
    memory_bytes_per_s = device.memory_bytes_per_s * 1.5
    quick = replace(
        device, name="quick", fp16_flops=rate * 1.5, memory_bytes_per_s=memory_bytes_per_s
    )
    return replace(node, device=quick)


def _faster(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 2)


BETTER: Final[Mapping[str, Callable[[Node], Node]]] = {
    "nic": lambda node: replace(node, inter=_faster(node.inter)),
    "links": lambda node: replace(node, intra=_faster(node.intra)),
    "memory": _more_memory,
    "device": _faster_device,
}
"""Nodes that are better in one property, by its name."""


def cluster_pair(seed: int, *, most_devices: int) -> tuple[Experiment, Experiment, str]:
    """Draw an experiment on 1 to 4 kinds of nodes, and the same on a better cluster.

    Args:
        seed: Seed of the draw.
        most_devices: Maximum number of devices; the better cluster may have one more node.

    Returns:
        Both experiments, and the difference between them: a key of `BETTER`, or ``node``.
    """
    rng = np.random.default_rng(seed)
    rows: list[str] = []
    num_devices = 0
    for _ in range(int(rng.integers(1, 5))):
        slots, count = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 5))
        if num_devices + slots * count <= most_devices:
            num_devices += slots * count
            rows.append(
                f"    - {{count: {count}, device: {rng.choice(DEVICES)}, slots: {slots}, "
                f"intra_gbit_per_s: {rng.choice([50, 100, 400, 1200])}, "
                f"inter_gbit_per_s: {rng.choice([5, 10, 25, 50, 100])}}}"
            )
    nodes = (
        "\n".join(rows)
        or "    - {count: 2, device: T4, slots: 1, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    )
    experiment = experiment_from(f"""\
name: pair
model: {{{rng.choice(MODELS)}, vocab_size: 51200}}
cluster:
  nodes:
{nodes}
recompute: {rng.choice(["none", "full"])}
global_batch_size: {rng.choice([8, 16, 24])}
search: {{space: heterogeneous}}
""")
    how = str(rng.choice([*BETTER, "node"]))
    better = list(experiment.cluster.nodes)
    index = int(rng.integers(0, len(better)))
    if how == "node":
        better.append(replace(better[index], name="extra"))
    else:
        better[index] = BETTER[how](better[index])
    return experiment, with_nodes(experiment, better), how


def with_new_kind(experiment: Experiment, seed: int) -> Experiment:
    """Return an experiment with one more node, fast or slow, usually of another kind."""
    rng = np.random.default_rng(seed)
    lone = experiment_from(f"""\
name: lone
model: {{{MODELS[0]}, vocab_size: 51200}}
cluster:
  nodes:
    - {{count: 1, device: {rng.choice(DEVICES)}, slots: {rng.choice([1, 2, 4])},
       intra_gbit_per_s: {rng.choice([50, 100, 400, 1200])},
       inter_gbit_per_s: {rng.choice([1, 5, 10, 25, 50, 100])}}}
global_batch_size: 8
""").cluster.nodes[0]
    return with_nodes(experiment, [*experiment.cluster.nodes, replace(lone, name="extra")])


def with_nodes(experiment: Experiment, nodes: list[Node]) -> Experiment:
    """Return the experiment on other nodes."""
    return replace(experiment, cluster=replace(experiment.cluster, nodes=tuple(nodes)))
