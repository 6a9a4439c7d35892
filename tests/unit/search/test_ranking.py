import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.estimate import Cost, Estimate, Infeasible, Reason, Result
from amp_ray.search.ranking import (
    Ranking,
    plainest_first,
    plainest_text,
    rank,
    reasons_text,
    why_none,
    with_more_ties,
)
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from support.checked import grid_of


def estimate(
    seconds: float, *, micro_batch_size: int = 1, pp: int = 1, reason: str | None = None
) -> Estimate:
    candidate = grid_of(micro_batch_size=micro_batch_size, pp=pp, num_micro_batches=4)
    return Estimate(
        strategy=Strategy.uniform(candidate, tuple(range(pp + 1))),
        iteration_time_s=seconds,
        reasons=() if reason is None else (Reason(kind=reason, detail="figures"),),
    )


def impossible(pp: int) -> Infeasible:
    candidate = grid_of(pp=pp, num_micro_batches=4)
    return Infeasible(
        candidate=candidate, reason=Reason(kind="more stages than layers", detail="figures")
    )


def test_feasible_come_first_then_infeasible_then_impossible() -> None:
    slow, fast, broken = estimate(3.0), estimate(2.0), estimate(1.0, reason="out of memory")
    ranking = rank([impossible(9), broken, slow, fast])
    assert ranking.results == (fast, slow, broken, impossible(9))
    assert ranking.num_feasible == 2


def test_order_of_arrival_does_not_matter() -> None:
    results: list[Result] = [
        estimate(1.0, micro_batch_size=2),
        estimate(1.0, micro_batch_size=1),
        estimate(1.0, pp=2),
        impossible(8),
        impossible(9),
    ]
    rankings = {rank(order).results for order in itertools.permutations(results)}
    assert len(rankings) == 1


def test_times_that_differ_by_rounding_are_equal() -> None:
    later = estimate(1.0 + 1e-15, micro_batch_size=1)
    earlier = estimate(1.0, micro_batch_size=2)
    assert rank([earlier, later]).results == (later, earlier)


def test_ties_are_within_the_models_error() -> None:
    ranking = rank([estimate(1.0), estimate(1.05, pp=2), estimate(1.2)], relative_error=0.06)
    assert ranking.num_tied == 2


def test_infeasible_results_are_no_ties() -> None:
    ranking = rank([estimate(1.0), estimate(1.01, reason="out of memory")], relative_error=0.06)
    assert ranking.num_tied == 1


def test_nothing_feasible_has_no_best_and_no_ties() -> None:
    ranking = rank([estimate(1.0, reason="out of memory")])
    assert ranking.best is None
    assert ranking.num_tied == 0


def test_reasons_are_counted_by_kind() -> None:
    broken = [estimate(1.0, reason="out of memory"), estimate(2.0, reason="out of memory")]
    ranking = rank([*broken, impossible(9), estimate(1.0)])
    assert len(ranking.infeasible) == 3
    assert reasons_text(ranking.infeasible) == "2 out of memory, 1 more stages than layers"


def test_a_result_with_two_reasons_is_counted_once_by_the_first() -> None:
    slow = Reason(kind="over the launcher's time limit", detail="figures")
    both = estimate(1.0, reason="out of memory")
    both = replace(both, reasons=(*both.reasons, slow))
    assert reasons_text([both]) == "1 out of memory"


# ------------------------------------------------------------------------- risk


def risky(seconds: float, probability: float, *, pp: int = 1) -> Estimate:
    return replace(estimate(seconds, pp=pp), failure_probability=probability)


def test_safe_strategies_come_before_all_risky_ones() -> None:
    fastest, safe, slower_safe = risky(1.0, 0.43), risky(1.03, 0.08), risky(2.0, 0.0)
    other = risky(1.02, 0.1)
    ranking = rank([fastest, slower_safe, other, safe], relative_error=0.06)
    assert ranking.results == (safe, slower_safe, fastest, other)
    assert (ranking.best, ranking.num_tied) == (safe, 1)


