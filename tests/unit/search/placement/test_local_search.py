from dataclasses import replace
from itertools import permutations

import pytest

from amp_ray.cost.estimate import Estimate, Reason
from amp_ray.cost.model import CostModel
from amp_ray.search.effort import EFFORT
from amp_ray.search.placement.local_search import (
    Chains,
    class_orders,
    climb,
    objective_s,
    reorder,
    swap_replicas,
)
from amp_ray.strategies.strategy import Strategy
from support.experiments import experiment_from
from support.mixed_cluster import mixed_candidate, mixed_cost_model
from support.pipelines import closed_form_s

LAST_FIRST = (2, 3, 4, 5, 0, 1)


def test_classes_stand_in_a_row_in_every_order() -> None:
    cluster = mixed_cost_model().experiment.cluster
    assert set(class_orders(cluster, mixed_candidate())) == {tuple(range(6)), LAST_FIRST}


def test_the_order_of_the_file_comes_first() -> None:
    quick = "{count: 1, slots: 2, device: QUICK, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    cost_model = mixed_cost_model(
        ("count: 2", "count: 1"), ("  nodes:\n", f"  nodes:\n    - {quick}\n")
    )
    first, *others = class_orders(cost_model.experiment.cluster, mixed_candidate())
    assert first == (0, 1, 2, 3, 4, 5)
    assert set(others) == {(0, 1, 4, 5, 2, 3), (2, 3, 0, 1, 4, 5)}


def test_fewer_devices_than_there_are_may_be_used() -> None:
    cluster = mixed_cost_model().experiment.cluster
    four = replace(mixed_candidate(), pp=4)
    assert {len(order) for order in class_orders(cluster, four)} == {4}


def test_many_classes_do_not_make_many_orders() -> None:
    figures = "device: T4, intra_gbit_per_s: 9, inter_gbit_per_s: 9"
    nodes = "\n".join(f"    - {{count: 1, slots: {slots}, {figures}}}" for slots in range(1, 8))
    text = f"""\
name: many
model: {{family: gpt2, num_layers: 2, hidden_size: 8, num_heads: 1, sequence_length: 8,
        vocab_size: 8}}
cluster:
  nodes:
{nodes}
global_batch_size: 1
"""
    all_devices = replace(mixed_candidate(), pp=28)
    orders = class_orders(experiment_from(text).cluster, all_devices)
    assert len(orders) <= EFFORT.max_node_orders + 1


def test_the_best_chain_gives_slow_devices_less() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    bounds = Chains(cost_model=cost_model, candidate=candidate).best(LAST_FIRST).bounds
    blocks = cost_model.experiment.model.indices("block")
    on_slow = sum(bounds[2] <= block for block in blocks)
    assert on_slow < len(blocks) / 3


def test_the_objective_is_the_closed_form_and_the_step_end() -> None:
    cost_model = mixed_cost_model(
        ("name: mixed", "name: mixed\ntraits: {blocking_transfers: false}")
    )
    candidate = mixed_candidate(dp=2)
    strategy = Strategy.uniform(candidate, (0, 4, 7, 11), LAST_FIRST)
    costs = cost_model.costs(candidate, LAST_FIRST)
    times = costs.times.at(strategy.bounds)[:2].sum(axis=0).max(axis=1)
    seconds, row = costs.messages.rows()
    cuts = seconds[row, [4, 7]]
    breakdown = cost_model.estimate(strategy).breakdown
    assert breakdown is not None
    expected = closed_form_s(times, cuts, candidate.num_micro_batches)
    expected += breakdown.gradient_sync_s + breakdown.optimizer_s
    assert objective_s(cost_model, strategy) == pytest.approx(expected, rel=1e-12)


def test_what_was_judged_stays_known() -> None:
    chains = Chains(cost_model=mixed_cost_model(), candidate=mixed_candidate(dp=2))
    chain = chains.best(LAST_FIRST)
    assert chains.best(LAST_FIRST) is chain
    assert chains.estimate(chain) is chains.estimate(chain)
    assert chains.estimate(chain) == chains.cost_model.estimate(chain)
    assert chains.objective_s(chain) == objective_s(chains.cost_model, chain)


BOUNDS = (0, 4, 7, 11)


def estimated(cost_model: CostModel, bounds: tuple[int, ...]) -> Estimate:
    return cost_model.estimate(Strategy.uniform(mixed_candidate(dp=2), bounds))


def test_the_summit_has_no_faster_neighbour() -> None:
    cost_model = mixed_cost_model()
    start = estimated(cost_model, BOUNDS)
    summit = climb(cost_model, start)
    low, high = summit.strategy.bounds[1:3]
    neighbours = [
        (0, low + a, high + b, 11) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))
    ]
    times = [estimated(cost_model, bounds).iteration_time_s for bounds in neighbours]
    assert summit.iteration_time_s < start.iteration_time_s
    assert summit.iteration_time_s <= min(times)


