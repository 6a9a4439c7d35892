import numpy as np
import pytest

from amp_ray.cost.schedule import bubble_fraction, closed_form_s, schedule_text, simulate_s

TWO = np.array([[1.0, 1.0], [2.0, 2.0]])
HALF_SECOND = np.full((2, 1), 0.5)


def test_closed_form_fills_once_and_waits_for_the_slowest() -> None:
    assert closed_form_s(np.array([1.0, 3.0, 2.0]), np.array([0.5, 0.25]), 4) == 6.75 + 9.0


def test_one_stage_runs_its_micro_batches() -> None:
    assert simulate_s(TWO[:, :1], np.zeros((2, 0)), 5, blocking=True) == 15.0
    assert simulate_s(TWO[:, :1], np.zeros((2, 0)), 5, blocking=False) == 15.0


def test_one_micro_batch_passes_every_stage_twice() -> None:
    # forward 1 + 0.5 + 1, backward 2 + 0.5 + 2
    assert simulate_s(TWO, HALF_SECOND, 1, blocking=True) == 7.0
    assert simulate_s(TWO, HALF_SECOND, 1, blocking=False) == 7.0


def test_blocking_transfers_stop_both_stages() -> None:
    # F0 ends at 1, meets until 1.5; both compute F: 2.5. Then stage 1 B0: 4.5, while stage 0
    # waits; they exchange gradient 0 and activation 1 until 5.5, or 5 at the same time; and so on
    assert simulate_s(TWO, HALF_SECOND, 2, blocking=True) == 11.0
    assert simulate_s(TWO, HALF_SECOND, 2, blocking=True, duplex=True) == 10.5


def test_overlapped_transfers_delay_only_what_they_carry() -> None:
    # stage 1: F0 1.5-2.5, B0 -4.5, F1 -5.5 (it arrived at 2.5), B1 -7.5; stage 0: B1 8-10
    assert simulate_s(TWO, HALF_SECOND, 2, blocking=False) == 10.0


def test_arrays_need_not_be_contiguous() -> None:
    wide = np.zeros((2, 4))
    wide[:, ::2] = TWO
    assert simulate_s(wide[:, ::2], HALF_SECOND, 1, blocking=True) == 7.0


@pytest.mark.parametrize(("cuts", "m"), [(0, 1), (2, 1), (1, 0)])
def test_wrong_shapes_are_refused(cuts: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"found {cuts} cuts and {m} micro-batches"):
        simulate_s(TWO, np.zeros((2, cuts)), m, blocking=True)
    with pytest.raises(ValueError, match=f"found {cuts} cuts and {m} micro-batches"):
        closed_form_s(TWO[0], np.zeros(cuts), m)


def test_bubble_shrinks_with_micro_batches_and_chunks() -> None:
    assert bubble_fraction(1, 8) == 0.0
    assert bubble_fraction(4, 3) == 0.5
    assert bubble_fraction(4, 3, virtual_stages=3) == 0.25


def test_one_stage_alternates() -> None:
    assert schedule_text(1, 2) == "0F0,0B0,0F1,0B1"
