import threading
from functools import partial

import pytest

from amp_ray.runtime.threads import at_once
from support.waiting import HANG_GUARD_S


def test_things_are_done_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    at_once([partial(barrier.wait, HANG_GUARD_S)] * 3, HANG_GUARD_S)
    assert not barrier.broken


def test_one_that_is_late_is_left_to_itself() -> None:
    quick, go = threading.Event(), threading.Event()
    at_once([quick.set, partial(go.wait, HANG_GUARD_S)], 0.1)
    assert quick.wait(HANG_GUARD_S)
    go.set()


def test_a_mistake_of_ours_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once([lambda: 1 // 0], HANG_GUARD_S)
