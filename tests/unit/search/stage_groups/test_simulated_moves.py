"""Local search by simulated time."""

from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search.effort import EFFORT
from amp_ray.search.ranking import is_risky
from amp_ray.search.stage_groups import DeviceGroups
from amp_ray.search.stage_groups.simulated_moves import (
    Moves,
    layout_of,
    moved_plans,
    strategy_of,
)
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.strategy import Stage, Strategy
from support.annealing_oracle import Annealing, small_mixed_experiment

MOST_BEATEN = 1.005
SMALL = replace(EFFORT, max_moved_devices=4_000)


def alone(experiment: Experiment) -> Strategy:
    """Return the plan with all layers on the device with the most memory."""
    cluster = experiment.cluster
    device = max(
        range(cluster.num_devices),
        key=lambda index: cluster.nodes[cluster.node_of_device[index]].device.memory_bytes,
    )
    stage = Stage(
        first_layer=0,
        end_layer=experiment.model.num_layers,
        options=StageOptions(tp=1, dp=1),
    )
    batch = experiment.global_batch_size
    return Strategy(
        stages=(stage,), micro_batch_size=1, num_micro_batches=batch, placement=(device,)
    )


def small(seed: int) -> tuple[CostModel, tuple[int, ...], Estimate]:
    """Return a cost model, its tp, and a slow plan that fits."""
    experiment = small_mixed_experiment(seed)
    experiment = replace(experiment, recompute=alone(experiment).stages[0].options.recompute)
    model = CostModel(experiment=experiment)
    return model, DeviceGroups(cost_model=model).tps, model.estimate(alone(experiment))


def test_equal_nodes_and_slots_are_interchangeable() -> None:
    model, tps, _ = small(9)  # nodes of two V100, of one A100 twice
    cluster = model.experiment.cluster
    assert cluster.nodes[1].kind == cluster.nodes[2].kind
    assert cluster.nodes[0].kind != cluster.nodes[1].kind
    (use,) = layout_of(alone(model.experiment))
    first, second = cluster.node_of_device.index(1), cluster.node_of_device.index(2)
    keys = [
        moves(model, tps).key((use._replace(replicas=((device,),)),))
        for device in (0, first, first + 1, second)
    ]
    assert keys[1] == keys[2] == keys[3] != keys[0]


def moves(model: CostModel, tps: tuple[int, ...]) -> Moves:
    return Moves(experiment=model.experiment, cost_model=model, tps=tps)


FITTING = [seed for seed in range(12) if small(seed)[2].feasible][:4]


@pytest.mark.parametrize("seed", FITTING)
def test_moves_of_a_slow_plan_make_it_faster_whatever_the_order_of_the_plans(seed: int) -> None:
    model, tps, start = small(seed)
    (best,) = moved_plans(model, tps, [start], SMALL)[:1]
    assert best.feasible
    assert best.iteration_time_s < start.iteration_time_s
    ways = ([start, best], [best, start])
    assert len({str(moved_plans(model, tps, plans, SMALL)) for plans in ways}) == 1


@pytest.mark.parametrize("seed", FITTING)
def test_moves_keep_the_limits(seed: int) -> None:
    model, tps, start = small(seed)
    limits = replace(model.experiment.limits, max_pp=2, max_dp=2, micro_batch_sizes=(1, 2))
    model = CostModel(experiment=replace(model.experiment, limits=limits))
    node_of_device = model.experiment.cluster.node_of_device
    for plan in moved_plans(model, (1,), [start], SMALL):
        strategy = plan.strategy
        assert strategy.pp <= 2
        assert strategy.global_batch_size == model.experiment.global_batch_size
        for stage in strategy.stages:
            assert stage.options.tp == 1
            assert stage.options.dp <= 2
            assert set(stage.shares or (strategy.micro_batch_size,)) <= {1, 2}
    for layout, steps in moves(model, tps).of(layout_of(start.strategy)):
        bounds = (0, *range(1, len(layout)), model.experiment.model.num_layers)
        moved = strategy_of(layout, steps, bounds)  # checks that no device is used twice
        assert moved.pp <= 2
        for use in layout:
            assert all(len({node_of_device[at] for at in row}) == 1 for row in use.replicas)


def test_a_plan_that_uses_all_devices_keeps_them_where_none_may_rest() -> None:
    experiment = small_mixed_experiment(0)
    limits = replace(experiment.limits, idle_devices=False)
    model = CostModel(experiment=replace(experiment, limits=limits))
    tps, num_devices = DeviceGroups(cost_model=model).tps, experiment.cluster.num_devices
    start = layout_of(alone(experiment))
    sizes = {sum(len(use.devices) for use in layout) for layout, _ in moves(model, tps).of(start)}
    assert sizes <= {num_devices}


@pytest.mark.parametrize("seed", [2, 8, 9])
def test_an_oracle_that_anneals_finds_no_faster_plan(seed: int) -> None:
    experiment = small_mixed_experiment(seed, most_devices=8)
    ranking = plan_experiment(experiment, workers=ALONE, progress=lambda _, __: None).ranking
    feasible = ranking.results[: ranking.num_feasible]
    plans = [result for result in feasible if isinstance(result, Estimate)]
    model = CostModel(experiment=experiment)
    for safe in (False, True):
        able = (plan for plan in plans if not (safe and is_risky(plan)))
        plan = min(able, key=lambda able: able.iteration_time_s, default=None)
        if plan is not None:
            oracle = Annealing(cost_model=model, safe=safe)
            best = oracle.best([plan.strategy], seed=seed, num_steps=300)
            assert best is not None
            assert plan.iteration_time_s <= best.iteration_time_s * MOST_BEATEN
