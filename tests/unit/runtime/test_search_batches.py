import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.estimate import Infeasible, Reason
from amp_ray.runtime.search_batches import PATIENCE_S, TARGET_S, Answer, Batch, Batches
from amp_ray.spec.candidate import Candidate, StageOptions


def result(number: int) -> Infeasible:
    """Make a result that tells which candidate it is of."""
    candidate = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=number + 1
    )
    return Infeasible(candidate=candidate, reason=Reason(kind="test", detail=""))


def answer(batch: Batch, *, each_s: float = 0.001, warm: bool = True) -> Answer:
    numbers = range(batch.start, batch.stop)
    busy_s = each_s * len(numbers)
    return Answer(results=tuple(map(result, numbers)), error=None, busy_s=busy_s, warm=warm)


def failed(batch: Batch, number: int) -> Answer:
    results = tuple(result(before) for before in range(batch.start, number))
    return Answer(results=results, error=ValueError(f"at {number}"), busy_s=0.0, warm=True)


def take(batches: Batches, worker: int = 0, now_s: float = 0.0) -> Batch:
    batch = batches.take(worker, num_workers=2, now_s=now_s)
    assert batch is not None
    return batch


def measured(num_candidates: int, each_s: float) -> Batches:
    """Begin a search of which the first candidate is done."""
    batches = Batches(num_candidates)
    first = take(batches)
    batches.collect(first, answer(first, each_s=each_s))
    return batches


def size(batch: Batch) -> int:
    return batch.stop - batch.start


def test_batches_have_one_candidate_until_their_time_is_known() -> None:
    batches = Batches(100)
    assert [size(take(batches)) for _ in range(3)] == [1, 1, 1]


def test_the_first_batch_of_a_process_is_no_measure() -> None:
    batches = Batches(100)
    first = take(batches)
    batches.collect(first, answer(first, each_s=0.001, warm=False))
    assert size(take(batches)) == 1


@pytest.mark.parametrize("each_s", [0.001, 0.01, 1.0])
def test_batches_take_as_long_as_they_should(each_s: float) -> None:
    assert size(take(measured(100_000, each_s))) == max(1, round(TARGET_S / each_s))


def test_batches_shrink_at_the_end_but_not_to_nothing() -> None:
    batches = measured(241, 0.001)
    sizes: list[int] = []
    while sum(sizes) < 240:
        sizes.append(size(take(batches)))
    assert sizes == [60, 50, 50, 50, 30]


def test_a_lost_batch_is_handed_out_again() -> None:
    batches = Batches(2)
    first = take(batches, worker=0)
    batches.lose(0, first)
    assert take(batches, worker=1) == first


def test_a_batch_that_two_have_is_lost_when_both_are() -> None:
    batches = Batches(1)
    batch = take(batches, worker=0)
    assert take(batches, worker=1, now_s=2 * PATIENCE_S) == batch
    batches.lose(0, batch)
    assert batches.take(2, num_workers=1, now_s=0.0) is None
    batches.lose(1, batch)
    assert take(batches, worker=2) == batch


def test_a_slow_batch_is_given_to_another_worker_after_a_while_only() -> None:
    batches = Batches(1)
    batch = take(batches, worker=0)
    assert batches.take(1, num_workers=2, now_s=PATIENCE_S / 2) is None
    assert batches.take(0, num_workers=2, now_s=2 * PATIENCE_S) is None
    assert batches.take(1, num_workers=2, now_s=2 * PATIENCE_S) == batch
    assert batches.take(2, num_workers=2, now_s=2.5 * PATIENCE_S) is None


def test_the_second_answer_changes_nothing() -> None:
    batches = Batches(2)
    batch = take(batches)
    for _ in range(2):
        batches.collect(batch, answer(batch))
    assert batches.num_done == 1
    batches.lose(1, batch)
    assert take(batches).start == 1


def test_the_error_of_the_first_candidate_counts_though_it_comes_later() -> None:
    batches = Batches(10)
    zero, one, two = (take(batches) for _ in range(3))
    batches.collect(two, failed(two, 2))
    assert batches.take(0, num_workers=1, now_s=0.0) is None  # what comes after does not matter
    batches.collect(one, failed(one, 1))
    before = batches.complete
    batches.collect(zero, answer(zero))
    assert (before, batches.complete) == (False, True)
    with pytest.raises(ValueError, match="at 1"):
        batches.results()


@given(num_candidates=st.integers(1, 40), data=st.data())
def test_whatever_is_lost_or_late_the_results_are_all_there_and_in_order(
    num_candidates: int, data: st.DataObject
) -> None:
    batches, held, now_s = Batches(num_candidates), list[tuple[int, Batch]](), 0.0
    num_misfortunes = 0
    while not batches.complete:
        now_s += PATIENCE_S
        worker = data.draw(st.integers(0, 3))
        batch = batches.take(worker, num_workers=4, now_s=now_s)
        if batch is not None:
            held.append((worker, batch))
        if held and (batch is None or data.draw(st.booleans())):
            worker, batch = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if num_misfortunes < 20 and data.draw(st.booleans()):
                num_misfortunes += 1
                batches.lose(worker, batch)
            else:
                batches.collect(batch, answer(batch, each_s=data.draw(st.floats(0, 1))))
    assert batches.results() == list(map(result, range(num_candidates)))
    assert batches.num_done == num_candidates
