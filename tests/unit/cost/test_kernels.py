"""The compiled loops as plain Python, so that every branch is seen.

What they mean is tested where they are used.
"""

import numpy as np
import pytest

from amp_ray.cost import kernels

STAGES = np.array([[1.0, 2.0, 1.5], [2.0, 3.0, 2.5]])
SENDS = np.array([[0.5, 0.25], [0.75, 0.125]])


@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_compiled_and_plain_blocking_simulation_agree(
    m: int,
    duplex: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    compiled = kernels.simulate_blocking(STAGES, SENDS, m, duplex)
    assert kernels.simulate_blocking.py_func(STAGES, SENDS, m, duplex) == compiled


@pytest.mark.parametrize("m", [1, 2, 7])
def test_compiled_and_plain_overlapped_simulation_agree(m: int) -> None:
    compiled = kernels.simulate_overlapped(STAGES, SENDS, m)
    assert kernels.simulate_overlapped.py_func(STAGES, SENDS, m) == compiled


LAYERS = np.array(
    [
        [0.0, 10.0, 20.0, 30.0],
        [0.0, 5.0, 9.0, 12.0],
        [4.0, 8.0, 2.0, 0.0],
        [0.0, 3.0, 6.0, 0.0],
    ]
)
STAGE = np.array([4.0, 2.0, 3.0, 2.0, 6.0, 15.0, 1.0, 100.0, 1.5])
TIED = np.array([0.0, 2.0, 7.0])
NOT_TIED = np.array([-1.0, -1.0, 0.0])


@pytest.mark.parametrize("tied", [TIED, NOT_TIED])
def test_compiled_and_plain_peak_agree(tied: np.ndarray) -> None:
    for start, end in ((0, 1), (0, 3), (1, 3)):
        compiled = kernels.stage_peak(LAYERS, STAGE, tied, start, end)
        assert kernels.stage_peak.py_func(LAYERS, STAGE, tied, start, end) == compiled
        temporary = LAYERS[2, start:end].max()
        kept = LAYERS[1, end] - LAYERS[1, start]
        plain = kernels.peak_with.py_func(LAYERS, STAGE, tied, (start, end), kept, temporary)
        assert plain == compiled


def test_peak_by_hand() -> None:
    # 20 parameters: 100 + 80; in flight 2 x 7, buffers 3 x 3, temporary 8, bucket 6 x 15
    assert kernels.stage_peak(LAYERS, STAGE, NOT_TIED, 1, 3) == 180 + 1.5 * (14 + 9 + 8 + 90)


def test_compiled_and_plain_earliest_starts_agree() -> None:
    stages = np.array([STAGE, STAGE])
    for limits in ([1.0, 1000.0], [260.0, 400.0]):
        compiled = kernels.earliest_starts(LAYERS, stages, TIED, np.array(limits))
        plain = kernels.earliest_starts.py_func(LAYERS, stages, TIED, np.array(limits))
        np.testing.assert_array_equal(plain, compiled)


@pytest.mark.parametrize("chunks", [1, 2])
def test_compiled_and_plain_most_like_blocks_agree(chunks: int) -> None:
    each = kernels.LikeBlocks(kept_again=2.0, kept=5.0, parameters=3.0, temporary=4.0, crossing=1.0)
    stages = np.array([STAGE, STAGE])
    found = []
    for limit in (10.0, 160.0, 250.0, 1000.0):
        given = stages, each, limit, (9, 2, chunks, 6)
        compiled = kernels.most_like_blocks(*given)
        np.testing.assert_array_equal(kernels.most_like_blocks.py_func(*given), compiled)
        found += compiled.tolist()
    assert found[:2] == [-1, -1]
    assert found[-1] == 9 > found[2] >= 0
