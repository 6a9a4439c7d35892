"""Local search by simulated time."""

from dataclasses import replace
from itertools import product

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.cost.verdict import safe_memory_fraction
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search.effort import EFFORT
from amp_ray.search.ranking import is_risky
from amp_ray.search.stage_groups import DeviceGroups
from amp_ray.search.stage_groups.simulated_moves import (
    Layout,
    Moves,
    Use,
    kept_bounds,
    layout_of,
    moved_plans,
    strategy_of,
)
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Stage, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from support.annealing_oracle import Annealing
from support.experiments import experiment_from
from support.small_clusters import small_cluster

MOST_BEATEN = 1.005
ORACLE_SEEDS = (8, 11, 16, 868, 1008, 1010, 1014)
"""Clusters whose search is quick; ``tests/benchmarks/check_mixed.py`` runs sixty."""
FULL = Recompute(kind="full")
NO_OPTIONS = StageOptions(tp=1, dp=1, recompute=NO_RECOMPUTE)
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
    experiment = replace(small_cluster(seed), recompute=NO_RECOMPUTE, zero_stage=0)
    limits = replace(experiment.limits, max_pp=None, micro_batch_sizes=None, idle_devices=None)
    experiment = replace(experiment, limits=limits)
    model = CostModel(experiment=experiment)
    return model, DeviceGroups(cost_model=model).tps, model.estimate(alone(experiment))


NODES = """\
name: three
model: {family: gpt2, num_layers: 6, hidden_size: 1024, num_heads: 8, sequence_length: 512,
        vocab_size: 8192}
cluster:
  nodes:
    - {count: 1, device: V100-16, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
    - {count: 2, device: A100-40, slots: 1, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
global_batch_size: 12
search: {space: heterogeneous}
"""


def test_equal_nodes_and_slots_are_interchangeable() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    (use,) = layout_of(alone(model.experiment))
    keys = [moves(model, (1,)).key((use._replace(replicas=((device,),)),)) for device in (0, 2, 3)]
    assert keys[1] == keys[2] != keys[0]
    pairs = [
        moves(model, (1,)).key(tuple(use._replace(replicas=((device,),)) for device in row))
        for row in ((0, 1), (1, 0), (2, 3), (3, 2))
    ]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]


def moves(model: CostModel, tps: tuple[int, ...]) -> Moves:
    return Moves(experiment=model.experiment, cost_model=model, tps=tps)


def starts(seed: int) -> bool:
    """Return whether the slow plan of a cluster runs."""
    model, _, plan = small(seed)
    return plan.feasible and not model.experiment.traits.min_zero_stage


FITTING = [seed for seed in range(12) if starts(seed)][:4]


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
    text = NODES.replace("heterogeneous", "heterogeneous, idle_devices: false")
    model = CostModel(experiment=experiment_from(text))
    tps, num_devices = DeviceGroups(cost_model=model).tps, model.experiment.cluster.num_devices
    start = layout_of(alone(model.experiment))
    sizes = {sum(len(use.devices) for use in layout) for layout, _ in moves(model, tps).of(start)}
    assert sizes <= {num_devices}


def test_a_search_leaves_no_device_idle_where_none_may_rest() -> None:
    text = NODES.replace("heterogeneous", "heterogeneous, idle_devices: false")
    experiment = experiment_from(text.replace("device: V100-16", "device: T4"))
    ranking = plan_experiment(experiment, workers=ALONE, progress=lambda _, __: None).ranking
    plans = [result for result in ranking.results if isinstance(result, Estimate)]
    assert {len(plan.strategy.placement) for plan in plans} == {experiment.cluster.num_devices}


@pytest.mark.parametrize("runtime", ["deepspeed", "torch", "fsdp2"])
def test_moves_have_every_zero_setting_that_the_runtime_has(runtime: str) -> None:
    text = NODES.replace("name: three", f"name: three\nruntime: {runtime}\nzero_stage: auto")
    model = CostModel(experiment=experiment_from(text))
    traits = model.experiment.traits
    one, two = (
        {
            (len(layout), layout[0].options.zero)
            for layout, _ in moves(model, (1,)).of(start)
            if len({use.options.zero for use in layout}) == 1
        }
        for start in (_layout(model, ((2, 3),)), _layout(model, ((0, 1), (2, 3))))
    )
    assert all(traits.why_no_zero(zero, pp) is None for pp, zero in one | two)
    whole = range(traits.min_zero_stage, traits.max_zero_stage + 1)
    assert {zero.stage for pp, zero in one if pp == 1} == set(whole)
    assert {zero.stage for pp, zero in two if pp == 2} == set(traits.pipeline_zero_stages)


