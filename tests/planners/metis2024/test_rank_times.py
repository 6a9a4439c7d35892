import numpy as np

from amp_ray.planners.metis2024.group_table import RankTimes
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.units import MIB
from support.metis import metis_profile_files
from support.metis_cases import metis_setting

A100, T4 = 0, 1


def rank_times_of(files: dict[str, str] | None = None) -> RankTimes:
    """Return the tables of a profile of A100 and T4, sizes 1 and 2."""
    return RankTimes(space=GroupSpace(setting=metis_setting(files), limits=MetisLimits()))


def row(rank_times: RankTimes, kind: int, tp: int, samples: int) -> int:
    """Return one row."""
    return int(rank_times.row(np.array([kind]), np.array([tp]), np.array([samples]))[0])


def layers_ms(rank_times: RankTimes, place: int) -> list[float]:
    """Return a row of times, the last layer first."""
    return [round(1e3 * float(time_s), 9) for time_s in rank_times.layer_s[place]]


def test_layers_count_backwards() -> None:
    files = metis_profile_files()
    rank_times = rank_times_of(files)
    assert layers_ms(rank_times, row(rank_times, A100, 1, 1)) == [1, 2, 2, 1]
    held = rank_times.memory_bytes[row(rank_times, A100, 1, 1)] / MIB
    assert held.tolist() == [4096, 2048, 2048, 1024]


def test_samples_are_split_into_binary_digits() -> None:
    rank_times = rank_times_of()
    assert layers_ms(rank_times, row(rank_times, T4, 1, 3)) == [9, 18, 18, 9]


def test_at_once_only_measured_sizes_run() -> None:
    rank_times = rank_times_of()
    assert rank_times.is_known[rank_times.num_rows + row(rank_times, A100, 1, 2)]
    assert not rank_times.is_known[rank_times.num_rows + row(rank_times, A100, 1, 3)]
    assert rank_times.is_known[row(rank_times, A100, 1, 3)]


def test_sizes_do_not_add_up_to_more_than_their_digits() -> None:
    rank_times = rank_times_of()
    assert not rank_times.is_known[row(rank_times, A100, 1, 4)]


def test_memory_is_that_of_the_next_measured_size() -> None:
    files = metis_profile_files()
    for name in [name for name in files if name.endswith("bs2.json")]:
        files[name.replace("bs2", "bs4")] = files.pop(name)
    rank_times = rank_times_of(files)
    known = ~np.isnan(rank_times.memory_bytes[:, 0])
    places = [row(rank_times, A100, 1, samples) for samples in range(1, 6)]
    assert known[places].tolist() == [True, True, True, True, False]


def test_no_samples_are_no_work() -> None:
    rank_times = rank_times_of()
    assert not rank_times.is_known[row(rank_times, A100, 1, 0)]
    assert row(rank_times, A100, 1, 1000) == row(rank_times, A100, 1, 0)


def test_what_a_model_takes_beyond_its_layers_may_be_unknown() -> None:
    files = metis_profile_files()
    rank_times = rank_times_of(files)
    rest_ms = 1e3 * rank_times.rest_s
    assert np.isclose(rest_ms[row(rank_times, A100, 1, 1)], 2.0)
    assert np.isnan(rest_ms[row(rank_times, A100, 1, 3)])
