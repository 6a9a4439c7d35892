import math
from dataclasses import replace

from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.candidate_queue import Batches, CandidateQueue, RowLimit, fastest_pipelines
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.planner import NO_CANDIDATES, OptionalCandidates
from amp_ray.search.ranking import NEAR_FRACTION, SHOWN_SLACK
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.strategy import Strategy
from support.experiments import small_experiment

EXPERIMENT = small_experiment()
CANDIDATES = uniform_candidates(EXPERIMENT)
NEEDED, OTHERS = CANDIDATES[:2], CANDIDATES[2:8]
BOUNDS_S = dict(zip(OTHERS, (4.0, 1.0, 9.0, math.inf, 3.0, 2.0), strict=True))


def estimate(number: int, time_s: float, *, risk: float = 0.0) -> Estimate:
    """Return a feasible estimate of a strategy of its own."""
    found = AmpRayPlanner(experiment=EXPERIMENT).plan(CANDIDATES[number])
    assert isinstance(found, Estimate)
    return replace(found, iteration_time_s=time_s, failure_probability=risk, reasons=())


def optional(expected_s: float = 0.0) -> OptionalCandidates:
    return OptionalCandidates(
        candidates=OTHERS,
        least_s=lambda candidate, _limit_s: BOUNDS_S[candidate],
        expected_s=lambda _: expected_s,
    )


def opened(
    *results: Result, expected_s: float = 0.0, effort: SearchEffort = EFFORT
) -> CandidateQueue:
    """Return what is wanted after the needed candidates."""
    found = CandidateQueue(NEEDED, optional(expected_s), effort)
    assert found.num == len(NEEDED)
    for number, result in enumerate(results):
        found.add(number, result)
    return found


def bounds_s(found: CandidateQueue) -> list[float]:
    """Return the bounds of the optional candidates that are still to be planned."""
    later = found.candidates[len(NEEDED) : found.num]
    return [BOUNDS_S[own] for own in later if isinstance(own, Candidate)]


def test_optional_candidates_come_by_their_bounds_up_to_the_fastest() -> None:
    found = opened(estimate(0, 5.0), estimate(1, 3.5))
    assert bounds_s(found) == [1.0, 2.0, 3.0]


def test_a_faster_strategy_leaves_fewer() -> None:
    found = opened(estimate(0, 5.0), estimate(1, 3.5))
    found.add(2, estimate(2, 2.5))
    assert bounds_s(found) == [1.0, 2.0]


def test_a_risky_strategy_excludes_no_candidate() -> None:
    safe, unsafe = estimate(1, 9.5), estimate(0, 2.8, risk=0.5)
    assert bounds_s(opened(unsafe, safe)) == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert bounds_s(opened(estimate(0, 2.8), estimate(1, 9.5))) == [1.0, 2.0]


def test_without_a_strategy_all_that_have_one_are_planned() -> None:
    nothing = Infeasible(candidate=NEEDED[0], reason=Reason(kind="none", detail=""))
    assert bounds_s(opened(nothing, nothing)) == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert CandidateQueue((), optional()).num == len(OTHERS) - 1


def test_of_optional_results_only_those_count_that_are_new_and_can_run() -> None:
    first = estimate(0, 5.0)
    found = opened(first, estimate(1, 6.0))
    slow = replace(estimate(2, 5.0), reasons=(Reason(kind="out of memory", detail=""),))
    for number, result in enumerate((first, slow, estimate(3, 4.5)), start=2):
        found.add(number, result)
    assert [
        result.iteration_time_s for result in found.results if isinstance(result, Estimate)
    ] == [
        5.0,
        6.0,
        4.5,
    ]


def test_of_many_those_are_left_out_that_are_expected_to_be_slow() -> None:
    results = estimate(0, 5.0), estimate(1, 3.5)
    assert bounds_s(opened(*results, expected_s=9.0)) == [1.0, 2.0, 3.0]
    few = SearchEffort(max_optional_devices=8)
    assert bounds_s(opened(*results, expected_s=9.0, effort=few)) == []
    assert sorted(bounds_s(opened(*results, expected_s=3.0, effort=few))) == [1.0, 2.0, 3.0]


def test_workers_get_no_less_than_what_is_planned_one_by_one() -> None:
    results: dict[int, Result | ValueError] = {0: estimate(0, 5.0), 1: estimate(1, 3.5)}
    found = CandidateQueue(NEEDED, optional())
    assert found.rest({}) == range(len(NEEDED))
    assert found.rest(results) == range(2, 5)
    assert found.candidates == opened(*(estimate(0, 5.0), estimate(1, 3.5))).candidates


def test_the_number_may_shrink_until_there_are_as_many_rows_as_wanted() -> None:
    found = CandidateQueue((), replace(optional(), num_rows=2), SearchEffort(num_early=2))
    assert (found.num, found.may_shrink) == (5, True)
    found.add(0, estimate(2, 1.5))
    assert (found.num, found.may_shrink) == (5, True)
    found.add(1, estimate(3, 1.9))
    assert not found.may_shrink
    assert found.num < 5


