from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.planners.metis2024.plan import DataRank, MetisPlan, MetisSetting, proportional_shares
from support.metis import HOSTFILE, metis_profile_files
from support.metis_cases import metis_setting

GOOD: dict[str, Any] = {
    "type_order": ("A100", "T4"),
    "group_sizes": (2, 2),
    "degrees": ((2, 1), (1, 2)),
    "num_micro_batches": 2,
    "bounds": (0, 2, 4),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": (0, 4)}, "one bound more, found 2, 2 and 2"),
        ({"degrees": ((2, 1),)}, "one bound more, found 2, 1 and 3"),
        ({"group_sizes": (), "degrees": (), "bounds": (0,)}, "found 0, 0 and 1"),
        ({"num_micro_batches": 0}, "start at 1"),
        ({"bounds": (0, 3, 2)}, "must not run backwards"),
        ({"bounds": (-1, 2, 4)}, "must not run backwards"),
        ({"degrees": ((2, 2), (1, 2))}, "dp 2 x tp 2 must be the 2 devices"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetisPlan(**GOOD | change)


def test_empty_stages_are_plans_too() -> None:
    assert MetisPlan(**GOOD | {"bounds": (0, 0, 4)}).pp == 2


def test_ranks_follow_the_order_of_types_not_of_nodes() -> None:
    setting = metis_setting()
    plan = MetisPlan(**GOOD | {"type_order": ("T4", "A100")})
    assert setting.rank_types(plan) == ("T4", "T4", "A100", "A100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type_order": ("A100", "H100")}, "orders the types A100, H100; the cluster has A100, T4"),
        ({"type_order": ("A100",)}, "orders the types A100; the cluster has A100, T4"),
        (
            {"group_sizes": (2, 1), "degrees": ((2, 1), (1, 1))},
            "uses 3 devices of the cluster's 4: this planner leaves none idle",
        ),
    ],
)
def test_a_plan_of_another_cluster_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metis_setting().rank_types(MetisPlan(**GOOD | change))


def test_a_tensor_parallel_group_counts_as_its_first_device() -> None:
    plan = MetisPlan(
        type_order=("T4", "A100"),
        group_sizes=(4,),
        degrees=((2, 2),),
        num_micro_batches=2,
        bounds=(0, 4),
    )
    setting = metis_setting(hostfile="0.0.0.2 slots=1\n0.0.0.1 slots=3\n")
    assert setting.data_ranks(plan, 0) == (
        DataRank(device_type="T4", group_types=("T4", "A100"), samples=1),
        DataRank(device_type="A100", group_types=("A100", "A100"), samples=3),
    )


def test_shares_add_up_and_the_largest_fraction_comes_first() -> None:
    assert proportional_shares(7, [1.0, 1.0, 2.0]) == [2, 2, 3]
    assert proportional_shares(1, [1.0, 5.0]) == [0, 1]


def test_a_file_that_is_not_there_cannot_be_listed_first() -> None:
    with pytest.raises(ValueError, match=r"has no file of \('A100', 4, 1\)"):
        metis_setting(listed_first=("A100", 4, 1))


def test_a_device_without_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="has no 'T4'"):
        metis_setting(metis_profile_files(kinds=("A100",)))


def test_a_type_without_memory_is_refused() -> None:
    given = metis_setting()
    with pytest.raises(ValueError, match="memory_bytes has no 'T4', only A100"):
        MetisSetting(
            cluster=given.cluster,
            profile=given.profile,
            memory_bytes={"A100": 1},
            hidden_size=1,
            sequence_length=1,
            vocab_size=1,
            global_batch_size=1,
            listed_first=given.listed_first,
        )


def test_the_hostfile_decides_the_types_of_nodes() -> None:
    assert metis_setting(hostfile=HOSTFILE + "0.0.0.1 slots=2\n").node_types == (
        "A100",
        "T4",
        "A100",
    )


def unequal(hostfile: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of ranks by the published rule."""
    setting = replace(metis_setting(hostfile=hostfile), first_node_counts=True)
    return setting.ordered_types(order)


def test_by_the_published_rule_every_node_counts_as_large_as_the_first() -> None:
    hostfile = "0.0.0.1 slots=4\n0.0.0.2 slots=2\n0.0.0.2 slots=2\n"
    assert unequal(hostfile, ("A100", "T4")) == ("A100",) * 4 + ("T4",) * 4
    assert unequal(hostfile, ("T4", "A100")) == ("T4",) * 8


def test_ranks_that_the_published_rule_gives_no_type_are_refused() -> None:
    with pytest.raises(InputError, match=r"gives types to 4 of 6 ranks.*list a larger node first"):
        unequal("0.0.0.1 slots=2\n0.0.0.2 slots=4\n", ("A100", "T4"))
