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


def test_a_host_with_boards_of_two_kinds_numbers_its_slots_through() -> None:
    second = replace(node("a", 1, device="V100-16"), first_slot=2)
    found = cluster(node("a", 2), second, node("b"), pairs={(0, 1): FAST})
    assert found.places == (("a", 0), ("a", 1), ("a", 2), ("b", 0))
    assert (found.host_names, found.host_of_device) == (("a", "b"), (0, 0, 0, 1))
    assert found.host_of_node == (0, 0, 2)
    assert found.of_hosts(["a"]).nodes == found.nodes[:2]
    assert found.part([1]).places == (("a", 2),)
    with pytest.raises(ValueError, match="nodes of host 'a' need a link"):
        cluster(node("a", 2), second)
    with pytest.raises(ValueError, match="different names"):
        cluster(node("a", 2), node("b"), second)
    with pytest.raises(ValueError, match="different names"):
        cluster(node("a", 3), second, pairs={(0, 1): FAST})


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


def rack(*names: str) -> Node:
    return node(names[0], 2).of_hosts(names)


def test_a_rack_is_a_node_with_the_devices_of_its_hosts() -> None:
    found = cluster(rack("a", "b", "c"), node("d", 1))
    assert (found.nodes[0].num_slots, found.nodes[0].host_slots, found.has_racks) == (6, 2, True)
    assert found.host_names == ("a", "b", "c", "d")
    assert found.node_of_device == (0,) * 6 + (1,)
    assert found.host_of_device == (0, 0, 1, 1, 2, 2, 3)
    assert found.places == (*((name, slot) for name in "abc" for slot in range(2)), ("d", 0))
    assert [host.num_slots for host in found.hosts] == [2, 2, 2, 1]
    assert not cluster(node("a"), node("b")).has_racks


def test_hosts_leave_a_rack_one_by_one() -> None:
    whole = cluster(rack("a", "b", "c"), rack("d", "e", "f"), node("g"), pairs={(1, 2): FAST})
    part = whole.of_hosts(["f", "d", "b", "g"])
    assert [found.host_names for found in part.nodes] == [("b",), ("d", "f"), ("g",)]
    assert [found.num_slots for found in part.nodes] == [2, 4, 1]
    assert part.pair_links == {(1, 2): FAST}
    assert whole.of_hosts(whole.host_names) == whole
    assert part.nodes[0] == node("b", 2)


def test_a_host_alone_has_its_own_link() -> None:
    both = replace(node("a", 2), host_link=FAST, intra=SLOW).of_hosts(["a", "b"])
    alone = both.of_hosts(["b"])
    assert (both.intra, alone.intra, alone.host_link, alone.hosts) == (SLOW, FAST, None, ())
    sized = replace(FAST, rates=((1.0, 5.0), (2.0, 100.0)))
    by_size = cluster(replace(both, host_link=sized))
    assert by_size.has_rates_by_size
    assert by_size.at(1.0).nodes[0].host_link == replace(FAST, bandwidth_bytes_per_s=5.0)


def test_racks_differ_in_their_hosts_but_not_in_names() -> None:
    assert rack("a", "b").nameless == rack("c", "d").nameless
    assert rack("a", "b").kind != node("a", 4).kind
    with pytest.raises(ValueError, match="different names"):
        cluster(rack("a", "b"), node("b"))
    with pytest.raises(ValueError, match="the 2 hosts of rack 'a' must have equally many slots"):
        replace(rack("a", "b"), num_slots=3)


def test_the_hosts_of_a_large_part_are_not_compared_one_by_one() -> None:
    class Name(str):
        __slots__ = ()
        comparisons = 0

        def __eq__(self, other: object) -> bool:
            Name.comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(number) for number in range(300)]
    assert len(cluster(*map(node, names)).of_hosts(tuple(names[::-1])).nodes) == 300
    assert Name.comparisons < 20 * len(names)
