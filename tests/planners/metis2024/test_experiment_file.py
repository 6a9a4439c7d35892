from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.planners.metis2024.inputs import (
    cluster_hostfile,
    cluster_yaml,
    metis_cluster,
    parse_metis_clusterfile,
)
from support.experiments import SMALL, experiment_from

CLUSTERFILE = """{
"a": {"instance_type": "V100", "inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 16},
"b": {"instance_type": "P100", "inter_bandwidth": 1.2, "intra_bandwidth": 46, "memory": 15}}"""
START, END = SMALL.index("cluster:"), SMALL.index("global_batch_size")


def cluster_of(hostfile: str) -> Cluster:
    """Read a hostfile with the cluster file above."""
    return metis_cluster(hostfile, parse_metis_clusterfile(CLUSTERFILE)).cluster


def test_an_experiment_with_the_text_has_the_same_cluster() -> None:
    cluster = cluster_of("a slots=4\na slots=4\nb 16\na 2\n")
    text = SMALL[:START] + cluster_yaml(cluster, hostfile="hosts") + SMALL[END:]
    again = experiment_from(text, {"hosts": cluster_hostfile(cluster)}).cluster
    assert again == cluster


def test_latencies_of_collectives_are_kept() -> None:
    (node,) = cluster_of("a 1").nodes
    slow = replace(node.intra, collective_latency_s=9e-5)
    text = cluster_yaml(Cluster(nodes=(replace(node, intra=slow),)))
    again = experiment_from(SMALL[:START] + text + SMALL[END:]).cluster.nodes[0]
    assert again.intra.step_s == pytest.approx(9e-5)
    assert again.inter.collective_latency_s is None


def test_equal_nodes_in_a_row_are_one_entry() -> None:
    text = cluster_yaml(cluster_of("a 4\na 4\nb 4"))
    assert [line[:16] for line in text.splitlines()[2:]] == ["    - {count: 2,", "    - {count: 1,"]
    assert "hostfile" not in text


def test_links_of_single_pairs_cannot_be_written() -> None:
    cluster = replace(
        cluster_of("a 1\nb 1"),
        pair_links={(0, 1): Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)},
    )
    with pytest.raises(ValueError, match="1 link of single pairs"):
        cluster_yaml(cluster)


def test_a_device_of_ones_own_cannot_be_written() -> None:
    (node,) = cluster_of("a 1").nodes
    own = replace(node, device=replace(node.device, name="X"))
    with pytest.raises(ValueError, match="device 'X' is not in the catalogue"):
        cluster_yaml(Cluster(nodes=(own,)))
