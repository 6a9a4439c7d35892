"""The pipeline of every replica, simulated; the slowest one counts."""

import numpy as np

from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.schedule import simulate_s
from amp_ray.cost.topology import FloatArray
from amp_ray.spec.traits import RuntimeTraits


def slowest_replica(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, traits: RuntimeTraits
) -> Breakdown:
    """Simulate every distinct replica and take the slowest one apart.

    Args:
        stage_s: Shape ``(3, pp, dp)``. Forward, backward, and the all-reduces within both.
        send_s: Shape ``(2, pp - 1, dp)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.
        traits: How transfers and computation share time.

    Returns:
        The pipeline's part of a breakdown.
    """
    num_replicas = stage_s.shape[2]
    columns = np.concatenate([stage_s.reshape(-1, num_replicas), send_s.reshape(-1, num_replicas)])
    distinct = {row.tobytes(): replica for replica, row in enumerate(columns.T)}
    parts = [
        _replica(stage_s[:, :, replica], send_s[:, :, replica], num_micro_batches, traits)
        for replica in distinct.values()
    ]
    return max(parts, key=lambda part: part.total_s)


def _replica(
    stage_s: FloatArray, send_s: FloatArray, num_micro_batches: int, traits: RuntimeTraits
) -> Breakdown:
    """Simulate one replica with its transfers and as if they took no time.

    With interleaved stages every micro-batch crosses every cut once per chunk, and what the
    pipeline takes to fill and drain shrinks by their number.
    """
    chunks = traits.virtual_stages
    pipeline_s, still_s = (
        simulate_s(
            stage_s[:2],
            sends,
            num_micro_batches,
            blocking=traits.blocking_transfers,
            duplex=traits.duplex_transfers,
        )
        for sends in (send_s * chunks, np.zeros_like(send_s))
    )
    totals = stage_s[:2].sum(axis=0)
    slowest = int(np.argmax(totals))
    busy_s = num_micro_batches * float(totals[slowest])
    talking_s = num_micro_batches * float(stage_s[2, slowest])
    return Breakdown(
        compute_s=busy_s - talking_s,
        tensor_parallel_s=talking_s,
        bubble_s=max(0.0, still_s - busy_s) / chunks,
        pipeline_p2p_s=max(0.0, pipeline_s - still_s),
    )
