"""A cluster as the ``cluster`` mapping of an experiment file, to take Metis's files in."""

from itertools import groupby

from amp_ray.spec.catalogue import CATALOGUE
from amp_ray.spec.cluster import Cluster, Node
from amp_ray.spec.hostfile import HostSlots, format_hostfile
from amp_ray.units import (
    BITS_PER_BYTE,
    GIB,
    GIGA,
    MICROSECONDS_PER_SECOND,
)


def cluster_yaml(cluster: Cluster, *, hostfile: str | None = None) -> str:
    """Write a cluster as the ``cluster:`` mapping of an experiment file, as text with a line break.

    The hostfile of that name holds the nodes' names; see `cluster_hostfile`.

    Raises:
        ValueError: If a device is not in the catalogue, or pairs of nodes have their own links.
    """
    if cluster.pair_links:
        message = f"links of {len(cluster.pair_links)} single pairs of nodes cannot be written"
        raise ValueError(message)
    lines = ["cluster:"] if hostfile is None else ["cluster:", f'  hostfile: "{hostfile}"']
    lines.append("  nodes:")
    for entry, nodes in groupby(cluster.nodes, key=_entry):
        lines.append(f"    - {{count: {len(list(nodes))}, {entry}}}")
    return "\n".join(lines) + "\n"


def cluster_hostfile(cluster: Cluster) -> str:
    """Write the names and slots of a cluster's nodes as a hostfile of our own form."""
    return format_hostfile(
        tuple(HostSlots(host=node.name, num_slots=node.num_slots) for node in cluster.nodes)
    )


def _entry(node: Node) -> str:
    """Write what equal nodes have in common."""
    board = CATALOGUE.get(node.device.name)
    if board is None:
        message = f"device {node.device.name!r} is not in the catalogue: describe it by hand"
        raise ValueError(message)
    figures = {
        "intra_gbit_per_s": node.intra.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "inter_gbit_per_s": node.inter.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "intra_latency_us": node.intra.latency_s * MICROSECONDS_PER_SECOND,
        "inter_latency_us": node.inter.latency_s * MICROSECONDS_PER_SECOND,
    }
    for scope, link in (("intra", node.intra), ("inter", node.inter)):
        if link.collective_latency_s is not None:
            figures[f"{scope}_collective_us"] = link.collective_latency_s * MICROSECONDS_PER_SECOND
    if board.memory_bytes != node.device.memory_bytes:
        figures["memory_gib"] = node.device.memory_bytes / GIB
    written = [f"{key}: {_number(value)}" for key, value in figures.items()]
    return ", ".join([f"device: {node.device.name}", f"slots: {node.num_slots}", *written])


def _number(value: float) -> str:
    """Write a number in full, without a fraction where it has none."""
    return str(int(value)) if value == int(value) else repr(value)
