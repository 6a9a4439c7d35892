from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.groups import MetisLimits
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis_oracle import cheapest_plan, random_setting


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["integers", "floats"]),
    max_size=st.sampled_from([1, 2, 4]),
    max_tp=st.sampled_from([1, 2]),
    by_first_node=st.booleans(),
)
def test_no_plan_is_better_than_the_one_found(
    seed: int, kind: str, max_size: int, max_tp: int, *, by_first_node: bool
) -> None:
    setting = random_setting(np.random.default_rng(seed), kind)
    slots = [node.num_slots for node in setting.cluster.nodes]
    if by_first_node and len(slots) * slots[0] >= sum(slots):
        setting = replace(setting, first_node_counts=True)
    search = MetisSearch(setting=setting, limits=MetisLimits(max_size=max_size, max_tp=max_tp))
    costs_s = []
    for number in search.numbers:
        expected, found = cheapest_plan(setting, search.limits, number), search.solve(number)
        if expected is None:
            assert isinstance(found, Reason)
            continue
        assert isinstance(found, MetisSolution)
        assert found.cost.total_s == pytest.approx(expected[0], rel=1e-9)
        assert found.lower_bound_s == pytest.approx(expected[0], rel=1e-9)
        costs_s.append(expected[0])
    best = search.best()
    if costs_s:
        assert isinstance(best, MetisSolution)
        assert best.cost.total_s == pytest.approx(min(costs_s), rel=1e-9)
        assert best.lower_bound_s == pytest.approx(min(costs_s), rel=1e-9)
    else:
        assert isinstance(best, Reason)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1.0, 4.0))
def test_more_memory_never_makes_the_best_plan_worse(seed: int, factor: float) -> None:
    setting = random_setting(np.random.default_rng(seed), "floats")
    before = MetisSearch(setting=setting).best()
    if isinstance(before, Reason):
        return
    for kind in setting.memory_bytes:
        setting.memory_bytes[kind] = int(factor * setting.memory_bytes[kind])
    after = MetisSearch(setting=setting).best()
    assert isinstance(after, MetisSolution)
    assert after.cost.total_s <= before.cost.total_s * (1 + 1e-12)
