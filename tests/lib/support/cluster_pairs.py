"""Pairs of a mixed cluster and a better one, to see that better hardware gives no slower answer."""

from dataclasses import replace

import numpy as np

from amp_ray.clusters.cluster import Node
from amp_ray.inputs.experiment import Experiment
from support.experiments import experiment_from

DEVICES = ("T4", "P100-16", "V100-16", "V100-32", "A100-40", "A100-80", "H100")
MODELS = (
    "family: gpt2, num_layers: 12, hidden_size: 1024, num_heads: 16, sequence_length: 512",
    "family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024",
    "family: gpt2, num_layers: 16, hidden_size: 1536, num_heads: 16, sequence_length: 2048",
)


def cluster_pair(seed: int, *, most_devices: int) -> tuple[Experiment, Experiment, str]:
    """Draw an experiment on 1 to 4 kinds of nodes, and the same on a better cluster.

    Args:
        seed: Of the draw.
        most_devices: Of the cluster; the better one may have a node more.

    Returns:
        Both, and what is better: nic, links (within a node), memory, device or node.
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
    how = str(rng.choice(["nic", "links", "memory", "device", "node"]))
    cluster = experiment.cluster
    own = list(cluster.nodes)
    index = int(rng.integers(0, len(own)))
    if how == "node":
        own.append(replace(own[index], name="extra"))
    else:
        own[index] = _better(own[index], how)
    return experiment, replace(experiment, cluster=replace(cluster, nodes=tuple(own))), how


def with_new_kind(experiment: Experiment, seed: int) -> Experiment:
    """Return an experiment with one more node, fast or slow, most often of a kind of its own."""
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
    nodes = (*experiment.cluster.nodes, replace(lone, name="extra"))
    return replace(experiment, cluster=replace(experiment.cluster, nodes=nodes))


def _better(node: Node, how: str) -> Node:
    """Return a node with a quicker interface, quicker links, more memory or quicker devices."""
    device = node.device
    if how == "memory":
        grown = replace(device, name="roomy", memory_bytes=int(device.memory_bytes * 1.5))
        return replace(node, device=grown)
    if how == "device":
        rate = device.fp16_flops
        assert rate is not None
        quick = replace(
            device,
            name="quick",
            fp16_flops=rate * 1.5,
            memory_bytes_per_s=device.memory_bytes_per_s * 1.5,
        )
        return replace(node, device=quick)
    name = "inter" if how == "nic" else "intra"
    link = getattr(node, name)
    quicker = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 2)
    return replace(node, inter=quicker) if how == "nic" else replace(node, intra=quicker)
