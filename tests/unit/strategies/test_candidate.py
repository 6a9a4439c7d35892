import pytest

from amp_ray.strategies.candidate import GroupsCandidate, StageOptions
from support.checked import grid_of


def test_samples_of_an_iteration_add_up() -> None:
    assert grid_of(tp=4, dp=3, micro_batch_size=2, num_micro_batches=5).global_batch_size == 30
    assert GroupsCandidate(micro_batch_size=6, num_micro_batches=5).global_batch_size == 30


@pytest.mark.parametrize(("size", "number"), [(0, 1), (1, 0), (-1, 2)])
def test_groups_need_samples_and_micro_batches(size: int, number: int) -> None:
    with pytest.raises(ValueError, match=f"start at 1, found {size} and {number}"):
        GroupsCandidate(micro_batch_size=size, num_micro_batches=number)


def test_one_rank_has_nobody_to_divide_tokens_with() -> None:
    with pytest.raises(ValueError, match="needs tp 2 or more"):
        StageOptions(tp=1, dp=4, sequence_parallel=True)


def test_candidates_compare_by_value() -> None:
    small, large = (GroupsCandidate(micro_batch_size=b, num_micro_batches=8 // b) for b in (1, 8))
    assert sorted((large, small)) == [small, large]
