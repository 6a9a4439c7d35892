from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.search.placement.node_moves import NodeClass, Scope, class_moves, node_classes
from support.mixed_cluster import mixed_cost_model


def cluster() -> Cluster:
    return mixed_cost_model().experiment.cluster


def test_equal_nodes_are_one_class() -> None:
    classes = node_classes(cluster(), 1, pairs_matter=True)
    assert sorted(found.nodes for found in classes) == [(0,), (1, 2)]
    assert {found.num_units for found in classes} == {2}


def test_units_are_tensor_parallel_groups() -> None:
    assert {found.num_units for found in node_classes(cluster(), 2, pairs_matter=True)} == {1}


def test_classes_do_not_depend_on_the_order_of_the_file() -> None:
    nodes = cluster().nodes
    turned = node_classes(Cluster(nodes=nodes[::-1]), 1, pairs_matter=True)
    given = node_classes(cluster(), 1, pairs_matter=True)
    devices = [
        [[named[index].device.name for index in found.nodes] for found in classes]
        for classes, named in ((given, nodes), (turned, nodes[::-1]))
    ]
    assert devices[0] == devices[1]


@pytest.mark.parametrize(("matter", "number"), [(True, 3), (False, 2)])
def test_a_link_of_its_own_tells_a_node_apart(number: int, *, matter: bool) -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    linked = replace(cluster(), pair_links={(0, 1): link})
    assert len(node_classes(linked, 1, pairs_matter=matter)) == number


def test_a_class_with_too_many_steps_is_given_up() -> None:
    huge = NodeClass(nodes=tuple(range(16)), num_units=8)
    assert class_moves(huge, 8, Scope(max_options=1), 6_000) is None
    small = NodeClass(nodes=(4, 7), num_units=2)
    assert class_moves(small, 2, Scope(max_options=1), 6_000) is not None
