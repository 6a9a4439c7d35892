from amp_ray.search.stage_groups.group_options import (
    all_shares,
    split_by_speed,
    within_pieces,
)


def test_every_sample_is_given_once() -> None:
    assert split_by_speed(12, [1, 1], [3.0, 1.0]) == (9, 3)


def test_a_rank_gets_one_sample_however_slow_it_is() -> None:
    assert split_by_speed(4, [1, 2], [1000.0, 1.0]) == (2, 2)


def test_ranks_of_a_piece_share_evenly() -> None:
    assert within_pieces((7, 2), [3, 1]) == (3, 2, 2, 2)


def test_all_splits_leave_every_rank_a_sample() -> None:
    assert all_shares(4, [2, 1], 16) == [(1, 1, 2), (2, 1, 1)]


def test_too_many_splits_are_not_offered() -> None:
    assert all_shares(18, [1, 1], 16) == []
    assert len(all_shares(17, [1, 1], 16)) == 16
