from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Cluster, Link, ZoneLink
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.topology import Topology


def link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


def path(bytes_per_s: float, step_s: float, num_nodes: int = 1, tree_s: float = 0.0) -> Path:
    return Path(bytes_per_s=bytes_per_s, step_s=step_s, num_nodes=num_nodes, tree_s=tree_s)


def between(topology: Topology) -> tuple[FloatArray, FloatArray]:
    """Rate and latency between every two nodes, shape ``(num_nodes, num_nodes)``."""
    kinds, links = topology.kind_of_node, topology.links
    pairs = np.ix_(kinds, kinds)
    return links.inter_bytes_per_s[pairs], links.inter_step_s[pairs]


INSIDE = path(900 / 1.25, 1.0)  # 1 + 0.5 / 2 ranks


@pytest.mark.parametrize(
    ("groups", "paths", "index"),
    [
        ([[0], [5]], [NO_RING], (0, 0)),
        ([[0, 1], [2, 3]], [INSIDE], (0, 0)),
        ([[0, 4], [1, 5], [2, 6]], [path(120 / 3, 2.0, 2, 2.0)], (0, 0, 0)),
        # a ring inside does not share the interface
        ([[0, 4], [1, 2]], [path(120, 2.0, 2, 2.0), INSIDE], (0, 1)),
        # one ring crosses once per node, however many ranks it has there; a step lasts until the
        # hops between nodes are through; a tree is a chain of two in each node, and a hop
        ([[0, 1, 4, 5]], [path(120.0, 2.0, 2, 2.0 + 1.0)], (0,)),
        # as slow as the slowest hop; three nodes are two deep
        ([[0, 4, 8]], [path(40.0, 2.0, 3, 2 * 2.0)], (0,)),
    ],
)
def test_rings_share_what_they_use_at_once(
    groups: list[list[int]], paths: list[Path], index: tuple[int, ...], topology: Topology
) -> None:
    rings = topology.rings(groups)
    assert list(rings.paths) == paths
    assert rings.index == index


def test_ring_with_one_rank_per_node_is_fed_at_the_rate_inside(topology: Topology) -> None:
    pairs = {(0, 2): link(10_000, 0.0)}
    wide = replace(topology, cluster=replace(topology.cluster, pair_links=pairs))
    (path,) = wide.rings([[0, 8]]).paths
    assert path.bytes_per_s == 80.0


def test_among_names_the_different_paths_of_some_groups(topology: Topology) -> None:
    rings = topology.rings([[0, 4], [1, 2], [2, 3]])
    assert len(rings.among(0, 3)) == 2
    assert rings.among(1, 3) == [rings.paths[1]]


def test_rings_take_the_latency_of_collectives_and_messages_their_own(
    topology: Topology,
) -> None:
    nodes = [
        replace(
            node,
            intra=replace(node.intra, collective_latency_s=5.0),
            inter=replace(node.inter, collective_latency_s=9.0),
        )
        for node in topology.cluster.nodes
    ]
    slow = replace(topology, cluster=Cluster(nodes=tuple(nodes)))
    inside, between = (slow.rings([pair]).paths[0] for pair in ([0, 1], [0, 4]))
    assert (inside.step_s, between.step_s) == (5.0, 9.0)
    assert (slow.links.intra_step_s[0], slow.links.inter_step_s[0, 0]) == (1.0, 2.0)


def test_a_known_pair_of_nodes_has_a_collective_latency_of_its_own(topology: Topology) -> None:
    known = replace(link(120, 2.0), collective_latency_s=11.0)
    pair = replace(topology.cluster, pair_links={(0, 1): known})
    found = replace(topology, cluster=pair).rings([[0, 4], [0, 8]])
    assert [found.paths[index].step_s for index in found.index] == [11.0, 2.0]


def test_between_nodes_the_slower_interface_and_the_longer_latency_count(
    topology: Topology,
) -> None:
    rates, steps = between(topology)
    assert rates[0].tolist() == [120, 120, 40]
    assert steps[0].tolist() == [2, 2, 2]


