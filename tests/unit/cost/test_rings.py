"""`RingTable` against `Topology.rings`, value by value, on clusters of every kind."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster, Fabric, Link, Node, ZoneLink
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.kernels import rings
from amp_ray.cost.kernels.rings import RingTable
from amp_ray.cost.nccl import SIZES, Curve
from amp_ray.cost.topology import Topology
from support.small_clusters import small_cluster
from support.uncompiled import uncompiled

ROUNDING = 1e-15
BYTES = (0.0, 100.0, 511.9, 512.0, 513.0, 1e4, 65536.0, 1e6, 2.0**28, 2.0**29 - 1, 2.0**29, 1e12)
FIGURES = ("bytes_per_s", "step_s", "tree_s", "num_nodes", "host_s")
BOARDS = ("A100-40", "A100-80", "H100", "H200", "B200", "B300", "GB200", "GB300")

Groups = Sequence[Sequence[int]]


MODULES = [rings] if rings.__file__.endswith(".py") else [rings, uncompiled(rings.__name__)]
"""The compiled module, if there is one, and its source as plain Python."""

in_both = pytest.mark.parametrize("module", MODULES, ids=["imported", "plain"][: len(MODULES)])


def numbers(table: RingTable, groups: Groups) -> list[int]:
    """Return the numbers of the paths of rings that run at once."""
    members = np.array([device for group in groups for device in group], np.int64)
    first = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    paths = np.full(len(groups), -1, np.int64)
    table.at_once(members, first, len(groups), paths)
    return [int(number) for number in paths]


def values(path: Path) -> list[float]:
    """Return all figures of a path in one list."""
    curves = [curve for curve in (path.all_reduce, path.gather) if curve is not None]
    figures = [float(getattr(path, name)) for name in FIGURES]
    return figures + [time for curve in curves for time in (*curve.seconds, curve.s_per_byte)]


def assert_alike(table: RingTable, topology: Topology, groups: Groups) -> None:
    """Compare paths with those of the topology."""
    expected = topology.rings(groups).of_groups
    for number, path in zip(numbers(table, groups), expected, strict=True):
        assert values(table.path(number)) == pytest.approx(values(path), rel=ROUNDING, abs=0.0)
        assert table.path(number).exchange is None


# --------------------------------------------------------------------------- clusters


def draw_link(rng: Random, fabrics: Sequence[Fabric | None]) -> Link:
    """Draw a link of which some others have the same rate."""
    return Link(
        bandwidth_bytes_per_s=rng.choice((1.25e9, 12.5e9, 50e9, rng.uniform(1e8, 1e12))),
        latency_s=rng.choice((0.0, 5e-6, 6e-5)),
        collective_latency_s=rng.choice((None, None, 1e-4)),
        fabric=rng.choice(fabrics),
    )


def draw_intra(rng: Random, device: str) -> Link:
    """Draw the link within a node, whose times may have been measured."""
    link = draw_link(rng, (None, "pcie", "nvlink", "nvlink", "nvlink"))
    is_measured = link.fabric == "nvlink" and rng.random() < 0.7
    return replace(link, board=device if is_measured else "")


def draw_inter(rng: Random) -> Link:
    """Draw a network interface of any protocol."""
    link = draw_link(rng, (None, "network", "network", "network"))
    return replace(link, protocol=rng.choice((None, "tcp", "rdma", "rdma", "efa")))


def draw_kind(rng: Random) -> Node:
    """Draw a node, or a rack of hosts which may have links of their own."""
    device = CATALOGUE[rng.choice((*CATALOGUE, *BOARDS * 3))]
    node = Node(
        name="one",
        device=device,
        num_slots=rng.choice((1, 2, 3, 4, 8)),
        intra=draw_intra(rng, device.name),
        inter=draw_inter(rng),
        host_link=draw_intra(rng, device.name) if rng.random() < 0.5 else None,
        zone=rng.choice(("", "near", "far")),
    )
    return node.of_hosts([str(host) for host in range(rng.choice((1, 1, 1, 2, 3)))])


def draw_nodes(rng: Random) -> list[Node]:
    """Draw up to six nodes of up to three kinds; some are entries of one host."""
    kinds = [draw_kind(rng) for _ in range(rng.randint(1, 3))]
    nodes, slot = list[Node](), 0
    for index in range(rng.randint(1, 6)):
        kind = rng.choice(kinds)
        joins = nodes and not (kind.hosts or nodes[-1].hosts) and rng.random() < 0.3
        slot = slot + nodes[-1].num_slots if joins else 0
        names = tuple(f"{index}-{host}" for host in range(kind.num_hosts))
        name, hosts = (nodes[-1].name if joins else names[0]), names if kind.hosts else ()
        nodes.append(replace(kind, name=name, hosts=hosts, first_slot=slot))
    return nodes


def draw_cluster(rng: Random) -> Cluster:
    """Draw nodes with links of some pairs, and perhaps of two zones."""
    nodes = draw_nodes(rng)
    pairs = [(low, high) for high in range(len(nodes)) for low in range(high)]
    known = [pair for pair in pairs if rng.random() < 0.1 or len({nodes[i].name for i in pair}) < 2]
    links = {pair: draw_link(rng, (None, "pcie", "network", "network")) for pair in known}
    zones = {("far", "near"): ZoneLink(link=draw_inter(rng))} if rng.random() < 0.5 else {}
    return Cluster(nodes=tuple(nodes), pair_links=links, zone_links=zones)


def draw_topology(rng: Random) -> Topology:
    """Draw the links of a cluster, with other constants and algorithms of NCCL."""
    scales = (1.0, 0.7, 1.9)
    constants = Constants(
        latency_scale=rng.choice(scales),
        intra_efficiency=rng.choice(scales),
        nic_efficiency=rng.choice(scales),
    )
    return Topology(cluster=draw_cluster(rng), constants=constants, has_pat=rng.random() < 0.5)


def draw_rings(rng: Random, num_devices: int) -> Groups:
    """Draw rings of equal or any lengths over some of the devices, mostly in order."""
    devices = list(range(num_devices))
    if rng.random() < 0.3:
        rng.shuffle(devices)
    if rng.random() < 0.5:
        size = rng.choice((1, 2, 3, 4, num_devices))
        stride = rng.choice((1, max(1, num_devices // size)))
        return [devices[at::stride][:size] for at in range(stride)]
    ends = sorted({0, num_devices, *rng.choices(devices, k=rng.randint(0, 6))})
    return [devices[first:end] for first, end in pairwise(ends) if rng.random() < 0.9] or [[0]]


def case_of(seed: int) -> tuple[Topology, list[Groups]]:
    """Draw links, and some sets of rings."""
    rng = Random(seed)
    topology = draw_topology(rng)
    num_devices = topology.cluster.num_devices
    return topology, [draw_rings(rng, num_devices) for _ in range(rng.randint(1, 6))]


# --------------------------------------------------------------------------- properties


@in_both
@given(seed=st.integers(0, 2**32))
def test_paths_are_those_of_the_topology(module: ModuleType, seed: int) -> None:
    topology, sets = case_of(seed)
    table = module.RingTable(topology)
    for groups in sets:
        assert_alike(table, topology, groups)


@in_both
@given(seed=st.integers(0, 2**32))
def test_a_table_numbers_paths_in_the_order_in_which_it_meets_them(
    module: ModuleType, seed: int
) -> None:
    topology, sets = case_of(seed)
    table, other = module.RingTable(topology), RingTable(topology)
    found = [number for groups in sets for number in numbers(table, groups)]
    assert found == [number for groups in sets for number in numbers(other, groups)]
    new = [number for number in dict.fromkeys(found) if number]
    assert new == list(range(1, len(new) + 1))
    assert table.num_paths == len(new) + 1


@in_both
@pytest.mark.parametrize("seed", range(12))
def test_paths_on_clusters_of_experiments_are_those_of_the_topology(
    module: ModuleType, seed: int
) -> None:
    experiment = small_cluster(seed, most_devices=16)
    topology = Topology(cluster=experiment.cluster, constants=experiment.constants)
    table = module.RingTable(topology)
    rng = np.random.default_rng(seed)
    for size in (1, 2, 3, 4, 8):
        order = rng.permutation(experiment.cluster.num_devices)
        groups = [order[at : at + size].tolist() for at in range(0, len(order), size)]
        assert_alike(table, topology, groups)


def nodes_like(node: Node, devices: Sequence[str]) -> tuple[Node, ...]:
    """Return nodes with the same links and other boards."""
    return tuple(
        replace(node, name=str(index), device=CATALOGUE[device])
        for index, device in enumerate(devices)
    )


def quick_node(board: str, num_slots: int = 8) -> Node:
    """Return a node with NVLink and InfiniBand; ``board`` names measured times, or is empty."""
    return Node(
        name="one",
        device=CATALOGUE[board or "H100"],
        num_slots=num_slots,
        intra=Link(bandwidth_bytes_per_s=3e11, latency_s=2e-6, fabric="nvlink", board=board),
        inter=Link(bandwidth_bytes_per_s=5e10, latency_s=5e-6, fabric="network", protocol="rdma"),
    )


@in_both
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("boards", [(board,) for board in BOARDS] + [("H100", "A100-80")])
def test_rings_of_boards_with_switches_are_those_of_the_topology(
    module: ModuleType, boards: tuple[str, ...], num_nodes: int
) -> None:
    for board in (boards[0], ""):  # measured or not, the generation is that of the devices
        nodes = nodes_like(quick_node(board), [*boards, *boards[:1] * 5][:num_nodes])
        topology = Topology(cluster=Cluster(nodes=nodes), constants=Constants(), has_pat=True)
        table = module.RingTable(topology)
        devices = range(8 * num_nodes)
        for size in (2, 3, 5, 8):
            assert_alike(table, topology, [[rank for rank in devices if rank % 8 < size]])
        assert_alike(table, topology, [list(devices[::8])])


@in_both
def test_the_most_shared_node_of_a_ring_counts(module: ModuleType) -> None:
    nodes = nodes_like(quick_node("H100"), ["H100"] * 4)
    topology = Topology(cluster=Cluster(nodes=nodes), constants=Constants())
    table = module.RingTable(topology)
    found = numbers(table, [[0, 8, 16, 24], [9, 17], [10, 18]])
    assert found == numbers(table, [[0, 8, 16, 24], [9, 17], [10, 18]])
    rates = [table.path(number).bytes_per_s for number in (*found, *numbers(table, [[0, 8]]))]
    assert rates == pytest.approx([rates[-1] / 3] * 3 + rates[-1:])


@in_both
def test_a_table_grows_and_keeps_its_paths(module: ModuleType) -> None:
    one = quick_node("", num_slots=2)
    nodes = tuple(
        replace(one, name=str(index), inter=replace(one.inter, bandwidth_bytes_per_s=1e9 + index))
        for index in range(300)
    )
    topology = Topology(cluster=Cluster(nodes=nodes), constants=Constants())
    table = module.RingTable(topology)
    groups = [[4 * index, 4 * index + 2] for index in range(150)]
    early = [numbers(table, [group])[0] for group in groups[:3]]
    assert early == [1, 2, 3]
    assert numbers(table, groups) == list(range(1, 151)) == numbers(table, groups)
    assert_alike(table, topology, groups)
    # node 0 is the slowest of all: rings with it have the same path, whatever the other node is
    assert [numbers(table, [[0, 2 * other]])[0] for other in (1, 100, 200)] == [1, 1, 1]
    assert table.num_paths == 151


@in_both
def test_a_path_of_a_number_is_one_object(module: ModuleType, topology: Topology) -> None:
    table = module.RingTable(topology)
    assert numbers(table, [[0], [4, 8], [], [1, 2]]) == [0, 1, 0, 2]
    assert table.path(0) is NO_RING
    assert table.path(2) is table.path(2) is not table.path(1)
    assert [table.bytes_per_s[1], table.num_nodes[1], table.has_curves[1]] == [40.0, 2, 0]


@in_both
def test_curves_of_rows_are_those_of_their_points(module: ModuleType) -> None:
    times = np.array([3e-6, 3e-6, *np.linspace(4e-6, 2e-2, SIZES.size - 2)])
    curve = Curve.of(times)
    row = np.array([*curve.seconds, curve.s_per_byte])
    for num_bytes in BYTES:
        assert module.curve_at(row, num_bytes) == curve.at(num_bytes)
        assert module.seconds_at(np.array([row, 2 * row]), 1, num_bytes) == 2 * curve.at(num_bytes)
