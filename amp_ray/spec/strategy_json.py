"""The STRATEGY object of the JSON contract, to and from values."""

from collections.abc import Mapping
from typing import Any

from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Stage, Strategy


def strategy_to_json(strategy: Strategy, cluster: Cluster) -> dict[str, Any]:
    """Return the STRATEGY object of a strategy; stages are spelled out only where they differ."""
    record: dict[str, Any] = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        "micro_batch_size": strategy.micro_batch_size,
        "num_micro_batches": strategy.num_micro_batches,
        "bounds": list(strategy.bounds),
        "recompute": strategy.recompute or [stage.recompute for stage in strategy.stages],
        "placement": [
            [cluster.nodes[cluster.node_of_device[device]].name, cluster.slot_of_device[device]]
            for device in strategy.placement
        ],
    }
    if not strategy.is_uniform or strategy.recompute is None:
        record["stages"] = [
            _stage_to_json(stage, first, strategy.micro_batch_size)
            for stage, first in zip(strategy.stages, strategy.first_rank, strict=True)
        ]
    return record


def strategy_from_json(record: Mapping[str, Any], cluster: Cluster) -> Strategy:
    """Read a STRATEGY object; the inverse of ``strategy_to_json`` on the same cluster.

    Without ``placement``, rank ``r`` runs on device ``r`` of the hostfile's order.

    Raises:
        ValueError: If a key is missing, or the placement names no device of the cluster.
    """
    try:
        stages = _stages_from_json(record)
        placement = record.get("placement")
        return Strategy(
            stages=stages,
            micro_batch_size=int(record["micro_batch_size"]),
            num_micro_batches=int(record["num_micro_batches"]),
            placement=tuple(range(sum(stage.num_ranks for stage in stages)))
            if placement is None
            else tuple(_device_index(cluster, host, slot) for host, slot in placement),
        )
    except KeyError as error:
        message = f"a strategy needs the key {error.args[0]!r}, found {sorted(record)}"
        raise ValueError(message) from None


def _stage_to_json(stage: Stage, first_rank: int, micro_batch_size: int) -> dict[str, Any]:
    """Return one entry of ``stages``."""
    return {
        "layers": [stage.first_layer, stage.end_layer],
        "tp": stage.tp,
        "dp": stage.dp,
        "devices": list(range(first_rank, first_rank + stage.num_ranks)),
        "recompute": stage.recompute,
        "shares": list(stage.shares or (micro_batch_size,) * stage.dp),
    }


def _stages_from_json(record: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Read ``stages`` where given, else make them from ``bounds``."""
    if "stages" in record:
        even = record.get("dp") is not None
        return tuple(_stage_from_json(stage, even=even) for stage in record["stages"])
    bounds = [int(bound) for bound in record["bounds"]]
    recompute = record.get("recompute", "none")
    per_stage = [recompute] * (len(bounds) - 1) if isinstance(recompute, str) else recompute
    if not bounds or bounds[0] != 0 or len(per_stage) != len(bounds) - 1:
        message = (
            f"bounds must start at 0 and recompute fit their stages, found {bounds} and {recompute}"
        )
        raise ValueError(message)
    return tuple(
        Stage(
            first_layer=first,
            end_layer=end,
            tp=int(record["tp"]),
            dp=int(record["dp"]),
            recompute=chosen,
        )
        for first, end, chosen in zip(bounds, bounds[1:], per_stage, strict=False)
    )


def _stage_from_json(record: Mapping[str, Any], *, even: bool) -> Stage:
    """Read one entry of ``stages``; with one dp for all stages, equal shares need no telling."""
    first, end = record["layers"]
    shares = tuple(int(share) for share in record["shares"])
    told = not (even and len(set(shares)) == 1)
    return Stage(
        first_layer=int(first),
        end_layer=int(end),
        tp=int(record["tp"]),
        dp=int(record["dp"]),
        recompute=record.get("recompute", "none"),
        shares=shares if told else None,
    )


def _device_index(cluster: Cluster, host: str, slot: int) -> int:
    """Return the device at one slot of a host."""
    places = zip(cluster.node_of_device, cluster.slot_of_device, strict=True)
    for device, (node, device_slot) in enumerate(places):
        if cluster.nodes[node].name == host and device_slot == slot:
            return device
    message = f"placement names slot {slot} of host {host!r}, which the cluster does not have"
    raise ValueError(message)
