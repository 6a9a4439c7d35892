"""The 1F1B pipeline schedule: closed form, event simulation, text."""

from amp_ray.cost.kernels import FloatArray, simulate_blocking, simulate_overlapped


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
    """
    if blocking:
        return float(simulate_blocking(stage_s, send_s, num_micro_batches, duplex))
    return float(simulate_overlapped(stage_s, send_s, num_micro_batches))
