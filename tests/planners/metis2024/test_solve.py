import json
import math

import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.group_table import GroupTable, RankTimes, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from amp_ray.planners.metis2024.plan import metis_defects
from amp_ray.planners.metis2024.search import MetisPruned, MetisSolution, solve_table
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting


def table_of(number: int, files: dict[str, str] | None = None, **limits: int) -> GroupTable:
    """Return the table of two A100 and two T4 with a batch of 8."""
    space = GroupSpace(setting=metis_setting(files), limits=MetisLimits(**limits))
    return group_table(space, RankTimes(space=space), number)


def test_the_answer_is_a_plan_that_can_run_with_its_bound() -> None:
    table = table_of(4)
    found = solve_table(table, math.inf)
    assert isinstance(found, MetisSolution)
    assert metis_defects(table.space.setting, found.plan) == ()
    assert found.lower_bound_s == pytest.approx(found.cost.total_s, rel=1e-9)
    assert found.lower_bound_s <= found.cost.total_s
    assert found.num_rounds == 1


def test_an_upper_bound_below_the_best_prunes() -> None:
    table = table_of(4)
    best = solve_table(table, math.inf)
    assert isinstance(best, MetisSolution)
    pruned = solve_table(table, 0.99 * best.cost.total_s)
    assert isinstance(pruned, MetisPruned)
    assert 0.99 * best.cost.total_s < pruned.lower_bound_s <= best.cost.total_s
    assert isinstance(solve_table(table, 1.01 * best.cost.total_s), MetisSolution)


def test_why_nothing_fits_is_told() -> None:
    document = metis_document()
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * 100] * 4
    files = dict.fromkeys(metis_profile_files(), json.dumps(document))
    found = solve_table(table_of(8, files), math.inf)
    assert isinstance(found, Reason)
    assert found.kind == "out of memory"
    assert "layer 0 fits no option's memory" in found.detail


def test_that_nothing_shares_a_micro_batch_is_told() -> None:
    found = solve_table(table_of(1, max_size=1), math.inf)
    assert isinstance(found, Reason)
    assert found.kind == "no plan"