def test_moves_that_first_make_replicas_try_every_zero_setting() -> None:
    text = NODES.replace("name: three", "name: three\nruntime: deepspeed\nzero_stage: auto")
    model = CostModel(experiment=experiment_from(text))
    (use,) = _layout(model, ((0,),))
    joined = {
        use.options.zero.stage
        for (use, *more), _ in moves(model, (1, 2)).of((use._replace(shares=(12,)),))
        if not more and use.options.dp == 2
    }
    assert joined == {0, 1, 2, 3}


def test_a_plan_with_zero_keeps_its_setting_in_most_moves() -> None:
    text = NODES.replace("name: three", "name: three\nruntime: deepspeed\nzero_stage: auto")
    model = CostModel(experiment=experiment_from(text))
    (use,) = _layout(model, ((0, 1),))
    start = use._replace(options=replace(use.options, zero=Zero(stage=1)))
    wider = [
        layout[0].options.zero.stage
        for layout, _ in moves(model, (1, 2)).of((start,))
        if len(layout) == 1 and layout[0].options.dp == 3
    ]
    assert set(wider) == {1}


def test_joined_and_ended_stages_keep_the_cuts_of_the_rest() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    first, second, third = start = _layout(model, ((0,), (1,), (2,)))
    moved = strategy_of(start, 3, (0, 2, 5, 8))
    whole = first._replace(replicas=(*first.replicas, *second.replicas), shares=(2, 2))
    bounds = {
        (whole, third): (0, 5, 8),
        (second, third): (0, 5, 8),
        (first, third): (0, 2, 8),
        (first, second): (0, 2, 8),
        (third, second, first): (0, 2, 5, 8),
    }
    for layout, kept in bounds.items():
        assert list(kept_bounds(layout, moved)) == [kept]
    assert not list(kept_bounds((whole,), moved))


def test_replicas_of_two_stages_that_meet_at_a_sample_pass_it_on_together() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    start = [
        use._replace(shares=shares)
        for use, shares in zip(_layout(model, ((0, 1), (2, 3))), ((4, 2), (4, 2)), strict=True)
    ]
    reached = {
        tuple(use.shares for use in layout)
        for layout, _ in moves(model, (1,)).of(tuple(start))
        if [use.devices for use in layout] == [use.devices for use in start]
    }
    assert reached >= {((3, 3), (3, 3)), ((5, 1), (5, 1)), ((4, 2), (3, 3)), ((5, 1), (4, 2))}


def test_joined_stages_get_a_sample_for_every_replica() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    (use,) = layout_of(alone(model.experiment))
    layout = tuple(use._replace(replicas=((device,),)) for device in (2, 3))
    joined = [new for new in moves(model, (1,)).of(layout) if len(new[0]) == 1]
    assert ((1, 1), 6) in [(new[0].shares, num_steps) for new, num_steps in joined]


def test_a_replica_leaves_with_its_samples() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    (use,) = layout_of(alone(model.experiment))
    both = Use(((2,), (3,)), (2, 2), replace(use.options, dp=2))
    layout = both, Use(((0,),), (4,), use.options)
    reached = {
        tuple((use.devices, use.shares) for use in new) for new, _ in moves(model, (1,)).of(layout)
    }
    rest = ((3,), (2,)), ((0,), (2,))
    assert rest in reached
    assert {(((2,), (2,)), *rest), (*rest, ((2,), (2,)))} <= reached


def test_resting_devices_become_a_stage_at_any_place_or_instead_of_one() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    start = _layout(model, ((0, 1), (2,)))
    reached = {
        tuple((use.devices, use.options.tp) for use in layout)
        for layout, _ in moves(model, (1, 2)).of(start)
    }
    first, second, resting = ((0, 1), 1), ((2,), 1), ((3,), 1)
    assert {(resting, second), (first, resting)} <= reached
    assert {(resting, first, second), (first, resting, second)} <= reached
    assert (first, second, resting) in reached
    whole = {(((0, 1), tp), second) for tp in (1, 2)}  # a node that rests gets any tp
    assert whole <= {
        tuple((use.devices, use.options.tp) for use in layout)
        for layout, _ in moves(model, (1, 2)).of(start[1:])
    }


