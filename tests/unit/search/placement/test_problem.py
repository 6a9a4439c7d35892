import math

import numpy as np
import pytest

from amp_ray.partition import InfeasiblePartition, PartitionSolution, solve
from amp_ray.search.placement.build_problem import build_problem
from amp_ray.search.placement.chains import objective_s
from amp_ray.search.placement.problem import PlacementProblem
from amp_ray.search.placement.ranks import Walk
from amp_ray.spec.strategy import Strategy
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def placement_problem(*, dp: int = 1, tied: bool = False) -> PlacementProblem:
    found = build_problem(mixed_cost_model(tied=tied), mixed_candidate(dp=dp))
    assert found is not None
    return found.problem


def solved(problem: PlacementProblem, cap_s: float, tied_s: float) -> PartitionSolution:
    solution = solve(problem.capped(cap_s, tied_s))
    assert isinstance(solution, PartitionSolution)
    return solution


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_value_and_step_end_of_a_solution_are_those_of_its_strategy(dp: int, *, tied: bool) -> None:
    problem = placement_problem(dp=dp, tied=tied)
    longest_s = float(problem.tied_times_s[-1])
    solution = solved(problem, math.inf, longest_s)
    steps, rows = problem.graph.path(solution.options)
    placement = Walk(moves=problem.moves, prices=problem.prices).placement(steps, rows)
    strategy = Strategy.uniform(problem.prices.candidate, solution.bounds, placement)
    tails_s = [
        problem.step_end_s(solution.bounds, solution.options, tied_s)
        for tied_s in problem.tied_times_s.tolist()
    ]
    values_s = [solution.value_s + step_end_s for step_end_s in tails_s]
    expected_s = objective_s(problem.prices.cost_model, strategy)
    assert min(abs(value_s / expected_s - 1) for value_s in values_s) < 1e-9


def test_a_cap_keeps_terms_below_it() -> None:
    problem = placement_problem(dp=2)
    free = solved(problem, math.inf, 0.0)
    step_end_s = problem.step_end_s(free.bounds, free.options, 0.0)
    capped = solved(problem, math.nextafter(step_end_s, 0.0), 0.0)
    assert problem.step_end_s(capped.bounds, capped.options, 0.0) < step_end_s
    assert capped.value_s >= free.value_s


def test_no_term_is_shorter_than_the_least() -> None:
    problem = placement_problem(dp=2)
    below_s = math.nextafter(problem.least_step_end_s, 0.0)
    assert isinstance(solve(problem.capped(below_s, 0.0)), InfeasiblePartition)


def test_tied_weights_take_one_of_several_times() -> None:
    assert placement_problem().tied_times_s.tolist() == [0.0]
    times_s = placement_problem(tied=True).tied_times_s
    assert len(times_s) == 2  # within a node, between nodes
    assert (np.diff(times_s) > 0).all()


def test_placements_whose_tied_weights_take_longer_are_left_out() -> None:
    problem = placement_problem(tied=True)
    shortest_s, longest_s = problem.tied_times_s.tolist()
    near, far = (solved(problem, math.inf, tied_s) for tied_s in (shortest_s, longest_s))
    assert far.value_s <= near.value_s
    steps, rows = problem.graph.path(near.options)
    placement = Walk(moves=problem.moves, prices=problem.prices).placement(steps, rows)
    assert placement[0] // 2 == placement[-1] // 2


def test_work_counts_options_and_the_ends_of_their_stages() -> None:
    problem = placement_problem(dp=2)
    assert problem.work == len(problem.graph.source) * (11 + 1 - 3)


def test_bottlenecks_grow_with_layers() -> None:
    tables = placement_problem().problem.tables
    assert (np.diff(tables.bottleneck_start_s[:, :-2]) <= 0).all()
    assert np.array_equal(tables.bottleneck_end_s[:, -1], tables.bottleneck_end_s[:, -2])
    assert np.array_equal(tables.bottleneck_start_s[:, 0], tables.bottleneck_start_s[:, 1])
