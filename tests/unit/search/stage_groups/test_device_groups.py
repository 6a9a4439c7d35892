from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.device import CATALOGUE
from amp_ray.search.effort import EFFORT
from amp_ray.search.stage_groups.device_groups import (
    device_graph,
    device_kinds,
    one_node_graphs,
)

FAST = Link(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
SLOW = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)


def node(name: str, device: str = "T4", slots: int = 2) -> Node:
    return Node(name=name, device=CATALOGUE[device], num_slots=slots, intra=FAST, inter=SLOW)


def test_equal_nodes_are_one_kind() -> None:
    cluster = Cluster(nodes=(node("a"), node("b", "V100-16"), node("c")))
    assert device_kinds(cluster, by_links=True) == ((0, 1, 4, 5), (2, 3))


def test_links_and_slots_tell_kinds_apart() -> None:
    other = replace(node("b"), inter=FAST)
    cluster = Cluster(nodes=(node("a"), other, node("c", slots=3)))
    assert len(device_kinds(cluster, by_links=True)) == 3
    assert len(device_kinds(cluster, by_links=False)) == 1


def test_a_node_with_a_link_of_its_own_is_a_kind() -> None:
    cluster = Cluster(nodes=(node("a"), node("b"), node("c")), pair_links={(0, 1): FAST})
    assert device_kinds(cluster, by_links=True) == ((0, 1), (2, 3), (4, 5))


def test_a_small_graph_takes_any_next_devices_of_every_kind() -> None:
    graph = device_graph(Cluster(nodes=(node("a"), node("b", "V100-16"))))
    assert graph.is_small
    # Pairs of states below each other: 6 x 6, less 9 equal ones
    pairs = [*zip(graph.from_state.tolist(), graph.to_state.tolist(), strict=True)]
    assert len(set(pairs)) == 27
    assert len(pairs) == 36  # nine groups of both kinds come in either order
    assert set(graph.pieces) >= {((0, 0, 2), (1, 0, 2)), ((0, 1, 2), (1, 1, 2))}


def test_a_large_graph_takes_kind_after_kind() -> None:
    nodes = [
        node(name, device, 8) for name, device in zip("abcd", 2 * ["T4", "P100-16"], strict=True)
    ]
    graph = device_graph(Cluster(nodes=tuple(nodes)))
    assert not graph.is_small
    mixed = [pieces for pieces in graph.pieces if len(pieces) == 2]
    assert all(pieces[0][2] == 16 and pieces[1][1] == 0 for pieces in mixed)


def test_states_ascend_along_groups() -> None:
    graph = device_graph(Cluster(nodes=(node("a", slots=3), node("b", "V100-16", 3))))
    assert (graph.from_state < graph.to_state).all()
    assert graph.final_states == tuple(range(1, 16))


def test_groups_at_other_places_of_equal_nodes_have_one_signature() -> None:
    graph = device_graph(Cluster(nodes=(node("a"), node("b"))))
    signatures = {graph.signature(edge) for edge in range(len(graph.pieces))}
    assert len(signatures) < len(graph.pieces)
    assert ((0, 0, 2),) in signatures


def test_groups_that_end_inside_a_node_are_told() -> None:
    graph = device_graph(Cluster(nodes=(node("a"), node("b"))))
    ends = {graph.pieces[edge]: graph.ends_at_nodes(edge) for edge in range(len(graph.pieces))}
    assert ends[(0, 0, 2),]
    assert not ends[(0, 0, 1),]
    assert ends[(0, 3, 4),]


def test_one_node_of_every_kind_is_looked_at_on_its_own() -> None:
    cluster = Cluster(nodes=(node("a"), node("b"), node("c", "V100-16")))
    assert [graph.rows for graph in one_node_graphs(cluster)] == [((0, 1),), ((4, 5),)]


def test_too_many_kinds_of_links_are_put_together() -> None:
    links = [Link(bandwidth_bytes_per_s=1e9 + index, latency_s=1e-5) for index in range(7)]
    nodes = tuple(replace(node(f"n{index}"), inter=link) for index, link in enumerate(links))
    graph = device_graph(Cluster(nodes=nodes))
    assert graph.rows == (tuple(range(14)),)
    assert len(set(map(graph.signature, range(len(graph.pieces))))) == len(graph.pieces)


def test_too_many_kinds_of_devices_are_one_row() -> None:
    nodes = tuple(
        replace(node(f"n{index}"), device=replace(CATALOGUE["T4"], name=f"kind{index}"))
        for index in range(7)
    )
    assert device_kinds(Cluster(nodes=nodes), by_links=False) == (tuple(range(14)),)


def test_groups_of_many_kinds_are_left_out_where_there_would_be_too_many() -> None:
    devices = ["T4", "P100-16", "V100-16", "A100-40", "A100-80"]
    nodes = tuple(node(device, device, 8) for device in devices)
    graph = device_graph(Cluster(nodes=nodes))
    assert max(map(len, graph.pieces)) <= 2


def test_whole_nodes_and_equal_parts_of_one_are_aligned() -> None:
    graph = device_graph(Cluster(nodes=(node("a", slots=4), node("b", slots=4))))
    aligned = {
        graph.pieces[edge][0][1:] for edge in range(len(graph.pieces)) if graph.is_aligned(edge)
    }
    assert (0, 8) in aligned
    assert (2, 4) in aligned
    assert (1, 3) not in aligned
    assert (2, 6) not in aligned


def test_very_many_devices_are_taken_in_parts_of_nodes() -> None:
    nodes = [node(f"n{index}", "T4" if index < 24 else "P100-16", 8) for index in range(48)]
    graph = device_graph(Cluster(nodes=tuple(nodes)))
    assert len(graph.pieces) <= EFFORT.max_groups
    sizes = {end - first for ((_, first, end),) in graph.pieces}
    assert {1, 2, 8, 16} <= sizes
    assert not any(size % 2 for size in sizes if size > 1)


@pytest.mark.parametrize("devices", [("T4", "V100-16"), ("T4", "V100-16", "P100-16", "A100-40")])
def test_without_idle_devices_a_pipeline_takes_all(devices: tuple[str, ...]) -> None:
    slots = 2 if len(devices) == 2 else 8
    nodes = tuple(node(f"n{index}", device, slots) for index, device in enumerate(devices))
    graph = device_graph(Cluster(nodes=nodes), idle=False)
    assert graph.is_small == (slots == 2)
    (final,) = graph.final_states
    sizes: list[set[int]] = [set() for _ in range(graph.num_states)]
    sizes[0] = {0}
    for edge in np.argsort(graph.from_state, kind="stable").tolist():
        size = sum(end - first for _, first, end in graph.pieces[edge])
        before, after = int(graph.from_state[edge]), int(graph.to_state[edge])
        sizes[after] |= {taken + size for taken in sizes[before]}
    assert sizes[final] == {slots * len(devices)}