def test_moves_to_another_zero_setting_recompute_no_more_than_then_fits() -> None:
    experiment = small_cluster(1100)
    model = CostModel(experiment=experiment)
    zeros = Zero(stage=2), Zero(stage=3)
    options = replace(NO_OPTIONS, dp=3, zero=zeros[0])
    start = (Use(((0,), (1,), (2,)), (6, 5, 5), options),)
    end = experiment.model.num_layers

    def is_able(options: StageOptions, shares: tuple[int, ...], *, safe: bool) -> bool:
        uses = [(options, shares, (0, 1, 2))]
        plan = model.estimate(Strategy.of_groups((0, end), uses, num_micro_batches=1))
        return plan.feasible and not (safe and is_risky(plan))

    for scale in (1.0, safe_memory_fraction(experiment.constants)):
        reached = [
            (use.options, use.shares)
            for (use, *_), num_steps in moves(model, (1,)).of(start, scale)
            if num_steps == 1 and use.options.zero == zeros[1] and len(use.devices) == 3
        ]
        able = [row for row in reached if is_able(*row, safe=scale < 1)]
        fewest = [options.recompute.layers for options, _ in able]
        assert fewest
        for options, shares in able:
            again = options.recompute.layers
            if again is not None:
                less = replace(options, recompute=Recompute(kind="full", layers=again - 1))
                assert not is_able(less, shares, safe=scale < 1)


def test_moved_replicas_may_meet_those_of_a_neighbour() -> None:
    model = CostModel(experiment=small_cluster(1423))
    options = replace(NO_OPTIONS, dp=2, recompute=FULL, zero=Zero(stage=3, keeps_weights=True))
    three = replace(options, dp=3)
    start = (
        Use(((0,), (1,)), (2, 2), options),
        Use(((2,), (3,), (4,)), (2, 1, 1), three),
        Use(((5,), (6,)), (2, 2), options),
    )
    moved = (
        start[0],
        Use(((2,), (3,)), (3, 1), options),
        Use(((5,), (6,), (4,)), (2, 1, 1), three),
    )
    meeting = (moved[0], moved[1]._replace(shares=(2, 2)), moved[2])
    reached = {layout for layout, num_steps in moves(model, (1,)).of(start) if num_steps == 9}
    assert {moved, meeting} <= reached
    before, by_speed, after = (
        model.estimate(strategy_of(layout, 9, (0, 7, 8, 9))) for layout in (start, moved, meeting)
    )
    assert by_speed.iteration_time_s > 1.3 * before.iteration_time_s
    assert after.feasible
    assert after.iteration_time_s < 0.98 * before.iteration_time_s


def test_cuts_are_moved_with_every_zero_setting() -> None:
    experiment = small_cluster(1220)
    model = CostModel(experiment=experiment)
    plans = []
    for zero, bounds in ((NO_ZERO, (0, 1, 7)), (Zero(stage=3, keeps_weights=True), (0, 2, 7))):
        options = replace(NO_OPTIONS, zero=zero)
        uses = [(replace(options, dp=2), (6, 5), (1, 2)), (options, (11,), (0,))]
        plans.append(model.estimate(Strategy.of_groups(bounds, uses, num_micro_batches=2)))
    start, sharded = plans
    same_cuts = model.estimate(sharded.strategy.with_bounds(start.strategy.bounds))
    assert same_cuts.iteration_time_s == pytest.approx(start.iteration_time_s)
    assert sharded.iteration_time_s < 0.99 * start.iteration_time_s
    moved = moved_plans(model, (1,), [start])
    assert min(plan.iteration_time_s for plan in moved) <= sharded.iteration_time_s


def test_cuts_of_plans_near_the_best_are_moved() -> None:
    experiment = small_cluster(1107)
    model = CostModel(experiment=experiment)
    rows = ((2, 3), (5,), (0,), (1,), (4,))
    stages = [(replace(NO_OPTIONS, tp=len(row)), (1,), row) for row in rows]
    good = model.estimate(Strategy.of_groups((0, 6, 16, 19, 22, 27), stages, num_micro_batches=8))
    by_form = model.estimate(good.strategy.with_bounds((0, 6, 15, 18, 21, 27)))
    assert good.feasible
    assert by_form.iteration_time_s > 1.01 * good.iteration_time_s
    moved = moved_plans(model, (1,), [by_form], replace(EFFORT, max_moved_devices=0))
    assert min(plan.iteration_time_s for plan in moved) <= good.iteration_time_s


