from dataclasses import replace

import pytest

from amp_ray.search.placement.nodes import (
    MOST_STEPS,
    ClassMoves,
    NodeClass,
    Scope,
    class_moves,
    node_classes,
)
from amp_ray.spec.cluster import Cluster, Link
from support.mixed_cluster import mixed_cost_model

WHOLE = Scope(max_options=1)
PAIR = NodeClass(nodes=(4, 7), num_units=2)


def cluster() -> Cluster:
    return mixed_cost_model().experiment.cluster


def moves_of(node_class: NodeClass, dp: int, scope: Scope = WHOLE) -> ClassMoves:
    moves = class_moves(node_class, dp, scope)
    assert moves is not None
    return moves


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


def test_steps_of_one_state_and_number_stand_together() -> None:
    moves = moves_of(PAIR, 2)
    for units in range(3):
        for state, nodes in enumerate(moves.states):
            first, count = moves.first[units, state], moves.count[units, state]
            for step in moves.steps[first : first + count]:
                given = [pick.after.used - pick.before.used for pick in step.picks]
                assert sum(given) == units
                assert all(pick.before in nodes for pick in step.picks)
    assert moves.count.sum() == len(moves.steps)


def test_states_know_what_is_left() -> None:
    moves = moves_of(PAIR, 1)
    assert moves.free[0] == 4
    assert [4 - sum(node.used for node in state) for state in moves.states] == moves.free.tolist()


def test_relations_tell_the_units_on_both_sides_of_a_cut() -> None:
    moves = moves_of(PAIR, 1)
    # Nothing on either side, on one of them, within a node, between nodes.
    assert set(moves.relations) == {
        (),
        ((0, 1),),
        ((1, 0),),
        ((1, 1),),
        ((1, 0), (0, 1)),
    }


def test_a_node_that_is_full_is_not_told_apart_by_its_past() -> None:
    full = {
        node._replace(last=0)
        for state in moves_of(PAIR, 2).states
        for node in state
        if node.used == 2 and not node.last
    }
    assert len(full) == 1


def test_ends_are_told_apart_only_where_they_count() -> None:
    without = moves_of(PAIR, 1)
    told = moves_of(PAIR, 1, Scope(max_options=1, ends=True))
    assert {home for entry in without.ends for home, _ in entry} == {0}
    assert {home for entry in told.ends for home, _ in entry} == {0, 1}
    assert len(told.states) > len(without.states)


def test_even_parts_need_fewer_states() -> None:
    several = NodeClass(nodes=(0, 1, 2), num_units=4)
    even = moves_of(several, 1, Scope(max_options=1, parts="even"))
    assert len(even.states) < len(moves_of(several, 1).states) / 3


def test_a_class_with_too_many_steps_is_given_up() -> None:
    huge = NodeClass(nodes=tuple(range(16)), num_units=8)
    assert class_moves(huge, 8, WHOLE) is None
    assert len(moves_of(PAIR, 2).steps) < MOST_STEPS
