from collections.abc import Mapping
from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.device import find_device

FAST = Link(bandwidth_bytes_per_s=100.0, latency_s=1.0)
SLOW = Link(bandwidth_bytes_per_s=10.0, latency_s=2.0)


def node(name: str, num_slots: int = 1, inter: Link = SLOW, device: str = "T4") -> Node:
    found = find_device(device)
    return Node(name=name, device=found, num_slots=num_slots, intra=FAST, inter=inter)


def cluster(*nodes: Node, pairs: Mapping[tuple[int, int], Link] | None = None) -> Cluster:
    return Cluster(nodes=nodes, pair_links=pairs or {})


def test_devices_are_numbered_through_in_the_nodes_order() -> None:
    found = cluster(node("a", 1), node("b", 3))
    assert found.node_of_device == (0, 1, 1, 1)
    assert found.slot_of_device == (0, 0, 1, 2)
    assert found.num_devices == 4


def test_device_types_come_in_order_of_first_appearance() -> None:
    found = cluster(node("a", device="V100-16"), node("b", 2), node("c", device="V100-16"))
    assert [device.name for device in found.device_types] == ["V100-16", "T4"]
    assert found.type_of_device == (0, 1, 1, 0)


def test_names_that_occur_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes with different names, found \['a', 'a'\]"):
        cluster(node("a"), node("a"))


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes with different names, found \[\]"):
        cluster()


@pytest.mark.parametrize("pair", [(1, 0), (0, 0), (0, 2), (-1, 0)])
def test_a_pair_that_does_not_exist_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"link between nodes .*: there are nodes 0\.\.1"):
        cluster(node("a"), node("b"), pairs={pair: FAST})


@pytest.mark.parametrize(("rate", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_link_that_moves_nothing_or_travels_in_time_is_refused(
    rate: float, latency_s: float
) -> None:
    with pytest.raises(ValueError, match="a link needs bandwidth_bytes_per_s > 0"):
        Link(bandwidth_bytes_per_s=rate, latency_s=latency_s)


def test_a_node_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="node 'a' needs at least one slot, found 0"):
        node("a", 0)


def test_a_node_that_pays_is_refused() -> None:
    with pytest.raises(ValueError, match="node 'a' has a price below 0: -1"):
        replace(node("a"), price_per_device_hour=-1.0)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="collective_latency_s >= 0, found -1"):
        replace(FAST, collective_latency_s=-1.0)
