from dataclasses import replace
from math import factorial

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster, Link
from amp_ray.cost.model import CostModel
from amp_ray.search.effort import SearchEffort
from amp_ray.search.placement import objective_s, placement_graph, solve_placement
from amp_ray.search.placement.best_placements import StepEndSearch, Walk
from amp_ray.search.placement.node_moves import NodeClass, Parts, Scope, class_moves, node_classes
from amp_ray.search.placement.placement_prices import matchings
from amp_ray.search.placement.placement_problem import NARROWER, build_problem, build_within
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from support.checked import grid_of, required
from support.mixed_cluster import mixed_candidate, mixed_cost_model
from support.placement_oracle import random_experiment

LINK = (
    "global_batch_size",
    "  links: [{between: [node1, node2], gbit_per_s: 1}]\nglobal_batch_size",
)


def test_small_clusters_are_built_whole() -> None:
    built = required(build_problem(mixed_cost_model(), mixed_candidate(dp=2)))
    assert built.scope.is_whole


def test_groups_that_no_node_holds_are_not_built() -> None:
    assert build_problem(mixed_cost_model(), mixed_candidate(tp=3)) is None


def test_ends_count_where_a_weight_is_tied() -> None:
    for tied in (False, True):
        built = required(build_problem(mixed_cost_model(tied=tied), mixed_candidate()))
        assert built.scope.ends == tied


def test_too_many_options_narrow_the_scope() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    whole = required(build_problem(cost_model, candidate))
    num_options = len(whole.problem.graph.source)
    fewer = SearchEffort(max_options=num_options - 1)
    narrower = required(build_problem(cost_model, candidate, fewer))
    assert not narrower.scope.is_whole
    assert len(narrower.problem.graph.source) < num_options


