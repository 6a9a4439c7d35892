"""Each scope, from all placements to the fewest, on clusters that can be searched whole."""

from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.model import CostModel
from amp_ray.search.effort import SearchEffort
from amp_ray.search.placement import objective_s, solve_placement
from amp_ray.search.placement.best_placements import StepEndSearch, Walk
from amp_ray.search.placement.node_moves import Parts, Scope
from amp_ray.search.placement.placement_problem import NARROWER, build_within
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from support.mixed_cluster import mixed_candidate, mixed_cost_model
from support.placement_oracle import random_experiment

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
