import json

import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.plan import (
    NO_WHOLE_TIME,
    NOT_PROFILED,
    MetisCost,
    MetisPlan,
    MetisSetting,
    metis_cost,
    stage_time_s,
)
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting

DATA_PARALLEL = MetisPlan(
    type_order=("A100", "T4"),
    group_sizes=(2, 2),
    degrees=((2, 1), (2, 1)),
    num_micro_batches=2,
    bounds=(0, 3, 4),
)
"""Two samples per replica and micro-batch."""

MIXED = MetisPlan(
    type_order=("T4", "A100"),
    group_sizes=(4,),
    degrees=((4, 1),),
    num_micro_batches=1,
    bounds=(0, 4),
)
"""One sample per T4 and three per A100."""

TENSOR_PARALLEL = MetisPlan(
    type_order=("A100", "T4"),
    group_sizes=(2, 2),
    degrees=((1, 2), (1, 2)),
    num_micro_batches=4,
    bounds=(0, 2, 4),
)


def cost_ms(setting: MetisSetting, plan: MetisPlan) -> dict[str, float]:
    """Return the parts of a cost in milliseconds."""
    cost = metis_cost(setting, plan)
    assert isinstance(cost, MetisCost)
    parts = ("execution", "rest", "batch_generator", "optimizer", "gradient_sync", "pipeline_p2p")
    return {part: 1e3 * getattr(cost, f"{part}_s") for part in parts}


def test_stages_of_one_type_are_costed_by_hand() -> None:
    assert cost_ms(metis_setting(), DATA_PARALLEL) == pytest.approx(
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
    assert cost_ms(metis_setting(), MIXED) == pytest.approx(
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
    assert cost_ms(metis_setting(), TENSOR_PARALLEL) == pytest.approx(
        {
            "execution": 3 * 12 + 4 + 12,
            "rest": 4 * 6,
            "batch_generator": 2,
            "optimizer": 2 * 10 / 2 * 2 / 4,
            "gradient_sync": 0,
            "pipeline_p2p": 1 / 5,
        }
    )


def test_the_whole_is_the_sum_of_its_parts() -> None:
    cost = metis_cost(metis_setting(), DATA_PARALLEL)
    assert isinstance(cost, MetisCost)
    assert cost.total_s == pytest.approx(62.8e-3)


def test_model_level_values_come_from_the_file_that_is_listed_first() -> None:
    files = metis_profile_files()
    other = metis_document([3, 6, 6, 3], 24)
    other["execution_time"]["optimizer_time_ms"] = 100.0
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(other)
    usual, slow = (
        cost_ms(metis_setting(files, listed_first=(kind, 1, 1)), DATA_PARALLEL)["optimizer"]
        for kind in ("A100", "T4")
    )
    assert (usual, slow) == pytest.approx((15, 150))


def test_a_lost_layer_costs_nothing() -> None:
    lost = MetisPlan(
        type_order=("A100", "T4"),
        group_sizes=(2, 2),
        degrees=((2, 1), (2, 1)),
        num_micro_batches=2,
        bounds=(0, 3, 3),
    )
    assert cost_ms(metis_setting(), lost)["execution"] == pytest.approx(10 + 10)


def test_every_middle_layer_has_the_parameters_of_the_second_one() -> None:
    files = metis_profile_files()
    odd = metis_document([1, 2, 2, 1])
    odd["model"]["parameters"]["parameters_per_layer_bytes"][2] = 10**12
    files["DeviceType.A100_tp1_bs1.json"] = json.dumps(odd)
    assert cost_ms(metis_setting(files), DATA_PARALLEL)["gradient_sync"] == pytest.approx(2.0)


def test_every_node_counts_as_large_as_the_first_and_as_its_first_type() -> None:
    setting = metis_setting(hostfile="0.0.0.2 slots=3\n0.0.0.1 slots=1\n")
    plan = MetisPlan(
        type_order=("A100", "T4"),
        group_sizes=(1, 1, 2),
        degrees=((1, 1), (1, 1), (2, 1)),
        num_micro_batches=4,
        bounds=(0, 1, 2, 4),
    )
    # An A100 and a T4 are taken for one node of A100s: 1 MiB at 10 GB/s, then 1 MiB at 5 GB/s.
    assert cost_ms(setting, plan)["pipeline_p2p"] == pytest.approx(0.1 + 0.2)


def test_a_size_that_no_file_has_drops_the_plan() -> None:
    found = metis_cost(metis_setting(metis_profile_files(sizes=(1,))), DATA_PARALLEL)
    assert found == Reason(kind=NOT_PROFILED, detail="stage 0: A100, tp 1, 2 samples")


def test_a_rest_that_no_file_has_drops_the_plan() -> None:
    files = metis_profile_files()
    del files["DeviceType.T4_tp1_bs2.json"]
    assert stage_time_s(metis_setting(files), MIXED, 0) == pytest.approx(18e-3)
    found = metis_cost(metis_setting(files), MIXED)
    assert found == Reason(kind=NOT_PROFILED, detail="T4, tp 1, 2 samples")


@pytest.mark.parametrize("whole_ms", [None, 36.0])
def test_a_whole_that_is_missing_or_its_layers_drops_the_plan(whole_ms: float | None) -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs2.json"] = json.dumps(metis_document([6, 12, 12, 6], whole_ms))
    found = metis_cost(metis_setting(files), DATA_PARALLEL)
    assert found == Reason(kind=NO_WHOLE_TIME, detail="T4, tp 1, 2 samples")


def test_a_mixed_stage_needs_the_speed_of_every_type() -> None:
    files = metis_profile_files()
    del files["DeviceType.T4_tp1_bs1.json"]
    found = stage_time_s(metis_setting(files), MIXED, 0)
    assert found == Reason(kind=NOT_PROFILED, detail="stage 0: tp 1, micro-batch size 1")
    assert metis_cost(metis_setting(files), MIXED) == found
