import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from amp_ray.partition.problem import InfeasiblePartition, PartitionProblem, PrunedPartition
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndSolution,
    StepEndTerm,
    among_options,
    option_values,
    solve_with_step_end,
)
from amp_ray.partition.tables import OptionTable, StageTables
from support.brute_force import Chain, all_chains
from support.examples import examples
from support.partition_cases import EXACT_KINDS, KINDS, random_problem


@st.composite
def step_end_problems(draw: st.DrawFn, kind: str, fewest: int = 0) -> StepEndProblem:
    """Draw a partition problem with ``fewest`` (or more, up to three) step-end terms."""
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
        for _ in range(draw(st.integers(fewest, 3)))
    )
    return StepEndProblem(problem=problem, terms=terms)


def value_s(problem: StepEndProblem, chain: Chain) -> float:
    """Return the objective of a partition, including the step end."""
    bounds = (*(start for start, _ in chain.stages), problem.problem.num_layers)
    terms_s = problem.terms_s(bounds, [option for _, option in chain.stages])
    num_later = problem.problem.num_micro_batches - 1
    return chain.sum_s + num_later * chain.slowest_s + sum(terms_s)


@pytest.mark.parametrize("kind", KINDS)
def test_solution_equals_brute_force(kind: str) -> None:
    @examples(400)
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


@examples(300)
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


def test_stages_with_terms_over_the_limit_are_in_the_bound() -> None:
    """The best stages within the limit's caps cost 25; with a longer term, others cost 21."""
    tables = StageTables(
        time_prefix_s=np.array([[0.0, 0, 2, 7, 7], [0, 5, 10, 13, 13], [0, 5, 8, 13, 18]]),
        cut_time_s=np.array([[2.0, 1, 5, 1, 0], [5, 1, 4, 4, 4], [0, 0, 4, 4, 3]]),
        bottleneck_start_s=np.array([[1.0, 0, 1, 1, 5], [5, 0, 2, 2, 4], [5, 5, 1, 0, 0]]),
        bottleneck_end_s=np.array([[5.0, 3, 2, 5, 4], [2, 1, 5, 3, 4], [4, 2, 5, 5, 2]]),
        earliest_start=np.array([[0, 1, 2, 2, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 2]]),
        latest_start=np.array([-1, -1, 1, 2, 3]),
    )
    options = OptionTable(
        time_row=np.array([1, 0, 0, 2, 1, 0]),
        from_state=np.array([0, 3, 2, 0, 1, 0]),
        to_state=np.array([3, 4, 4, 3, 2, 3]),
        cut_row=np.array([1, 2, 2, 0, 1, 2]),
        bottleneck_row=np.array([-1, 2, 2, 1, 1, 0]),
        memory_row=np.array([2, 1, -1, -1, 1, -1]),
        overhead_s=np.array([5.0, 5, 5, 3, 0, 2]),
        fixed_s=np.array([1.0, 1, 5, 4, 0, 2]),
    )
    term = StepEndTerm(
        weight_prefix=np.array([0.0, 0, 0, 1, 2]),
        s_per_weight=np.array([3.0, 0, 3, 0, 3, 3]),
        fixed_s=np.array([1.0, 0, 0, 3, 0, 4]),
    )
    partition = PartitionProblem(
        tables=tables, options=options, num_micro_batches=1, final_states=(1, 3)
    )
    problem = StepEndProblem(problem=partition, terms=(term,))
    best = solve_with_step_end(problem)
    assert isinstance(best, StepEndSolution)
    assert best.value_s == 21.0
    pruned = solve_with_step_end(problem, upper_bound_s=5.25)
    assert isinstance(pruned, PrunedPartition)
    assert pruned.lower_bound_s <= best.value_s


# ------------------------------------------------------------------------- pruned options

ANY_KIND = st.sampled_from(KINDS).flatmap(lambda kind: step_end_problems(kind, fewest=1))


@examples(400)
@given(problem=ANY_KIND, share=st.sampled_from([1.0, 1.1, 2.0, math.inf]))
def test_no_partition_of_interest_undercuts_its_options(
    problem: StepEndProblem, share: float
) -> None:
    costs_s = [(value_s(problem, chain), chain) for chain in all_chains(problem.problem)]
    limit_s = min((cost_s for cost_s, _ in costs_s), default=1.0) * share
    least = option_values(problem, limit_s)
    for cost_s, chain in costs_s:
        if cost_s <= limit_s:
            options = [option for _, option in chain.stages]
            assert (least[options] <= cost_s * (1 + 1e-9)).all()


@given(problem=ANY_KIND)
def test_kept_options_have_the_best_partition(problem: StepEndProblem) -> None:
    best_s = min(
        (value_s(problem, chain) for chain in all_chains(problem.problem)), default=math.inf
    )
    assume(best_s < math.inf)
    kept = np.flatnonzero(option_values(problem, best_s) < math.inf)
    fewer = among_options(problem, kept)
    assert fewer is not None
    solution = solve_with_step_end(fewer)
    assert isinstance(solution, StepEndSolution)
    assert solution.value_s == pytest.approx(best_s, rel=1e-9)
    options = kept[list(solution.options)].tolist()
    assert problem.terms_s(solution.bounds, options) == solution.terms_s


@given(problem=ANY_KIND)
def test_options_that_reach_no_end_make_no_problem(problem: StepEndProblem) -> None:
    to_state, finals = problem.problem.options.to_state, list(problem.problem.final_states)
    assert among_options(problem, np.flatnonzero(~np.isin(to_state, finals))) is None
