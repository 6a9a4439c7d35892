"""Reader of a user's DeepSpeed configuration, as a strategy."""

from collections.abc import Mapping
from typing import Any

from amp_ray.errors import shown
from amp_ray.strategies.zero import MOST_ZERO_STAGE


def read_ds_config(
    config: Mapping[str, Any], num_devices: int, num_parameters: int
) -> dict[str, Any]:
    """Return the settings of a configuration, as keys of a STRATEGY and of the step.

    It has tp as ``tensor_parallel.autotp_size`` and pp as ``pipeline.stages``; a missing one
    follows from the number of devices. It has no cuts, so the solver chooses them.

    Args:
        config: The object.
        num_devices: That the run has.
        num_parameters: Of the model; with ZeRO-3 weights stay where DeepSpeed may reuse them after
            as many.

    Raises:
        ValueError: If the batch sizes do not fit each other, or tp and pp cannot be told.
    """
    micro = _count(config, "train_micro_batch_size_per_gpu", 1, low=1)
    steps = _count(config, "gradient_accumulation_steps", 1, low=1)
    batch = _count(config, "train_batch_size", micro * steps, low=1)
    dp, rest = divmod(batch, micro * steps)
    per_replica, left = divmod(num_devices, dp or 1)
    if rest or left or not dp:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x a dp that divides {num_devices} devices"
        )
    tp = _count(config.get("tensor_parallel", {}), "autotp_size", 0)
    pp = _count(config.get("pipeline", {}), "stages", 0)
    if per_replica > 1 and not tp and not pp:
        raise ValueError(
            f"{num_devices} devices, dp {dp}: whether the other {per_replica} are tp or pp the "
            'configuration does not say; add "tensor_parallel": {"autotp_size": N} or "pipeline": '
            '{"stages": N}'
        )
    tp = tp or max(1, per_replica // (pp or 1))
    pp = pp or max(1, per_replica // tp)
    if tp * pp != per_replica:
        raise ValueError(f"tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp} devices, not {num_devices}")
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    record = {
        "tp": tp,
        "pp": pp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "zero_stage": zero.get("stage", 0),
    }
    distance = zero.get("stage3_max_reuse_distance")
    if record["zero_stage"] == MOST_ZERO_STAGE and isinstance(distance, int | float):
        record["reshard_after_forward"] = distance < num_parameters / tp
    return record


def _count(config: object, key: str, default: int, *, low: int = 0) -> int:
    """Return a count; ``auto`` and a missing key mean the default."""
    value = config.get(key, default) if isinstance(config, Mapping) else default
    if value == "auto":
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 10**9:
        raise ValueError(f"{key}: found {shown(value)}; expected a count")
    return value
