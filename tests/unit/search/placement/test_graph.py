from itertools import pairwise

import numpy as np
import pytest

from amp_ray.search.placement import graph
from amp_ray.search.placement.graph import Grower, Level
from amp_ray.search.placement.nodes import Scope, class_moves, node_classes
from amp_ray.search.placement.prices import Prices
from amp_ray.spec.candidate import Candidate
from support.mixed_cluster import mixed_candidate, mixed_cost_model
from support.placement_oracle import all_placements


def grower_of(candidate: Candidate, scope: Scope) -> Grower:
    cost_model = mixed_cost_model()
    classes = node_classes(cost_model.experiment.cluster, candidate.options.tp, pairs_matter=True)
    moves = [class_moves(found, candidate.options.dp, scope) for found in classes]
    prices = Prices(cost_model=cost_model, candidate=candidate, classes=classes)
    return Grower(
        moves=tuple(found for found in moves if found is not None),
        dp=candidate.options.dp,
        cut_rows=prices.cut_rows,
        scope=scope,
    )


def levels_of(candidate: Candidate, scope: Scope) -> tuple[Level, ...]:
    levels = grower_of(candidate, scope).levels(candidate.pp)
    assert levels is not None
    return levels


def num_paths(levels: tuple[Level, ...]) -> int:
    """Count the ways through the graph."""
    paths = np.ones(len(levels[0].states), np.int64)
    for level in levels[1:]:
        after = np.zeros(len(level.states), np.int64)
        np.add.at(after, level.target, paths[level.source])
        paths = after
    return int(paths.sum())


def test_every_order_of_whole_nodes_is_one_path() -> None:
    # The slow node comes first, second or third; the quick ones are interchangeable.
    assert num_paths(levels_of(mixed_candidate(tp=2), Scope(max_options=10**4))) == 3


def test_no_order_of_devices_is_there_twice() -> None:
    candidate = mixed_candidate()
    cluster = mixed_cost_model().experiment.cluster
    levels = levels_of(candidate, Scope(max_options=10**5))
    assert num_paths(levels) <= len(list(all_placements(cluster, candidate)))


def test_levels_take_the_units_of_one_stage_each() -> None:
    candidate = mixed_candidate(dp=3)
    grower = grower_of(candidate, Scope(max_options=10**5))
    levels = grower.levels(candidate.pp)
    assert levels is not None
    total = sum(moves.free[0] for moves in grower.moves)
    for depth, level in enumerate(levels, start=1):
        free = sum(moves.free[level.states[:, column]] for column, moves in enumerate(grower.moves))
        assert set(np.atleast_1d(free).tolist()) == {total - depth * candidate.options.dp}


def test_options_lead_from_one_level_to_the_next() -> None:
    levels = levels_of(mixed_candidate(dp=2), Scope(max_options=10**5))
    for before, after in pairwise(levels):
        assert after.source.max() < len(before.states)
        assert set(after.target.tolist()) == set(range(len(after.states)))
        pairs = list(zip(after.source.tolist(), after.target.tolist(), strict=True))
        assert len(pairs) == len(set(pairs))


def test_the_first_stage_has_no_cut_before_it() -> None:
    first, *others = levels_of(mixed_candidate(dp=2), Scope(max_options=10**5))
    assert set(first.cut_row.tolist()) == {-1}
    assert all((level.cut_row >= 0).all() for level in others)


def test_a_graph_that_grows_too_large_is_given_up() -> None:
    candidate = mixed_candidate(dp=2)
    levels = levels_of(candidate, Scope(max_options=10**5))
    num_options = sum(len(level.source) for level in levels)
    assert grower_of(candidate, Scope(max_options=num_options // 2)).levels(candidate.pp) is None


def test_a_graph_with_too_many_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, scope = mixed_candidate(dp=2), Scope(max_options=10**5)
    assert grower_of(candidate, scope).levels(candidate.pp) is not None
    monkeypatch.setattr(graph, "MOST_DEVICE_SETS", 2)
    assert grower_of(candidate, scope).levels(candidate.pp) is None


def test_pure_stages_take_a_part_of_one_class_at_most() -> None:
    candidate, scope = mixed_candidate(dp=3), Scope(max_options=10**5, pure=True)
    grower = grower_of(candidate, scope)
    (level, _) = levels_of(candidate, scope)
    for row in level.states.tolist():
        begun = [
            0 < moves.free[state] < moves.free[0]
            for moves, state in zip(grower.moves, row, strict=True)
        ]
        assert sum(begun) <= 1
