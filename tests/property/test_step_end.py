import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.partition.problem import InfeasiblePartition, PrunedPartition
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    solve_with_step_end,
)
from support.brute_force import Chain, all_chains
from support.partition_cases import EXACT_KINDS, KINDS, random_problem


@st.composite
def step_end_problems(draw: st.DrawFn, kind: str) -> StepEndProblem:
    """Draw a partition problem with up to three step-end terms."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = random_problem(rng, kind)
    num_options = problem.options.num_options
    exact = kind in EXACT_KINDS

    def times(*shape: int) -> np.ndarray:
        return rng.integers(0, 5, shape).astype(float) if exact else rng.random(shape)

    terms = tuple(
        StepEndTerm(
            weight_prefix=np.pad(times(problem.num_layers).cumsum(), (1, 0)),
            s_per_weight=times(num_options),
            fixed_s=times(num_options),
        )
        for _ in range(draw(st.integers(0, 3)))
    )
    return StepEndProblem(problem=problem, terms=terms)


def value_s(problem: StepEndProblem, chain: Chain) -> float:
    """Cost a partition."""
    bounds = (*(start for start, _ in chain.stages), problem.problem.num_layers)
    terms_s = problem.terms_s(bounds, [option for _, option in chain.stages])
    num_later = problem.problem.num_micro_batches - 1
    return chain.sum_s + num_later * chain.slowest_s + sum(terms_s)


@pytest.mark.parametrize("kind", KINDS)
def test_solution_equals_brute_force(kind: str) -> None:
    @settings(max_examples=400, deadline=None)
    @given(problem=step_end_problems(kind))
    def check(problem: StepEndProblem) -> None:
        best_s = min(
            (value_s(problem, chain) for chain in all_chains(problem.problem)), default=math.inf
        )
        solution = solve_with_step_end(problem)
        if best_s == math.inf:
            assert isinstance(solution, InfeasiblePartition)
            return
        assert isinstance(solution, StepEndSolution)
        if kind in EXACT_KINDS:
            assert solution.value_s == solution.lower_bound_s == best_s
        assert solution.value_s == pytest.approx(best_s, rel=1e-12)
        assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-12)
        assert solution.terms_s == problem.terms_s(solution.bounds, solution.options)

    check()


@settings(max_examples=300, deadline=None)
@given(
    problem=step_end_problems("integers"),
    fraction=st.floats(0.2, 2.0),
    most_boxes=st.one_of(st.none(), st.integers(1, 3)),
)
def test_bounds_are_honest_under_limits(
    problem: StepEndProblem, fraction: float, most_boxes: int | None
) -> None:
    best_s = min(
        (value_s(problem, chain) for chain in all_chains(problem.problem)), default=math.inf
    )
    limit_s = 10.0 if best_s == math.inf else fraction * best_s
    solution = solve_with_step_end(problem, upper_bound_s=limit_s, most_boxes=most_boxes)
    if isinstance(solution, StepEndSolution):
        assert solution.lower_bound_s <= best_s <= solution.value_s
        if most_boxes is None:
            assert solution.value_s == best_s <= limit_s
    elif isinstance(solution, PrunedPartition):
        assert solution.lower_bound_s <= best_s
        assert most_boxes is not None or best_s > limit_s
    else:
        assert best_s == math.inf
