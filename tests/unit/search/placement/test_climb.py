from dataclasses import replace
from itertools import permutations

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.search.placement.improve import climb, reorder
from amp_ray.strategies.strategy import Strategy
from support.mixed_cluster import mixed_candidate, mixed_cost_model

EVEN = (0, 4, 7, 11)


def estimated(cost_model: CostModel, bounds: tuple[int, ...]) -> Estimate:
    return cost_model.estimate(Strategy.uniform(mixed_candidate(dp=2), bounds))


def test_the_summit_has_no_faster_neighbour() -> None:
    cost_model = mixed_cost_model()
    start = estimated(cost_model, EVEN)
    summit = climb(cost_model, start)
    low, high = summit.strategy.bounds[1:3]
    neighbours = [
        (0, low + a, high + b, 11) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))
    ]
    times = [estimated(cost_model, bounds).iteration_time_s for bounds in neighbours]
    assert summit.iteration_time_s < start.iteration_time_s
    assert summit.iteration_time_s <= min(times)


def test_devices_stay() -> None:
    cost_model = mixed_cost_model()
    strategy = Strategy.uniform(mixed_candidate(dp=2), EVEN, (2, 3, 0, 1, 4, 5))
    summit = climb(cost_model, cost_model.estimate(strategy))
    assert summit.strategy.placement == strategy.placement
    assert summit == cost_model.estimate(summit.strategy)


def test_what_does_not_fit_is_not_stepped_on() -> None:
    cost_model = mixed_cost_model(slow_gib=3)
    start = estimated(cost_model, (0, 1, 7, 11))
    assert start.feasible
    assert climb(cost_model, start).feasible


def test_what_cannot_run_is_left_as_it_is() -> None:
    cost_model = mixed_cost_model(slow_gib=1)
    start = estimated(cost_model, EVEN)
    assert not start.feasible
    assert climb(cost_model, start) is start


def test_cuts_that_a_runtime_fixes_are_left_as_they_are() -> None:
    cost_model = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    start = estimated(cost_model, EVEN)
    assert climb(cost_model, replace(start, reasons=())).strategy == start.strategy


def test_one_stage_has_nothing_to_move() -> None:
    cost_model = mixed_cost_model()
    start = cost_model.estimate(Strategy.uniform(mixed_candidate(dp=6), (0, 11)))
    assert climb(cost_model, start) == start


def test_stages_change_places_where_that_is_faster() -> None:
    cost_model = mixed_cost_model()
    crossed = Strategy.uniform(mixed_candidate(dp=2), EVEN, (4, 0, 1, 2, 3, 5))
    start = climb(cost_model, cost_model.estimate(crossed))
    summit = reorder(cost_model, start)
    assert summit.iteration_time_s <= start.iteration_time_s
    assert summit == cost_model.estimate(summit.strategy)
    grids = {crossed.devices(stage) for stage in range(3)}
    assert {summit.strategy.devices(stage) for stage in range(3)} == grids
    assert reorder(cost_model, summit) == summit


def test_a_plan_whose_best_order_is_known_gets_it() -> None:
    cost_model = mixed_cost_model()
    candidate = mixed_candidate(dp=2)
    grids = ((0, 1), (2, 3), (4, 5))
    times_s, found_s = [], []
    for order in permutations(grids):
        placement = tuple(device for grid in order for device in grid)
        start = cost_model.estimate(Strategy.uniform(candidate, EVEN, placement))
        times_s.append(climb(cost_model, start).iteration_time_s)
        found_s.append(reorder(cost_model, start).iteration_time_s)
    assert found_s == pytest.approx([min(times_s)] * len(found_s), rel=1e-3)


def test_what_cannot_run_keeps_its_order() -> None:
    start = estimated(mixed_cost_model(slow_gib=1), EVEN)
    assert reorder(mixed_cost_model(slow_gib=1), start) is start
