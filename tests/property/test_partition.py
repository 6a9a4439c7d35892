import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from amp_ray.partition.exact import solve
from amp_ray.partition.kernels import cheapest_chain
from amp_ray.partition.layout import laid_out, scratch_for, views_of
from amp_ray.partition.problem import (
    InfeasiblePartition,
    PartitionProblem,
    PartitionSolution,
    PrunedPartition,
    objective,
)
from amp_ray.partition.tables import OptionTable, StageTables
from support import brute_force
from support.examples import examples
from support.partition_cases import EXACT_KINDS, KINDS, CaseSize, random_problem

MEDIUM = CaseSize(num_layers=14, num_states=8, num_options=20, num_rows=4)


@st.composite
def problems(
    draw: st.DrawFn, kind: str | None = None, most: CaseSize | None = None
) -> PartitionProblem:
    """Draw a random problem; hypothesis shrinks its sizes and its seed."""
    most = most or CaseSize()
    size = CaseSize(
        num_layers=draw(st.integers(1, most.num_layers)),
        num_states=draw(st.integers(2, most.num_states)),
        num_options=draw(st.integers(1, most.num_options)),
        num_rows=draw(st.integers(1, most.num_rows)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_problem(rng, kind or draw(st.sampled_from(KINDS)), size)


def solved(problem: PartitionProblem) -> PartitionSolution:
    """Solve a problem that has a solution."""
    solution = solve(problem)
    assume(isinstance(solution, PartitionSolution))
    assert isinstance(solution, PartitionSolution)
    return solution


def cost_of(problem: PartitionProblem) -> float:
    """Return the best objective; infinite if no partition fits."""
    solution = solve(problem)
    return solution.value_s if isinstance(solution, PartitionSolution) else math.inf


def with_tables(problem: PartitionProblem, **tables: np.ndarray) -> PartitionProblem:
    """Return a problem with some of its tables replaced."""
    return replace(problem, tables=replace(problem.tables, **tables))


@pytest.mark.parametrize("kind", KINDS)
def test_solver_equals_brute_force(kind: str) -> None:
    @examples(800)
    @given(problem=problems(kind))
    def check(problem: PartitionProblem) -> None:
        best, solution = brute_force.best_chain(problem), solve(problem)
        if best is None:
            assert isinstance(solution, InfeasiblePartition)
            return
        assert isinstance(solution, PartitionSolution)
        assert solution.lower_bound_s == solution.value_s
        num_later = problem.num_micro_batches - 1
        assert solution.value_s == best.sum_s + num_later * best.slowest_s
        assert solution.slowest_s == best.slowest_s
        if kind in EXACT_KINDS:
            stages = tuple(zip(solution.bounds[:-1], solution.options, strict=True))
            assert stages == best.stages

    check()


@settings(max_examples=300)
@given(problem=problems(most=MEDIUM), cap_fraction=st.floats(0.0, 1.1))
def test_kernel_equals_plain_loops(problem: PartitionProblem, cap_fraction: float) -> None:
    cap_s = cap_fraction * problem.tables.time_prefix_s.max()
    programme = laid_out(problem)
    views = views_of(programme, scratch_for(programme))
    sum_s, slowest_s, num_stages, next_cap_s = cheapest_chain(cap_s, *views)
    chain = brute_force.cheapest_chain(problem, cap_s)
    if chain is None:
        assert (sum_s, num_stages) == (math.inf, 0)
        assert next_cap_s > cap_s
        just_below_s = math.nextafter(next_cap_s, 0.0)
        assert brute_force.cheapest_chain(problem, just_below_s) is None
    else:
        assert sum_s == chain.sum_s
        assert slowest_s <= cap_s


@settings(max_examples=300)
@given(problem=problems(most=MEDIUM))
def test_solution_is_a_partition_that_fits_and_costs_what_it_says(
    problem: PartitionProblem,
) -> None:
    solution = solved(problem)
    cost = objective(problem, solution.bounds, solution.options)
    assert (solution.value_s, solution.slowest_s) == (cost.value_s, cost.slowest_s)
    for (start, end), option in zip(pairwise(solution.bounds), solution.options, strict=True):
        assert brute_force.is_allowed(problem, start, end, option)


@given(problem=problems(most=MEDIUM), doublings=st.integers(-20, 20))
def test_scaling_every_time_scales_the_answer(problem: PartitionProblem, doublings: int) -> None:
    solution, factor = solved(problem), 2.0**doublings
    tables, options = problem.tables, problem.options
    scaled = replace(
        problem,
        tables=replace(
            tables,
            time_prefix_s=tables.time_prefix_s * factor,
            cut_time_s=tables.cut_time_s * factor,
            bottleneck_start_s=tables.bottleneck_start_s * factor,
            bottleneck_end_s=tables.bottleneck_end_s * factor,
        ),
        options=replace(
            options, overhead_s=options.overhead_s * factor, fixed_s=options.fixed_s * factor
        ),
    )
    same = solved(scaled)
    assert same.value_s == solution.value_s * factor
    assert (same.bounds, same.options) == (solution.bounds, solution.options)


@given(problem=problems(most=MEDIUM), seed=st.integers(0, 2**32 - 1))
def test_more_memory_is_never_worse(problem: PartitionProblem, seed: int) -> None:
    earliest_start = problem.tables.earliest_start
    roomier = np.random.default_rng(seed).integers(0, earliest_start + 1)
    assert cost_of(with_tables(problem, earliest_start=roomier)) <= cost_of(problem)


@given(problem=problems("integers", MEDIUM), seed=st.integers(0, 2**32 - 1))
def test_faster_cuts_are_never_worse(problem: PartitionProblem, seed: int) -> None:
    cut_time_s = problem.tables.cut_time_s
    faster_s = np.floor(cut_time_s * np.random.default_rng(seed).random(cut_time_s.shape))
    assert cost_of(with_tables(problem, cut_time_s=faster_s)) <= cost_of(problem)


@given(problem=problems(most=MEDIUM), more=st.integers(1, 100))
def test_more_micro_batches_never_take_less_time(problem: PartitionProblem, more: int) -> None:
    longer = replace(problem, num_micro_batches=problem.num_micro_batches + more)
    assert cost_of(longer) >= cost_of(problem)


@settings(max_examples=300)
@given(problem=problems(most=MEDIUM), seed=st.integers(0, 2**32 - 1))
def test_order_of_options_does_not_matter(problem: PartitionProblem, seed: int) -> None:
    solution = solved(problem)
    order = np.random.default_rng(seed).permutation(problem.options.num_options)
    names = OptionTable.__dataclass_fields__
    columns = {name: getattr(problem.options, name)[order] for name in names}
    permuted = solved(replace(problem, options=OptionTable(**columns)))
    assert permuted.bounds == solution.bounds
    assert permuted.value_s == solution.value_s
    for name in names:
        ours, theirs = getattr(problem.options, name), columns[name]
        assert ours[list(solution.options)].tolist() == theirs[list(permuted.options)].tolist()


@settings(max_examples=300)
@given(problem=problems(most=MEDIUM), fraction=st.floats(0.5, 1.5))
def test_upper_bound_prunes_or_changes_nothing(problem: PartitionProblem, fraction: float) -> None:
    solution = solved(problem)
    upper_bound_s = solution.value_s * fraction
    bounded = solve(problem, upper_bound_s=upper_bound_s)
    if solution.value_s > upper_bound_s:
        assert isinstance(bounded, PrunedPartition)
        assert upper_bound_s < bounded.lower_bound_s <= solution.value_s
    else:
        assert isinstance(bounded, PartitionSolution)
        assert replace(bounded, num_evaluations=solution.num_evaluations) == solution


@settings(max_examples=300)
@given(problem=problems(most=MEDIUM), budget=st.integers(1, 6), fraction=st.floats(0.5, 1.5))
def test_budget_gives_honest_bounds(
    problem: PartitionProblem, budget: int, fraction: float
) -> None:
    best = solved(problem)
    stopped = solve(problem, upper_bound_s=best.value_s * fraction, max_evaluations=budget)
    assert not isinstance(stopped, InfeasiblePartition)
    assert stopped.num_evaluations <= budget
    assert stopped.lower_bound_s <= best.value_s
    if isinstance(stopped, PartitionSolution):
        assert stopped.value_s >= best.value_s
    else:
        assert best.value_s > best.value_s * fraction


def test_large_chain_of_equal_layers_is_split_evenly() -> None:
    tables = StageTables(time_prefix_s=np.arange(4001.0)[np.newaxis])
    options = OptionTable(time_row=np.zeros(128, int))
    problem = PartitionProblem(tables=tables, options=options, num_micro_batches=64)
    solution = solve(problem)
    assert isinstance(solution, PartitionSolution)
    assert solution.slowest_s == math.ceil(4000 / 128)
    assert solution.value_s == 4000 + 63 * solution.slowest_s
