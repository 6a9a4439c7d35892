from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.cost.estimate import Cost, Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.candidate_queue import CandidateQueue
from amp_ray.search.space import candidates_of
from amp_ray.search.variants import (
    levelled_clusters,
    on_cluster,
    plans_for_other_clusters,
    sub_clusters,
    without_a_node,
)
from amp_ray.strategies.strategy import Strategy
from support.checked import as_estimate, grid_of
from support.experiments import experiment_from, small_experiment

TEXT = """\
name: levelled
model: {family: gpt2, num_layers: 6, hidden_size: 1024, num_heads: 16, sequence_length: 512,
        vocab_size: 51200}
cluster:
  nodes:
    - {count: 3, device: V100-16, slots: 1, intra_gbit_per_s: 400, inter_gbit_per_s: 10}
    - {count: 1, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
global_batch_size: 8
search: {space: heterogeneous}
"""
BEFORE = experiment_from(TEXT)


def better(name: str, factor: float) -> Experiment:
    """Return the experiment with a better link at the second node."""
    nodes = list(BEFORE.cluster.nodes)
    link = getattr(nodes[1], name)
    quicker = replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
    nodes[1] = (
        replace(nodes[1], inter=quicker) if name == "inter" else replace(nodes[1], intra=quicker)
    )
    return replace(BEFORE, cluster=replace(BEFORE.cluster, nodes=tuple(nodes)))


def fastest(experiment: Experiment) -> Estimate:
    """Return the fastest plan that the candidates have."""
    return min(found(experiment), key=lambda each: each.iteration_time_s)


def found(experiment: Experiment) -> list[Estimate]:
    """Return what the candidates have that can run."""
    planner = AmpRayPlanner(experiment=experiment)
    optional = replace(planner.candidates().optional, extra_plans=lambda _: [])
    wanted = CandidateQueue(candidates_of(experiment), optional)
    results = wanted.run(planner.plan)
    return [each for each in results if isinstance(each, Estimate) and each.feasible]


def test_a_better_node_is_levelled_to_what_it_was() -> None:
    for name in ("inter", "intra"):
        assert levelled_clusters(better(name, 2.0).cluster) == [BEFORE.cluster]


def test_a_cluster_whose_kinds_differ_in_several_things_is_left_as_it_is() -> None:
    assert levelled_clusters(BEFORE.cluster) == []


def test_of_equally_many_nodes_all_become_the_slower() -> None:
    slow, fast = BEFORE.cluster.nodes[0], better("inter", 2.0).cluster.nodes[1]
    (found,) = levelled_clusters(Cluster(nodes=(fast, slow)))
    assert [node.inter for node in found.nodes] == [slow.inter, slow.inter]
    assert [node.name for node in found.nodes] == [fast.name, slow.name]


def test_a_better_device_is_levelled_too() -> None:
    nodes = BEFORE.cluster.nodes
    quick = replace(nodes[2].device, name="quick", memory_bytes=2 * nodes[2].device.memory_bytes)
    cluster = replace(
        BEFORE.cluster, nodes=(*nodes[:2], replace(nodes[2], device=quick), *nodes[3:])
    )
    assert levelled_clusters(cluster) == [BEFORE.cluster]


def test_nodes_of_which_there_are_several_are_left_out_one_at_a_time() -> None:
    first, second, third, other = BEFORE.cluster.nodes
    (fewer,) = without_a_node(BEFORE.cluster)
    assert fewer.nodes == (first, second, other)
    assert without_a_node(Cluster(nodes=(third, other))) == []


def test_the_plan_without_a_node_is_ranked_on_the_cluster_that_has_it() -> None:
    nodes = BEFORE.cluster.nodes
    after = replace(
        BEFORE,
        cluster=replace(BEFORE.cluster, nodes=(*nodes, replace(nodes[0], name="extra"))),
    )
    planner = AmpRayPlanner(experiment=after)
    plans = {each.strategy: each for each in plans_for_other_clusters(planner, [])}
    # The extra node is listed last: the devices before it are those that there were
    old = fastest(BEFORE).strategy
    scored = as_estimate(planner.score(old))
    assert min(each.iteration_time_s for each in plans.values()) <= scored.iteration_time_s
    assert old in plans


def test_large_clusters_are_searched_once() -> None:
    nodes = tuple(
        replace(node, name=f"{node.name}-{copy}", num_slots=8)
        for copy in range(2)
        for node in better("inter", 2.0).cluster.nodes
    )
    large = replace(better("inter", 2.0), cluster=replace(BEFORE.cluster, nodes=nodes))
    assert list(plans_for_other_clusters(AmpRayPlanner(experiment=large), [])) == []


def test_the_plan_for_the_cluster_as_it_was_is_ranked_on_a_better_one() -> None:
    after = better("inter", 3.0)
    planner = AmpRayPlanner(experiment=after)
    own = found(after)
    plans = {each.strategy: each for each in plans_for_other_clusters(planner, own)}
    old = fastest(BEFORE).strategy
    scored = as_estimate(AmpRayPlanner(experiment=after).score(old))
    assert plans[old].iteration_time_s == scored.iteration_time_s


def test_grids_beside_stages_divide_tokens_as_placements_do() -> None:
    experiment = experiment_from("""\
name: tokens
model: {family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024,
        vocab_size: 51200}
cluster:
  nodes:
    - {device: A100-40, slots: 4, intra_gbit_per_s: 2400, inter_gbit_per_s: 10}
runtime: torch
global_batch_size: 32
search: {space: heterogeneous}
""")
    best = fastest(experiment)
    assert best.strategy.sequence_parallel
    placed = fastest(replace(experiment, limits=replace(experiment.limits, space="placement")))
    assert best.iteration_time_s <= placed.iteration_time_s


# ------------------------------------------------------------------------- parts of a cluster


def priced(seconds: float, money: float) -> Estimate:
    candidate = grid_of(num_micro_batches=4)
    return Estimate(
        strategy=Strategy.uniform(candidate, (0, 1)),
        iteration_time_s=seconds,
        cost=Cost(devices=money, egress=0.0),
        tokens_per_s=100 / seconds,
    )


def mixed_cluster() -> Cluster:
    nodes = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    other = nodes.replace("T4", "V100-16").replace("count: 2", "count: 1")
    return small_experiment((nodes, f"{nodes}\n    - {other}")).cluster


def test_limits_on_money_and_tokens_are_reasons() -> None:
    experiment = small_experiment()
    limits = replace(experiment.limits, max_cost_per_iteration=2, min_tokens_per_s=50)
    planner = AmpRayPlanner(experiment=replace(experiment, limits=limits))
    assert planner.within_limits(priced(1, 2)) == priced(1, 2)
    found = as_estimate(planner.within_limits(priced(4, 3)))
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
    found = priced(1, 1)
    placed = replace(found, strategy=replace(found.strategy, placement=(2,)))
    moved = as_estimate(on_cluster(placed, part, whole))
    device = moved.strategy.placement[0]
    assert whole.nodes[whole.node_of_device[device]] == part.nodes[1]
    assert whole.slot_of_device[device] == 0
