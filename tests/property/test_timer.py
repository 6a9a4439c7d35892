"""The timer against instruction lists executed one by one, and properties of every pipeline."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.instructions import Instruction, Schedule
from amp_ray.cost.timeline import time_instructions
from amp_ray.cost.timer import pipeline_s
from amp_ray.runtimes.traits import RUNTIMES
from support.pipelines import closed_form_s, simulate_s

RELATIVE = 1e-12
"""Relative tolerance for sums that are added in different orders."""

CLOSE = 0.03
"""Maximum relative error of the closed form if stages differ by at most 5 %."""


SIZES = st.builds(
    lambda pp, m, v, slices: (pp, m, v if pp > 1 else 1, slices),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 3),
)
"""Stages, micro-batches, chunks per stage, token slices per micro-batch."""


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw stage times, send times and the number of micro-batches of a pipeline."""
    pp, m = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sends_last = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    return rng.random((2, pp)), sends_last * rng.random((2, pp - 1)), m


@given(
    size=SIZES,
    blocking=st.booleans(),
    duplex=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_timer_equals_timing_the_instructions_one_by_one(
    size: tuple[int, int, int, int], seed: int, *, blocking: bool, duplex: bool
) -> None:
    pp, num_micro_batches, virtual_stages, num_slices = size
    rng, num_chunks = np.random.default_rng(seed), pp * virtual_stages
    passes_s = rng.random((2, num_chunks, num_slices))
    sends_s = rng.choice([0.0, 0.1, 1.0]) * rng.random((2, num_chunks - 1, num_slices))
    meets = blocking and virtual_stages == num_slices == 1
    stands_still = blocking and virtual_stages > 1 and num_slices == 1

    def message_s(item: Instruction) -> float:
        backward = item.kind in {"B", "SEND_B"}
        cut = item.stage - 1 if backward else item.stage
        inner = 0 <= cut < num_chunks - 1
        return float(sends_s[int(backward), cut, item.token_slice or 0]) if inner else 0.0

    def seconds(item: Instruction) -> float:
        if item.kind in {"F", "B"}:  # a stage that waits is as busy as if it computed
            alone_s = float(passes_s[int(item.kind == "B"), item.stage, item.token_slice or 0])
            return alone_s + (message_s(item) if stands_still else 0.0)
        return message_s(item) if item.peer is not None and not stands_still else 0.0

    schedule = Schedule(
        pp=pp,
        num_slices=(num_slices,) * num_micro_batches,
        virtual_stages=virtual_stages,
        blocking=meets,
    )
    timed = time_instructions(schedule.lists(), seconds, blocking=meets, duplex=duplex)
    traits = replace(
        RUNTIMES["torch"], blocking_transfers=blocking, duplex_transfers=duplex and meets
    )
    iteration_s = pipeline_s(passes_s, sends_s, pp, num_micro_batches, traits)
    assert iteration_s == pytest.approx(max(row[-1].end_s for row in timed), rel=RELATIVE)


@given(size=SIZES, seed=st.integers(0, 2**32 - 1))
def test_what_crosses_together_still_holds_stages_up(
    size: tuple[int, int, int, int], seed: int
) -> None:
    pp, num_micro_batches, virtual_stages, _ = size
    rng, num_chunks = np.random.default_rng(seed), pp * virtual_stages
    passes_s, sends_s = rng.random((2, num_chunks, 1)), rng.random((2, num_chunks - 1, 1))
    free = replace(RUNTIMES["torch"], blocking_transfers=False)
    together = replace(free, blocking_transfers=True, duplex_transfers=True)
    free_s, together_s = (
        pipeline_s(passes_s, sends_s, pp, num_micro_batches, traits) for traits in (free, together)
    )
    assert together_s >= free_s * (1 - RELATIVE)


@given(pipelines())
def test_overlapping_and_duplex_never_take_longer_than_blocking(
    pipeline: tuple[np.ndarray, np.ndarray, int],
) -> None:
    blocking = simulate_s(*pipeline, blocking=True)
    assert simulate_s(*pipeline, blocking=True, duplex=True) <= blocking * (1 + RELATIVE)
    assert simulate_s(*pipeline, blocking=False) <= blocking * (1 + RELATIVE)


@given(pipelines(), st.booleans(), st.floats(0.001, 1000))
def test_scaling_every_time_scales_the_iteration(
    pipeline: tuple[np.ndarray, np.ndarray, int],
    blocking: bool,  # noqa: FBT001 - drawn
    factor: float,
) -> None:
    stage_s, send_s, m = pipeline
    once = simulate_s(stage_s, send_s, m, blocking=blocking)
    scaled = simulate_s(factor * stage_s, factor * send_s, m, blocking=blocking)
    assert scaled == pytest.approx(factor * once, rel=1e-9)


@given(pipelines(), st.data())
def test_a_slower_part_never_makes_the_iteration_shorter(
    pipeline: tuple[np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    stage_s, send_s, m = pipeline
    blocking = data.draw(st.booleans())
    slower_stage, slower_send = stage_s.copy(), send_s.copy()
    slower = data.draw(st.sampled_from([slower_stage, slower_send]))
    if slower.size:
        slower.flat[data.draw(st.integers(0, slower.size - 1))] += 0.5
    before = simulate_s(stage_s, send_s, m, blocking=blocking)
    after = simulate_s(slower_stage, slower_send, m, blocking=blocking)
    assert after >= before * (1 - RELATIVE)


@given(pipelines())
def test_closed_form_is_exact_for_equal_stages_and_free_transfers(
    pipeline: tuple[np.ndarray, np.ndarray, int],
) -> None:
    stage_s, send_s, m = pipeline
    equal = np.repeat(stage_s[:, :1], stage_s.shape[1], axis=1)
    free = np.zeros_like(send_s)
    closed_s = closed_form_s(equal.sum(axis=0), free.sum(axis=0), m)
    assert simulate_s(equal, free, m, blocking=True) == pytest.approx(closed_s, rel=1e-9)


@given(pipelines(), st.booleans())
def test_no_iteration_beats_its_slowest_stage_or_its_first_micro_batch(
    pipeline: tuple[np.ndarray, np.ndarray, int],
    blocking: bool,  # noqa: FBT001 - drawn
) -> None:
    stage_s, send_s, m = pipeline
    totals = stage_s.sum(axis=0)
    bound = max(m * totals.max(), totals.sum() + send_s.sum())
    assert simulate_s(*pipeline, blocking=blocking) >= bound * (1 - RELATIVE)


@given(st.integers(1, 16), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_closed_form_is_close_for_a_good_partition(pp: int, fill: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward_s = rng.uniform(0.95, 1.0, pp)
    stage_s = np.array([forward_s, 2 * forward_s])
    free = np.zeros((2, pp - 1))
    closed_s = closed_form_s(stage_s.sum(axis=0), free.sum(axis=0), fill * pp)
    simulated_s = simulate_s(stage_s, free, fill * pp, blocking=False)
    assert closed_s * (1 - CLOSE) <= simulated_s <= closed_s * (1 + RELATIVE)
