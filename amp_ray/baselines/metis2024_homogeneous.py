"""The homogeneous planner published with Metis (2024): what it says a uniform strategy takes."""

from itertools import accumulate, pairwise

from amp_ray.baselines.metis2024 import (
    NO_REST_S,
    NO_WHOLE_TIME,
    NOT_PROFILED,
    OPTIMIZER_FACTOR,
    MetisCost,
    bytes_per_s,
    transfer_elements,
)
from amp_ray.baselines.metis2024_plan import MetisPlan, MetisSetting
from amp_ray.cost.estimate import Reason
from amp_ray.spec.candidate import Candidate


def homogeneous_bounds(num_layers: int, pp: int) -> tuple[int, ...]:
    """Return where the published planner cuts for a uniform strategy.

    Middle layers are shared out evenly; of those that are left the second stage gets the first.
    Input and output layer come on top, to the first and the last stage.

    Args:
        num_layers: Input and output layer included.
        pp: Number of stages.

    Returns:
        Shape ``(pp + 1,)``.

    Example:
        >>> homogeneous_bounds(10, 3)
        (0, 3, 6, 10)
        >>> homogeneous_bounds(11, 4)
        (0, 3, 6, 8, 11)
    """
    each, left = divmod(num_layers - 2, pp)
    lengths = [each + (1 <= stage <= left) for stage in range(pp)]
    lengths[0] += 1
    lengths[-1] += 1
    return (0, *accumulate(lengths))


def homogeneous_cost(setting: MetisSetting, candidate: Candidate) -> MetisCost | Reason:
    """Cost a uniform strategy on a cluster of one device type.

    It differs from `metis_cost` in the optimizer, which is divided by the stages, and in the
    gradient all-reduce, which is of the stage with the most parameters.

    Args:
        setting: What is given; its nodes are all of one type.
        candidate: Degrees and micro-batch size; they use every device.

    Returns:
        The cost, or why the planner drops the strategy.

    Raises:
        ValueError: If the cluster has several device types or another number of devices.
    """
    plan = _plan(setting, candidate)
    (kind,) = plan.type_order
    tp, size = candidate.tp, candidate.micro_batch_size
    entry = setting.profile.entries.get((kind, tp, size))
    if entry is None:
        return Reason(kind=NOT_PROFILED, detail=f"{kind}, tp {tp}, {size} samples")
    if entry.rest_s is None or abs(entry.rest_s) < NO_REST_S:
        return Reason(kind=NO_WHOLE_TIME, detail=f"{kind}, tp {tp}, {size} samples")
    whole = setting.whole
    times = [float(entry.layer_s[first:end].sum()) for first, end in pairwise(plan.bounds)]
    held = whole.layer_parameter_bytes
    largest = max(float(held[first:end].sum()) for first, end in pairwise(plan.bounds))
    rate = bytes_per_s(setting, plan, [0])
    sent = sum(transfer_elements(setting, plan, stage) for stage in range(plan.pp - 1))
    return MetisCost(
        execution_s=(plan.num_micro_batches - 1) * max(times) + sum(times),
        rest_s=plan.num_micro_batches * entry.rest_s,
        batch_generator_s=plan.num_micro_batches * whole.batch_generator_s,
        optimizer_s=OPTIMIZER_FACTOR * whole.optimizer_s / candidate.pp / tp,
        gradient_sync_s=2 * (candidate.dp - 1) / candidate.dp * largest / tp / rate,
        pipeline_p2p_s=sent / rate,
    )


def _plan(setting: MetisSetting, candidate: Candidate) -> MetisPlan:
    """Write a uniform strategy as a plan."""
    types = sorted(set(setting.node_types))
    if len(types) != 1 or candidate.num_devices != setting.cluster.num_devices:
        message = (
            f"a uniform strategy takes {candidate.num_devices} devices of one type, found "
            f"{setting.cluster.num_devices} of {', '.join(types)}"
        )
        raise ValueError(message)
    return MetisPlan(
        type_order=tuple(types),
        group_sizes=(candidate.dp * candidate.tp,) * candidate.pp,
        degrees=((candidate.dp, candidate.tp),) * candidate.pp,
        num_micro_batches=candidate.num_micro_batches,
        bounds=homogeneous_bounds(setting.profile.num_layers, candidate.pp),
    )
