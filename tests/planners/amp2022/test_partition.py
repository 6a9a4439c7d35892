import numpy as np
import pytest

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


@pytest.mark.parametrize("num_stages", [0, 5])
def test_even_split_refuses_stages_that_do_not_fit(num_stages: int) -> None:
    with pytest.raises(ValueError, match=rf"num_stages={num_stages} .* num_layers=4"):
        even_bounds(4, num_stages, 2, 4)


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


def test_refuses_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="num_stages=4 is more than num_layers=3"):
        published_bounds(np.ones(3), free_cuts(3, 4), 2)


@pytest.mark.parametrize("shape", [(2, 1), (3,), (3, 1, 1)])
def test_refuses_boundaries_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"boundary_time_s has shape .*num_layers=3"):
        published_bounds(np.ones(3), np.zeros(shape), 2)
