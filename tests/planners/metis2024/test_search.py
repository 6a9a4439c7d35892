import json

import numpy as np
import pytest

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.groups import MetisLimits
from amp_ray.planners.metis2024.search import MetisPruned, MetisSearch, MetisSolution
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting
from support.metis_oracle import cheapest_plan, random_setting


def search_of(files: dict[str, str] | None = None, **limits: int) -> MetisSearch:
    """Search two A100 and two T4 with a batch of 8."""
    return MetisSearch(setting=metis_setting(files), limits=MetisLimits(**limits))


def uneven_files() -> dict[str, str]:
    """Return profile files whose types are fast in different layers."""
    files = metis_profile_files()
    for tp in (1, 2):
        for size in (1, 2):
            a100, t4 = [9 + size, 1, 9, 1], [1, 9, 1, 9 + size]
            for kind, layers in (("A100", a100), ("T4", t4)):
                text = json.dumps(metis_document(layers, sum(layers) + 1.0))
                files[f"DeviceType.{kind}_tp{tp}_bs{size}.json"] = text
    return files


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("files", [metis_profile_files(), uneven_files()], ids=["even", "uneven"])
def test_the_best_plan_of_each_number_is_found(
    files: dict[str, str], num_micro_batches: int
) -> None:
    search = search_of(files)
    found = search.solve(num_micro_batches)
    expected = cheapest_plan(search.setting, search.limits, num_micro_batches)
    if expected is None:
        assert isinstance(found, Reason)
        return
    assert isinstance(found, MetisSolution)
    assert found.cost.total_s == pytest.approx(expected[0], rel=1e-9)
    assert found.lower_bound_s == pytest.approx(expected[0], rel=1e-9)
    assert found.plan.num_micro_batches == num_micro_batches


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_groups_without_a_leading_work_are_told_apart_by_their_first_layer(
    seed: int, number: int
) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    search = MetisSearch(setting=setting)
    found, expected = search.solve(number), cheapest_plan(setting, search.limits, number)
    assert isinstance(found, MetisSolution)
    assert expected is not None
    assert found.num_rounds > 1
    assert found.cost.total_s == pytest.approx(expected[0], rel=1e-9)


def test_the_best_of_all_numbers_is_the_best_of_each() -> None:
    search = search_of()
    each = [search.solve(number) for number in search.numbers]
    best = search.best()
    assert isinstance(best, MetisSolution)
    assert best.cost.total_s == min(
        found.cost.total_s for found in each if isinstance(found, MetisSolution)
    )
    assert best.lower_bound_s == pytest.approx(best.cost.total_s, rel=1e-9)


def test_limits_of_tp_and_size_hold() -> None:
    best = search_of(max_tp=1, max_size=1).best()
    assert isinstance(best, MetisSolution)
    assert {tp for _, tp in best.plan.degrees} == {1}
    assert all(8 // best.plan.num_micro_batches // dp == 1 for dp, _ in best.plan.degrees)


def test_what_takes_longer_than_the_upper_bound_is_pruned() -> None:
    search = search_of()
    whole = search.solve(8)
    assert isinstance(whole, MetisSolution)
    pruned = search.solve(8, upper_bound_s=0.9 * whole.cost.total_s)
    assert isinstance(pruned, MetisPruned)
    assert pruned.lower_bound_s <= whole.cost.total_s
    assert isinstance(search.solve(8, upper_bound_s=1.1 * whole.cost.total_s), MetisSolution)


def test_memory_that_holds_no_layer_is_told() -> None:
    files = metis_profile_files()
    document = metis_document()
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * 100] * 4
    files = dict.fromkeys(files, json.dumps(document))
    best = search_of(files).best()
    assert isinstance(best, Reason)
    assert best.kind == "out of memory"


def test_micro_batches_that_nothing_shares_are_told() -> None:
    found = search_of(max_size=1).solve(1)
    assert isinstance(found, Reason)
    assert str(found) == "no plan: 1 micro-batches: no groups of devices share them"


def test_a_number_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="3 micro-batches do not divide the batch of 8"):
        search_of().solve(3)


def test_the_order_of_the_profile_files_does_not_matter() -> None:
    files = metis_profile_files()
    first = search_of(files).best()
    turned = search_of(dict(reversed(files.items()))).best()
    assert isinstance(first, MetisSolution)
    assert turned == first
