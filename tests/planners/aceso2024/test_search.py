"""Plans in the published space: its limits, and the published tables.

Tests against every plan of tiny models are in `operators/test_space.py`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from amp_ray.inputs.experiment import SearchLimits
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.inputs.profiles.aceso import parse_aceso_profile
from amp_ray.planners.aceso2024.cost import AcesoCost, AcesoPlan, aceso_cost
from amp_ray.planners.aceso2024.planner import AcesoSetting, posed_problems
from amp_ray.planners.operators.partition.several import (
    BestStages,
    NoStages,
    SolveEach,
)
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.units import MIB
from support.aceso import aceso_files

TINY = ("conv1", "layer1-0-conv1", "layer1-0-bn3", "layer1-0-relu", "layer1-1-conv1", "fc")


def tiny(seed: int) -> OperatorProfile:
    """Read a made-up model of six operators."""
    files = aceso_files("resnet_x", TINY, algorithms=(0,), seed=seed)
    return parse_aceso_profile(files, folder="p", model="resnet_x", num_layers=1)


def setting_of(profile: OperatorProfile, limit_mib: float, devices: int = 2) -> AcesoSetting:
    """Return a setting with one node."""
    return AcesoSetting(
        profile=profile,
        num_devices=devices,
        devices_per_node=devices,
        limit_bytes=limit_mib * MIB,
        global_batch_size=8,
    )


def plan_of(stages: tuple[tuple[OperatorUse, ...], ...], size: int, batch: int = 8) -> AcesoPlan:
    """Return a plan from how each operator is used."""
    return AcesoPlan(stages=stages, micro_batch_size=size, num_micro_batches=batch // size)


def costed(setting: AcesoSetting, plan: AcesoPlan) -> AcesoCost | None:
    """Return the cost of a plan that fits; None for one that does not or was not measured."""
    cost = aceso_cost(setting.profile, plan, devices_per_node=setting.devices_per_node)
    fits = isinstance(cost, AcesoCost) and all(
        memory.total_bytes <= setting.limit_bytes for memory in cost.memory
    )
    return cost if fits and isinstance(cost, AcesoCost) else None


def all_stages(setting: AcesoSetting) -> dict[int, BestStages | NoStages]:
    """Return the best stages of each micro-batch size."""
    search = SolveEach(posed=posed_problems(setting))
    return {size: search.best(size) for size in setting.micro_batch_sizes}


def test_limits_of_the_search_hold() -> None:
    setting = setting_of(tiny(1), 4000)
    limits = SearchLimits(min_tp=2, micro_batch_sizes=(2, 4), max_pp=1)
    stages = all_stages(replace(setting, limits=limits))
    assert stages.keys() == {2, 4}
    results = [result for result in stages.values() if isinstance(result, BestStages)]
    assert results
    assert all(use[:2] == (2, 1) for result in results for uses in result.stages for use in uses)


def test_stages_stay_within_nodes_of_any_size() -> None:
    profile = tiny(2)
    setting = replace(
        setting_of(profile, 4000, devices=6),
        devices_per_node=3,
        limits=SearchLimits(micro_batch_sizes=(4,)),
    )
    result = all_stages(setting)[4]
    assert isinstance(result, BestStages)
    first = 0
    for uses in result.stages:
        number = uses[0][0] * uses[0][1]
        assert first // 3 == (first + number - 1) // 3
        first += number
    assert first == 6


@dataclass(frozen=True, kw_only=True)
class Published:
    """A case of the published search, which reaches 58.76, 101.18 and 87.13 s."""

    tables: str
    model: str
    num_layers: int
    devices: int
    batch: int
    limit_mib: int
    most_s: float


SMALL = Published(
    tables="miniset",
    model="gpt_1_3B",
    num_layers=24,
    devices=4,
    batch=512,
    limit_mib=12000,
    most_s=57.82,
)
PUBLISHED = (
    SMALL,
    replace(SMALL, tables="eurosys", batch=1024, limit_mib=28000, most_s=99.70),
    Published(
        tables="eurosys",
        model="gpt_2_6B",
        num_layers=32,
        devices=8,
        batch=1024,
        limit_mib=28000,
        most_s=86.43,
    ),
)


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_tables(aceso_data: Path, case: Published) -> None:
    files = {path.name: path.read_text() for path in (aceso_data / case.tables).glob("*.csv")}
    profile = parse_aceso_profile(files, folder="p", model=case.model, num_layers=case.num_layers)
    one_node = setting_of(profile, case.limit_mib, case.devices)
    setting = replace(one_node, global_batch_size=case.batch)
    best_s = math.inf
    for size, result in all_stages(setting).items():
        if isinstance(result, BestStages):
            cost = costed(setting, plan_of(result.stages, size, case.batch))
            assert cost is not None
            assert result.lower_bound_s <= cost.iteration_s * (1 + 1e-9)
            best_s = min(best_s, cost.iteration_s)
    assert best_s <= case.most_s
