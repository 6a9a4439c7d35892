import numpy as np

from amp_ray.partition.resources import labelled, limited_graph, resource_graph


def test_edges_lead_to_higher_states() -> None:
    graph = resource_graph((2, 2, 1), idle=True)
    assert (graph.from_state < graph.to_state).all()


def test_sizes_and_kinds_are_counted_per_group() -> None:
    graph = resource_graph((2, 1))
    for edge in range(len(graph.size)):
        units = graph.units(edge)
        assert graph.size[edge] == sum(end - first for _, first, end in units)
        assert graph.num_kinds[edge] == len(units)


def test_edges_from_states_that_nothing_leads_to_are_dropped() -> None:
    graph = labelled(np.array([0, 2]), np.array([1, 3]), np.array([0, 0]), (1, 3))
    assert graph.edge.tolist() == [0]
    assert graph.final_states == (1,)


def test_final_states_that_nothing_leads_to_are_none() -> None:
    graph = labelled(np.array([0, 2]), np.array([1, 3]), np.array([0, 0]), (3,))
    assert graph.final_states == ()


def test_groups_are_whole_grains_or_equal_parts_of_one() -> None:
    graph = limited_graph((8,), (4,), most_kinds=1, idle=False)
    assert graph is not None
    pieces = {graph.units(edge)[0][1:] for edge in range(len(graph.from_state))}
    assert {(0, 8), (0, 4), (4, 8), (4, 6), (7, 8)} <= pieces
    assert not pieces & {(2, 6), (0, 3), (3, 5), (2, 8)}


def test_too_many_groups_are_none() -> None:
    assert limited_graph((8,), (1,), most_kinds=1, idle=False, most_groups=35) is None
    assert limited_graph((8,), (1,), most_kinds=1, idle=False, most_groups=36) is not None