def test_graphs_without_prices_exclude_only_scopes_that_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nothing:
        def exceeds(self, *_: object) -> bool:
            return False

    sizes = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        cost_model = CostModel(experiment=random_experiment(rng, 8))
        dp = int(rng.choice([1, 2, 4]))
        candidate = grid_of(dp=dp, pp=8 // dp, num_micro_batches=4)
        for most in (10, 40, 200):
            built = []
            for parts, pure in NARROWER:
                scope = Scope(parts=parts, pure=pure, max_options=most)
                for of in (placement_graph.growth_of, lambda *_: Nothing()):
                    monkeypatch.setattr(placement_graph, "growth_of", of)
                    problem = build_within(cost_model, candidate, scope)
                    built.append(None if problem is None else problem.graph.source.tolist())
                monkeypatch.undo()
            assert built[::2] == built[1::2]
            sizes += built[::2]
    assert None in sizes
    assert any(sizes)


def test_no_scope_may_be_narrow_enough() -> None:
    nothing = SearchEffort(max_options=0)
    assert build_problem(mixed_cost_model(), mixed_candidate(dp=2), nothing) is None


def test_single_links_are_given_up_before_parts_of_nodes() -> None:
    cost_model, candidate = mixed_cost_model(LINK), mixed_candidate()
    without = build_within(cost_model, candidate, Scope(max_options=10_000, pairs=False))
    exact = build_within(cost_model, candidate, Scope(max_options=10_000))
    assert without is not None
    assert exact is not None
    num_options = len(without.graph.source)
    assert num_options < len(exact.graph.source)
    built = required(build_problem(cost_model, candidate, SearchEffort(max_options=num_options)))
    assert (built.scope.pairs, built.scope.parts) == (False, "any")


def test_the_last_scope_takes_nodes_in_a_row() -> None:
    cost_model = mixed_cost_model(
        ("count: 1, slots: 2", "count: 12, slots: 8"), ("count: 2, slots: 2", "count: 12, slots: 8")
    )
    candidate = grid_of(dp=24, pp=8)
    built = required(build_problem(cost_model, candidate))
    assert built.scope.parts == "row"


ROUNDING = 1e-9


def found_within(
    cost_model: CostModel, candidate: Candidate, scope: Scope
) -> list[tuple[float, Strategy]]:
    """Return what the search finds within a scope, with the objective that it tells."""
    problem = build_within(cost_model, candidate, scope)
    if problem is None:
        return []
    search = StepEndSearch(problem=problem)
    search.run()
    found = []
    for placed in search.placements:
        walk = Walk(moves=problem.moves, prices=problem.prices)
        placement = walk.placement(*problem.graph.path(placed.options))
        found.append((placed.value_s, Strategy.uniform(candidate, placed.bounds, placement)))
    return found


@pytest.mark.parametrize(("parts", "pure"), NARROWER)
@pytest.mark.parametrize("num_devices", [4, 8])
def test_what_is_found_costs_what_it_says_and_nothing_beats_the_bound(
    num_devices: int, parts: Parts, *, pure: bool
) -> None:
    num_found = 0
    for seed in range(3):
        experiment = random_experiment(np.random.default_rng(seed), num_devices)
        cost_model = CostModel(experiment=experiment)
        for candidate in uniform_candidates(experiment):
            tp, dp = candidate.options.tp, candidate.options.dp
            nodes = experiment.cluster.nodes
            if candidate.pp > 4 or any(node.num_slots % tp for node in nodes):
                continue
            tied = cost_model.weights(tp).tied is not None and candidate.pp > 1
            scope = Scope(max_options=10**5, parts=parts, pure=pure, ends=tied)
            bound_s = solve_placement(cost_model, candidate).lower_bound_s
            for value_s, strategy in found_within(cost_model, candidate, scope):
                num_found += 1
                assert sorted(strategy.placement) == list(range(num_devices))
                assert bound_s is not None
                assert value_s >= bound_s * (1 - ROUNDING)
                if not tied or dp == 1:
                    expected_s = objective_s(cost_model, strategy)
                    assert value_s == pytest.approx(expected_s, rel=ROUNDING)
    assert num_found > 10


def test_narrower_scopes_have_fewer_options() -> None:
    more_slots = [(f"count: {count}, slots: 2", f"count: {count}, slots: 4") for count in (1, 2)]
    cost_model = mixed_cost_model(*more_slots)
    candidate = replace(mixed_candidate(dp=2), pp=6)
    sizes: list[int] = []
    for parts, pure in NARROWER:
        problem = build_within(
            cost_model, candidate, Scope(max_options=10**6, parts=parts, pure=pure)
        )
        assert problem is not None
        sizes.append(len(problem.graph.source))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


@pytest.mark.parametrize(
    "effort", [SearchEffort(max_device_sets=0), SearchEffort(max_distinct_cuts=0)]
)
def test_where_every_scope_is_too_large_there_is_a_plan_without_a_bound(
    effort: SearchEffort,
) -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    whole = solve_placement(cost_model, candidate)
    simple = solve_placement(cost_model, candidate, effort)
    assert simple.lower_bound_s is None
    assert simple.value_s is not None
    assert whole.value_s is not None
    assert simple.value_s >= whole.value_s


def cluster() -> Cluster:
    return mixed_cost_model().experiment.cluster


def test_equal_nodes_are_one_class() -> None:
    classes = node_classes(cluster(), 1, pairs_matter=True)
    assert sorted(found.nodes for found in classes) == [(0,), (1, 2)]
    assert {found.num_units for found in classes} == {2}


def test_units_are_tensor_parallel_groups() -> None:
    assert {found.num_units for found in node_classes(cluster(), 2, pairs_matter=True)} == {1}


def test_classes_do_not_depend_on_the_order_of_the_file() -> None:
    nodes = cluster().nodes
    turned = node_classes(Cluster(nodes=nodes[::-1]), 1, pairs_matter=True)
    given = node_classes(cluster(), 1, pairs_matter=True)
    devices = [
        [[named[index].device.name for index in found.nodes] for found in classes]
        for classes, named in ((given, nodes), (turned, nodes[::-1]))
    ]
    assert devices[0] == devices[1]


@pytest.mark.parametrize(("matter", "number"), [(True, 3), (False, 2)])
def test_a_link_of_its_own_tells_a_node_apart(number: int, *, matter: bool) -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    linked = replace(cluster(), pair_links={(0, 1): link})
    assert len(node_classes(linked, 1, pairs_matter=matter)) == number


def test_a_class_with_too_many_steps_is_given_up() -> None:
    huge = NodeClass(nodes=tuple(range(16)), num_units=8)
    assert class_moves(huge, 8, Scope(max_options=1), 6_000) is None
    small = NodeClass(nodes=(4, 7), num_units=2)
    assert class_moves(small, 2, Scope(max_options=1), 6_000) is not None


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_a_class_is_given_up_only_beyond_the_limit(dp: int, *, ends: bool) -> None:
    pair, scope = NodeClass(nodes=(0, 1), num_units=3), Scope(ends=ends, max_options=1)
    whole = required(class_moves(pair, dp, scope, 100_000))
    assert class_moves(pair, dp, scope, len(whole.steps)) is not None
    assert class_moves(pair, dp, scope, len(whole.steps) - 1) is None


def test_one_unit_goes_to_the_only_place() -> None:
    assert matchings(((1, 0), (0, 1)), 4, 8) == (((0, 1, 1),),)


def test_what_can_stay_in_its_node_does_in_the_first_matching() -> None:
    assert matchings(((2, 2), (1, 1)), 4, 8)[0] == ((0, 0, 2), (1, 1, 1))


def test_few_units_are_matched_in_every_way() -> None:
    pairs = tuple((1, 1) for _ in range(4))
    found = matchings(pairs, 4, 8)
    assert len(found) == len(set(found)) == factorial(4)


@pytest.mark.parametrize("pairs", [((2, 1), (1, 0), (0, 2)), ((4, 4), (4, 2), (0, 2)), ((8, 8),)])
def test_every_unit_sends_and_receives_once(pairs: tuple[tuple[int, int], ...]) -> None:
    for matching in matchings(pairs, 4, 8):
        for node, (sent, received) in enumerate(pairs):
            assert sum(units for i, _, units in matching if i == node) == sent
            assert sum(units for _, j, units in matching if j == node) == received


def test_many_units_keep_all_they_can_in_their_nodes() -> None:
    found = matchings(((4, 2), (4, 2), (0, 2), (0, 2)), 4, 8)
    assert 1 < len(found) <= 8
    assert all({(0, 0, 2), (1, 1, 2)} <= set(matching) for matching in found)
