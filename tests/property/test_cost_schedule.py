import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.schedule import bubble_fraction, closed_form_s, schedule_text, simulate_s
from support.pipelines import Pass, passes, run_blocking, run_overlapped

RELATIVE = 1e-12
"""Sums in another order differ by rounding only."""

CLOSE = 0.03
"""How far the closed form may be off where stages differ by at most 5 %."""


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Stage times, send times and the number of micro-batches of a random pipeline."""
    pp, m = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sends_last = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    return rng.random((2, pp)), sends_last * rng.random((2, pp - 1)), m


@given(pipelines(), st.booleans())
def test_blocking_simulation_equals_executed_instructions(
    pipeline: tuple[np.ndarray, np.ndarray, int],
    duplex: bool,  # noqa: FBT001 - drawn
) -> None:
    found = simulate_s(*pipeline, blocking=True, duplex=duplex)
    assert found == pytest.approx(run_blocking(*pipeline, duplex=duplex), rel=RELATIVE)


@given(pipelines())
def test_overlapped_simulation_equals_longest_path(
    pipeline: tuple[np.ndarray, np.ndarray, int],
) -> None:
    found = simulate_s(*pipeline, blocking=False)
    assert found == pytest.approx(run_overlapped(*pipeline), rel=RELATIVE)


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
    busy_s = m * float(equal[:, 0].sum())
    assert 1 - busy_s / closed_s == pytest.approx(bubble_fraction(len(equal[0]), m), abs=1e-9)


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


@given(st.integers(1, 6), st.integers(1, 9))
def test_text_lists_the_passes_of_1f1b_in_order(pp: int, m: int) -> None:
    for stage, line in enumerate(schedule_text(pp, m).splitlines()):
        printed = [cell for cell in line.split(",") if cell]
        letters = {"forward": "F", "backward": "B"}
        wanted = [
            f"{stage}{letters[work.direction]}{work.micro_batch}" for work in passes(stage, pp, m)
        ]
        assert printed == wanted


@given(st.integers(1, 6), st.integers(1, 9))
def test_text_never_shows_a_pass_before_what_it_needs(pp: int, m: int) -> None:
    rows = [line.split(",") for line in schedule_text(pp, m).splitlines()]
    for i in range(m):
        forward = [row.index(f"{stage}F{i}") for stage, row in enumerate(rows)]
        backward = [row.index(f"{stage}B{i}") for stage, row in enumerate(rows)]
        path = forward + backward[::-1]
        assert path == sorted(set(path))


def test_first_stage_runs_ahead_by_the_depth_of_the_pipeline() -> None:
    kinds = [work.direction for work in passes(0, 3, 4)]
    assert kinds[:3] == ["forward", "forward", "forward"]
    assert passes(2, 3, 4)[:2] == [
        Pass(direction="forward", micro_batch=0),
        Pass(direction="backward", micro_batch=0),
    ]
