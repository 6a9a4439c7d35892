import numpy as np
import pytest

from amp_ray.partition.resources import NO_KIND, labelled, limited_graph, resource_graph


def groups_of(counts: tuple[int, ...], **options: object) -> list[tuple[tuple[int, int, int], ...]]:
    """Return the units of every group of a graph."""
    graph = resource_graph(counts, **options)  # type: ignore[arg-type]
    return [graph.units(edge) for edge in range(len(graph.size))]


def test_a_single_unit_is_a_single_group() -> None:
    assert groups_of((1,)) == [((0, 0, 1),)]


def test_groups_of_one_kind_are_all_runs_of_its_row() -> None:
    runs = {((0, first, end),) for end in range(1, 5) for first in range(end)}
    assert set(groups_of((4,))) == runs


def test_the_last_stage_takes_units_from_the_end_of_a_row() -> None:
    graph = resource_graph((3,))
    from_start = np.flatnonzero(graph.from_state == 0)
    assert {graph.units(edge)[0][2] for edge in from_start.tolist()} == {3}


def test_a_group_of_two_kinds_takes_the_whole_rest_of_the_one_begun_first() -> None:
    mixed = {units for units in groups_of((2, 2)) if len(units) > 1}
    assert ((1, 1, 2), (0, 0, 2)) in mixed
    assert ((1, 1, 2), (0, 0, 1)) in mixed
    assert ((1, 1, 2), (0, 1, 2)) not in mixed


def test_groups_have_no_more_kinds_than_allowed() -> None:
    assert max(len(units) for units in groups_of((1, 1, 1))) == 3
    assert max(len(units) for units in groups_of((1, 1, 1), most_kinds=2)) == 2


def test_without_idle_units_only_everything_is_final() -> None:
    graph = resource_graph((2, 1))
    assert graph.full
    assert graph.final_states == (len(graph.states) - 1,)
    assert graph.states[-1] == (0b11, NO_KIND, 0)


def test_with_idle_units_every_state_but_the_first_is_final() -> None:
    graph = resource_graph((2, 1), idle=True)
    assert graph.final_states == tuple(range(1, len(graph.states)))


def test_a_row_is_left_for_another_only_where_units_may_stay_idle() -> None:
    def leaves(*, idle: bool) -> bool:
        graph = resource_graph((2, 1), idle=idle)
        state = graph.states.index((0, 0, 1))
        edges = np.flatnonzero(graph.from_state == state)
        return any(graph.units(edge)[-1][0] == 1 for edge in edges.tolist())

    assert leaves(idle=True)
    assert not leaves(idle=False)


def test_edges_lead_to_higher_states() -> None:
    graph = resource_graph((2, 2, 1), idle=True)
    assert (graph.from_state < graph.to_state).all()


def test_sizes_and_kinds_are_counted_per_group() -> None:
    graph = resource_graph((2, 1))
    for edge in range(len(graph.size)):
        units = graph.units(edge)
        assert graph.size[edge] == sum(end - first for _, first, end in units)
        assert graph.num_kinds[edge] == len(units)


def test_a_state_is_split_by_the_labels_that_lead_to_it() -> None:
    graph = labelled(np.array([0, 0, 1]), np.array([1, 1, 2]), np.array([0, 1, 0]), (2,))
    assert graph.edge.tolist() == [0, 1, 2, 2]
    assert graph.label.tolist() == [-1, -1, 0, 1]
    assert graph.from_state.tolist() == [0, 0, 1, 2]
    assert graph.to_state.tolist() == [1, 2, 3, 3]
    assert graph.final_states == (3,)


def test_edges_from_states_that_nothing_leads_to_are_dropped() -> None:
    graph = labelled(np.array([0, 2]), np.array([1, 3]), np.array([0, 0]), (1, 3))
    assert graph.edge.tolist() == [0]
    assert graph.final_states == (1,)


def test_final_states_that_nothing_leads_to_are_none() -> None:
    graph = labelled(np.array([0, 2]), np.array([1, 3]), np.array([0, 0]), (3,))
    assert graph.final_states == ()


@pytest.mark.parametrize("label", [0, 7])
def test_one_label_changes_nothing(label: int) -> None:
    graph = resource_graph((2, 1))
    labels = np.full(len(graph.size), label)
    split = labelled(graph.from_state, graph.to_state, labels, graph.final_states)
    assert split.edge.tolist() == list(range(len(graph.size)))
    assert split.from_state.tolist() == graph.from_state.tolist()
    assert split.final_states == graph.final_states


def test_groups_are_whole_grains_or_equal_parts_of_one() -> None:
    graph = limited_graph((8,), (4,), most_kinds=1, idle=False)
    assert graph is not None
    pieces = {graph.units(edge)[0][1:] for edge in range(len(graph.from_state))}
    assert {(0, 8), (0, 4), (4, 8), (4, 6), (7, 8)} <= pieces
    assert not pieces & {(2, 6), (0, 3), (3, 5), (2, 8)}


def test_too_many_groups_are_none() -> None:
    assert limited_graph((8,), (1,), most_kinds=1, idle=False, most_groups=35) is None
    assert limited_graph((8,), (1,), most_kinds=1, idle=False, most_groups=36) is not None
