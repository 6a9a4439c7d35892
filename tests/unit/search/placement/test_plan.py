import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.search.placement.best_placements import plan_placement
from support.mixed_cluster import mixed_candidate, mixed_cost_model

SLOW, QUICK = {0, 1}, {2, 3, 4, 5}


def layers_on(estimate: Estimate, devices: set[int]) -> list[int]:
    """Count the layers of the stages that begin on some devices."""
    strategy = estimate.strategy
    stage_size = len(strategy.placement) // strategy.pp
    first_devices = strategy.placement[::stage_size]
    return [
        strategy.bounds[stage + 1] - strategy.bounds[stage]
        for stage, device in enumerate(first_devices)
        if device in devices
    ]


def test_slow_devices_carry_fewer_layers() -> None:
    placed = plan_placement(mixed_cost_model(), mixed_candidate())
    slow, quick = layers_on(placed, SLOW), layers_on(placed, QUICK)
    assert len(slow) == 2
    assert max(slow) <= min(quick)
    assert sum(slow) / 2 < sum(quick) / 4


def test_devices_of_a_node_stand_side_by_side_in_the_pipeline() -> None:
    placement = plan_placement(mixed_cost_model(), mixed_candidate()).strategy.placement
    assert [device // 2 for device in placement[::2]] == [device // 2 for device in placement[1::2]]


def test_equal_devices_stay_in_the_order_of_the_file() -> None:
    cost_model = mixed_cost_model(("SLOW", "QUICK"))
    placed = plan_placement(cost_model, mixed_candidate(tp=2))
    assert placed.strategy.placement == tuple(range(6))


def test_what_fits_nowhere_is_estimated_all_the_same() -> None:
    cost_model = mixed_cost_model(("QUICK", "SLOW"), slow_gib=0.5)
    placed = plan_placement(cost_model, mixed_candidate())
    assert not placed.feasible
    assert placed.iteration_time_s > 0
    assert max(placed.peak_memory_bytes) > placed.memory_limit_bytes[0]


def test_small_memory_is_respected_on_the_device_that_has_it() -> None:
    cost_model, candidate = mixed_cost_model(slow_tflops=20, slow_gib=2.62), mixed_candidate()
    roomy = plan_placement(mixed_cost_model(slow_tflops=20), candidate)
    assert not cost_model.estimate(roomy.strategy).feasible
    placed = plan_placement(cost_model, candidate)
    assert placed.feasible
    assert min(placed.memory_limit_bytes) < max(placed.memory_limit_bytes)


@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 3), (2, 1)])
def test_tensor_parallel_groups_stay_inside_nodes(tp: int, dp: int) -> None:
    candidate = mixed_candidate(tp=tp, dp=dp)
    placement = plan_placement(mixed_cost_model(), candidate).strategy.placement
    groups = [placement[first : first + tp] for first in range(0, 6, tp)]
    assert sorted(placement) == list(range(6))
    assert all(len({device // 2 for device in group}) == 1 for group in groups)


def test_groups_that_no_node_holds_are_planned_in_simple_orders() -> None:
    cost_model = mixed_cost_model()
    placed = plan_placement(cost_model, mixed_candidate(tp=3, dp=1))
    assert placed.strategy.placement in {tuple(range(6)), (2, 3, 4, 5, 0, 1)}


def test_cuts_that_a_runtime_fixes_stay() -> None:
    cost_model = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    placed = plan_placement(cost_model, mixed_candidate(tp=1, dp=3))
    blocks = cost_model.experiment.model.indices("block")
    assert placed.strategy.bounds[1] == blocks[0] + len(blocks) // 2
