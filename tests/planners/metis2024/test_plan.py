"""Cost and defects of single plans, by hand; devices are two A100 and two T4."""

import json
from dataclasses import replace
from typing import Any, Final

import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.errors import InputError
from amp_ray.planners.metis2024.plan import (
    NO_WHOLE_TIME,
    NOT_PROFILED,
    DataRank,
    MetisCost,
    MetisPlan,
    MetisSetting,
    metis_cost,
    metis_defects,
    proportional_shares,
    stage_time_s,
)
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting

FAST_FIRST: Final = ("A100", "T4")
SLOW_FIRST: Final = ("T4", "A100")

DATA_PARALLEL: Final = MetisPlan(
    type_order=FAST_FIRST, degrees=((2, 1), (2, 1)), num_micro_batches=2, bounds=(0, 3, 4)
)
"""Two samples per replica and micro-batch."""

MIXED: Final = MetisPlan(
    type_order=SLOW_FIRST, degrees=((4, 1),), num_micro_batches=1, bounds=(0, 4)
)
"""One sample per T4 and three per A100."""

TENSOR_PARALLEL: Final = MetisPlan(
    type_order=FAST_FIRST, degrees=((1, 2), (1, 2)), num_micro_batches=4, bounds=(0, 2, 4)
)


def changed_files(name: str, *layers_ms: float, **change: Any) -> dict[str, str]:  # noqa: ANN401
    """Return profile files with another one: times of its layers, the whole, GiB of a layer."""
    gib = change.pop("gib", None)
    document = metis_document(layers_ms or (1, 2, 2, 1), **change)
    if gib is not None:
        document["execution_memory"]["layer_memory_total_mb"] = [1024 * gib] * 4
    return metis_profile_files() | {f"DeviceType.{name}.json": json.dumps(document)}


def without(name: str) -> dict[str, str]:
    """Return profile files without one."""
    files = metis_profile_files()
    del files[f"DeviceType.{name}.json"]
    return files


def cost_ms(plan: MetisPlan, setting: MetisSetting | None = None) -> dict[str, float]:
    """Return the parts of a cost in milliseconds."""
    cost = metis_cost(setting or metis_setting(), plan)
    assert isinstance(cost, MetisCost)
    parts = ("execution", "rest", "batch_generator", "optimizer", "gradient_sync", "pipeline_p2p")
    times_ms = {part: 1e3 * getattr(cost, f"{part}_s") for part in parts}
    assert 1e3 * cost.total_s == pytest.approx(sum(times_ms.values()))
    return times_ms


def defects(plan: MetisPlan, files: dict[str, str] | None = None) -> list[str]:
    """Return the reasons why a plan cannot run."""
    return list(map(str, metis_defects(metis_setting(files), plan)))


def test_stages_of_one_type_are_costed_by_hand() -> None:
    assert cost_ms(DATA_PARALLEL) == pytest.approx(
        {
            "execution": 10 + (10 + 6),  # A100: 2 + 4 + 4; T4: 6
            "rest": 2 * 9,  # T4 at two samples: 45 - 36
            "batch_generator": 2 * 0.5,
            "optimizer": 2 * 10 * 3 / 4,
            "gradient_sync": 2.0,  # 20 MiB at 10 GB/s
            "pipeline_p2p": 4 / 5,  # logits of 2 samples over the T4's 5 GB/s
        }
    )


def test_a_mixed_stage_shares_samples_by_speed() -> None:
    assert cost_ms(MIXED) == pytest.approx(
        {
            "execution": 18,  # a T4's one sample, and an A100's 2 + 1
            "rest": 9,  # the T4's at the even share of two samples
            "batch_generator": 0.5,
            "optimizer": 20,
            "gradient_sync": 1.5 * 24 / 5,
            "pipeline_p2p": 0,
        }
    )


def test_tensor_parallel_stages_have_no_gradient_all_reduce() -> None:
    assert cost_ms(TENSOR_PARALLEL) == pytest.approx(
        {
            "execution": 3 * 12 + 4 + 12,
            "rest": 4 * 6,
            "batch_generator": 2,
            "optimizer": 2 * 10 / 2 * 2 / 4,
            "gradient_sync": 0,
            "pipeline_p2p": 1 / 5,
        }
    )


