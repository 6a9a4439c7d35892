from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.schedule import simulate_s, slowest_replica
from amp_ray.spec.traits import RuntimeTraits

NO_CUT = np.zeros((2, 0, 1))


def one_replica(*stages: tuple[float, float, float]) -> np.ndarray:
    """Return forward, backward and all-reduce seconds of the stages, shape ``(3, pp, 1)``."""
    return np.array(stages).T[:, :, None]


def test_one_stage_computes_and_talks(traits: RuntimeTraits) -> None:
    found = slowest_replica(one_replica((1.0, 2.0, 0.5)), NO_CUT, 4, traits)
    assert (found.compute_s, found.tensor_parallel_s) == (10.0, 2.0)
    assert (found.bubble_s, found.pipeline_p2p_s) == (0.0, 0.0)


def test_what_the_slowest_stage_waits_for_is_the_bubble(traits: RuntimeTraits) -> None:
    stages = one_replica((1.0, 2.0, 0.0), (1.0, 3.0, 0.0))
    found = slowest_replica(stages, np.zeros((2, 1, 1)), 4, traits)
    assert found.compute_s == 16.0
    assert found.bubble_s == pytest.approx(3.0)
    assert found.total_s == pytest.approx(7.0 + 3 * 4.0)


def test_transfers_are_what_they_add(traits: RuntimeTraits) -> None:
    stages, sends = one_replica((1.0, 2.0, 0.0), (1.0, 2.0, 0.0)), np.full((2, 1, 1), 0.5)
    found = slowest_replica(stages, sends, 4, traits)
    whole_s = simulate_s(stages[:2, :, 0], sends[:, :, 0], 4, blocking=True)
    still_s = simulate_s(stages[:2, :, 0], 0 * sends[:, :, 0], 4, blocking=True)
    assert found.pipeline_p2p_s == pytest.approx(whole_s - still_s)
    assert found.total_s == pytest.approx(whole_s)


def test_runtime_decides_how_transfers_run(traits: RuntimeTraits) -> None:
    stages, sends = one_replica((1.0, 2.0, 0.0), (1.0, 2.0, 0.0)), np.full((2, 1, 1), 0.5)
    alone, both = stages[:2, :, 0], sends[:, :, 0]
    overlapped = slowest_replica(stages, sends, 4, replace(traits, blocking_transfers=False))
    assert overlapped.total_s == pytest.approx(simulate_s(alone, both, 4, blocking=False))
    duplex = slowest_replica(stages, sends, 4, replace(traits, duplex_transfers=True))
    wanted_s = simulate_s(alone, both, 4, blocking=True, duplex=True)
    assert duplex.total_s == pytest.approx(wanted_s)


def test_slowest_replica_counts_wherever_it_stands(traits: RuntimeTraits) -> None:
    fast, slow = one_replica((1.0, 2.0, 0.0)), one_replica((2.0, 2.0, 0.0))
    sends = np.zeros((2, 0, 3))
    for order in ([fast, slow, fast], [slow, fast, fast]):
        found = slowest_replica(np.concatenate(order, axis=2), sends, 4, traits)
        assert found.total_s == 16.0