def test_without_a_safe_strategy_the_fastest_comes_first() -> None:
    fastest, other, broken = risky(1.0, 0.43), risky(1.07, 0.2), estimate(0.5, reason="none")
    ranking = rank([broken, other, fastest], relative_error=0.1)
    assert ranking.results == (fastest, other, broken)
    assert ranking.num_tied == 2


def test_of_times_that_are_shown_alike_the_plainest_comes_first() -> None:
    piped, plain, faster = estimate(1.0001, pp=2), estimate(1.0004), estimate(0.999, pp=4)
    given = [piped, plain, faster]
    assert rank(given, relative_error=0.06).results == (faster, plain, piped)
    assert rank(given).results == (faster, piped, plain)


# ------------------------------------------------------------------------- the plainest first


def made(
    seconds: float,
    *,
    cp: int = 1,
    ep: int = 1,
    chunks: int = 1,
    probability: float = 0.0,
    zero: int = 0,
) -> Estimate:
    options = StageOptions(tp=1, dp=4, cp=cp, ep=ep, zero=Zero(stage=zero))
    candidate = Candidate(
        micro_batch_size=1, options=options, pp=2, num_micro_batches=4, virtual_stages=chunks
    )
    plan = Strategy.uniform(candidate, (0, 4, 8))
    return replace(estimate(seconds), strategy=plan, failure_probability=probability)


def plainest(*given: Estimate, relative_error: float = 0.06) -> Ranking:
    rankings = {
        plainest_first(rank(order, relative_error=relative_error))
        for order in itertools.permutations(given)
    }
    assert len(rankings) == 1
    return rankings.pop()


def test_of_strategies_near_the_fastest_the_plainest_comes_first() -> None:
    fastest, near = made(1.0, cp=2, chunks=2), made(1.019)
    between, apart = made(1.01, cp=2), made(1.021)
    ranking = plainest(fastest, near, between, apart)
    assert ranking.results == (near, between, fastest, apart)
    assert (ranking.best, ranking.fastest) == (near, fastest)
    assert (ranking.num_near, ranking.num_tied) == (3, 4)
    assert plainest_text(ranking) == "the plainest of 3 within 2 % of the fastest"


def test_strategies_as_plain_as_the_fastest_follow_by_time() -> None:
    fastest, second = made(1.0), replace(made(1.01), strategy=estimate(1.0, pp=4).strategy)
    ranking = plainest(second, fastest)
    assert ranking.results == (fastest, second)
    assert not plainest_text(ranking)


def test_expert_parallelism_counts_above_what_the_fastest_has() -> None:
    fastest, more, less = made(1.0, ep=2), made(1.005, ep=4), made(1.01)
    assert plainest(fastest, more, less).results == (fastest, less, more)


def test_each_doubling_of_cp_counts_and_zero_only_where_it_gains_nothing() -> None:
    fastest, half = made(1.0, cp=4), made(1.01, cp=2)
    assert plainest(fastest, half).results == (half, fastest)
    sharded, whole = made(1.0, zero=1), made(1.01)
    assert plainest(sharded, whole).results == (whole, sharded)
    full = made(1.01, probability=0.05)
    assert plainest(sharded, full).results == (sharded, full)


def test_gathering_all_experts_is_not_first_if_a_tie_does_without() -> None:
    gathers, spreads, near = made(1.0, zero=3), made(1.04, ep=4, zero=1), made(1.05, ep=4)
    ranking = plainest_first(rank([gathers, spreads, near], relative_error=0.06), has_experts=True)
    assert ranking.results == (near, spreads, gathers)
    assert plainest_text(ranking).startswith("a tie of the fastest, whose ranks gather all experts")
    assert plainest(gathers, spreads, near).best is gathers  # a model without experts
    alone = plainest_first(rank([gathers, spreads], relative_error=0.03), has_experts=True)
    assert alone.best is gathers


def test_a_risky_strategy_is_never_the_plainest() -> None:
    fastest, risky_one = made(1.0, cp=2), made(1.01, probability=0.1)
    assert plainest(fastest, risky_one).results == (fastest, risky_one)
    assert plainest(replace(fastest, failure_probability=0.2), risky_one).num_near == 0


