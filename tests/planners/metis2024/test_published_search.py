"""The exact search against the published planner, on its own files."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.plan import MetisCost, MetisPlan, metis_cost, metis_defects
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis_cases import CASES, LIMITS, MetisCase, read_case

SAME = 1e-9
"""Relative; sums in another order."""


@pytest.fixture(scope="module")
def folder(metis_data: Path) -> Path:
    """The published planner's files and figures."""
    return metis_data


def case_of(*nodes: tuple[str, int], **change: object) -> MetisCase:
    """Return a case with the profile of all four types."""
    case = MetisCase(
        name="", nodes=nodes, profile="all4_ext", listed_first=("T4", 4, 4), target_s=1.0
    )
    return replace(case, **change)  # type: ignore[arg-type]


def best_of(folder: Path, case: MetisCase, *, batch: int = 128) -> MetisSolution:
    """Return the proven plan of a case."""
    search = MetisSearch(setting=read_case(folder, case, global_batch_size=batch), limits=LIMITS)
    found = search.best()
    assert not isinstance(found, Reason), found
    assert found.lower_bound_s >= found.cost.total_s * (1 - SAME)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.num_layers} layers")
def test_plans_are_as_good_as_asked(folder: Path, case: MetisCase) -> None:
    found = best_of(folder, case)
    if case.target_ms is not None:
        assert round(1e3 * found.cost.total_s) <= case.target_ms
    setting = read_case(folder, case)
    assert metis_defects(setting, found.plan) == ()
    assert metis_cost(setting, found.plan) == found.cost
    assert sum(found.plan.group_sizes) == setting.cluster.num_devices


@pytest.mark.parametrize(
    ("ranking", "case"),
    [
        ("ref16_p6", CASES[0]),
        ("X_readme4x8_p4", CASES[2]),
        ("X_t2_1x1x4_p4", case_of(("A100", 4), ("T4", 4), profile="a100_t4_ext")),
        (
            "homo_2x8_p4",
            case_of(("A100", 8), ("A100", 8), profile="a100", listed_first=("A100", 2, 2)),
        ),
    ],
)
def test_no_published_plan_that_can_run_is_better(
    folder: Path, ranking: str, case: MetisCase
) -> None:
    setting, found = read_case(folder, case), best_of(folder, case)
    with (folder / "expected" / f"{ranking}.csv").open(encoding="utf-8", newline="") as file:
        plans = [
            MetisPlan(
                type_order=tuple(row["node_sequence"].split("|")),
                group_sizes=tuple(map(int, row["device_groups"].split("|"))),
                degrees=tuple(
                    (int(dp), int(tp))
                    for word in row["strategies_dp_tp"].split("|")
                    for dp, tp in [word.split("x")]
                ),
                num_micro_batches=int(row["batches"]),
                bounds=tuple(map(int, row["layer_partition"].split("|"))),
            )
            for row in csv.DictReader(file)
        ]
    costs = [metis_cost(setting, plan) for plan in plans if not metis_defects(setting, plan)]
    times_s = [cost.total_s for cost in costs if isinstance(cost, MetisCost)]
    assert times_s
    assert found.cost.total_s <= min(times_s) * (1 + SAME)


CRASHES = {
    "12 devices": (("A100", 4), ("A100", 4), ("T4", 4)),
    "unequal nodes": (("A100", 4), ("T4", 8)),
    "other unequal nodes": (("A100", 8), ("T4", 4), ("V100", 4)),
    "16 slots": (("A100", 16),),
    "24 devices": (("A100", 8), ("T4", 8), ("T4", 8)),
}


@pytest.mark.parametrize("batch", [96, 128])
@pytest.mark.parametrize("nodes", CRASHES.values(), ids=CRASHES)
def test_clusters_on_which_the_published_planner_crashes_are_planned(
    folder: Path, nodes: tuple[tuple[str, int], ...], batch: int
) -> None:
    case = case_of(*nodes)
    found = best_of(folder, case, batch=batch)
    assert sum(found.plan.group_sizes) == sum(slots for _, slots in nodes)
    assert metis_defects(read_case(folder, case, global_batch_size=batch), found.plan) == ()
