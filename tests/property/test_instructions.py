"""Instruction lists: every schedule ends, in memory that is bounded."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.instructions import RECEIVES, SENDS, Schedule, other_end
from amp_ray.cost.timeline import time_instructions
from support.pipelines import passes_of, schedule_text


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule of up to 6 stages, 3 chunks and 12 micro-batches of up to 4 slices."""
    pp = draw(st.integers(1, 6))
    return Schedule(
        pp=pp,
        num_slices=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))),
        virtual_stages=draw(st.integers(1, 3)) if pp > 1 else 1,
    )


@given(st.integers(1, 6), st.integers(1, 9))
def test_lists_have_the_passes_of_the_text(pp: int, m: int) -> None:
    lines = [line.split(",") for line in schedule_text(pp, m).splitlines()]
    printed = tuple(tuple(cell for cell in line if cell) for line in lines)
    assert passes_of(Schedule(pp=pp, num_slices=(1,) * m).lists()) == printed


@given(schedules())
def test_every_schedule_ends_and_computes_every_unit_once(schedule: Schedule) -> None:
    orders = schedule.lists()
    timed = time_instructions(orders, lambda _: 1.0)
    done = Counter(item.instruction for order in timed for item in order)
    assert done == Counter(item for order in orders for item in order)
    assert max(done.values()) == 1
    units = schedule.virtual_stages * sum(schedule.num_slices)
    for order in orders:
        kinds = Counter(item.kind for item in order)
        assert kinds["F"] == kinds["B"] == units


@given(schedules())
def test_every_message_has_two_ends_in_one_order(schedule: Schedule) -> None:
    """Between two ranks, only the order distinguishes messages of the same kind."""
    orders = schedule.lists()
    for sender in range(schedule.pp):
        for receiver in range(schedule.pp):
            for send, receive in zip(SENDS, RECEIVES, strict=True):
                sent = [i for i in orders[sender] if i.kind == send and i.peer is not None
                        and i.peer % schedule.pp == receiver]  # fmt: skip
                received = [i for i in orders[receiver] if i.kind == receive and i.peer is not None
                            and i.peer % schedule.pp == sender]  # fmt: skip
                assert [other_end(i) for i in sent] == received


@given(schedules())
def test_backward_passes_follow_their_forward_passes_last_slice_first(schedule: Schedule) -> None:
    for stage in range(schedule.pp):
        order = schedule.passes(stage)
        at = {work: position for position, work in enumerate(order)}
        for kind, unit in order:
            if kind == "B":
                pieces = range(schedule.num_slices[unit.micro_batch])
                assert all(at["F", unit._replace(token_slice=k)] < at["B", unit] for k in pieces)
                later = unit._replace(token_slice=unit.token_slice + 1)
                assert later.token_slice not in pieces or at["B", later] < at["B", unit]


@given(schedules())
def test_units_in_flight_do_not_grow_with_the_number_of_micro_batches(schedule: Schedule) -> None:
    most = max(schedule.num_slices)
    group = 2 * schedule.pp - 1 if schedule.virtual_stages > 1 else 1
    for stage in range(schedule.pp):
        flying = np.cumsum([1 if kind == "F" else -1 for kind, _ in schedule.passes(stage)])
        ahead = 2 * (schedule.pp - 1 - stage) if group > 1 else schedule.pp - 1 - stage
        assert max(flying) <= ahead + (schedule.virtual_stages - 1) * group * most + most