def test_the_plainest_is_a_tie_of_the_fastest_however_small_the_error() -> None:
    fastest, near, apart = made(1.0, cp=2), made(1.004), made(1.01)
    ranking = plainest(fastest, near, apart, relative_error=0.005)
    assert ranking.results == (near, fastest, apart)
    assert (ranking.num_near, ranking.num_tied) == (2, 2)
    assert plainest_text(ranking) == "the plainest of 2 within 0.5 % of the fastest"
    assert plainest(fastest, near, relative_error=0.0).results == (fastest, near)


def test_money_comes_before_plainness() -> None:
    fast, plain = made(1.0, cp=2), made(1.01)
    priced = [
        replace(plan, cost=Cost(devices=money, egress=0.0))
        for plan, money in ((fast, 1.0), (plain, 2.0))
    ]
    ranking = plainest_first(rank(priced, relative_error=0.06, objective="cost"))
    assert ranking.results == tuple(priced)


@given(
    plans=st.lists(
        st.builds(
            made,
            st.sampled_from((1.0, 1.0001, 1.005, 1.0199, 1.02, 1.0201, 1.05, 1.3)),
            cp=st.sampled_from((1, 2)),
            ep=st.sampled_from((1, 2, 4)),
            chunks=st.sampled_from((1, 2)),
            probability=st.sampled_from((0.0, 0.05, 0.1, 0.5)),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda plan: plan.strategy,
    ),
    relative_error=st.sampled_from((0.01, 0.06, 0.3)),
    seed=st.randoms(use_true_random=False),
)
def test_laws_of_the_plainest_first(
    plans: list[Estimate], relative_error: float, seed: random.Random
) -> None:
    by_time = rank(plans, relative_error=relative_error)
    ranking = plainest_first(by_time)
    seed.shuffle(plans)
    assert plainest_first(rank(plans, relative_error=relative_error)) == ranking
    near, rest = ranking.results[: ranking.num_near], ranking.results[ranking.num_near :]
    assert set(map(id, ranking.results)) == set(map(id, by_time.results))
    assert rest == tuple(plan for plan in by_time.results if plan not in near)
    assert ranking.fastest is not None
    assert by_time.fastest is not None
    assert ranking.fastest.iteration_time_s == by_time.fastest.iteration_time_s
    assert ranking.num_near <= ranking.num_tied
    safe_s = [plan.iteration_time_s for plan in plans if plan.failure_probability < 0.1]
    limit_s = min(safe_s, default=0.0) * (1 + min(0.02, relative_error))
    assert len(near) == sum(seconds <= limit_s + 1e-12 for seconds in safe_s)


def test_the_front_of_time_and_money_is_of_safe_strategies() -> None:
    def priced(plan: Estimate, money: float) -> Estimate:
        return replace(plan, cost=Cost(devices=money, egress=0.0))

    fast, cheap = priced(risky(1.0, 0.0), 3.0), priced(risky(2.0, 0.0), 2.0)
    unsafe = priced(risky(0.5, 0.5), 1.0)
    ranking = rank([unsafe, cheap, fast], objective="time-cost")
    assert (ranking.results, ranking.num_front) == ((fast, cheap, unsafe), 2)


# ------------------------------------------------------------------------- ties of pairs


def paired(*given: tuple[Estimate, float]) -> Ranking:
    """Rank estimates with their errors against the fastest, which comes first."""
    results = [estimate for estimate, _ in given]
    return with_more_ties(rank(results, relative_error=0.06), given)


def test_what_lies_within_the_error_against_the_fastest_is_a_tie() -> None:
    first, second, third = estimate(1.0), estimate(1.1, pp=2), estimate(1.15, pp=4)
    assert paired((first, 0.06), (second, 0.06), (third, 0.06)).num_tied == 1
    assert paired((first, 0.06), (second, 0.12), (third, 0.06)).num_tied == 2
    assert paired((first, 0.06), (second, 0.12), (third, 0.15)).num_tied == 3


def test_ties_end_with_the_first_that_is_none() -> None:
    first, second, third = estimate(1.0), estimate(1.1, pp=2), estimate(1.15, pp=4)
    assert paired((first, 0.06), (second, 0.07), (third, 0.3)).num_tied == 1


def test_what_nothing_is_known_of_ties_by_the_models_own_error_alone() -> None:
    first, second, third = estimate(1.0), estimate(1.05, pp=2), estimate(1.07, pp=4)
    ranking = with_more_ties(rank([first, second, third], relative_error=0.06), [(first, 0.06)])
    assert ranking.num_tied == 2


def test_risky_strategies_are_no_ties_of_safe_ones() -> None:
    unsafe, safe, far = risky(1.0, 0.43), risky(1.1, 0.0), risky(1.3, 0.0)
    errors = [(safe, 0.06), (far, 0.2), (unsafe, 0.2)]
    ranking = with_more_ties(rank([far, safe, unsafe], relative_error=0.06), errors)
    assert ranking.results == (safe, far, unsafe)
    assert ranking.num_tied == 2


# ------------------------------------------------------------------------- nothing fits


def short_of(need: float, seconds: float, *, pp: int = 1) -> Estimate:
    """An estimate whose last stage needs so many parts of what it has."""
    ahead = (1.0,) * (pp - 1)
    return replace(
        estimate(seconds, pp=pp, reason="out of memory"),
        peak_memory_bytes=(*ahead, need * 16),
        memory_limit_bytes=(*ahead, 16.0),
    )


def test_what_needs_least_beyond_its_memory_is_the_closest() -> None:
    text = why_none([short_of(2.0, 1.0), short_of(1.1, 3.0, pp=2), impossible(9)])
    assert text == (
        "2 out of memory, 1 more stages than layers; "
        "closest: tp 1, pp 2, dp 1, micro-batch size 1, bounds 0 1 2: figures"
    )


def test_strategies_beside_the_results_may_be_closer_but_are_not_counted() -> None:
    text = why_none([short_of(2.0, 1.0)], [short_of(1.5, 9.0, pp=4), estimate(1.0)])
    assert text.startswith("1 out of memory; closest: tp 1, pp 4, ")


def test_of_equal_needs_the_fastest_is_the_closest() -> None:
    late = [estimate(time_s, pp=pp, reason="too slow") for time_s, pp in ((9.0, 1), (5.0, 2))]
    assert "closest: tp 1, pp 2, " in why_none(late)


def test_where_no_strategy_could_be_made_a_detail_is_told() -> None:
    assert why_none([impossible(9)]) == "1 more stages than layers, for example figures"


def test_strategies_of_different_batches_go_by_the_time_of_a_sample() -> None:
    small, large = estimate(1.0), estimate(1.5, micro_batch_size=2)
    assert rank([small, large]).results == (small, large)
    ranking = rank([small, large, impossible(9)], per_sample=True, relative_error=0.4)
    assert ranking.results == (large, small, impossible(9))
    assert ranking.num_tied == 2


# ------------------------------------------------------------------------- money


def priced(seconds: float, money: float) -> Estimate:
    return replace(estimate(seconds), cost=Cost(devices=money, egress=0.0))


def times(results: Sequence[object]) -> list[float]:
    return [each.iteration_time_s for each in results if isinstance(each, Estimate)]


def test_by_cost_the_cheapest_comes_first() -> None:
    ranking = rank([priced(1, 3), priced(2, 1), priced(3, 2)], objective="cost")
    assert times(ranking.results) == [2, 3, 1]


def test_equal_costs_are_ordered_by_time() -> None:
    ranking = rank([priced(2, 1), priced(1, 1)], objective="cost")
    assert times(ranking.results) == [1, 2]
    assert ranking.num_tied == 2


def test_the_front_is_what_no_other_beats_in_time_and_cost() -> None:
    given = [priced(1, 9), priced(2, 9.5), priced(3, 4), priced(4, 5), priced(5, 1)]
    ranking = rank(given, objective="time-cost")
    assert times(ranking.results) == [1, 3, 5, 2, 4]
    assert ranking.num_front == 3
