import json

from amp_ray.planners.metis2024.inputs import (
    metis_cluster,
    metis_cluster_files,
    parse_metis_clusterfile,
)
from support.experiments import small_experiment
from support.metis import metis_setting


def test_a_cluster_is_read_back_as_it_was() -> None:
    cluster = metis_setting().cluster
    files = metis_cluster_files(cluster)
    described = parse_metis_clusterfile(files["clusterfile.json"])
    again = metis_cluster(files["hostfile"], described).cluster
    assert [node.device for node in again.nodes] == [node.device for node in cluster.nodes]
    assert [node.num_slots for node in again.nodes] == [2, 2]
    for node, before in zip(again.nodes, cluster.nodes, strict=True):
        assert node.intra.bandwidth_bytes_per_s == before.intra.bandwidth_bytes_per_s
        assert node.inter.bandwidth_bytes_per_s == before.inter.bandwidth_bytes_per_s


def test_units_are_metis_own() -> None:
    files = metis_cluster_files(small_experiment().cluster)
    assert files["hostfile"] == "node0 slots=2\nnode1 slots=2\n"
    node = json.loads(files["clusterfile.json"])["node0"]
    assert node["instance_type"] == "T4"
    assert node["intra_bandwidth"] == 6.25
    assert node["inter_bandwidth"] == 1.25
    assert 14 < node["memory"] < 15
