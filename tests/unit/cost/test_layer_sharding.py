import numpy as np
import pytest

from amp_ray.clusters.device import find_device
from amp_ray.cost.collective import taken_share
from amp_ray.cost.step_end import exposed_s

NOTHING = np.zeros(3)
PASSES = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])


def simulated_s(
    passes_s: np.ndarray, gathers_s: np.ndarray, again_s: np.ndarray, scatters_s: np.ndarray
) -> float:
    """Run one micro-batch event by event: one stream computes, one talks one layer ahead."""
    forward_s, backward_s = passes_s
    now = free = gathers_s[0]
    for layer, seconds in enumerate(forward_s):
        free = max(now, free) + (gathers_s[layer + 1] if layer + 1 < len(forward_s) else 0.0)
        now = max(now + seconds, free)
    now += again_s[-1]
    for layer in reversed(range(len(backward_s))):
        talk = scatters_s[layer + 1] if layer + 1 < len(backward_s) else 0.0
        talk += again_s[layer - 1] if layer else 0.0
        now = max(now + backward_s[layer], now + talk)
    return float(now + scatters_s[0] - passes_s.sum())


def test_computation_is_slower_beside_a_collective() -> None:
    assert exposed_s(PASSES, np.array([0.0, 1.0, 0.0]), NOTHING, NOTHING, 0.25) == 0.25


@pytest.mark.parametrize("seed", range(50))
def test_windows_equal_a_simulation_of_both_streams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.exponential(size=(5, rng.integers(1, 8)))
    assert exposed_s(drawn[:2], *drawn[2:]) == pytest.approx(simulated_s(drawn[:2], *drawn[2:]))


@pytest.mark.parametrize(("name", "share"), [("A100-80", 24 / 108), ("cpu", 0.5)])
def test_a_collective_takes_a_multiprocessor_per_channel(name: str, share: float) -> None:
    assert taken_share(find_device(name)) == share
