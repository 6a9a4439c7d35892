from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import rank
from amp_ray.search.replan import Replanner, best_matching
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of
from support.experiments import small_experiment

STATE_BYTES = 2 + 4 + 8
"""Of a parameter: fp16 weight, master weight and two moments of Adam."""


def experiment(num_nodes: int, *, zero_stage: int = 0) -> Experiment:
    old = "{count: 2, device: T4, slots: 2"
    return small_experiment(
        (old, f"{{count: {num_nodes}, device: T4, slots: 2"),
        ("global_batch_size: 8", f"global_batch_size: 8\nzero_stage: {zero_stage}"),
    )


def grid(given: Experiment, *, tp: int, dp: int, pp: int, placement: list[int]) -> Strategy:
    candidate = grid_of(tp=tp, dp=dp, zero=given.zero(pp), pp=pp, num_micro_batches=8 // dp)
    num_layers = given.model.num_layers
    bounds = [num_layers * stage // pp for stage in range(pp + 1)]
    return Strategy.uniform(candidate, bounds, tuple(placement))


def replanner(given: Experiment, before: Strategy, *, left: list[int]) -> Replanner:
    return Replanner(
        experiment=replace(given, cluster=given.cluster.part(left)),
        before=before,
        old_cluster=given.cluster,
    )


def parameters(given: Experiment, stage: int, pp: int) -> float:
    num_layers = given.model.num_layers
    first, end = (num_layers * cut // pp for cut in (stage, stage + 1))
    return sum(layer.num_parameters for layer in given.model.layers[first:end])


def test_the_same_plan_on_the_same_devices_moves_nothing() -> None:
    given = experiment(2)
    before = grid(given, tp=1, dp=2, pp=2, placement=[0, 1, 2, 3])
    moves = replanner(given, before, left=[0, 1]).moves(before)
    assert moves.total_bytes == 0
    assert sum(moves.needed_bytes.values()) == pytest.approx(
        2 * given.model.num_parameters * STATE_BYTES, rel=0.1
    )


def test_a_stage_whose_only_node_is_lost_comes_from_a_checkpoint() -> None:
    given = experiment(3)
    before = grid(given, tp=1, dp=2, pp=3, placement=[0, 1, 2, 3, 4, 5])
    left = replanner(given, before, left=[0, 2])
    # Two stages, and the node that is left of each end keeps a part of what it has.
    moves = left.moves(grid(given, tp=1, dp=2, pp=2, placement=[0, 1, 2, 3]))
    lost = parameters(given, 1, 3) * STATE_BYTES
    assert sum(moves.lost_bytes.values()) == pytest.approx(2 * lost)
    assert moves.moved_bytes["node0"] >= moves.lost_bytes["node0"] > 0
    assert moves.transfer_s == pytest.approx(
        max(moves.moved_bytes.values())
        / (given.cluster.nodes[0].inter.bandwidth_bytes_per_s * given.constants.nic_efficiency)
    )


def test_a_replica_that_is_left_spares_the_checkpoint() -> None:
    given = experiment(2)
    before = grid(given, tp=2, dp=2, pp=1, placement=[0, 1, 2, 3])
    moves = replanner(given, before, left=[1]).moves(
        grid(given, tp=1, dp=2, pp=1, placement=[0, 1])
    )
    assert sum(moves.lost_bytes.values()) == 0
    # Each device had half of what is sharded and needs the rest of it.
    sharded = sum(layer.sharded_parameters for layer in given.model.layers)
    assert moves.total_bytes == pytest.approx(2 * sharded / 2 * STATE_BYTES)


def test_zero_shards_the_optimizer_state_of_lost_ranks() -> None:
    given = experiment(2, zero_stage=1)
    before = grid(given, tp=1, dp=4, pp=1, placement=[0, 1, 2, 3])
    moves = replanner(given, before, left=[1]).moves(
        grid(given, tp=1, dp=2, pp=1, placement=[0, 1])
    )
    held = sum(layer.num_parameters for layer in given.model.layers)
    assert sum(moves.lost_bytes.values()) == pytest.approx(held / 2 * (4 + 8))


def test_equal_nodes_change_places_where_that_moves_less() -> None:
    given = experiment(3)
    before = grid(given, tp=2, dp=1, pp=3, placement=[4, 5, 0, 1, 2, 3])
    same = grid(given, tp=2, dp=1, pp=3, placement=[0, 1, 2, 3, 4, 5])
    planner = replanner(given, before, left=[0, 1, 2])
    score = CostModel(experiment=given).estimate
    ranking = planner.ranking(rank([score(same)], relative_error=0.06), score)
    assert ranking.best is not None
    assert ranking.best.strategy == before


def test_of_ties_the_one_that_moves_least_comes_first() -> None:
    given = experiment(2)
    before = grid(given, tp=1, dp=2, pp=2, placement=[0, 1, 2, 3])
    score = CostModel(experiment=given).estimate
    plans = [score(before), score(grid(given, tp=2, dp=2, pp=1, placement=[0, 1, 2, 3]))]
    fastest = min(plan.iteration_time_s for plan in plans)
    ties = [replace(plan, iteration_time_s=fastest) for plan in plans]
    ranking = replanner(given, before, left=[0, 1]).ranking(rank(ties), score)
    assert isinstance(ranking.results[0], Estimate)
    assert ranking.results[0].strategy == before


@pytest.mark.parametrize("seed", range(40))
def test_the_best_matching_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 6))
    gains = random.integers(0, 6, (size, size)).astype(float)
    found = best_matching(gains)
    rows = np.arange(size)
    most = max(gains[rows, list(columns)].sum() for columns in permutations(range(size)))
    assert gains[rows, found].sum() == most
    assert sorted(found) == list(range(size))


def test_a_matching_changes_nothing_without_need() -> None:
    assert best_matching(np.ones((4, 4))).tolist() == [0, 1, 2, 3]
