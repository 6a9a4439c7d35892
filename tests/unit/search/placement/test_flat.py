import numpy as np

from amp_ray.partition import NO_ROW
from amp_ray.search.placement.graph import FlatGraph, Level


def level(
    cut_row: list[int], source: list[int], target: list[int], steps: list[list[int]]
) -> Level:
    return Level(
        states=np.zeros((len(cut_row), 1), np.int64),
        cut_row=np.array(cut_row),
        source=np.array(source),
        target=np.array(target),
        steps=np.array(steps),
    )


GRAPH = FlatGraph(
    levels=(
        level([-1, -1], [0, 0], [0, 1], [[0], [1]]),
        level([5, 6, 5], [0, 1, 1], [0, 1, 2], [[2], [3], [4]]),
        level([7], [0, 1, 2], [0, 0, 0], [[5], [6], [7]]),
    )
)
"""Two first places, three second ones, one last: three options, three, and one to end with."""


def test_options_stand_stage_by_stage() -> None:
    assert GRAPH.depth.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert GRAPH.source.tolist() == [0, 1, 1, 0, 1, 2, 0]
    assert GRAPH.vertex.tolist() == [0, 1, 1, 2, 3, 4, 5]


def test_all_first_places_are_the_first_state() -> None:
    from_state, to_state = GRAPH.ends
    assert from_state.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert to_state.tolist() == [1, 2, 3, 4, 4, 4, 5]


def test_options_know_the_cuts_on_both_sides() -> None:
    before, after = GRAPH.cut_rows
    assert before.tolist() == [NO_ROW, NO_ROW, NO_ROW, 5, 6, 5, 7]
    assert after.tolist() == [5, 6, 5, 7, 7, 7, NO_ROW]


def test_a_path_leads_back_to_its_steps() -> None:
    steps, rows = GRAPH.path((1, 4, 6))
    assert steps.ravel().tolist() == [1, 3, 6]
    assert rows == [6, 7]


def test_one_stage_has_one_step() -> None:
    steps, rows = FlatGraph(levels=GRAPH.levels[:1]).path((1,))
    assert steps.ravel().tolist() == [1]
    assert rows == []
