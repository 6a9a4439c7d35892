"""The exact search against every plan there is."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.groups import MetisLimits
from amp_ray.planners.metis2024.plan import MetisSetting, metis_defects
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis import metis_document, metis_profile_files
from support.metis_cases import best_of, divisors, metis_setting
from support.metis_oracle import cheapest_plan, random_setting


def search_of(files: dict[str, str] | None = None, **limits: int) -> MetisSearch:
    """Search two A100 and two T4 with a batch of 8."""
    return MetisSearch(setting=metis_setting(files), limits=MetisLimits(**limits))


def check(search: MetisSearch, num_micro_batches: int) -> None:
    """Compare the answer with the cheapest of all plans."""
    solution = search.solve(num_micro_batches)
    expected = cheapest_plan(search.setting, search.limits, num_micro_batches)
    if expected is None:
        assert isinstance(solution, Reason)
        return
    assert isinstance(solution, MetisSolution)
    assert solution.cost.total_s == pytest.approx(expected[0], rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(expected[0], rel=1e-9)
    assert solution.lower_bound_s <= solution.cost.total_s
    assert solution.plan.num_micro_batches == num_micro_batches
    assert metis_defects(search.setting, solution.plan) == ()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["integers", "floats"]),
    max_size=st.sampled_from([1, 2, 4]),
    max_tp=st.sampled_from([1, 2]),
    by_first_node=st.booleans(),
)
def test_no_plan_is_better_than_the_answer(
    seed: int, kind: str, max_size: int, max_tp: int, *, by_first_node: bool
) -> None:
    setting = random_setting(np.random.default_rng(seed), kind)
    slots = [node.num_slots for node in setting.cluster.nodes]
    if by_first_node and len(slots) * slots[0] >= sum(slots):
        setting = replace(setting, first_node_counts=True)
    search = MetisSearch(setting=setting, limits=MetisLimits(max_size=max_size, max_tp=max_tp))
    for number in divisors(setting.global_batch_size):
        check(search, number)


@pytest.mark.parametrize(("seed", "number"), [(176, 2), (213, 3), (286, 6), (289, 2)])
def test_groups_without_a_leading_rank_are_told_apart_by_their_first_layer(
    seed: int, number: int
) -> None:
    check(MetisSearch(setting=random_setting(np.random.default_rng(seed), "floats")), number)


def test_types_that_are_fast_in_different_layers_are_told_apart() -> None:
    files = metis_profile_files()
    for tp in (1, 2):
        for size in (1, 2):
            a100, t4 = [9 + size, 1, 9, 1], [1, 9, 1, 9 + size]
            for kind, layers in (("A100", a100), ("T4", t4)):
                text = json.dumps(metis_document(layers, sum(layers) + 1.0))
                files[f"DeviceType.{kind}_tp{tp}_bs{size}.json"] = text
    for number in (1, 2, 4, 8):
        check(search_of(files), number)


def with_more_memory(setting: MetisSetting, factor: float) -> MetisSetting:
    """Return the same with larger devices."""
    nodes = tuple(
        replace(
            node,
            device=replace(
                node.device,
                memory_bytes=int(factor * (node.device.nominal_bytes or node.device.memory_bytes)),
                nominal_bytes=None,
            ),
        )
        for node in setting.cluster.nodes
    )
    return replace(setting, cluster=replace(setting.cluster, nodes=nodes))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1.0, 4.0))
def test_more_memory_never_makes_the_best_plan_worse(seed: int, factor: float) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    before = best_of(MetisSearch(setting=setting))
    after = best_of(MetisSearch(setting=with_more_memory(setting, factor)))
    if before is not None:
        assert after is not None
        assert after.cost.total_s <= before.cost.total_s * (1 + 1e-12)


def test_limits_of_tp_and_size_hold() -> None:
    best = best_of(search_of(max_tp=1, max_size=1))
    assert best is not None
    assert {tp for _, tp in best.plan.degrees} == {1}
    assert all(8 // best.plan.num_micro_batches // dp == 1 for dp, _ in best.plan.degrees)


def test_memory_that_holds_no_layer_is_told() -> None:
    document = metis_document()
    document["execution_memory"]["layer_memory_total_mb"] = [1024 * 100] * 4
    answer = search_of(dict.fromkeys(metis_profile_files(), json.dumps(document))).solve(8)
    assert isinstance(answer, Reason)
    assert answer.kind == "out of memory"
    assert "layer 0 fits no option's memory" in answer.detail


def test_micro_batches_that_nothing_shares_are_told() -> None:
    answer = search_of(max_size=1).solve(1)
    assert str(answer) == "no plan: 1 micro-batches: no groups of devices share them"


def test_without_a_time_of_the_whole_no_group_can_be_last() -> None:
    files = dict.fromkeys(metis_profile_files(), json.dumps(metis_document(whole_ms=None)))
    answer = search_of(files).solve(8)
    assert isinstance(answer, Reason)
    assert answer.kind == "no plan"


def test_the_order_of_the_profile_files_does_not_matter() -> None:
    files = metis_profile_files()
    assert search_of(files).solve(8) == search_of(dict(reversed(files.items()))).solve(8)
