import numpy as np
import pytest

from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices, solve_unequal


def tables(*cells: float, backward: list[float]) -> SliceTables:
    """Return times of the first granule, the second alone, and both together."""
    return SliceTables(forward_s=np.array([cells]), backward_s=np.array([backward]))


def test_what_cannot_run_one_way_cannot_run() -> None:
    one_way = tables(1.0, 1.5, 2.0, backward=[1.0, np.inf, 1.0])
    assert one_way.forward_s[0, 1] == np.inf
    best = solve_slices(one_way, (1.0, 8.0))
    assert isinstance(best, SliceSolution)
    assert best.slices == ((1, (2,)),)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 2.0)])
def test_a_batch_that_no_slices_make_up_is_infeasible(factors: tuple[float, ...]) -> None:
    result = solve_unequal(tables(np.inf, 1.0, np.inf, backward=[1.0] * 3), factors)
    assert isinstance(result, InfeasiblePartition)
    assert result.detail == "no slices that can run make up 1 sequence(s) of 2 granule(s)"
