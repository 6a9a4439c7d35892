"""The published rule on small chains, and its fast form against the same rule in words."""

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.arrays import FloatArray
from amp_ray.planners.amp2022.planner import even_bounds, published_bounds


def free_cuts(num_layers: int, num_stages: int) -> FloatArray:
    return np.zeros((num_layers, num_stages - 1))


def test_even_split_gives_the_first_stages_one_layer_more() -> None:
    assert even_bounds(7, 3, 0, 0) == (0, 3, 5, 7)


def test_even_split_adds_the_outer_layers_to_the_first_and_last_stage() -> None:
    assert even_bounds(4, 2, 2, 4) == (0, 4, 10)


def test_even_split_into_one_stage_holds_everything() -> None:
    assert even_bounds(4, 1, 2, 4) == (0, 10)


def test_one_stage_needs_no_cut() -> None:
    assert published_bounds(np.ones(3), free_cuts(3, 1), 4) == (0, 3)


def test_as_many_stages_as_layers_cut_everywhere() -> None:
    assert published_bounds(np.array([5.0, 1.0, 1.0]), free_cuts(3, 3), 4) == (0, 1, 2, 3)


def test_free_cuts_balance_the_stages() -> None:
    assert published_bounds(np.ones(6), free_cuts(6, 3), 2) == (0, 2, 4, 6)


def test_dear_boundary_moves_the_cut() -> None:
    # After layer 2 the slowest stage takes 2 s and the cut 5 s; after layer 1 it takes 3 s.
    boundary = np.array([[0.0], [5.0], [0.0], [0.0]])
    assert published_bounds(np.ones(4), boundary, 2) == (0, 1, 4)


def test_each_boundary_is_priced_for_the_stage_that_it_ends() -> None:
    # A cut after layer 2 is dear at the end of stage 0 and free at the end of stage 1.
    boundary = np.array([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
    assert published_bounds(np.ones(4), boundary, 2) == (0, 1, 2, 4)


def test_the_first_of_equal_alternatives_is_kept() -> None:
    assert published_bounds(np.full(3, 2.0), free_cuts(3, 2), 2) == (0, 1, 3)


def test_published_rule_misses_the_optimum_of_its_own_objective() -> None:
    # Cut after layer 1 or 2: the slowest stage takes 4 s either way, so the objective is 4 + 10
    # or 4 + 1. The rule keeps the first as 4, without its boundary, and 4 + 1 is not below that.
    layer_time_s = np.full(3, 2.0)
    boundary_time_s = np.array([[10.0], [1.0], [0.0]])

    def objective(cut: int) -> float:
        slowest = max(layer_time_s[:cut].sum(), layer_time_s[cut:].sum())
        return float(slowest + boundary_time_s[cut - 1, 0])

    assert (objective(1), objective(2)) == (14.0, 5.0)
    assert published_bounds(layer_time_s, boundary_time_s, 2) == (0, 1, 3)


def test_published_rule_misses_it_at_an_inner_cut_too() -> None:
    # The last layer sets the pace, so the cut before it may be anywhere: cut 1 is kept as 0,
    # without its 10 s, and cut 2 with its 1 s is not below that.
    boundary_time_s = np.zeros((4, 2))
    boundary_time_s[:2, 0] = 10.0, 1.0
    assert published_bounds(np.array([2.0, 2.0, 2.0, 6.0]), boundary_time_s, 2) == (0, 1, 3, 4)


def bounds_by_recursion(
    layer_time_s: list[float], boundary_time_s: list[list[float]], num_micro_batches: int
) -> tuple[int, ...]:
    """Cut by the published rule, one state at a time."""
    waits = num_micro_batches - 1

    def stage(first: int, end: int) -> float:
        return float(np.cumsum(layer_time_s[first:end])[-1])

    @cache
    def best(end: int, num_cuts: int, slowest: float) -> tuple[float, tuple[int, ...]]:
        if num_cuts == 0:
            return waits * max(0.0, stage(0, end) - slowest), (0, end)
        value = float("inf")
        bounds: tuple[int, ...] = ()
        for cut in range(num_cuts, end):
            last = stage(cut, end)
            before, bounds_before = best(cut, num_cuts - 1, max(last, slowest))
            kept = before + waits * max(0.0, last - slowest)
            if kept + boundary_time_s[cut - 1][num_cuts - 1] < value:
                value, bounds = kept, (*bounds_before, end)
        return value, bounds

    return best(len(layer_time_s), len(boundary_time_s[0]), 0.0)[1]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[list[float]], int]:
    """Draw few different times, so that ties are common, or any times."""
    num_layers = draw(st.integers(1, 8))
    num_cuts = draw(st.integers(0, num_layers - 1))
    few = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
    times = draw(st.sampled_from([few, st.floats(0.0, 10.0, allow_subnormal=False)]))
    layer_time_s = draw(st.lists(times, min_size=num_layers, max_size=num_layers))
    row = st.lists(times, min_size=num_cuts, max_size=num_cuts)
    boundary_time_s = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    return layer_time_s, boundary_time_s, draw(st.integers(2, 6))


@given(chain=chains())
def test_cuts_are_those_of_the_rule_in_words(
    chain: tuple[list[float], list[list[float]], int],
) -> None:
    layer_time_s, boundary_time_s, num_micro_batches = chain
    bounds = published_bounds(
        np.array(layer_time_s),
        np.array(boundary_time_s).reshape(len(layer_time_s), -1),
        num_micro_batches,
    )
    assert bounds == bounds_by_recursion(layer_time_s, boundary_time_s, num_micro_batches)