def test_larger_micro_batches_leave_small_devices_what_fits() -> None:
    text = NODES.replace("num_layers: 6, hidden_size: 1024", "num_layers: 29, hidden_size: 1280")
    text = text.replace("global_batch_size: 12", "global_batch_size: 48")
    model = CostModel(experiment=experiment_from(f"{text}recompute: none\n"))
    (use,) = layout_of(alone(model.experiment))
    uneven = Use(((0,), (2,)), (1, 3), replace(use.options, dp=2))
    shares = {
        new[0].shares for new, num_steps in moves(model, (1,)).of((uneven,)) if num_steps == 2
    }
    assert {(6, 18), (5, 19)} <= shares  # by speed, and as many as fit the smaller device


@pytest.mark.parametrize("most", [(), (3, 2, 9, 9), (1, 9, 9, 2)])
@pytest.mark.parametrize("size", [4, 5, 12])
@pytest.mark.parametrize("kinds", [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 0)])
def test_every_sample_goes_to_the_replica_that_would_end_first(
    kinds: tuple[int, ...], size: int, most: tuple[int, ...]
) -> None:
    experiment = experiment_from(NODES)
    model = CostModel(experiment=experiment)
    moves, types = Moves(experiment=experiment, cost_model=model, tps=(1,)), [(at,) for at in kinds]
    if len(set(kinds)) == 1:
        most = ()  # equal replicas have equal limits
    shares = [1] * len(types)
    for _ in range(size - len(types)):
        able = [at for at in range(len(types)) if not most or shares[at] < most[at]]
        first = min(able, key=lambda at: moves.seconds(types[at], NO_OPTIONS, shares[at] + 1))
        shares[first] += 1
    assert moves.by_speed(tuple(types), NO_OPTIONS, size, most) == tuple(shares)


@pytest.mark.parametrize("most", [(), (1, 4, 4, 2)])
@pytest.mark.parametrize("size", [4, 6, 9, 15, 16])
@pytest.mark.parametrize("kinds", [(0, 0, 0, 0), (0, 1, 1, 0)])
def test_where_sizes_are_limited_every_replica_has_one_of_them(
    kinds: tuple[int, ...], size: int, most: tuple[int, ...]
) -> None:
    experiment = experiment_from(NODES)
    limits = replace(experiment.limits, micro_batch_sizes=(1, 2, 4))
    model = CostModel(experiment=replace(experiment, limits=limits))
    types, search = tuple((at,) for at in kinds), moves(model, (1,))
    shares = search.by_speed(types, NO_OPTIONS, size, most)

    def slowest_s(shares: tuple[int, ...]) -> float:
        pairs = zip(types, shares, strict=True)
        return max(search.seconds(kind, NO_OPTIONS, count) for kind, count in pairs)

    able = [
        row
        for row in product((1, 2, 4), repeat=len(types))
        if sum(row) == size and all(map(int.__le__, row, most or row))
    ]
    assert shares in (able or [()])
    assert not able or slowest_s(shares) == min(map(slowest_s, able))


def test_plans_of_a_kind_take_equal_nodes_in_the_same_order() -> None:
    model = CostModel(experiment=experiment_from(NODES))
    kinds = [
        moves(model, (1,)).kind(strategy_of(layout, 1, range(len(layout) + 1)))
        for layout in (
            _layout(model, ((0, 1), (2,))),
            _layout(model, ((0, 1), (3,))),
            _layout(model, ((0,), (1,), (3,))),  # another number of stages
            _layout(model, ((0,), (3,), (1,))),
            _layout(model, ((2,), (0, 1))),
        )
    ]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 4


