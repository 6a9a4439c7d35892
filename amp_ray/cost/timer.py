"""What the passes and messages of one iteration take, by the schedule of the pipeline."""

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.kernels import time_1f1b, time_chunks
from amp_ray.cost.schedule import num_ahead, pass_order
from amp_ray.runtimes.traits import RuntimeTraits


def pipeline_s(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> float:
    """Time the pipeline of one replica, pass by pass.

    Args:
        passes_s: Shape ``(2, num_chunks, num_slices)``. Forward and backward of one micro-batch;
            chunks in the model's order, token slices in theirs.
        sends_s: Shape ``(2, num_chunks - 1, num_slices)``. Activation and gradient across each cut.
        pp: Number of stages.
        num_micro_batches: Per replica.
        traits: Whether transfers stop the stages, as DeepSpeed's do, which waits for every send and
            receive; and whether an activation and a gradient then cross at the same time. Token
            slices are passed on by runtimes alone whose transfers run beside their computation.

    Returns:
        Seconds until the last pass of any stage ends.
    """
    passes, sends = np.ascontiguousarray(passes_s), np.ascontiguousarray(sends_s)
    num_chunks, num_slices = passes.shape[1:]
    modes = traits.blocking_transfers and num_slices == 1, traits.duplex_transfers
    if num_chunks == pp and num_slices == 1:
        return float(time_1f1b(passes[..., 0], sends[..., 0], num_micro_batches, *modes))
    shape = pp, num_micro_batches, num_chunks // pp, num_slices
    order, ahead = pass_order(*shape), num_ahead(*shape)
    return float(time_chunks(passes, sends, order, ahead, *modes))


def longest_pipeline_s(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> float:
    """Time the pipelines of all replicas and return the longest; arguments as `slowest_replica`."""
    return max(
        pipeline_s(passes_s[:2, :, replica], sends_s[:, :, replica], pp, num_micro_batches, traits)
        for replica in distinct_replicas(passes_s, sends_s)
    )


def slowest_replica(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> Breakdown:
    """Time every distinct replica and take the slowest one apart.

    Args:
        passes_s: Shape ``(3, num_chunks, dp, num_slices)``. Forward, backward, and the all-reduces
            within both.
        sends_s: Shape ``(2, num_chunks - 1, dp, num_slices)``. Activation and gradient across each
            cut.
        pp: Number of stages.
        num_micro_batches: Per replica.
        traits: As in `pipeline_s`.

    Returns:
        The pipeline's part of a breakdown.
    """
    parts = [
        _breakdown(passes_s[:, :, replica], sends_s[:, :, replica], pp, num_micro_batches, traits)
        for replica in distinct_replicas(passes_s, sends_s)
    ]
    return max(parts, key=lambda part: part.total_s)


def distinct_replicas(passes_s: FloatArray, sends_s: FloatArray) -> list[int]:
    """Return one replica of each kind; arguments as `slowest_replica`."""
    num_replicas = passes_s.shape[2]
    if num_replicas == 1:
        return [0]
    rows = [np.moveaxis(times, 2, 0).reshape(num_replicas, -1) for times in (passes_s, sends_s)]
    columns = np.concatenate(rows, axis=1)
    return list({row.tobytes(): replica for replica, row in enumerate(columns)}.values())


def _breakdown(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> Breakdown:
    """Time one replica with its transfers, and as if they took no time."""
    whole_s, still_s = (
        pipeline_s(passes_s[:2], sends, pp, num_micro_batches, traits)
        for sends in (sends_s, np.zeros_like(sends_s))
    )
    by_stage = passes_s.sum(axis=2).reshape(3, -1, pp).sum(axis=1)
    totals = by_stage[:2].sum(axis=0)
    slowest = int(np.argmax(totals))
    busy_s = num_micro_batches * float(totals[slowest])
    talking_s = num_micro_batches * float(by_stage[2, slowest])
    return Breakdown.of_pipeline(whole_s, still_s, busy_s, talking_s)
