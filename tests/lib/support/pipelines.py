"""Simple models of pipelines: closed form, schedule as text, the timer on whole micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

from amp_ray.arrays import FloatArray
from amp_ray.cost.instructions import Order
from amp_ray.cost.timer import pipeline_s
from amp_ray.runtimes.traits import RUNTIMES


def simulate_s(
    stage_s: FloatArray,
    send_s: FloatArray,
    num_micro_batches: int,
    *,
    blocking: bool,
    duplex: bool = False,
) -> float:
    """Return the time of 1F1B with whole micro-batches, by the package's timer.

    Args:
        stage_s: Shape ``(2, pp)``. Forward and backward of one micro-batch.
        send_s: Shape ``(2, pp - 1)``. Activation and gradient across each cut.
        num_micro_batches: Per replica.
        blocking: Whether a transfer occupies both of its stages.
        duplex: Whether an activation and a gradient cross a blocking cut at the same time.
    """
    traits = replace(RUNTIMES["torch"], blocking_transfers=blocking, duplex_transfers=duplex)
    pp = stage_s.shape[1]
    return pipeline_s(stage_s[..., None], send_s[..., None], pp, num_micro_batches, traits)


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

    References:
        Li et al., AMP, arXiv:2210.07297. Narayanan et al., arXiv:2104.04473.

    Example:
        >>> import numpy as np
        >>> closed_form_s(np.array([1.0, 2.0]), np.array([0.5]), 4)
        9.5
    """
    return float(
        stage_time_s.sum() + cut_time_s.sum() + (num_micro_batches - 1) * stage_time_s.max()
    )


def schedule_text(pp: int, num_micro_batches: int) -> str:
    """Return the schedule: a line per stage, a column per step; ``2F0`` is stage 2, forward 0.

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


def passes_of(orders: Sequence[Order]) -> tuple[tuple[str, ...], ...]:
    """Return the forward and backward passes of each stage, without other instructions.

    Example:
        >>> from amp_ray.cost.instructions import Schedule
        >>> passes_of(Schedule(pp=2, num_slices=(1, 1)).lists())[1]
        ('1F0', '1B0', '1F1', '1B1')
    """
    return tuple(
        tuple(str(instruction) for instruction in order if instruction.kind in {"F", "B"})
        for order in orders
    )
