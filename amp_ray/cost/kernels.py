"""Compiled loops: arrays in, numbers out; what they mean stands in `amp_ray.cost.schedule`."""

import numba
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@numba.njit("f8(f8[:,::1],f8[:,::1],i8,b1)", cache=True)
def simulate_blocking(
    stage_s: FloatArray,
    send_s: FloatArray,
    m: int,
    duplex: bool,  # noqa: FBT001 - compiled code has no keywords
) -> float:
    """Walk DeepSpeed's TrainSchedule: in each step every second stage has a forward slot.

    Stage ``j`` runs forward ``i`` in step ``2 i + j`` and backward ``i`` in step
    ``2 i + 2 pp - 1 - j``. Before it computes, it exchanges with its neighbour what the
    neighbour made in the step before; the pair leaves the exchange together.
    """
    pp = stage_s.shape[1]
    clock = np.zeros(pp)
    for step in range(2 * (m + pp - 1)):
        for j in range(1, pp):
            forward = step - j
            if forward % 2 != 0:
                continue
            sends_forward = forward >= 0 and forward // 2 < m
            backward = step - 1 - (2 * pp - 1 - j)
            sends_backward = backward >= 0 and backward % 2 == 0 and backward // 2 < m
            if sends_forward or sends_backward:
                forward_s = send_s[0, j - 1] if sends_forward else 0.0
                backward_s = send_s[1, j - 1] if sends_backward else 0.0
                exchange_s = max(forward_s, backward_s) if duplex else forward_s + backward_s
                time = max(clock[j - 1], clock[j]) + exchange_s
                clock[j - 1] = time
                clock[j] = time
        for j in range(pp):
            forward = step - j
            backward = step - (2 * pp - 1 - j)
            if forward % 2 == 0:
                if forward >= 0 and forward // 2 < m:
                    clock[j] += stage_s[0, j]
            elif backward >= 0 and backward % 2 == 0 and backward // 2 < m:
                clock[j] += stage_s[1, j]
    return float(clock.max())


@numba.njit("f8(f8[:,::1],f8[:,::1],i8)", cache=True)
def simulate_overlapped(stage_s: FloatArray, send_s: FloatArray, m: int) -> float:
    """Walk the same order, with transfers that delay only the micro-batch they carry."""
    pp = stage_s.shape[1]
    clock = np.zeros(pp)
    forward_done = np.zeros((pp, m))
    backward_done = np.zeros((pp, m))
    for step in range(2 * (m + pp - 1)):
        for j in range(pp):
            forward = step - j
            backward = step - (2 * pp - 1 - j)
            if forward % 2 == 0:
                i = forward // 2
                if forward >= 0 and i < m:
                    ready = 0.0
                    if j > 0:
                        ready = forward_done[j - 1, i] + send_s[0, j - 1]
                    clock[j] = max(clock[j], ready) + stage_s[0, j]
                    forward_done[j, i] = clock[j]
            elif backward >= 0 and backward % 2 == 0 and backward // 2 < m:
                i = backward // 2
                ready = 0.0
                if j < pp - 1:
                    ready = backward_done[j + 1, i] + send_s[1, j]
                clock[j] = max(clock[j], ready) + stage_s[1, j]
                backward_done[j, i] = clock[j]
    return float(clock.max())


@numba.njit("f8(f8[:,::1],f8[::1],f8[::1],i8,i8,f8)", cache=True)
def peak_with(
    layers: FloatArray,
    stage: FloatArray,
    tied: FloatArray,
    start: int,
    end: int,
    temporary: float,
) -> float:
    """Return the peak bytes of a stage ``[start, end)`` whose largest temporary is known.

    Arrays as in `stage_peak`.
    """
    parameters = layers[0, end] - layers[0, start]
    if start <= tied[0] and tied[1] < end and tied[0] >= 0:
        parameters -= tied[2]
    kept = stage[1] * (layers[1, end] - layers[1, start])
    buffers = stage[2] * layers[3, start] + stage[3] * layers[3, end]
    tail = max(stage[4] * min(parameters, stage[5]), stage[6] * parameters)
    return float(stage[7] + stage[0] * parameters + stage[8] * (kept + buffers + temporary + tail))


@numba.njit("f8(f8[:,::1],f8[::1],f8[::1],i8,i8)", cache=True)
def stage_peak(
    layers: FloatArray, stage: FloatArray, tied: FloatArray, start: int, end: int
) -> float:
    """Return the peak bytes of one rank of a stage that takes layers ``[start, end)``.

    Args:
        layers: Shape ``(4, num_layers + 1)``. Prefix sums of parameters and of bytes kept per
            micro-batch in flight; temporary bytes of each layer; bytes that cross each boundary.
        stage: Shape ``(9,)``. State bytes per parameter; micro-batches in flight; buffers for
            what enters and what leaves; bytes per bucket element; largest bucket; bytes per
            parameter in the optimizer step; constant bytes; allocator factor.
        tied: Shape ``(3,)``. Positions of the two layers that share a weight (or -1), and its
            parameters on this rank.
        start: First layer.
        end: Layer after the last.
    """
    temporary = 0.0
    for layer in range(start, end):
        temporary = max(temporary, layers[2, layer])
    return float(peak_with(layers, stage, tied, start, end, temporary))


@numba.njit("i8[:,::1](f8[:,::1],f8[:,::1],f8[::1],f8[::1])", cache=True)
def earliest_starts(
    layers: FloatArray, stages: FloatArray, tied: FloatArray, limits: FloatArray
) -> IntArray:
    """Return the earliest start from which a stage with this end fits.

    A longer stage can need less than a shorter one, where a smaller tensor crosses the boundary
    at its start: so starts close to the end that do not fit are passed over, and the earliest
    start of the first run of starts that do is returned. What a longer stage can spare is no more
    than the buffer at its start and a weight that it would hold twice; beyond that none fits.

    Args:
        layers: As in `stage_peak`.
        stages: Shape ``(num_stages, 9)``, rows as in `stage_peak`.
        tied: As in `stage_peak`.
        limits: Shape ``(num_stages,)``. Bytes that a rank of the stage may need.

    Returns:
        Shape ``(num_stages, num_layers + 1)``; the end itself where no stage fits.
    """
    num_layers = layers.shape[1] - 1
    starts = np.zeros((len(limits), num_layers + 1), np.int64)
    for stage in range(len(limits)):
        for end in range(1, num_layers + 1):
            starts[stage, end] = end
            temporary = 0.0
            for start in range(end - 1, -1, -1):
                temporary = max(temporary, layers[2, start])
                peak = peak_with(layers, stages[stage], tied, start, end, temporary)
                buffers = stages[stage, 8] * stages[stage, 2] * layers[3, start]
                spared = buffers + stages[stage, 0] * max(tied[2], 0.0)
                if peak <= limits[stage]:
                    starts[stage, end] = start
                elif starts[stage, end] < end or peak - spared > limits[stage]:
                    break
    return starts
