"""The published planner's figures, row by row, through our reader of its own files."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from amp_ray.planners.metis2024.plan import (
    EMPTY_STAGE,
    LAYERS_LOST,
    NOT_PROFILED,
    OUT_OF_MEMORY,
    MetisCost,
    MetisPlan,
    metis_cost,
    metis_defects,
)
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis_cases import CASES, LIMITS, MetisCase, best_of, read_case

TOLERANCE: Final = 1e-6
"""Relative; the figures agree to the last bit or two."""

SAME: Final = 1e-9
"""Relative; sums in another order."""


def case_of(*nodes: tuple[str, int], **change: object) -> MetisCase:
    """Return a case with the profile of all four types."""
    case = MetisCase(
        name="", nodes=nodes, profile="all4_ext", listed_first=("T4", 4, 4), target_s=1.0
    )
    return replace(case, **change)  # type: ignore[arg-type]


RANKINGS: Final[dict[str, tuple[MetisCase, int]]] = {
    "X_readme4x8_p4": (CASES[2], 1052),
    "X_t2_1x1x4_p4": (case_of(("A100", 4), ("T4", 4), profile="a100_t4_ext"), 95),
    "homo_2x8_p4": (
        case_of(("A100", 8), ("A100", 8), profile="a100", listed_first=("A100", 2, 2)),
        255,
    ),
    "ref16_p6": (CASES[0], 879),
}
"""Published rankings: the files that were given, the one listed first, and the number of plans."""


@pytest.fixture(scope="module")
def folder(metis_data: Path) -> Path:
    """The published planner's files and figures."""
    return metis_data


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """Read a published ranking."""
    with (folder / "expected" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def plan_of(row: dict[str, str]) -> MetisPlan:
    """Read a printed plan."""
    plan = MetisPlan(
        type_order=tuple(row["node_sequence"].split("|")),
        degrees=tuple(degrees(word) for word in row["strategies_dp_tp"].split("|")),
        num_micro_batches=int(row["batches"]),
        bounds=tuple(map(int, row["layer_partition"].split("|"))),
    )
    assert "|".join(str(dp * tp) for dp, tp in plan.degrees) == row["device_groups"]
    return plan


def degrees(word: str) -> tuple[int, int]:
    """Read ``4x2``: dp 4, tp 2."""
    dp, tp = map(int, word.split("x"))
    return dp, tp


def wrong_costs(pairs: Iterator[tuple[object, object, float]]) -> list[object]:
    """Return what differs from the published milliseconds."""
    wrong: list[object] = []
    for what, cost, published_ms in pairs:
        ours_ms = 1e3 * cost.total_s if isinstance(cost, MetisCost) else float("nan")
        if not abs(ours_ms / published_ms - 1) <= TOLERANCE:
            wrong.append((what, cost, published_ms))
    return wrong


@pytest.mark.parametrize("name", RANKINGS)
def test_the_cost_of_every_plan_is_the_published_one(folder: Path, name: str) -> None:
    case, num_rows = RANKINGS[name]
    setting, rows = read_case(folder, case), rows_of(folder, name)
    assert len(rows) == num_rows
    plans = ((plan_of(row), float(row["true_cost_ms"])) for row in rows)
    assert wrong_costs((plan, metis_cost(setting, plan), cost) for plan, cost in plans) == []


@pytest.mark.parametrize("name", RANKINGS)
def test_exactly_the_plans_that_cannot_run_are_refused(folder: Path, name: str) -> None:
    setting = read_case(folder, RANKINGS[name][0])
    wrong = []
    for row in rows_of(folder, name):
        kinds = {reason.kind for reason in metis_defects(setting, plan_of(row))}
        reasons = (
            LAYERS_LOST in kinds,
            EMPTY_STAGE in kinds,
            bool(kinds & {OUT_OF_MEMORY, NOT_PROFILED}),
        )
        flagged = (
            row["all_layers_placed"] == "0",
            row["empty_stages"] != "0",
            row["per_device_oom"] == "1",
        )
        if reasons != flagged or kinds - {LAYERS_LOST, EMPTY_STAGE, OUT_OF_MEMORY, NOT_PROFILED}:
            wrong.append((row, kinds))
    assert wrong == []


@pytest.mark.parametrize("name", RANKINGS)
def test_no_published_plan_that_can_run_is_better(folder: Path, name: str) -> None:
    case, _ = RANKINGS[name]
    setting, best = read_case(folder, case), proven(folder, case)
    plans = [plan_of(row) for row in rows_of(folder, name)]
    costs = [metis_cost(setting, plan) for plan in plans if not metis_defects(setting, plan)]
    times_s = [cost.total_s for cost in costs if isinstance(cost, MetisCost)]
    assert times_s
    assert best.cost.total_s <= min(times_s) * (1 + SAME)


def proven(folder: Path, case: MetisCase, *, batch: int = 128) -> MetisSolution:
    """Return the proven plan of a case, which uses all devices and can run."""
    setting = read_case(folder, case, global_batch_size=batch)
    best = best_of(MetisSearch(setting=setting, limits=LIMITS))
    assert best is not None
    assert best.lower_bound_s >= best.cost.total_s * (1 - SAME)
    assert metis_defects(setting, best.plan) == ()
    assert metis_cost(setting, best.plan) == best.cost
    assert best.plan.first_rank[-1] == setting.cluster.num_devices
    return best


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.num_layers} layers")
def test_plans_are_as_good_as_asked(folder: Path, case: MetisCase) -> None:
    best = proven(folder, case)
    if case.target_ms is not None:
        assert round(1e3 * best.cost.total_s) <= case.target_ms


def test_only_the_file_that_was_listed_first_explains_a_run(folder: Path) -> None:
    case, _ = RANKINGS["ref16_p6"]
    setting = read_case(folder, case)
    row = rows_of(folder, "ref16_p6")[0]
    explained = []
    for key in setting.profile.entries:
        cost = metis_cost(replace(setting, listed_first=key), plan_of(row))
        assert isinstance(cost, MetisCost)
        if abs(1e3 * cost.total_s / float(row["true_cost_ms"]) - 1) <= TOLERANCE:
            explained.append(key)
    assert explained == [case.listed_first]
