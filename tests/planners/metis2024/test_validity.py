import json
from typing import Any

import pytest

from amp_ray.planners.metis2024.plan import MetisPlan, metis_defects
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting

GOOD: dict[str, Any] = {
    "type_order": ("A100", "T4"),
    "group_sizes": (2, 2),
    "degrees": ((2, 1), (2, 1)),
    "num_micro_batches": 2,
    "bounds": (0, 2, 4),
}


def heavy_files(size: int, *, gib: int, kind: str = "T4") -> dict[str, str]:
    """Return profile files with one that needs this much per layer at tp 1."""
    files = metis_profile_files()
    document = metis_document()
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * gib] * 4
    files[f"DeviceType.{kind}_tp1_bs{size}.json"] = json.dumps(document)
    return files


def defects(files: dict[str, str] | None = None, **change: Any) -> list[str]:  # noqa: ANN401
    """Return the reasons why a changed plan cannot run."""
    return [
        str(reason) for reason in metis_defects(metis_setting(files), MetisPlan(**GOOD | change))
    ]


def test_a_whole_plan_has_no_defect() -> None:
    assert defects() == []


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 2, 3), "layers lost: bounds 0 to 3 of 4 layers"),
        ((1, 2, 4), "layers lost: bounds 1 to 4 of 4 layers"),
        ((0, 2, 5), "layers lost: bounds 0 to 5 of 4 layers"),
        ((0, 0, 4), "empty stage: stage 0"),
        ((0, 4, 4), "empty stage: stage 1"),
    ],
)
def test_layers_must_all_be_somewhere(bounds: tuple[int, ...], message: str) -> None:
    assert defects(bounds=bounds)[0] == message


def test_samples_that_are_rounded_away_are_told() -> None:
    assert defects(num_micro_batches=3) == [
        "samples lost: stage 0 takes 6 of 8",
        "samples lost: stage 1 takes 6 of 8",
    ]


def test_each_device_must_hold_its_layers() -> None:
    assert defects(heavy_files(2, gib=8)) == [
        "out of memory: stage 1 needs 16.0 GiB of 15.0 (T4, 2 samples)"
    ]
    assert defects(heavy_files(2, gib=7)) == []


def test_a_share_between_measured_sizes_needs_the_larger_one() -> None:
    mixed = {
        "type_order": ("T4", "A100"),
        "group_sizes": (4,),
        "degrees": ((4, 1),),
        "num_micro_batches": 1,
        "bounds": (0, 4),
    }
    files = metis_profile_files()
    assert defects(files, **mixed) == ["not in the profile: stage 0: A100, tp 1, 3 samples"]
    files |= {"DeviceType.A100_tp1_bs4.json": json.dumps(metis_document())}
    assert defects(files, **mixed) == []
    large = heavy_files(4, gib=21, kind="A100")
    assert defects(large, **mixed) == [
        "out of memory: stage 0 needs 84.0 GiB of 80.0 (A100, 3 samples)"
    ]


def test_the_smallest_device_of_a_group_counts() -> None:
    plan = MetisPlan(
        type_order=("A100", "T4"),
        group_sizes=(4,),
        degrees=((1, 4),),
        num_micro_batches=8,
        bounds=(0, 4),
    )
    files = metis_profile_files()
    document = metis_document()
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * 5] * 4
    files |= {
        f"DeviceType.{kind}_tp4_bs{size}.json": json.dumps(document)
        for kind in ("A100", "T4")
        for size in (1, 2)
    }
    reasons = metis_defects(metis_setting(files), plan)
    assert [str(reason) for reason in reasons] == [
        "out of memory: stage 0 needs 20.0 GiB of 15.0 (T4, 1 samples)"
    ]


def test_a_mixed_stage_whose_speeds_are_unknown_is_told() -> None:
    files = metis_profile_files()
    del files["DeviceType.T4_tp1_bs1.json"]
    found = defects(
        files,
        type_order=("T4", "A100"),
        group_sizes=(4,),
        degrees=((4, 1),),
        num_micro_batches=1,
        bounds=(0, 4),
    )
    assert found == ["not in the profile: stage 0: tp 1, micro-batch size 1"]


def test_a_device_without_samples_holds_nothing() -> None:
    files = heavy_files(1, gib=80, kind="T4")
    document = json.loads(files["DeviceType.T4_tp1_bs1.json"])
    document["execution_time"]["layer_compute_total_ms"] = [300.0] * 4
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(document)
    idle = {"group_sizes": (4,), "degrees": ((4, 1),), "num_micro_batches": 4, "bounds": (0, 4)}
    assert defects(files, **idle) == []
