from collections.abc import Iterator
from itertools import combinations, groupby, pairwise, permutations, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.partition.resources import labelled, resource_graph
from support.examples import examples

Units = tuple[tuple[int, int, int], ...]
Counts = tuple[int, ...]

COUNTS = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def paths(
    from_state: np.ndarray, to_state: np.ndarray, final_states: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield every path of edges from state 0 to a final state."""

    def walk(state: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if state in final_states:
            yield taken
        for edge in np.flatnonzero(from_state == state):
            yield from walk(int(to_state[edge]), (*taken, int(edge)))

    yield from walk(0, ())


def pipelines(counts: Counts, most_kinds: int, *, idle: bool) -> Iterator[tuple[Units, ...]]:
    """Yield every pipeline of groups of units; with ``idle``, first units may stay unused."""
    kinds = range(len(counts))
    orders = [
        order
        for num in (range(1, len(counts) + 1) if idle else (len(counts),))
        for order in permutations(kinds, num)
    ]
    for order in orders:
        ranges = [range(1, counts[kind] + 1) if idle else (counts[kind],) for kind in order]
        for used in product(*ranges):
            yield from cut(counts, tuple(zip(order, used, strict=True)), most_kinds)


def cut(
    counts: Counts, row: tuple[tuple[int, int], ...], most_kinds: int
) -> Iterator[tuple[Units, ...]]:
    """Yield every division of a row into groups of at most ``most_kinds`` kinds."""
    units = [
        (kind, unit) for kind, used in row for unit in range(counts[kind] - used, counts[kind])
    ]
    for num in range(1, len(units) + 1):
        for cuts in combinations(range(1, len(units)), num - 1):
            groups = tuple(pieces(units[a:b]) for a, b in pairwise((0, *cuts, len(units))))
            whole = all(first == 0 for group in groups for _, first, _ in group[1:])
            if whole and max(map(len, groups)) <= most_kinds:
                yield groups


def pieces(units: list[tuple[int, int]]) -> Units:
    """Return consecutive units as runs."""
    runs = [list(run) for _, run in groupby(units, key=lambda unit: unit[0])]
    return tuple((run[0][0], run[0][1], run[-1][1] + 1) for run in runs)


@examples(60)
@given(counts=COUNTS, most_kinds=st.integers(1, 3), idle=st.booleans())
def test_paths_are_all_ways_to_take_units_each_once(
    counts: Counts, most_kinds: int, *, idle: bool
) -> None:
    counts = counts if sum(counts) <= 6 else counts[:2]
    graph = resource_graph(counts, most_kinds=most_kinds, idle=idle)
    found = [
        tuple(graph.units(edge) for edge in reversed(path))
        for path in paths(graph.from_state, graph.to_state, graph.final_states)
    ]
    expected = set(pipelines(counts, most_kinds, idle=idle))
    assert len(found) == len(set(found))
    assert set(found) == expected


@examples(200)
@given(st.data())
def test_labels_keep_every_path_and_tell_the_group_before(data: st.DataObject) -> None:
    num_states = data.draw(st.integers(2, 6))
    pairs = [(a, b) for b in range(1, num_states) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=10))
    from_state, to_state = np.array(edges, np.int64).T
    labels = np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=len(edges), max_size=len(edges)))
    )
    finals = tuple(sorted(data.draw(st.sets(st.integers(1, num_states - 1), min_size=1))))
    graph = labelled(from_state, to_state, labels, finals)
    plain = sorted(paths(from_state, to_state, finals))
    split = list(paths(graph.from_state, graph.to_state, graph.final_states))
    assert sorted(tuple(int(graph.edge[edge]) for edge in path) for path in split) == plain
    for path in split:
        for before, edge in pairwise((None, *path)):
            expected = -1 if before is None else labels[graph.edge[before]]
            assert graph.label[edge] == expected
