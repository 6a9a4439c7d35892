import pytest

from amp_ray.partition.problem import even_bounds


def test_first_stages_get_the_layers_left_over() -> None:
    assert even_bounds(30, 4) == (0, 8, 16, 23, 30)


def test_all_stages_are_equal_when_the_layers_divide() -> None:
    assert even_bounds(12, 3) == (0, 4, 8, 12)


def test_one_stage_takes_all_layers() -> None:
    assert even_bounds(7, 1) == (0, 7)


def test_every_layer_can_be_a_stage() -> None:
    assert even_bounds(3, 3) == (0, 1, 2, 3)


@pytest.mark.parametrize("num_stages", [0, -1, 6])
def test_refuses_a_number_of_stages_that_cannot_be(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"num_stages is {num_stages}, but the chain has 5 layers"):
        even_bounds(5, num_stages)