def test_a_much_faster_plan_of_another_kind_hides_no_start() -> None:
    experiment = small_cluster(695)
    model = CostModel(experiment=experiment)
    tps = DeviceGroups(cost_model=model).tps
    one, pipeline = (
        model.estimate(
            Strategy.of_groups(
                bounds,
                [
                    (
                        replace(NO_OPTIONS, dp=len(row), zero=zero),
                        (size // len(row),) * len(row),
                        row,
                    )
                    for row in rows
                ],
                num_micro_batches=60 // size,
            )
        )
        for bounds, rows, size, zero in (
            ((0, 21), ((0, 1, 2),), 60, Zero(stage=3, keeps_weights=True)),
            ((0, 1, 7, 20, 21), ((0,), (6,), (1,), (2,)), 10, Zero()),
        )
    )
    assert one.iteration_time_s < 0.8 * pipeline.iteration_time_s
    best = moved_plans(model, tps, [one, pipeline])[0]
    assert best.iteration_time_s < 0.9 * one.iteration_time_s


@pytest.mark.parametrize(("runtime", "able"), [("torch", {False, True}), ("deepspeed", {False})])
def test_moves_switch_sequence_parallelism_of_a_stage(runtime: str, able: set[bool]) -> None:
    text = NODES.replace("name: three", f"name: three\nruntime: {runtime}")
    model = CostModel(experiment=experiment_from(text))
    first, second = _layout(model, ((0,), (2,)))
    options = replace(first.options, tp=2)
    start = (first._replace(replicas=((0, 1),), options=options), second)
    reached = {
        tuple(use.options.sequence_parallel for use in layout)
        for layout, _ in moves(model, (1, 2)).of(start)
        if [use.devices for use in layout] == [use.devices for use in start]
        and layout[0].options.tp == 2
    }
    assert reached == {(divides, False) for divides in able}


def _layout(model: CostModel, groups: tuple[tuple[int, ...], ...]) -> Layout:
    """Return stages with a sample for every device, without ZeRO."""
    (use,) = layout_of(alone(model.experiment))
    return tuple(
        Use(
            tuple((device,) for device in row),
            (12 // len(row) // len(groups),) * len(row),
            replace(use.options, dp=len(row)),
        )
        for row in groups
    )


TIGHT = """\
name: tight
model: {family: llama, num_layers: 12, tied_embedding: false, hidden_size: 2048, num_heads: 16,
        sequence_length: 1024, vocab_size: 128000}
cluster:
  nodes:
    - {device: H100, slots: 1, memory_gib: 10.9, intra_gbit_per_s: 100, inter_gbit_per_s: 10}
    - {device: A100-80, slots: 1, intra_gbit_per_s: 400, inter_gbit_per_s: 100}
runtime: torch
global_batch_size: 32
search: {space: heterogeneous}
"""


def test_a_safe_start_gets_the_cuts_that_all_the_memory_allows() -> None:
    model = CostModel(experiment=experiment_from(TIGHT))
    stages = [(StageOptions(tp=1, dp=1, recompute=kind), (4,)) for kind in (FULL, NO_RECOMPUTE)]
    both = [(*stage, (device,)) for device, stage in enumerate(stages)]
    safe = model.estimate(Strategy.of_groups((0, 3, 15), both, num_micro_batches=8))
    risky = model.estimate(safe.strategy.with_bounds((0, 4, 15)))
    assert risky.feasible
    assert is_risky(risky)
    assert not is_risky(safe)
    assert safe.iteration_time_s > MOST_BEATEN * risky.iteration_time_s
    moved = moved_plans(model, (1,), [safe], replace(EFFORT, max_moved_devices=0))
    assert min(plan.iteration_time_s for plan in moved) <= risky.iteration_time_s


def test_without_a_plan_moves_begin_with_one_stage_on_all_devices() -> None:
    model = CostModel(experiment=small_cluster(1019))
    plans = moved_plans(model, (1,), [], replace(EFFORT, max_moved_devices=0))
    assert {plan.strategy.pp for plan in plans} == {1}
    assert all(plan.feasible for plan in plans)


@pytest.mark.parametrize("seed", ORACLE_SEEDS)
def test_an_oracle_that_anneals_finds_no_faster_plan(seed: int) -> None:
    experiment = small_cluster(seed)
    ranking = plan_experiment(experiment, workers=ALONE, progress=lambda _, __: None).ranking
    feasible = ranking.results[: ranking.num_feasible]
    plans = [result for result in feasible if isinstance(result, Estimate)]
    oracle = Annealing(cost_model=CostModel(experiment=experiment))
    oracle.run([plans[0].strategy], seed=seed, num_steps=300, restarts=2)
    for safe in (False, True):
        able = (plan.iteration_time_s for plan in plans if not (safe and is_risky(plan)))
        assert min(able) <= oracle.best[safe].iteration_time_s * MOST_BEATEN