def test_the_link_between_zones_holds_back_faster_interfaces(topology: Topology) -> None:
    nodes = topology.cluster.nodes
    zones = [replace(node, zone=zone) for node, zone in zip(nodes, "aab", strict=True)]
    joined = {("a", "b"): ZoneLink(link=link(60, 9.0))}
    cluster = Cluster(nodes=tuple(zones), zone_links=joined)
    rates, steps = between(replace(topology, cluster=cluster))
    assert rates[:, 2].tolist() == [40, 40, 40]  # node 2's own interface is slower still
    assert rates[:, 0].tolist() == [120, 120, 40]
    assert steps[:, 2].tolist() == [9, 9, 2]
    assert replace(topology, cluster=cluster).ring_step_s.tolist() == [[2, 9], [9, 2]]


def test_a_pair_of_its_own_wins_over_interfaces_and_zones(topology: Topology) -> None:
    nodes = topology.cluster.nodes
    zones = [replace(node, zone=zone) for node, zone in zip(nodes, "abb", strict=True)]
    joined = {("a", "b"): ZoneLink(link=link(60, 9.0))}
    cluster = Cluster(nodes=tuple(zones), zone_links=joined, pair_links={(0, 1): link(7, 3.0)})
    rates, steps = between(replace(topology, cluster=cluster))
    assert (rates[1, 0], steps[0, 1]) == (7, 3)
    assert rates[0, 2] == 40


@pytest.mark.parametrize("size", [2, 3, 4, 8, 24])
def test_equal_nodes_are_as_good_as_each_for_itself(topology: Topology, size: int) -> None:
    node = replace(topology.cluster.nodes[0], num_slots=4)
    nodes = tuple(replace(node, name=f"node{index}") for index in range(6))
    own = replace(topology, cluster=Cluster(nodes=nodes))
    assert own.cluster.is_even
    orders = [np.random.default_rng(seed).permutation(24) for seed in range(5)]
    for order in (np.arange(24), *orders):
        groups = order.reshape(-1, size)
        assert own.rings(groups) == own.rings(groups.tolist())


def test_where_equal_nodes_lie_does_not_matter_to_an_exchange(topology: Topology) -> None:
    node = replace(topology.cluster.nodes[0], num_slots=4)
    nodes = tuple(replace(node, name=f"node{index}") for index in range(6))
    own = replace(topology, cluster=Cluster(nodes=nodes))
    across = [[0, 1, 4, 5], [2, 3, 6, 7]]
    moved = [[rank + 8 for rank in group] for group in across]
    assert own.exchange(across) == own.exchange(moved) != own.exchange([[0, 1, 2, 3], [4, 5, 6, 7]])


def racked(topology: Topology, num_hosts: int = 2, host_link: Link | None = None) -> Topology:
    """Two racks of hosts of four: 900 B/s and 1 s inside, 120 B/s and 2 s for each host outside."""
    one = replace(topology.cluster.nodes[0], host_link=host_link)
    names = [[f"{rack}{host}" for host in range(num_hosts)] for rack in "ab"]
    return replace(topology, cluster=Cluster(nodes=tuple(map(one.of_hosts, names))))


EIGHT = path(900 / (1 + 0.5 / 8), 1.0)


@pytest.mark.parametrize(
    ("groups", "paths"),
    [
        # devices 0 to 7 are two hosts of one rack
        ([[0, 7]], [INSIDE]),
        ([list(range(8)), list(range(8, 16))], [EIGHT]),
        # one rank in a rack uses the interface of its host, two on two hosts use both
        ([[0, 8]], [path(120, 2.0, 2, 2.0)]),
        ([[0, 4, 8, 12]], [path(240, 2.0, 2, 2.0 + 1.0)]),
        # eight rings share two interfaces
        ([[rank, rank + 8] for rank in range(8)], [path(240 / 8, 2.0, 2, 2.0)]),
    ],
)
def test_rings_leave_a_rack_by_the_interfaces_of_its_hosts(
    groups: list[list[int]], paths: list[Path], topology: Topology
) -> None:
    rack = racked(topology)
    assert list(rack.rings(groups).paths) == paths
    assert list(rack.rings(np.array(groups)).paths) == paths


