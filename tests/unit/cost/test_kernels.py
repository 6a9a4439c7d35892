"""The compiled loops as plain Python, so that every branch is seen.

What they mean is tested where they are used.
"""

import pickle

import numpy as np
import pytest

from amp_ray.cost.kernels import stages as kernels
from amp_ray.cost.timer import num_ahead, pass_order
from support.uncompiled import uncompiled

plain = uncompiled("amp_ray.cost.kernels.stages")

PASSES = np.arange(1.0, 13.0).reshape(2, 3, 2) / 8
SENDS = np.array([[[0.5, 0.25], [0.75, 0.125]], [[0.125, 1.0], [0.0, 0.5]]])


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7])
@pytest.mark.parametrize("modes", [(False, False), (True, False), (True, True)])
def test_compiled_and_plain_timer_of_1f1b_agree(
    num_micro_batches: int, modes: tuple[bool, bool]
) -> None:
    passes, sends = PASSES[..., 0].copy(), SENDS[..., 0].copy()
    arguments = passes, sends, num_micro_batches, *modes
    assert plain.time_1f1b(*arguments) == kernels.time_1f1b(*arguments)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7])
@pytest.mark.parametrize("modes", [(False, False), (True, False), (True, True)])
def test_compiled_and_plain_timer_of_chunks_agree(
    num_micro_batches: int, modes: tuple[bool, bool]
) -> None:
    passes = np.concatenate([PASSES, PASSES[:, ::-1]], axis=1)
    sends = np.concatenate([SENDS, SENDS[:, :1], SENDS], axis=1)
    shape = 3, num_micro_batches, 2, 2
    arguments = passes, sends, pass_order(*shape), num_ahead(*shape), *modes
    assert plain.time_chunks(*arguments) == kernels.time_chunks(*arguments)


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
        arguments = LAYERS, STAGE[np.newaxis], 0, tied, (start, end), 7.0, 8.0
        assert plain.peak_with(*arguments) == kernels.peak_with(*arguments)


def test_peak_by_hand() -> None:
    # 20 parameters: 100 + 80; in flight 2 x 7, buffers 3 x 3, temporary 8, bucket 6 x 15
    peak = kernels.peak_with(LAYERS, STAGE[np.newaxis], 0, NOT_TIED, (1, 3), 7.0, 8.0)
    assert peak == 180 + 1.5 * (14 + 9 + 8 + 90)


def test_compiled_and_plain_earliest_starts_agree() -> None:
    stages = np.array([STAGE, STAGE])
    for limits in ([1.0, 1000.0], [260.0, 400.0]):
        compiled = kernels.earliest_starts(LAYERS, stages, TIED, np.array(limits))
        expected = plain.earliest_starts(LAYERS, stages, TIED, np.array(limits))
        np.testing.assert_array_equal(expected, compiled)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("keeps_ends_once", [False, True])
def test_compiled_and_plain_most_like_blocks_agree(chunks: int, *, keeps_ends_once: bool) -> None:
    each = {
        "kept_again": 2.0,
        "kept": 5.0,
        "parameters": 3.0,
        "temporary": 4.0,
        "temporary_again": 4.5,
        "crossing": 1.0,
        "num_others": 1,
        "keeps_ends_once": keeps_ends_once,
    }
    stages = np.array([STAGE, STAGE])
    sent = pickle.loads(pickle.dumps(kernels.LikeBlocks(**each)))  # noqa: S301 - to a worker
    found = []
    for limit in (10.0, 160.0, 250.0, 1000.0):
        rest = limit, (9, 2, chunks, 6)
        compiled = kernels.most_like_blocks(stages, sent, *rest)
        expected = plain.most_like_blocks(stages, plain.LikeBlocks(**each), *rest)
        np.testing.assert_array_equal(expected, compiled)
        found += compiled.tolist()
    assert found[:2] == [-1, -1]
    assert found[-1] == 9 > found[2] >= 0
