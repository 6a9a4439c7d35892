from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import (
    NO_RING,
    Path,
    all_gather_s,
    all_reduce_s,
    fastest_path,
    in_buckets_s,
    start_s,
)
from amp_ray.cost.nccl import Group
from amp_ray.runtimes.traits import RuntimeTraits

PATH = Path(bytes_per_s=100.0, step_s=0.5)


def test_all_reduce_sends_twice_what_all_others_hold() -> None:
    # 6 steps of 0.5 s; 6/4 of 400 bytes at 100 bytes/s; 1 s to start
    assert all_reduce_s(400, 4, PATH, start=1.0) == pytest.approx(1.0 + 3.0 + 6.0)


def test_all_gather_takes_half_of_an_all_reduce_after_its_start() -> None:
    assert all_gather_s(400, 4, PATH, start=1.0) == pytest.approx(1.0 + 1.5 + 3.0)


def test_every_bucket_has_a_start_and_a_latency_of_its_own() -> None:
    """Of 400 bytes a bucket of 160 makes two and a half, and the last is begun once more."""
    reduced_s, gathered_s = (
        in_buckets_s(collective, 400, 4, PATH, 1.0, 160)
        for collective in (all_reduce_s, all_gather_s)
    )
    assert reduced_s == pytest.approx(3.5 * 4.0 + 6.0)
    assert gathered_s == pytest.approx(3.5 * 2.5 + 3.0)


def test_one_message_is_one_bucket() -> None:
    assert in_buckets_s(all_reduce_s, 400, 4, PATH, 1.0) == pytest.approx(1.0 + 3.0 + 6.0)
    assert in_buckets_s(all_gather_s, 400, 1, PATH, 1.0) == 0.0


@pytest.mark.parametrize("bucket_bytes", [2.0**20, 5e7, 1e9, float("inf")])
def test_buckets_are_linear_in_the_bytes(bucket_bytes: float) -> None:
    group = Group(num_ranks=8, within_bytes_per_s=3e11, within="nvlink", generation=2)
    path = replace(PATH, all_reduce=group.all_reduce())
    none, one, two = (
        in_buckets_s(all_reduce_s, size, 8, path, 1e-5, bucket_bytes) for size in (0, 1e9, 2e9)
    )
    assert two - one == pytest.approx(one - none)
    if bucket_bytes < 1e9:
        bucket_s = all_reduce_s(bucket_bytes, 8, path, 1e-5)
        assert one == pytest.approx(none + 1e9 / bucket_bytes * bucket_s)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_nothing_undercuts_the_fastest_path(size: float) -> None:
    rate = 5e10
    for num_nodes in (2, 4):
        group = Group(
            num_ranks=8,
            num_nodes=num_nodes,
            within_bytes_per_s=3e11,
            network_bytes_per_s=rate,
            switch_bytes_per_s=3e11,
            within="nvlink",
            generation=2,
            has_pat=True,
        )
        path = replace(PATH, all_reduce=group.all_reduce(), gather=group.gather())
        for collective in (all_reduce_s, all_gather_s):
            least_s = collective(size, 8, fastest_path(rate), 1e-5)
            assert least_s <= collective(size, 8, path, 1e-5)


@pytest.mark.parametrize(("tree_s", "latency_s"), [(0.25, 0.5), (1.0, 2.0), (9.0, 3.0)])
def test_all_reduce_over_nodes_takes_a_tree_where_that_is_quicker(
    tree_s: float, latency_s: float
) -> None:
    path = replace(PATH, tree_s=tree_s)
    assert all_reduce_s(400, 4, path, start=1.0) == pytest.approx(1.0 + latency_s + 6.0)
    assert all_gather_s(400, 4, path, start=1.0) == all_gather_s(400, 4, PATH, start=1.0)


def test_a_single_rank_has_nobody_to_talk_to() -> None:
    assert all_reduce_s(400, 1, PATH, start=1.0) == 0.0
    assert all_gather_s(400, 1, NO_RING, start=1.0) == 0.0


def test_start_holds_the_call_and_what_the_runtime_waits_for(
    constants: Constants, traits: RuntimeTraits
) -> None:
    stated = replace(constants, collective_start_s=3.0, message_scale=2.0)
    assert start_s(stated, replace(traits, synchronisation_s=1.0)) == 8.0
