"""`RingTable` against `Topology.rings`, value by value, on clusters of every kind."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path as File
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster, Fabric, Link, Node, ZoneLink
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost import rings
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.nccl import SIZES, Curve
from amp_ray.cost.kernels.rings import RingTable
from amp_ray.cost.topology import Topology
from support.small_clusters import small_cluster

ROUNDING = 1e-15
BYTES = (0.0, 100.0, 511.9, 512.0, 513.0, 1e4, 65536.0, 1e6, 2.0**28, 2.0**29 - 1, 2.0**29, 1e12)
FIGURES = ("bytes_per_s", "step_s", "tree_s", "num_nodes", "host_s")
BOARDS = ("A100-40", "A100-80", "H100", "H200", "B200", "B300", "GB200", "GB300")

FABRICS: tuple[Fabric | None, ...] = (None, "pcie", "nvlink")

Groups = Sequence[Sequence[int]]


def plain_python() -> ModuleType:
    """Return the module as plain Python."""
    source = File(rings.__file__).with_name("rings.py")
    spec = importlib.util.spec_from_file_location("plain_rings", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = [rings] if rings.__file__.endswith(".py") else [rings, plain_python()]
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


def rates() -> st.SearchStrategy[float]:
    """Draw a rate of which some are equal."""
    return st.sampled_from([1e8, 1.25e9, 12.5e9, 50e9]) | st.floats(1e6, 1e12)


@st.composite
def intra_links(draw: st.DrawFn, device: str) -> Link:
    """Draw the link within a node, whose times may have been measured."""
    fabric = draw(st.sampled_from(FABRICS))
    board = device if fabric == "nvlink" and draw(st.booleans()) else ""
    return Link(
        bandwidth_bytes_per_s=draw(rates()),
        latency_s=draw(st.sampled_from([0.0, 2e-6, 1e-4])),
        fabric=fabric,
        board=board,
    )


@st.composite
def inter_links(draw: st.DrawFn) -> Link:
    """Draw a network interface of any protocol."""
    return Link(
        bandwidth_bytes_per_s=draw(rates()),
        latency_s=draw(st.sampled_from([1e-6, 5e-6, 6e-5])),
        collective_latency_s=draw(st.sampled_from([None, 1e-4])),
        protocol=draw(st.sampled_from([None, "tcp", "rdma", "efa"])),
        fabric=draw(st.sampled_from([None, "network", "network"])),
    )


@st.composite
def kinds_of_nodes(draw: st.DrawFn) -> Node:
    """Draw a node, or a rack of hosts which may have links of their own."""
    device = CATALOGUE[draw(st.sampled_from(sorted(CATALOGUE)) | st.sampled_from(BOARDS))]
    node = Node(
        name="one",
        device=device,
        num_slots=draw(st.integers(1, 4) | st.just(8)),
        intra=draw(intra_links(device.name)),
        inter=draw(inter_links()),
        host_link=draw(st.none() | intra_links(device.name)),
        zone=draw(st.sampled_from(["", "near", "far"])),
    )
    num_hosts = draw(st.sampled_from([1, 1, 2, 3]))
    return node.of_hosts([str(host) for host in range(num_hosts)])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw up to six nodes of up to three kinds; some are entries of one host."""
    kinds = draw(st.lists(kinds_of_nodes(), min_size=1, max_size=3))
    nodes, slot = list[Node](), 0
    for index, kind in enumerate(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))):
        joins = nodes and not (kind.hosts or nodes[-1].hosts) and draw(st.integers(0, 4)) == 0
        slot = slot + nodes[-1].num_slots if joins else 0
        names = [f"{index}-{host}" for host in range(kind.num_hosts)]
        name = nodes[-1].name if joins else names[0]
        hosts = tuple(names) if kind.hosts else ()
        nodes.append(replace(kind, name=name, hosts=hosts, first_slot=slot))
    pairs = [(low, high) for high in range(len(nodes)) for low in range(high)]
    known = [(low, high) for low, high in pairs if nodes[low].name == nodes[high].name]
    known += draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    zones = {("far", "near"): ZoneLink(link=draw(inter_links()))} if draw(st.booleans()) else {}
    own = st.one_of(inter_links(), intra_links(""))
    return Cluster(
        nodes=tuple(nodes), pair_links={pair: draw(own) for pair in known}, zone_links=zones
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Draw the links of a cluster, with other constants and algorithms of NCCL."""
    scales = st.sampled_from([1.0, 0.7, 1.9])
    constants = Constants(
        latency_scale=draw(scales), intra_efficiency=draw(scales), nic_efficiency=draw(scales)
    )
    return Topology(cluster=draw(clusters()), constants=constants, has_pat=draw(st.booleans()))


@st.composite
def rings_on(draw: st.DrawFn, num_devices: int) -> list[list[int]]:
    """Draw rings of any lengths over some of the devices, in any order."""
    order = draw(st.permutations(range(num_devices)) | st.just(range(num_devices)))
    cuts = draw(st.lists(st.integers(0, num_devices), max_size=6, unique=True))
    ends = sorted({0, *cuts, num_devices})
    found = [list(order[first:end]) for first, end in pairwise(ends)]
    return found[: draw(st.integers(1, len(found)))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, list[list[list[int]]]]:
    """Draw links, and some sets of rings."""
    topology = draw(topologies())
    sets = st.lists(rings_on(topology.cluster.num_devices), min_size=1, max_size=4)
    return topology, draw(sets)


# --------------------------------------------------------------------------- properties


@in_both
@given(case=cases())
def test_paths_are_those_of_the_topology(
    module: ModuleType, case: tuple[Topology, list[Groups]]
) -> None:
    topology, sets = case
    table = module.RingTable(topology)
    for groups in sets:
        assert_alike(table, topology, groups)


@in_both
@given(case=cases())
def test_a_table_numbers_paths_in_the_order_in_which_it_meets_them(
    module: ModuleType, case: tuple[Topology, list[Groups]]
) -> None:
    topology, sets = case
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


def many_rings() -> tuple[Topology, Groups]:
    """Return rings on a large cluster of which no two have the same path."""
    links = [Link(bandwidth_bytes_per_s=1e9 + index, latency_s=1e-6) for index in range(300)]
    device = CATALOGUE["H100"]
    nodes = tuple(
        Node(name=str(index), device=device, num_slots=2, intra=link, inter=link)
        for index, link in enumerate(links)
    )
    topology = Topology(cluster=Cluster(nodes=nodes), constants=Constants())
    return topology, [[2 * index, 2 * index + 1] for index in range(300)]


@in_both
def test_a_table_grows_and_keeps_its_paths(module: ModuleType) -> None:
    topology, groups = many_rings()
    table = module.RingTable(topology)
    early = numbers(table, groups[:3])
    assert numbers(table, groups) == list(range(1, 301)) == numbers(table, groups)
    assert early == [1, 2, 3]
    assert_alike(table, topology, groups)
    # node 0 is the slowest of all: other nodes make no difference to rings with it
    assert len(set(numbers(table, [[0, 100], [1, 200]]))) == 1
    assert table.num_paths == 302


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
