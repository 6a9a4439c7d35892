import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import (
    SliceSolution,
    SliceTables,
    critical_path_s,
    solve_slices,
    solve_unequal,
)
from support.examples import examples
from support.slice_oracle import (
    KINDS,
    is_partition,
    least_s,
    played_s,
    random_tables,
    without_memory,
)


@st.composite
def cases(
    draw: st.DrawFn, kind: str, *, capped: bool, uneven: bool
) -> tuple[SliceTables, tuple[float, ...]]:
    """Draw tables of latencies, and the factors of stages."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_sequences = draw(st.integers(1, 3))
    num_granules = draw(st.integers(1, (7, 5, 3)[num_sequences - 1]))
    tables = random_tables(rng, kind, num_sequences, num_granules)
    if capped:
        tables = without_memory(rng, tables)
    num_stages = draw(st.integers(1, 12))
    spread = rng.choice([0.05, 0.5, 3.0])
    factors = rng.uniform(1.0, 1.0 + spread, num_stages) if uneven else np.ones(num_stages)
    return tables, tuple(factors.tolist())


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_stages_get_the_best_of_all_slices(kind: str, *, capped: bool) -> None:
    @examples(12)
    @given(case=cases(kind, capped=capped, uneven=False))
    def check(case: tuple[SliceTables, tuple[float, ...]]) -> None:
        tables, factors = case
        _check(solve_slices(tables, (1.0, len(factors) - 1.0)), tables, factors)

    check()


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_unequal_stages_are_proven_in_few_steps(seed: int) -> None:
    tables = random_tables(np.random.default_rng(seed), "smooth", 2, 5)
    solution = solve_unequal(tables, (1.0, 2.0, 4.0), most_steps=200)
    assert isinstance(solution, SliceSolution)
    assert solution.lower_bound_s == solution.value_s


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unequal_stages_get_the_best_of_all_slices_in_any_order(kind: str, *, capped: bool) -> None:
    @examples(12)
    @given(case=cases(kind, capped=capped, uneven=True))
    def check(case: tuple[SliceTables, tuple[float, ...]]) -> None:
        tables, factors = case
        _check(solve_unequal(tables, factors), tables, factors)

    check()


def _check(
    solution: SliceSolution | InfeasiblePartition, tables: SliceTables, factors: tuple[float, ...]
) -> None:
    """Compare a solution with brute force."""
    best_s = least_s(tables, factors)
    if isinstance(solution, InfeasiblePartition):
        assert best_s == np.inf
        return
    forward_s, backward_s = tables.times_s(solution.slices)
    assert is_partition(solution.slices, tables)
    assert solution.lower_bound_s == solution.value_s == pytest.approx(best_s, rel=1e-12)
    assert played_s(forward_s, backward_s, factors) == pytest.approx(best_s, rel=1e-9)


@examples(60)
@given(case=cases("noisy", capped=True, uneven=False))
def test_both_passes_as_one_are_bounded_by_their_sum(
    case: tuple[SliceTables, tuple[float, ...]],
) -> None:
    tables, factors = case
    both = SliceTables(forward_s=tables.total_s, backward_s=np.zeros_like(tables.total_s))
    merged = solve_slices(both, (1.0, len(factors) - 1.0))
    apart = solve_slices(tables, (1.0, len(factors) - 1.0))
    if isinstance(apart, InfeasiblePartition):
        assert isinstance(merged, InfeasiblePartition)
        return
    assert isinstance(merged, SliceSolution)
    assert merged.value_s <= apart.value_s * (1 + 1e-12)
    best_s = least_s(both, factors)
    assert merged.value_s == pytest.approx(best_s, rel=1e-12)


@examples(20)
@given(seed=st.integers(0, 2**32 - 1))
def test_where_no_size_is_regular_nothing_is_skipped(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = SliceTables(forward_s=rng.random((2, 15)), backward_s=rng.random((2, 15)))
    _check(solve_slices(tables, (1.0, 3.0)), tables, (1.0,) * 4)


@examples(10)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_search_that_stops_early_gives_an_honest_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, "noisy", 2, 4)
    factors = tuple(rng.uniform(0.5, 2.0, 5).tolist())
    found = solve_unequal(tables, factors, most_steps=5)
    assert isinstance(found, SliceSolution)
    best_s = least_s(tables, factors)
    assert found.lower_bound_s <= best_s * (1 + 1e-12)
    assert found.value_s >= best_s * (1 - 1e-12)


@examples(200)
@given(
    times_s=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20),
    factors=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=10),
)
def test_the_critical_path_is_the_same_from_both_ends(
    times_s: list[float], factors: list[float]
) -> None:
    there = critical_path_s(np.array(times_s), factors)
    back = critical_path_s(np.array(times_s[::-1]), factors[::-1])
    assert there == pytest.approx(back, rel=1e-9, abs=1e-12)
    equal = critical_path_s(np.array(times_s), [1.0] * len(factors))
    formula = sum(times_s) + (len(factors) - 1) * max(times_s)
    assert equal == pytest.approx(formula, rel=1e-9, abs=1e-12)
