from itertools import product

import numpy as np
import pytest

from amp_ray.search.grid_bounds import WholeLayers


def brute_force_s(room: WholeLayers) -> float:
    """Compare every way to give stages layers and ends at cuts between nodes."""
    each_s = np.repeat(room.each_s, room.stages)
    best_s = np.inf
    most = range(room.num_layers + 1)
    for held in product(most, repeat=len(each_s)):
        if sum(held) != room.num_layers or held.count(0) > room.num_others:
            continue
        for ends in product(range(3), repeat=len(each_s)):
            if sum(ends) == room.num_ends:
                best_s = min(
                    best_s, float((np.array(held) * each_s + np.array(ends) * room.across_s).max())
                )
    return best_s


@pytest.mark.parametrize("seed", range(40))
def test_no_way_to_share_layers_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = rng.multinomial(int(rng.integers(1, 4)), [0.5, 0.5])
    room = WholeLayers(
        each_s=rng.integers(1, 6, 2).astype(np.float64)[stages > 0],
        stages=stages[stages > 0].astype(np.int64),
        num_layers=int(rng.integers(1, 7)),
        num_others=int(rng.integers(0, 3)),
        across_s=float(rng.integers(0, 4)),
        num_ends=int(rng.integers(0, 2 * stages.sum() + 1)),
    )
    best_s = brute_force_s(room)
    assert room.least_s() <= best_s
    if not room.num_ends and best_s < np.inf:
        assert room.least_s() == pytest.approx(best_s)
