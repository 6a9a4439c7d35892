"""Our clusters as Metis's hostfile and cluster file."""

import json

from amp_ray.spec.cluster import Cluster
from amp_ray.spec.hostfile import HostSlots, format_hostfile
from amp_ray.units import GIB, GIGA


def metis_cluster_files(cluster: Cluster) -> dict[str, str]:
    """Return ``hostfile`` and ``clusterfile.json`` (GB/s, GiB) of a cluster, for Metis's planner.

    It reads one digit of the slots, and takes every node to be as large as the first.
    """
    hosts = tuple(HostSlots(host=node.name, num_slots=node.num_slots) for node in cluster.nodes)
    described = {
        node.name: {
            "instance_type": node.device.name.partition("-")[0].upper(),
            "inter_bandwidth": node.inter.bandwidth_bytes_per_s / GIGA,
            "intra_bandwidth": node.intra.bandwidth_bytes_per_s / GIGA,
            "memory": node.device.memory_bytes / GIB,
        }
        for node in cluster.nodes
    }
    return {
        "hostfile": format_hostfile(hosts),
        "clusterfile.json": json.dumps(described, indent=1) + "\n",
    }
