"""Plans in the published space: its limits, and the published tables.

Tests against every plan of tiny models are in `operators/test_space.py`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from amp_ray.inputs.experiment import SearchLimits
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.planners.aceso2024.cost import AcesoCost, AcesoPlan, aceso_cost
from amp_ray.planners.aceso2024.planner import (
    AcesoSetting,
    offered,
    operator_problem,
    posed_problems,
    stage_options,
)
from amp_ray.planners.aceso2024.profile import parse_aceso_profile
from amp_ray.planners.operators.partition.problem import MOST_GAP
from amp_ray.planners.operators.partition.several import (
    BestStages,
    NoStages,
    SolveEach,
)
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.units import MIB
from support.aceso import T5_ROWS, aceso_files
from support.checked import required

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


@pytest.mark.parametrize(
    ("case", "mixes"),
    [
        (("resnet_x", TINY, (0, 1), None), True),
        (("resnet_x", TINY, (0, 1), False), False),
        (("resnet_x", TINY, (0,), None), False),
        (("resnet_x", TINY, (0,), True), True),
        (("t5_x", T5_ROWS, (0, 1), True), False),
    ],
)
def test_operators_differ_by_default_where_two_algorithms_were_measured(
    case: tuple[str, tuple[str, ...], tuple[int, ...], bool | None], *, mixes: bool
) -> None:
    model, rows, algorithms, asked = case
    files = aceso_files(model, rows, algorithms=algorithms)
    profile = parse_aceso_profile(files, folder="p", model=model, num_layers=1)
    limits = SearchLimits(space="operator", per_operator=asked)
    setting = replace(setting_of(profile, 40000), limits=limits)
    assert setting.mixes_operators is mixes
    options = stage_options(setting, 2)
    problem = operator_problem(setting, options, num_micro_batches=4)
    assert (offered(setting, options, problem)[1] is not problem) is mixes


def test_layers_of_many_operators_are_planned_within_the_gap() -> None:
    files = aceso_files("t5_x", T5_ROWS, sizes=(1,), algorithms=(0,))
    profile = parse_aceso_profile(files, folder="p", model="t5_x", num_layers=3)
    roomy = setting_of(profile, 40000)
    stages = all_stages(roomy)[1]
    assert isinstance(stages, BestStages)
    needs = aceso_cost(profile, plan_of(stages.stages, 1), devices_per_node=2)
    assert isinstance(needs, AcesoCost)
    tight = replace(roomy, limit_bytes=0.9 * max(memory.total_bytes for memory in needs.memory))
    stages = all_stages(tight)[1]
    assert isinstance(stages, BestStages)
    cost = required(costed(tight, plan_of(stages.stages, 1)))
    assert any(use[3] for uses in stages.stages for use in uses)
    low_s = stages.lower_bound_s
    assert low_s <= cost.iteration_s * (1 + 1e-9)
    assert cost.iteration_s <= low_s * (1 + MOST_GAP)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A case of the published search, which reaches 58.76, 101.18, 87.13 and 36.308 s.

    Of the ResNet its time is not known; a search without mixes reaches 40.82 s.
    """

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
    Published(
        tables="eurosys",
        model="t5_770M",
        num_layers=24,
        devices=8,
        batch=1024,
        limit_mib=8000,
        most_s=36.308,
    ),
    Published(
        tables="eurosys",
        model="resnet_500M",
        num_layers=1,
        devices=2,
        batch=1536,
        limit_mib=8000,
        most_s=37.4,
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
            cost = required(costed(setting, plan_of(result.stages, size, case.batch)))
            assert result.lower_bound_s <= cost.iteration_s * (1 + 1e-9)
            best_s = min(best_s, cost.iteration_s)
    assert best_s <= case.most_s
