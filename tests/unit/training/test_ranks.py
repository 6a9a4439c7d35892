from hypothesis import given
from hypothesis import strategies as st

from amp_ray.training.grid import rank_map, shard_range


@given(order=st.permutations([(host, slot) for host in "abc" for slot in range(2)]))
def test_every_rank_is_played_at_its_place(order: list[tuple[str, int]]) -> None:
    placement = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    processes = rank_map(placement, order)
    assert [order[process] for process in processes] == placement


@given(size=st.integers(0, 200), num_shards=st.integers(1, 16))
def test_shards_cover_everything_once_and_evenly(size: int, num_shards: int) -> None:
    ranges = [shard_range(size, index, num_shards) for index in range(num_shards)]
    assert [item for first, end in ranges for item in range(first, end)] == list(range(size))
    lengths = [end - first for first, end in ranges]
    assert max(lengths) - min(lengths) <= 1