def test_cuts_move_by_more_layers_where_single_ones_are_slower() -> None:
    cost_model = mixed_cost_model()
    start = estimated(cost_model, BOUNDS)
    by_two = climb(cost_model, start, steps=(2,))
    moved = [new - old for old, new in zip(BOUNDS, by_two.strategy.bounds, strict=True)]
    assert any(moved)
    assert all(layers % 2 == 0 for layers in moved)
    single = climb(cost_model, by_two)
    assert climb(cost_model, by_two, steps=(1, 2)).iteration_time_s <= single.iteration_time_s


def test_devices_stay() -> None:
    cost_model = mixed_cost_model()
    strategy = Strategy.uniform(mixed_candidate(dp=2), BOUNDS, (2, 3, 0, 1, 4, 5))
    summit = climb(cost_model, cost_model.estimate(strategy))
    assert summit.strategy.placement == strategy.placement
    assert summit == cost_model.estimate(summit.strategy)


def test_what_does_not_fit_is_not_stepped_on() -> None:
    cost_model = mixed_cost_model(slow_gib=3)
    start = estimated(cost_model, (0, 1, 7, 11))
    assert start.feasible
    assert climb(cost_model, start).feasible


def test_what_lacks_memory_is_climbed_as_with_enough_and_what_lacks_more_is_not() -> None:
    tight = mixed_cost_model(slow_gib=1)
    start = estimated(tight, BOUNDS)
    assert not start.feasible
    roomy = climb(mixed_cost_model(), estimated(mixed_cost_model(), BOUNDS))
    assert climb(tight, start).strategy == roomy.strategy
    broken = replace(start, reasons=(Reason(kind="stage without parameters", detail=""),))
    assert climb(tight, broken) is broken


def test_cuts_that_a_runtime_fixes_are_left_as_they_are() -> None:
    cost_model = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    start = estimated(cost_model, BOUNDS)
    assert climb(cost_model, replace(start, reasons=())).strategy == start.strategy


def test_one_stage_has_nothing_to_move() -> None:
    cost_model = mixed_cost_model()
    start = cost_model.estimate(Strategy.uniform(mixed_candidate(dp=6), (0, 11)))
    assert climb(cost_model, start) == start


def test_stages_change_places_where_that_is_faster() -> None:
    cost_model = mixed_cost_model()
    crossed = Strategy.uniform(mixed_candidate(dp=2), BOUNDS, (4, 0, 1, 2, 3, 5))
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
        start = cost_model.estimate(Strategy.uniform(candidate, BOUNDS, placement))
        times_s.append(climb(cost_model, start).iteration_time_s)
        found_s.append(reorder(cost_model, start).iteration_time_s)
    assert found_s == pytest.approx([min(times_s)] * len(found_s), rel=1e-3)


def test_what_cannot_run_keeps_its_order() -> None:
    start = estimated(mixed_cost_model(slow_gib=1), BOUNDS)
    assert reorder(mixed_cost_model(slow_gib=1), start) is start


BOUNDS = (0, 4, 7, 11)
CROSSED = (2, 4, 0, 1, 5, 3)
"""Both ends stand on both quick nodes, but the replicas that share a weight on different ones."""


def chains_of(*, tied: bool, slow_gib: float = 16) -> Chains:
    cost_model = mixed_cost_model(tied=tied, slow_gib=slow_gib)
    return Chains(cost_model=cost_model, candidate=mixed_candidate(dp=2))


def crossed(chains: Chains) -> Strategy:
    return Strategy.uniform(chains.candidate, BOUNDS, CROSSED)


def test_replicas_that_share_a_weight_come_together() -> None:
    chains = chains_of(tied=True)
    start = chains.estimate(crossed(chains))
    swapped = swap_replicas(chains, start)
    assert swapped.strategy.placement == (2, 4, 0, 1, 3, 5)
    assert swapped.iteration_time_s < start.iteration_time_s
    assert swapped.strategy.bounds == BOUNDS


def test_without_a_tied_weight_nothing_is_swapped() -> None:
    chains = chains_of(tied=False)
    start = chains.estimate(crossed(chains))
    assert swap_replicas(chains, start) is start


def test_replicas_of_what_lacks_more_than_memory_stay() -> None:
    chains = chains_of(tied=True, slow_gib=1)
    start = chains.estimate(crossed(chains))
    assert not start.feasible
    assert swap_replicas(chains, start).iteration_time_s < start.iteration_time_s
    broken = replace(start, reasons=(Reason(kind="stage without parameters", detail=""),))
    assert swap_replicas(chains, broken) is broken


def test_replicas_of_a_summit_stay() -> None:
    chains = chains_of(tied=True)
    summit = swap_replicas(chains, chains.estimate(crossed(chains)))
    assert swap_replicas(chains, summit) is summit
