"""The 1F1B pipeline schedule: closed form, event simulation, text."""

import numpy as np

from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.kernels import FloatArray, simulate_blocking, simulate_overlapped
from amp_ray.spec.traits import RuntimeTraits


def closed_form_s(
    stage_time_s: FloatArray, cut_time_s: FloatArray, num_micro_batches: int
) -> float:
    """Estimate one synchronous 1F1B iteration, without the gradient all-reduce.

    The first micro-batch fills the pipeline; each later one waits for the
    slowest stage: ``T = sum(t) + sum(c) + (m - 1) * max(t)``.

    Args:
        stage_time_s: Shape ``(pp,)``. Forward plus backward of one micro-batch.
        cut_time_s: Shape ``(pp - 1,)``. Activation plus gradient sent across each cut.
        num_micro_batches: ``m``, per data-parallel replica.

    Returns:
        Seconds per iteration.

    Raises:
        ValueError: If the shapes disagree or ``num_micro_batches < 1``.

    References:
        Li et al., AMP, arXiv:2210.07297. Narayanan et al., arXiv:2104.04473.

    Example:
        >>> closed_form_s(np.array([1.0, 2.0]), np.array([0.5]), 4)
        9.5
    """
    if len(cut_time_s) != len(stage_time_s) - 1 or num_micro_batches < 1:
        message = (
            f"{len(stage_time_s)} stages need {len(stage_time_s) - 1} cuts and at least one "
            f"micro-batch, found {len(cut_time_s)} cuts and {num_micro_batches} micro-batches"
        )
        raise ValueError(message)
    return float(
        stage_time_s.sum() + cut_time_s.sum() + (num_micro_batches - 1) * stage_time_s.max()
    )


def simulate_s(
    stage_s: FloatArray,
    send_s: FloatArray,
    num_micro_batches: int,
    *,
    blocking: bool,
    duplex: bool = False,
) -> float:
    """Simulate one 1F1B iteration event by event, in O(pp x m).

    Args:
        stage_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        send_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: ``m``, per data-parallel replica.
        blocking: Whether a transfer occupies both of its stages (DeepSpeed, which waits for
            every send and receive) or runs beside their computation.
        duplex: Whether an activation and a gradient cross a blocking cut at the same time.

    Returns:
        Seconds until the last backward pass ends.

    Raises:
        ValueError: If the shapes disagree or ``num_micro_batches < 1``.
    """
    if send_s.shape[1] != stage_s.shape[1] - 1 or num_micro_batches < 1:
        message = (
            f"{stage_s.shape[1]} stages need {stage_s.shape[1] - 1} cuts and at least one "
            f"micro-batch, found {send_s.shape[1]} cuts and {num_micro_batches} micro-batches"
        )
        raise ValueError(message)
    stages, sends = np.ascontiguousarray(stage_s), np.ascontiguousarray(send_s)
    if blocking:
        return float(simulate_blocking(stages, sends, num_micro_batches, duplex))
    return float(simulate_overlapped(stages, sends, num_micro_batches))


def schedule_text(pp: int, num_micro_batches: int) -> str:
    """Print the schedule: a line per stage, a column per step, ``2F0`` = stage 2, forward 0.

    Every pass takes one step here, as in DeepSpeed's own schedule: stage ``j`` has forward ``i``
    in step ``2 i + j`` and backward ``i`` in step ``2 i + 2 pp - 1 - j``.

    Args:
        pp: Number of stages.
        num_micro_batches: ``m``.

    Returns:
        Comma-separated values; an idle step is empty.

    Example:
        >>> print(schedule_text(2, 2))
        0F0,,0F1,0B0,,0B1
        ,1F0,1B0,1F1,1B1,
    """
    lines = []
    for stage in range(pp):
        steps = [""] * (2 * (num_micro_batches + pp - 1))
        for i in range(num_micro_batches):
            steps[2 * i + stage] = f"{stage}F{i}"
            steps[2 * i + 2 * pp - 1 - stage] = f"{stage}B{i}"
        lines.append(",".join(steps))
    return "\n".join(lines)


def bubble_fraction(pp: int, num_micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the idle share of a pipeline of equal stages with free transfers.

    Args:
        pp: Number of stages.
        num_micro_batches: ``m``.
        virtual_stages: Model chunks per stage, which divide fill and drain.

    References:
        Narayanan et al., arXiv:2104.04473, section 2.2.

    Example:
        >>> bubble_fraction(4, 12)
        0.2
    """
    idle = (pp - 1) / virtual_stages
    return idle / (num_micro_batches + idle)


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
