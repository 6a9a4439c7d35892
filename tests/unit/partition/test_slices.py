import numpy as np
import pytest

from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices, solve_unequal

# The first granule, the second alone, both together.
TIMES = np.array([[1.0, 1.5, 2.0]])


def tables(forward: np.ndarray = TIMES, backward: np.ndarray | None = None) -> SliceTables:
    return SliceTables(forward_s=forward, backward_s=2 * forward if backward is None else backward)


def solved(own: SliceTables, num_stages: int) -> SliceSolution:
    found = solve_slices(own, (1.0, num_stages - 1.0))
    assert isinstance(found, SliceSolution)
    return found


def test_many_stages_want_short_slices_and_one_stage_long_ones() -> None:
    assert solved(tables(), 4).slices == ((1, (1, 1)),)
    assert solved(tables(), 4).value_s == 7.5 + 3 * 4.5
    assert solved(tables(), 1).slices == ((1, (2,)),)


def test_slowest_passes_may_be_those_of_different_slices() -> None:
    forward, backward = np.array([[1.0, 3.0, 9.0]]), np.array([[5.0, 1.0, 9.0]])
    found = solved(tables(forward, backward), 3)
    assert found.value_s == 10.0 + 2 * (3.0 + 5.0)


def test_batch_slices_may_be_cut_differently() -> None:
    # Two sequences together run in one slice only, one alone in two only.
    forward = np.array([[1.0, 1.0, np.inf], [np.inf, 9.0, 2.0], [np.inf, 9.0, np.inf]])
    found = solved(tables(forward), 2)
    assert found.slices == ((2, (2,)), (1, (1, 1)))


def test_what_cannot_run_one_way_cannot_run() -> None:
    own = tables(TIMES, np.array([[1.0, np.inf, 1.0]]))
    assert own.forward_s[0, 1] == np.inf
    assert solved(own, 9).slices == ((1, (2,)),)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 2.0)])
def test_nothing_that_runs_is_told(factors: tuple[float, ...]) -> None:
    own = tables(np.array([[np.inf, 1.0, np.inf]]))
    found = solve_unequal(own, factors)
    assert isinstance(found, InfeasiblePartition)
    assert found.detail == "no slices that can run make up 1 sequence(s) of 2 granule(s)"


def test_the_order_of_batch_slices_counts_where_stages_differ() -> None:
    # One sequence takes 1, two take 5: with a slow last stage the short one goes first.
    forward = np.array([[1.0], [5.0], [50.0]])
    own = tables(forward, np.zeros((3, 1)))
    found = solve_unequal(own, (1.0, 3.0))
    assert isinstance(found, SliceSolution)
    assert found.slices == ((1, (1,)),) * 3
    assert found.value_s == found.lower_bound_s == 10.0
