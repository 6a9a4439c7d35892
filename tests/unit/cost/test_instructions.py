"""Schedules as they are printed, and what is no schedule."""

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.cost.timeline import time_instructions
from support.pipelines import passes_of


def test_messages_stand_beside_their_passes() -> None:
    first, second = Schedule(pp=2, num_slices=(1, 1)).text().splitlines()
    assert first == ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP")
    assert second == ("1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP")


def test_blocking_stages_meet_between_passes() -> None:
    first, second = Schedule(pp=2, num_slices=(1, 1), blocking=True).text().splitlines()
    assert first == ("0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP")
    assert second == ("1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP")


def test_interleaved_chunks_take_turns() -> None:
    """Narayanan et al., arXiv:2104.04473, figure 4, with 2 stages, 2 chunks, 4 micro-batches."""
    first, second = passes_of(Schedule(pp=2, num_slices=(1,) * 4, virtual_stages=2).lists())
    assert " ".join(first) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert " ".join(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_slices_go_back_in_reverse() -> None:
    first, second = passes_of(Schedule(pp=2, num_slices=(2, 1)).lists())
    assert " ".join(first) == "0F0.0 0F0.1 0F1 0B0.1 0B0.0 0B1"
    assert " ".join(second) == "1F0.0 1F0.1 1B0.1 1F1 1B0.0 1B1"


@pytest.mark.parametrize(
    "values",
    [
        {"pp": 0, "num_slices": (1,)},
        {"pp": 1, "num_slices": ()},
        {"pp": 1, "num_slices": (1, 0)},
        {"pp": 1, "num_slices": (1,), "virtual_stages": 2},
    ],
)
def test_what_is_no_pipeline_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="found pp"):
        Schedule(**values)  # type: ignore[arg-type]


def test_stages_that_wait_for_each_other_are_named() -> None:
    first, second = Schedule(pp=2, num_slices=(1,)).lists()
    without_sending = (first[0], *first[2:])
    with pytest.raises(ValueError, match="wait for each other at 0RECV_B0, 1RECV_F0"):
        time_instructions((without_sending, second), lambda _: 1.0)
