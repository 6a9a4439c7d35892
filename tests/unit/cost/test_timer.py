"""The timer by hand: 1F1B, and the slowest replica taken apart."""

from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.timer import in_flight, slowest_replica
from amp_ray.runtimes.traits import RuntimeTraits
from support.pipelines import simulate_s

TWO = np.array([[1.0, 1.0], [2.0, 2.0]])
HALF_SECOND = np.full((2, 1), 0.5)


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


def test_a_stage_holds_a_micro_batch_and_what_the_stages_behind_it_wait_for() -> None:
    assert in_flight(4, 16).tolist() == [4, 3, 2, 1]
    assert in_flight(4, 2).tolist() == [2, 2, 2, 1]
    # chunks ahead: 2 x 3 + 4 = 10, and one being computed, of half a stage each
    assert in_flight(4, 16, virtual_stages=2).tolist() == [5.5, 4.5, 3.5, 2.5]
    assert in_flight(4, 3, virtual_stages=2)[0] == 3
    # all slices of one micro-batch, and one more for every stage behind
    assert in_flight(4, 16, slice_share=0.25).tolist() == [1.75, 1.5, 1.25, 1.0]
    assert in_flight(4, 1, slice_share=0.25)[0] == 1.0


NO_CUT = np.zeros((2, 0, 1, 1))


def one_replica(*stages: tuple[float, float, float]) -> np.ndarray:
    """Return forward, backward and all-reduce seconds of the stages, shape ``(3, pp, 1, 1)``."""
    return np.array(stages).T[:, :, None, None]


def test_one_stage_computes_and_talks(traits: RuntimeTraits) -> None:
    found = slowest_replica(one_replica((1.0, 2.0, 0.5)), NO_CUT, 1, 4, traits)
    assert (found.compute_s, found.tensor_parallel_s) == (10.0, 2.0)
    assert (found.bubble_s, found.pipeline_p2p_s) == (0.0, 0.0)


def test_what_the_slowest_stage_waits_for_is_the_bubble(traits: RuntimeTraits) -> None:
    stages = one_replica((1.0, 2.0, 0.0), (1.0, 3.0, 0.0))
    found = slowest_replica(stages, np.zeros((2, 1, 1, 1)), 2, 4, traits)
    assert found.compute_s == 16.0
    assert found.bubble_s == pytest.approx(3.0)
    assert found.total_s == pytest.approx(7.0 + 3 * 4.0)


def test_transfers_are_what_they_add(traits: RuntimeTraits) -> None:
    stages, sends = one_replica((1.0, 2.0, 0.0), (1.0, 2.0, 0.0)), np.full((2, 1, 1, 1), 0.5)
    found = slowest_replica(stages, sends, 2, 4, traits)
    whole_s = simulate_s(stages[:2, :, 0, 0], sends[:, :, 0, 0], 4, blocking=True)
    still_s = simulate_s(stages[:2, :, 0, 0], 0 * sends[:, :, 0, 0], 4, blocking=True)
    assert found.pipeline_p2p_s == pytest.approx(whole_s - still_s)
    assert found.total_s == pytest.approx(whole_s)


def test_runtime_decides_how_transfers_run(traits: RuntimeTraits) -> None:
    stages, sends = one_replica((1.0, 2.0, 0.0), (1.0, 2.0, 0.0)), np.full((2, 1, 1, 1), 0.5)
    alone, both = stages[:2, :, 0, 0], sends[:, :, 0, 0]
    overlapped = slowest_replica(stages, sends, 2, 4, replace(traits, blocking_transfers=False))
    assert overlapped.total_s == pytest.approx(simulate_s(alone, both, 4, blocking=False))
    duplex = slowest_replica(stages, sends, 2, 4, replace(traits, duplex_transfers=True))
    wanted_s = simulate_s(alone, both, 4, blocking=True, duplex=True)
    assert duplex.total_s == pytest.approx(wanted_s)


def test_slowest_replica_counts_wherever_it_stands(traits: RuntimeTraits) -> None:
    fast, slow = one_replica((1.0, 2.0, 0.0)), one_replica((2.0, 2.0, 0.0))
    sends = np.zeros((2, 0, 3, 1))
    for order in ([fast, slow, fast], [slow, fast, fast]):
        found = slowest_replica(np.concatenate(order, axis=2), sends, 1, 4, traits)
        assert found.total_s == 16.0
