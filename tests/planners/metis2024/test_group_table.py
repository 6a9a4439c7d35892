import json

import numpy as np
import pytest

from amp_ray.planners.metis2024.group_table import GroupTable, RankTimes, group_table
from amp_ray.planners.metis2024.groups import GroupSpace, MetisLimits
from support.metis import metis_document, metis_profile_files
from support.metis_cases import metis_setting


def table_of(num_micro_batches: int, files: dict[str, str] | None = None) -> GroupTable:
    """Return the table of two A100 and two T4 with a batch of 8."""
    space = GroupSpace(setting=metis_setting(files), limits=MetisLimits())
    return group_table(space, RankTimes(space=space), num_micro_batches)


def total_ms(table: GroupTable) -> dict[tuple[tuple[int, ...], int, int], float]:
    """Return what a micro-batch takes in each group over all layers, by kinds, dp and tp."""
    variants = table.space.variants
    return {
        (
            tuple(variants.kinds[row].tolist()),
            int(variants.dp[row]),
            int(variants.tp[row]),
        ): round(1e3 * float(time_s), 6)
        for row, time_s in zip(
            table.variant, table.layer_s.sum(axis=1)[table.rank_set[1]], strict=True
        )
    }


def test_groups_of_one_type_take_what_was_measured() -> None:
    found = total_ms(table_of(4))
    assert found[(0, -1), 2, 1] == 6.0
    assert found[(0, -1), 1, 1] == 12.0
    assert found[(1, -1), 1, 2] == 24.0


def test_a_mixed_group_takes_what_its_slowest_index_does() -> None:
    # Two samples over a T4 and an A100 that is thrice as fast: one each, 18 and 6 ms.
    assert total_ms(table_of(4))[(1, 0), 2, 1] == 18.0


def test_a_group_in_which_a_device_takes_no_samples_is_no_choice() -> None:
    # Two samples: 1.5 and 0.5, and of equal fractions the first one, an A100, gets the sample.
    assert ((0, 1), 2, 1) not in total_ms(table_of(4))


def test_samples_that_do_not_divide_are_no_choice_for_one_type() -> None:
    table = table_of(8)
    variants = table.space.variants
    one_type = ~variants.mixed[table.variant]
    assert (variants.dp[table.variant][one_type] == 1).all()


def test_sizes_that_were_not_measured_are_no_choice() -> None:
    assert table_of(2).variant.size
    assert (table_of(2).space.variants.dp[table_of(2).variant] > 1).all()


def test_only_last_groups_pay_for_what_is_beyond_the_layers() -> None:
    table = table_of(4)
    is_last = table.space.graph.from_state[table.space.variants.edge[table.variant]] == 0
    assert (table.rest_s[is_last] > 0).all()
    assert (table.rest_s[~is_last] == 0).all()


def test_a_group_cannot_be_last_where_that_is_not_known() -> None:
    files = metis_profile_files()
    for name in [name for name in files if "T4" in name]:
        files[name] = json.dumps(metis_document([3, 6, 6, 3], whole_ms=None))
    table = table_of(8, files)
    is_last = table.space.graph.from_state[table.space.variants.edge[table.variant]] == 0
    assert set(table.space.variants.kinds[table.variant[is_last], 0]) == {0}


def test_memory_limits_where_a_stage_may_start() -> None:
    files = metis_profile_files()
    document = metis_document([3, 6, 6, 3], 24)
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * 9] * 4
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(document)
    table = table_of(8, files)
    starts, number = table.holders
    variants = table.space.variants
    single_t4 = np.flatnonzero(
        (variants.kinds[table.variant, 0] == 1)
        & (variants.dp[table.variant] == 1)
        & (variants.tp[table.variant] == 1)
    )
    assert {tuple(starts[number[row]]) for row in single_t4} == {(0, 0, 1, 2, 3)}


@pytest.mark.parametrize(("t4_ms", "led"), [((3, 6, 6, 3), True), ((3, 0, 6, 3), False)])
def test_a_work_leads_only_if_it_is_slowest_in_every_layer(
    t4_ms: tuple[float, ...], *, led: bool
) -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(metis_document(t4_ms, 24))
    table = table_of(4, files)
    variants = table.space.variants
    mixed = np.flatnonzero(
        variants.mixed[table.variant]
        & (variants.dp[table.variant] == 2)
        & (variants.tp[table.variant] == 1)
    )
    assert set(table.is_led[table.rank_set[1][mixed]]) == {led}
