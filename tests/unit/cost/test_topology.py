from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.topology import Topology
from amp_ray.spec.cluster import Cluster, Link, Node
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device

FOUR = 4  # slots of each node here


def link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


@pytest.fixture
def topology(device: Device, constants: Constants) -> Topology:
    """Nodes 0, 1: 900 B/s inside, 120 B/s outside; node 2: 80 and 40. 1 s inside, 2 s outside."""
    nodes = [
        Node(
            name=str(i),
            device=device,
            num_slots=FOUR,
            intra=link(80 if i == 2 else 900, 1.0),
            inter=link(40 if i == 2 else 120, 2.0),
        )
        for i in range(3)
    ]
    return Topology(cluster=Cluster(nodes=tuple(nodes)), constants=constants)


def grid(*devices: int, pp: int, dp: int, tp: int) -> np.ndarray:
    return np.array(devices).reshape(pp, dp, tp)


def test_message_within_a_node_runs_at_the_nodes_own_rate(topology: Topology) -> None:
    found = topology.transfers(grid(0, 1, pp=2, dp=1, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 900]]
    assert found.step_s.tolist() == [[1.0]]


def test_messages_of_one_cut_share_the_interface(topology: Topology) -> None:
    alone = topology.transfers(grid(0, 4, pp=2, dp=1, tp=1))
    four = topology.transfers(grid(*range(8), pp=2, dp=2, tp=2))
    assert alone.s_per_byte.tolist() == [[1 / 120]]
    assert four.s_per_byte.tolist() == [[4 / 120] * 2]
    assert four.step_s.tolist() == [[2.0] * 2]


def test_messages_that_enter_one_node_share_its_interface(topology: Topology) -> None:
    # from nodes 0 and 1 into node 2, whose interface (40 B/s) both messages share
    found = topology.transfers(grid(0, 4, 8, 9, pp=2, dp=2, tp=1))
    assert found.s_per_byte.tolist() == [[2 / 40] * 2]


def test_cuts_do_not_share_with_each_other(topology: Topology) -> None:
    found = topology.transfers(grid(0, 4, 1, pp=3, dp=1, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 120], [1 / 120]]


def test_only_messages_that_leave_the_node_share_its_interface(topology: Topology) -> None:
    # replica 0 stays in node 0, replica 1 goes from node 0 to node 1
    found = topology.transfers(grid(0, 1, 2, 4, pp=2, dp=2, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 900, 1 / 120]]


def test_replica_waits_for_the_slowest_of_its_ranks(topology: Topology) -> None:
    found = topology.transfers(grid(0, 1, 2, 4, pp=2, dp=1, tp=2))
    assert found.s_per_byte.tolist() == [[1 / 120]]


def test_message_cannot_leave_faster_than_its_rank_feeds_the_interface(topology: Topology) -> None:
    wide = replace(
        topology.cluster, pair_links={(0, 2): link(10_000, 0.0)}
    )  # node 2 moves 80 B/s inside
    found = replace(topology, cluster=wide).transfers(grid(0, 8, pp=2, dp=1, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 80]]


def test_known_link_of_a_pair_counts_instead_of_the_interfaces(topology: Topology) -> None:
    paired = replace(topology.cluster, pair_links={(0, 1): link(60, 5.0)})
    found = replace(topology, cluster=paired).transfers(grid(0, 4, pp=2, dp=1, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 60]]
    assert found.step_s.tolist() == [[5.0]]


def test_efficiencies_and_latency_scale_apply(topology: Topology, constants: Constants) -> None:
    slower = replace(constants, intra_efficiency=0.5, nic_efficiency=0.25, latency_scale=3.0)
    found = replace(topology, constants=slower).transfers(grid(0, 1, 4, pp=3, dp=1, tp=1))
    assert found.s_per_byte.tolist() == [[1 / 450], [1 / 30]]
    assert found.step_s.tolist() == [[3.0], [6.0]]


def test_group_of_one_meets_nothing(topology: Topology) -> None:
    rings = topology.rings(np.array([[0], [5]]))
    assert rings.paths == (NO_RING,)
    assert rings.index == (0, 0)


def test_ring_within_a_node_pays_its_overhead(topology: Topology) -> None:
    rings = topology.rings(np.array([[0, 1], [2, 3]]))
    assert rings.paths == (Path(bytes_per_s=900 / 1.25, step_s=1.0),)  # 1 + 0.5 / 2 ranks
    assert rings.index == (0, 0)


def test_rings_that_leave_a_node_share_its_interface(topology: Topology) -> None:
    rings = topology.rings(np.array([[0, 4], [1, 5], [2, 6]]))
    assert rings.paths == (Path(bytes_per_s=120 / 3, step_s=2.0, num_nodes=2),)


def test_ring_inside_does_not_share_the_interface(topology: Topology) -> None:
    rings = topology.rings(np.array([[0, 4], [1, 2]]))
    assert [path.bytes_per_s for path in rings.paths] == [120.0, 900 / 1.25]
    assert rings.index == (0, 1)


def test_ring_of_several_ranks_per_node_crosses_once_per_node(topology: Topology) -> None:
    (path,) = topology.rings(np.array([[0, 1, 4, 5]])).paths
    assert path.bytes_per_s == 120.0  # one ring, however many ranks it has in the node
    assert path.step_s == 1.5  # two of its four hops leave a node


def test_ring_is_as_slow_as_its_slowest_hop(topology: Topology) -> None:
    (path,) = topology.rings(np.array([[0, 4, 8]])).paths
    assert (path.bytes_per_s, path.num_nodes) == (40.0, 3)


def test_ring_with_one_rank_per_node_is_fed_at_the_rate_inside(topology: Topology) -> None:
    pairs = {(0, 2): link(10_000, 0.0)}
    wide = replace(topology, cluster=replace(topology.cluster, pair_links=pairs))
    (path,) = wide.rings(np.array([[0, 8]])).paths
    assert path.bytes_per_s == 80.0


def test_among_names_the_different_paths_of_some_groups(topology: Topology) -> None:
    rings = topology.rings(np.array([[0, 4], [1, 2], [2, 3]]))
    assert len(rings.among(0, 3)) == 2
    assert rings.among(1, 3) == {rings.paths[1]}


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
    inside, between = (slow.rings(np.array([pair])).paths[0] for pair in ([0, 1], [0, 4]))
    assert (inside.step_s, between.step_s) == (5.0, 9.0)
    assert slow.transfers(grid(0, 1, pp=2, dp=1, tp=1)).step_s.tolist() == [[1.0]]
    assert slow.transfers(grid(0, 4, pp=2, dp=1, tp=1)).step_s.tolist() == [[2.0]]


def test_a_known_pair_of_nodes_has_a_collective_latency_of_its_own(topology: Topology) -> None:
    known = replace(link(120, 2.0), collective_latency_s=11.0)
    pair = replace(topology.cluster, pair_links={(0, 1): known})
    found = replace(topology, cluster=pair).rings(np.array([[0, 4], [0, 8]]))
    assert [found.paths[index].step_s for index in found.index] == [11.0, 2.0]