def test_strategies_near_the_fastest_count_however_few_rows_are_wanted() -> None:
    limit = RowLimit(2)
    for number, time_s in enumerate((1.001, 1.0, 1.0005)):
        limit.add(estimate(number, time_s))
    assert limit.seconds == 1.0 * (1 + NEAR_FRACTION)
    slow = RowLimit(2)
    slow.add(estimate(0, 1.0))
    slow.add(estimate(1, 2.0))
    assert slow.seconds == 2.0 * (1 + SHOWN_SLACK)


def test_workers_stop_where_one_process_stops() -> None:
    results: dict[int, Result | ValueError] = {0: estimate(0, 5.0), 1: estimate(1, 3.5)}
    found = CandidateQueue(NEEDED, optional())
    assert found.rest(results) == range(2, 5)
    results[3] = estimate(3, 1.5)  # faster than the bounds of the next; out of order
    assert found.rest(results) == range(2, 3)


def test_beside_faster_plans_few_are_planned() -> None:
    few = replace(optional(), most_devices=2 * OTHERS[0].num_devices)
    found = CandidateQueue(NEEDED, few)
    for number, result in enumerate((estimate(0, 5.0), estimate(1, 3.5))):
        found.add(number, result)
    assert bounds_s(found) == [1.0, 2.0]


def test_the_fastest_pipelines_are_improved_once() -> None:
    numbers = [number for number, own in enumerate(CANDIDATES) if own.pp > 1][:6]
    results = [estimate(number, 1.0 + number) for number in numbers]
    single = next(number for number, own in enumerate(CANDIDATES) if own.pp == 1)
    better = estimate(single, 0.5)
    asked: list[Estimate] = []

    def improve(given: Estimate) -> Estimate:
        asked.append(given)
        return better

    candidates = [CANDIDATES[number] for number in numbers]
    found = CandidateQueue(candidates, replace(NO_CANDIDATES, improve=improve))
    for number, result in enumerate(results):
        found.add(number, result)
    assert found.improved() == [better, *results[1:]]
    assert asked == results[:4]


def test_a_plan_that_only_gets_safer_stays_too() -> None:
    number = next(number for number, grid in enumerate(CANDIDATES) if grid.pp > 1)
    single = next(number for number, grid in enumerate(CANDIDATES) if grid.pp == 1)
    fast, safe = estimate(number, 1.0, risk=0.5), estimate(single, 2.0)
    queue = CandidateQueue([CANDIDATES[number]], replace(NO_CANDIDATES, improve=lambda _plan: safe))
    queue.add(0, fast)
    assert queue.improved() == [fast, safe]


def test_stages_that_differ_keep_no_grid_from_being_improved() -> None:
    grid = next(estimate(number, 9.0) for number, own in enumerate(CANDIDATES) if own.pp > 1)
    others = [replace(grid, strategy=uneven(grid, share), iteration_time_s=1.0) for share in (0, 1)]
    single = next(estimate(number, 0.5) for number, own in enumerate(CANDIDATES) if own.pp == 1)
    assert fastest_pipelines([single, *others, grid], 4) == [grid, *others]


def uneven(grid: Estimate, stage: int) -> Strategy:
    """Return its strategy with one stage that computes everything again."""
    stages = list(grid.strategy.stages)
    again = replace(stages[stage].options, recompute=Recompute(kind="full"))
    stages[stage] = replace(stages[stage], options=again)
    return replace(grid.strategy, stages=tuple(stages))


def test_others_are_ranked_where_they_are_faster_than_all() -> None:
    faster, slower = estimate(2, 3.0), estimate(3, 4.0)
    ranked = replace(optional(9.0), extra_plans=lambda _: [slower, faster])
    found = CandidateQueue(NEEDED, ranked)
    for number, time_s in enumerate((5.0, 3.5)):
        found.add(number, estimate(number, time_s))
    assert [each for each in found.improved() if each in (faster, slower)] == [faster]


def test_batches_cover_all_candidates_once_and_end_small() -> None:
    batches = Batches(range(3, 1003), num_workers=2)
    sizes: list[int] = []
    numbers: list[int] = []
    while (batch := batches.next(stop=2000)) is not None:
        batches.took(batch, 0.01 * len(batch))
        numbers += batch
        sizes.append(len(batch))
    assert numbers == list(range(3, 1003))
    assert sizes[:2] == [0, 16]  # the first is empty, the second small
    assert sizes[2] == 246  # a quarter of the rest: shorter than `BATCH_S`
    assert sizes[2:] == sorted(sizes[2:], reverse=True)
    assert sizes[-1] == 1


def test_batches_of_slow_candidates_are_short() -> None:
    batches = Batches(range(1000), num_workers=2)
    batches.took(range(4), 8.0)
    assert [batches.next(stop=1000) for _ in range(3)] == [range(0), range(2), range(2, 4)]


def test_batches_are_repeated_and_end_where_they_have_to() -> None:
    batches = Batches(range(1000), num_workers=2)
    first, second, third = (batches.next(stop=1000) for _ in range(3))
    assert second == range(16)
    assert third == range(16, 32)
    batches.repeat(third)
    batches.repeat(second)
    assert batches.next(stop=10) == second
    assert batches.next(stop=10) is None
    batches.repeat(third)
    batches.repeat(second)
    batches.end_at(16)
    assert [batches.next(stop=1000) for _ in range(2)] == [second, None]
    assert first == range(0)
