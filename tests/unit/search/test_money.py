from collections.abc import Sequence
from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.cost.estimate import Cost, Estimate
from amp_ray.inputs.experiment import SearchLimits
from amp_ray.search.ranking import rank
from amp_ray.search.variants import on_cluster, sub_clusters, within_limits
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy
from support.experiments import small_experiment


def estimate(seconds: float, money: float, *, size: int = 1) -> Estimate:
    candidate = Candidate(
        micro_batch_size=size, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=4
    )
    return Estimate(
        strategy=Strategy.uniform(candidate, (0, 1)),
        iteration_time_s=seconds,
        cost=Cost(devices=money, egress=0.0),
        tokens_per_s=100 / seconds,
    )


def times(results: Sequence[object]) -> list[float]:
    return [each.iteration_time_s for each in results if isinstance(each, Estimate)]


def mixed_cluster() -> Cluster:
    nodes = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    other = nodes.replace("T4", "V100-16").replace("count: 2", "count: 1")
    return small_experiment((nodes, f"{nodes}\n    - {other}")).cluster


def test_by_cost_the_cheapest_comes_first() -> None:
    ranking = rank([estimate(1, 3), estimate(2, 1), estimate(3, 2)], objective="cost")
    assert times(ranking.results) == [2, 3, 1]


def test_equal_costs_are_ordered_by_time() -> None:
    ranking = rank([estimate(2, 1), estimate(1, 1)], objective="cost")
    assert times(ranking.results) == [1, 2]
    assert ranking.num_tied == 2


def test_the_front_is_what_no_other_beats_in_time_and_cost() -> None:
    given = [estimate(1, 9), estimate(2, 9.5), estimate(3, 4), estimate(4, 5), estimate(5, 1)]
    ranking = rank(given, objective="time-cost")
    assert times(ranking.results) == [1, 3, 5, 2, 4]
    assert ranking.num_front == 3


def test_limits_on_money_and_tokens_are_reasons() -> None:
    limits = SearchLimits(max_cost_per_iteration=2, min_tokens_per_s=50)
    assert within_limits(estimate(1, 2), limits) == estimate(1, 2)
    found = within_limits(estimate(4, 3), limits)
    assert isinstance(found, Estimate)
    assert [str(reason) for reason in found.reasons] == [
        "over max_cost_per_iteration: 3 per iteration, at most 2",
        "below min_tokens_per_s: 25 tokens/s, at least 50",
    ]


def test_every_number_of_nodes_of_each_kind_is_a_part() -> None:
    parts = [[node.name for node in part.nodes] for part in sub_clusters(mixed_cluster())]
    assert sorted(parts) == [
        ["node0"],
        ["node0", "node1"],
        ["node0", "node2"],
        ["node2"],
    ]


def test_of_many_nodes_powers_of_two_are_parts() -> None:
    cluster = small_experiment(("count: 2", "count: 100")).cluster
    sizes = [len(part.nodes) for part in sub_clusters(cluster)]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]


def test_links_of_pairs_go_with_their_nodes() -> None:
    link = Link(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    cluster = replace(mixed_cluster(), pair_links={(0, 2): link, (0, 1): link})
    assert cluster.part([2, 0]).pair_links == {(0, 1): link}


@pytest.mark.parametrize("nodes", [[1, 2], [2, 1]])
def test_a_plan_for_a_part_names_the_devices_of_the_whole(nodes: list[int]) -> None:
    whole = mixed_cluster()
    part = whole.part(nodes)
    found = estimate(1, 1)
    placed = replace(found, strategy=replace(found.strategy, placement=(2,)))
    moved = on_cluster(placed, part, whole)
    assert isinstance(moved, Estimate)
    device = moved.strategy.placement[0]
    assert whole.nodes[whole.node_of_device[device]] == part.nodes[1]
    assert whole.slot_of_device[device] == 0