def test_model_level_values_come_from_the_file_that_is_listed_first() -> None:
    files = metis_profile_files()
    other = metis_document([3, 6, 6, 3], 24)
    other["execution_time"]["optimizer_time_ms"] = 100.0
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(other)
    usual, slow = (
        cost_ms(DATA_PARALLEL, metis_setting(files, listed_first=(kind, 1, 1)))["optimizer"]
        for kind in FAST_FIRST
    )
    assert (usual, slow) == pytest.approx((15, 150))


def test_a_lost_layer_costs_nothing() -> None:
    lost = replace(DATA_PARALLEL, bounds=(0, 3, 3))
    assert cost_ms(lost)["execution"] == pytest.approx(10 + 10)


def test_every_middle_layer_has_the_parameters_of_the_second_one() -> None:
    files = metis_profile_files()
    odd = metis_document([1, 2, 2, 1])
    odd["model"]["parameters"]["parameters_per_layer_bytes"][2] = 10**12
    files["DeviceType.A100_tp1_bs1.json"] = json.dumps(odd)
    assert cost_ms(DATA_PARALLEL, metis_setting(files))["gradient_sync"] == pytest.approx(2.0)


def test_every_node_counts_as_large_as_the_first_and_as_its_first_type() -> None:
    setting = metis_setting(hostfile="0.0.0.2 slots=3\n0.0.0.1 slots=1\n")
    plan = MetisPlan(
        type_order=FAST_FIRST,
        degrees=((1, 1), (1, 1), (2, 1)),
        num_micro_batches=4,
        bounds=(0, 1, 2, 4),
    )
    # An A100 and a T4 are taken for one node of A100s: 1 MiB at 10 GB/s, then 1 MiB at 5 GB/s.
    assert cost_ms(plan, setting)["pipeline_p2p"] == pytest.approx(0.1 + 0.2)


@pytest.mark.parametrize(
    ("files", "plan", "kind", "detail"),
    [
        (
            metis_profile_files(sizes=(1,)),
            DATA_PARALLEL,
            NOT_PROFILED,
            "stage 0: A100, tp 1, 2 samples",
        ),
        (without("T4_tp1_bs1"), MIXED, NOT_PROFILED, "stage 0: tp 1, micro-batch size 1"),
        (without("T4_tp1_bs2"), MIXED, NOT_PROFILED, "T4, tp 1, 2 samples"),
        *(
            (
                changed_files("T4_tp1_bs2", 6, 12, 12, 6, whole_ms=whole_ms),
                DATA_PARALLEL,
                NO_WHOLE_TIME,
                "T4, tp 1, 2 samples",
            )
            for whole_ms in (None, 36.0)
        ),
    ],
)
def test_what_no_file_has_drops_the_plan(
    files: dict[str, str], plan: MetisPlan, kind: str, detail: str
) -> None:
    assert metis_cost(metis_setting(files), plan) == Reason(kind=kind, detail=detail)


def test_the_rest_of_a_mixed_stage_is_looked_up_apart_from_its_time() -> None:
    assert stage_time_s(metis_setting(without("T4_tp1_bs2")), MIXED, 0) == pytest.approx(18e-3)


def test_shares_add_up_and_the_largest_fraction_comes_first() -> None:
    assert proportional_shares(7, [1.0, 1.0, 2.0]) == [2, 2, 3]
    assert proportional_shares(1, [1.0, 5.0]) == [0, 1]


def test_a_tensor_parallel_group_counts_as_its_first_device() -> None:
    plan = replace(MIXED, degrees=((2, 2),), num_micro_batches=2)
    setting = metis_setting(hostfile="0.0.0.2 slots=1\n0.0.0.1 slots=3\n")
    ranks = setting.data_ranks(plan, 0)
    assert ranks == (
        DataRank(group_types=("T4", "A100"), samples=1),
        DataRank(group_types=("A100", "A100"), samples=3),
    )
    assert [rank.device_type for rank in ranks] == ["T4", "A100"]


def test_ranks_follow_the_order_of_types_not_of_nodes() -> None:
    assert metis_setting().ordered_types(SLOW_FIRST) == ("T4", "T4", "A100", "A100")


