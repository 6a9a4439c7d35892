import itertools

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.search.ranking import rank
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.strategy import StageOptions, Strategy


def estimate(
    seconds: float, *, micro_batch_size: int = 1, pp: int = 1, reason: str | None = None
) -> Estimate:
    candidate = Candidate(
        micro_batch_size=micro_batch_size,
        options=StageOptions(tp=1, dp=1),
        pp=pp,
        num_micro_batches=4,
    )
    return Estimate(
        strategy=Strategy.uniform(candidate, tuple(range(pp + 1))),
        iteration_time_s=seconds,
        reasons=() if reason is None else (Reason(kind=reason, detail="figures"),),
    )


def impossible(pp: int) -> Infeasible:
    candidate = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=pp, num_micro_batches=4
    )
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
    assert ranking.reason_counts() == [("out of memory", 2), ("more stages than layers", 1)]
