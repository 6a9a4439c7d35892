"""The published rule in its fast form against the same rule in words."""

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.planners.amp2022.planner import published_bounds


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
