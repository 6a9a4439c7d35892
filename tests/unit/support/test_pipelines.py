import numpy as np

from support.pipelines import (
    Exchange,
    Instruction,
    Pass,
    instructions,
    merged,
    passes,
    ready_steps,
    run_blocking,
    run_overlapped,
)

F0, F1 = Pass(direction="forward", micro_batch=0), Pass(direction="forward", micro_batch=1)
B0, B1 = Pass(direction="backward", micro_batch=0), Pass(direction="backward", micro_batch=1)

TWO = np.array([[1.0, 1.0], [2.0, 2.0]])
HALF_SECOND = np.full((2, 1), 0.5)


def crossing(*tensors: Pass, cut: int = 0) -> Exchange:
    return Exchange(cut=cut, tensors=frozenset(tensors))


def test_first_stage_runs_ahead_by_the_depth_of_the_pipeline() -> None:
    assert passes(0, 2, 2) == [F0, F1, B0, B1]
    assert passes(1, 2, 2) == [F0, B0, F1, B1]


def test_exchanges_stand_between_the_passes_that_make_and_need_a_tensor() -> None:
    assert instructions(0, 2, 1) == [F0, crossing(F0), crossing(B0), B0]
    assert instructions(1, 2, 1) == [crossing(F0), F0, B0, crossing(B0)]


def test_a_stage_in_the_middle_serves_both_cuts() -> None:
    front, back = 0, 1
    assert instructions(1, 3, 1) == [
        crossing(F0, cut=front),
        F0,
        crossing(F0, cut=back),
        crossing(B0, cut=back),
        B0,
        crossing(B0, cut=front),
    ]


def test_exchanges_that_follow_each_other_at_both_ends_become_one() -> None:
    lists = [instructions(stage, 2, 2) for stage in range(2)]
    assert merged(lists) == [
        [F0, crossing(F0), F1, crossing(F1, B0), B0, crossing(B1), B1],
        [crossing(F0), F0, B0, crossing(F1, B0), F1, B1, crossing(B1)],
    ]


def test_an_exchange_waits_for_both_ends() -> None:
    meeting = crossing(F0)
    lists: list[list[Instruction]] = [[F0, meeting], [meeting, B0], []]
    assert list(ready_steps(lists, [0, 0, 0])) == [((0,), F0)]
    assert list(ready_steps(lists, [1, 0, 0])) == [((0, 1), meeting)]
    assert list(ready_steps(lists, [2, 1, 0])) == [((1,), B0)]
    assert list(ready_steps(lists, [2, 2, 0])) == []


def test_two_stages_by_hand() -> None:
    # see the same pipeline in the tests of amp_ray.cost.schedule
    assert run_blocking(TWO, HALF_SECOND, 2, duplex=False) == 11.0
    assert run_blocking(TWO, HALF_SECOND, 2, duplex=True) == 10.5
    assert run_overlapped(TWO, HALF_SECOND, 2) == 10.0
