import json
import math

import numpy as np
import pytest

from amp_ray.baselines.metis2024_bounds import outside_s, work_bound_s
from amp_ray.baselines.metis2024_groups import GroupSpace, MetisLimits
from amp_ray.baselines.metis2024_menu import Menu, stage_menu
from amp_ray.baselines.metis2024_solve import MetisSolution, solve_menu
from amp_ray.baselines.metis2024_works import Works
from support.metis import metis_document, metis_profile_files, metis_setting
from support.metis_oracle import random_setting


def menu_of(num_micro_batches: int, **setting: str) -> Menu:
    """Return the menu of two A100 and two T4 with a batch of 8."""
    space = GroupSpace(setting=metis_setting(**setting), limits=MetisLimits())  # type: ignore[arg-type]
    return stage_menu(space, Works(space=space), num_micro_batches)


@pytest.mark.parametrize("number", [2, 4, 8])
def test_no_plan_undercuts_the_bound(number: int) -> None:
    menu = menu_of(number)
    found = solve_menu(menu, math.inf)
    assert isinstance(found, MetisSolution)
    assert 0 < work_bound_s(menu) <= found.cost.total_s


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_any_cluster_undercuts_the_bound(seed: int) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    space = GroupSpace(setting=setting, limits=MetisLimits())
    works = Works(space=space)
    for number in (1, 2, setting.global_batch_size):
        menu = stage_menu(space, works, number)
        found = solve_menu(menu, math.inf)
        if isinstance(found, MetisSolution):
            assert work_bound_s(menu) <= found.cost.total_s * (1 + 1e-12)


def test_one_device_meets_the_bound_but_for_its_tail() -> None:
    menu = menu_of(8, hostfile="0.0.0.1 1\n")
    found = solve_menu(menu, math.inf)
    assert isinstance(found, MetisSolution)
    assert work_bound_s(menu) == pytest.approx(found.cost.total_s - found.cost.optimizer_s)


def test_micro_batches_are_made_outside_of_stages() -> None:
    assert outside_s(menu_of(4)) == pytest.approx(4 * 0.5e-3)


def test_without_a_last_group_there_is_no_plan() -> None:
    unknown = json.dumps(metis_document(whole_ms=None))
    space = GroupSpace(
        setting=metis_setting(dict.fromkeys(metis_profile_files(), unknown)), limits=MetisLimits()
    )
    assert work_bound_s(stage_menu(space, Works(space=space), 8)) == math.inf