def unequal(hostfile: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of ranks by the published rule."""
    return replace(metis_setting(hostfile=hostfile), first_node_counts=True).ordered_types(order)


def test_by_the_published_rule_every_node_counts_as_large_as_the_first() -> None:
    hostfile = "0.0.0.1 slots=4\n0.0.0.2 slots=2\n0.0.0.2 slots=2\n"
    assert unequal(hostfile, FAST_FIRST) == ("A100",) * 4 + ("T4",) * 4
    assert unequal(hostfile, SLOW_FIRST) == ("T4",) * 8


def test_ranks_that_the_published_rule_gives_no_type_are_refused() -> None:
    with pytest.raises(InputError, match=r"gives types to 4 of 6 ranks.*list a larger node first"):
        unequal("0.0.0.1 slots=2\n0.0.0.2 slots=4\n", FAST_FIRST)


HALVES: Final = replace(DATA_PARALLEL, bounds=(0, 2, 4))

FIVE_GIB: Final = {
    f"DeviceType.{kind}_tp4_bs{size}.json": changed_files("X", gib=5)["DeviceType.X.json"]
    for kind in FAST_FIRST
    for size in (1, 2)
}

DEFECTS: Final[dict[str, tuple[MetisPlan, dict[str, str] | None, list[str]]]] = {
    "none": (HALVES, None, []),
    "lost at the end": (
        replace(HALVES, bounds=(0, 2, 3)),
        None,
        ["layers lost: bounds 0 to 3 of 4 layers"],
    ),
    "lost at the start": (
        replace(HALVES, bounds=(1, 2, 4)),
        None,
        ["layers lost: bounds 1 to 4 of 4 layers"],
    ),
    "too many": (
        replace(HALVES, bounds=(0, 2, 5)),
        None,
        ["layers lost: bounds 0 to 5 of 4 layers"],
    ),
    "empty first": (replace(HALVES, bounds=(0, 0, 4)), None, ["empty stage: stage 0"]),
    "empty last": (replace(HALVES, bounds=(0, 4, 4)), None, ["empty stage: stage 1"]),
    "rounded away": (
        replace(HALVES, num_micro_batches=3),
        None,
        ["samples lost: stage 0 takes 6 of 8", "samples lost: stage 1 takes 6 of 8"],
    ),
    "a device too small": (
        HALVES,
        changed_files("T4_tp1_bs2", gib=8),
        ["out of memory: stage 1 needs 16.0 GiB of 15.0 (T4, 2 samples)"],
    ),
    "a device that just holds it": (HALVES, changed_files("T4_tp1_bs2", gib=7), []),
    "a share between measured sizes": (MIXED, changed_files("A100_tp1_bs4"), []),
    "its larger size too large": (
        MIXED,
        changed_files("A100_tp1_bs4", gib=21),
        ["out of memory: stage 0 needs 84.0 GiB of 80.0 (A100, 3 samples)"],
    ),
    "no larger size": (MIXED, None, ["not in the profile: stage 0: A100, tp 1, 3 samples"]),
    "unknown speeds": (
        MIXED,
        without("T4_tp1_bs1"),
        ["not in the profile: stage 0: tp 1, micro-batch size 1"],
    ),
    "the smallest device of a tensor-parallel group": (
        replace(MIXED, type_order=FAST_FIRST, degrees=((1, 4),), num_micro_batches=8),
        metis_profile_files() | FIVE_GIB,
        ["out of memory: stage 0 needs 20.0 GiB of 15.0 (T4, 1 samples)"],
    ),
    "a device without samples": (
        replace(MIXED, type_order=FAST_FIRST, num_micro_batches=4),
        changed_files("T4_tp1_bs1", 300, 300, 300, 300, gib=80),
        [],
    ),
}


@pytest.mark.parametrize(("plan", "files", "reasons"), DEFECTS.values(), ids=DEFECTS)
def test_a_plan_that_cannot_run_is_told_why(
    plan: MetisPlan, files: dict[str, str] | None, reasons: list[str]
) -> None:
    assert defects(plan, files)[:2] == reasons
