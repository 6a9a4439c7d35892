"""Nodes that are better in one thing, for tests that better hardware never gives a worse plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from amp_ray.clusters.cluster import Link, Node


def more_memory(node: Node) -> Node:
    """Give a node half as much memory more."""
    device = node.device
    grown = replace(device, name="roomy", memory_bytes=int(device.memory_bytes * 1.5))
    return replace(node, device=grown)


def faster_device(node: Node) -> Node:
    """Let a node compute faster."""
    device, rate = node.device, node.device.fp16_flops
    assert rate is not None
    quick = replace(
        device,
        name="quick",
        fp16_flops=rate * 1.7,
        memory_bytes_per_s=device.memory_bytes_per_s * 1.7,
    )
    return replace(node, device=quick)


def faster_links(node: Node) -> Node:
    """Let a node send faster."""
    intra, inter = (
        Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 1.3, latency_s=link.latency_s)
        for link in (node.intra, node.inter)
    )
    return replace(node, intra=intra, inter=inter)


BETTER: Final[tuple[Callable[[Node], Node], ...]] = (more_memory, faster_device, faster_links)
