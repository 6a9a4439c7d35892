import json
import math

import numpy as np
import pytest

from amp_ray.planners.metis2024.group_table import GroupTable, RankTimes, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.search import MetisSolution, outside_s, solve_table, work_bound_s
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting
from support.metis_oracle import random_setting


def table_of(num_micro_batches: int, **setting: str) -> GroupTable:
    """Return the table of two A100 and two T4 with a batch of 8."""
    space = GroupSpace(setting=metis_setting(**setting), limits=MetisLimits())  # type: ignore[arg-type]
    return group_table(space, RankTimes(space=space), num_micro_batches)


@pytest.mark.parametrize("number", [2, 4, 8])
def test_no_plan_undercuts_the_bound(number: int) -> None:
    table = table_of(number)
    found = solve_table(table, math.inf)
    assert isinstance(found, MetisSolution)
    assert 0 < work_bound_s(table) <= found.cost.total_s


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_any_cluster_undercuts_the_bound(seed: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    space = GroupSpace(setting=setting, limits=MetisLimits())
    rank_times = RankTimes(space=space)
    for number in (1, 2, setting.global_batch_size):
        table = group_table(space, rank_times, number)
        found = solve_table(table, math.inf)
        if isinstance(found, MetisSolution):
            assert work_bound_s(table) <= found.cost.total_s * (1 + 1e-12)


def test_one_device_meets_the_bound_but_for_its_step_end() -> None:
    table = table_of(8, hostfile="0.0.0.1 1\n")
    found = solve_table(table, math.inf)
    assert isinstance(found, MetisSolution)
    assert work_bound_s(table) == pytest.approx(found.cost.total_s - found.cost.optimizer_s)


def test_micro_batches_are_made_outside_of_stages() -> None:
    assert outside_s(table_of(4)) == pytest.approx(4 * 0.5e-3)


def test_without_a_last_group_there_is_no_plan() -> None:
    unknown = json.dumps(metis_document(whole_ms=None))
    space = GroupSpace(
        setting=metis_setting(dict.fromkeys(metis_profile_files(), unknown)), limits=MetisLimits()
    )
    assert work_bound_s(group_table(space, RankTimes(space=space), 8)) == math.inf