def test_a_host_of_a_rack_may_have_a_link_of_its_own(topology: Topology) -> None:
    rack = racked(topology, host_link=link(3600, 0.5))
    for groups in ([[0, 1], [3, 4]], np.array([[0, 1], [3, 4]])):
        assert list(rack.rings(groups).paths) == [path(3600 / 1.25, 0.5), INSIDE]
    within = rack.ring((0,), 2, {})
    assert (within.bytes_per_s, within.step_s) == (3600 / 1.25, 0.5)
    assert rack.ring((0,), 8, {}) == EIGHT


def test_an_exchange_within_a_rack_uses_no_interface(topology: Topology) -> None:
    rack = racked(topology)
    inside = rack.exchange([list(range(8))])
    assert [inside.bytes_per_s, inside.step_s] == pytest.approx([900 * 8 / 7, 1.0])
    # half of each rank's bytes leave its rack, and eight ranks share two interfaces of 120 B/s
    across = rack.exchange([list(range(16))])
    assert across.bytes_per_s == pytest.approx(240 / 8 / 0.5)
    # a rank alone in its rack has the interface of its host
    assert rack.exchange([[0, 8]]).bytes_per_s == pytest.approx(120 / 0.5)


def test_a_rack_is_a_node_of_as_many_devices(topology: Topology) -> None:
    one = topology.cluster.nodes[0]
    wide = replace(one, num_slots=8, inter=link(240, 2.0))
    rack = racked(topology)
    flat = replace(topology, cluster=Cluster(nodes=(wide, replace(wide, name="other"))))
    groups = np.arange(16).reshape(2, 8).T
    assert rack.rings(groups) == flat.rings(groups)
    assert rack.exchange([list(range(16))]) == flat.exchange([list(range(16))])


@pytest.mark.parametrize("seed", range(5))
def test_kinds_of_nodes_say_of_every_pair_what_its_own_links_say(
    topology: Topology, seed: int
) -> None:
    random = np.random.default_rng(seed)
    kinds = [replace(node, zone=zone) for node in topology.cluster.nodes[1:] for zone in ("a", "b")]
    nodes = [replace(kinds[random.integers(4)], name=str(index)) for index in range(12)]
    zones = {("a", "b"): ZoneLink(link=link(50, 9.0))}
    pairs = {(2, 7): link(7, 3.0), (3, 4): link(5000, 0.5)}
    cluster = Cluster(nodes=tuple(nodes), zone_links=zones, pair_links=pairs)
    rates, steps = between(replace(topology, cluster=cluster))
    for low in range(12):
        for high in range(low + 1, 12):
            one, other = nodes[low], nodes[high]
            links = [one.inter, other.inter, *([link(50, 9.0)] * (one.zone != other.zone))]
            links = [pairs[low, high]] if (low, high) in pairs else links
            assert rates[low, high] == min(path.bandwidth_bytes_per_s for path in links)
            assert steps[high, low] == max(path.latency_s for path in links)


def test_nodes_of_one_host_share_its_interface_but_not_their_own_link(topology: Topology) -> None:
    one, two, three = topology.cluster.nodes
    nodes = (one, replace(two, name=one.name, first_slot=4), three)
    cluster = Cluster(nodes=nodes, pair_links={(0, 1): link(300, 1.5)})
    joined = replace(topology, cluster=cluster)
    assert joined.rings([[0, 8], [4, 9]]).of_groups == (path(40 / 2, 2.0, 2, 2.0),) * 2
    inside, outside = joined.rings([[0, 4], [1, 8]]).of_groups
    assert inside == path(300, 1.5, 2, 1.5)
    assert outside == path(40, 2.0, 2, 2.0)
    known = joined.exchange([[0, 8], [4, 9]])
    assert known.bytes_per_s == 2 * 40 / 2
