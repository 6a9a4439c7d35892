from dataclasses import replace

import pytest

from amp_ray.search.cuts import latest_starts
from amp_ray.search.effort import EFFORT
from amp_ray.search.placement.simple_placements import (
    Chains,
    class_orders,
    key_of,
    objective_s,
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


def test_a_stage_needs_parameters_where_the_runtime_says_so() -> None:
    assert latest_starts(mixed_cost_model().experiment).tolist()[1:3] == [0, 1]
    other = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    assert other.experiment.traits.fails_without_parameters == bool(
        latest_starts(other.experiment).size
    )


def test_keys_tell_devices_and_cuts() -> None:
    candidate = mixed_candidate(dp=2)
    strategies = [
        Strategy.uniform(candidate, (0, 4, 7, 11)),
        Strategy.uniform(candidate, (0, 4, 8, 11)),
        Strategy.uniform(candidate, (0, 4, 7, 11), LAST_FIRST),
    ]
    assert len({key_of(strategy) for strategy in strategies}) == 3
