import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    among_options,
    option_values,
    solve_with_step_end,
)
from support.brute_force import all_chains
from support.examples import examples
from support.partition_cases import KINDS, random_problem

ROUNDING = 1e-9


@st.composite
def step_end_problems(draw: st.DrawFn) -> StepEndProblem:
    """Draw a partition problem with one or two step-end terms."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = random_problem(rng, draw(st.sampled_from(KINDS)))
    num_options = problem.options.num_options
    terms = tuple(
        StepEndTerm(
            weight_prefix=np.pad(rng.random(problem.num_layers).cumsum(), (1, 0)),
            s_per_weight=rng.random(num_options),
            fixed_s=rng.random(num_options),
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    return StepEndProblem(problem=problem, terms=terms)


def values(problem: StepEndProblem) -> list[tuple[float, tuple[int, ...]]]:
    """Cost every partition; with its options."""
    num_later = problem.problem.num_micro_batches - 1
    found = []
    for chain in all_chains(problem.problem):
        bounds = (*(start for start, _ in chain.stages), problem.problem.num_layers)
        options = tuple(option for _, option in chain.stages)
        terms_s = problem.terms_s(bounds, options)
        found.append((chain.sum_s + num_later * chain.slowest_s + sum(terms_s), options))
    return found


@examples(400)
@given(problem=step_end_problems(), share=st.sampled_from([1.0, 1.1, 2.0, math.inf]))
def test_no_partition_of_interest_undercuts_its_options(
    problem: StepEndProblem, share: float
) -> None:
    known = values(problem)
    best_s = min((value_s for value_s, _ in known), default=1.0)
    limit_s = best_s * share
    least = option_values(problem, limit_s)
    for value_s, options in known:
        if value_s <= limit_s:
            assert (least[list(options)] <= value_s * (1 + ROUNDING)).all()


@given(problem=step_end_problems())
def test_kept_options_have_the_best_partition(problem: StepEndProblem) -> None:
    best_s = min((value_s for value_s, _ in values(problem)), default=math.inf)
    chosen = np.flatnonzero(option_values(problem, best_s) < math.inf)
    fewer = among_options(problem, chosen) if len(chosen) else None
    if best_s == math.inf:
        return
    assert fewer is not None
    solution = solve_with_step_end(fewer)
    assert isinstance(solution, StepEndSolution)
    assert solution.value_s == pytest.approx(best_s, rel=ROUNDING)
    known = chosen[list(solution.options)]
    assert problem.terms_s(solution.bounds, known.tolist()) == solution.terms_s


@given(problem=step_end_problems())
def test_options_that_reach_no_end_make_no_problem(problem: StepEndProblem) -> None:
    finals = set(problem.problem.final_states)
    dead = [
        option
        for option, state in enumerate(problem.problem.options.to_state.tolist())
        if state not in finals
    ]
    assert among_options(problem, np.array(dead, dtype=np.int64)) is None
