"""The ROW object of the JSON contract, and records that explain the time of a plan.

The records list times by stage and by cut, and the difference between two plans.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.search.planner import Planner
from amp_ray.search.ranking import Ranking
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

SCHEMA = 1

_LEAST_BOUND: Final = 0.5
"""Least share of a time that its lower bound must be: below, it leaves more than twice the speed
open, and is not shown."""

_UNKNOWN = (
    *("iteration_time_s", "interval_s", "breakdown_s", "peak_memory_bytes", "memory_limit_bytes"),
    *("lower_bound_s", "memory_bytes", "cost", "tokens_per_s", "tokens_per_s_per_device", "mfu"),
    "training",
)
"""Keys that are null for a candidate without an estimate."""


def row(
    result: Result, position: int | None, experiment: Experiment, planner: Planner | None = None
) -> dict[str, Any]:
    """Return one result as a ROW; unknown values are null.

    ``position`` counts from 1; None if rows are not ranked. Without a planner the parts of the
    memory are left out.
    """
    if not isinstance(result, Estimate):
        return {
            "position": position,
            "strategy": _candidate(result.candidate),
            **dict.fromkeys(_UNKNOWN),
            "feasible": False,
            "reason": str(result.reason),
            "launchable": False,
            "failure_probability": 1.0,
            "warnings": [],
        }
    idle = idle_devices(result.strategy, experiment.cluster)
    remedies = [
        {"change": remedy.change, "iteration_time_s": remedy.iteration_time_s}
        for remedy in result.remedies
    ]
    return {
        "position": position,
        "strategy": strategy_to_json(result.strategy, experiment.cluster),
        "iteration_time_s": result.iteration_time_s,
        "interval_s": None if result.interval_s is None else list(result.interval_s),
        "breakdown_s": None if result.breakdown is None else result.breakdown.to_json(),
        "peak_memory_bytes": [round(value) for value in result.peak_memory_bytes] or None,
        "memory_limit_bytes": [round(value) for value in result.memory_limit_bytes] or None,
        "feasible": result.feasible,
        "reason": "; ".join(map(str, result.reasons)) or None,
        "launchable": result.launchable,
        "failure_probability": result.failure_probability,
        "lower_bound_s": shown_bound_s(result.lower_bound_s, result.iteration_time_s),
        "cost": None if result.cost is None else result.cost.to_json(),
        "memory_bytes": None if planner is None else _memory(planner, result.strategy),
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "mfu": result.mfu,
        "training": training_needs(result, experiment.tokens),
        "warnings": list(result.warnings),
        **({"idle_devices": idle} if idle else {}),
        **({"remedies": remedies} if remedies else {}),
    }


def shown_bound_s(bound_s: float | None, time_s: float) -> float | None:
    """Return a lower bound on a time; None where it is too far below it to say anything."""
    return bound_s if bound_s is not None and bound_s >= _LEAST_BOUND * time_s else None


def idle_devices(strategy: Strategy, cluster: Cluster) -> dict[str, int]:
    """Count the devices that a strategy leaves idle, by their names."""
    used = set(strategy.placement)
    if len(used) == cluster.num_devices:
        return {}
    nodes = (node for index, node in enumerate(cluster.node_of_device) if index not in used)
    return dict(Counter(cluster.nodes[node].device.name for node in nodes))


def _memory(planner: Planner, strategy: Strategy) -> list[dict[str, int]] | None:
    """Return the parts of each stage's peak memory, or None if the planner has none."""
    parts = planner.memory_parts(strategy)
    if parts is None:
        return None
    return [{name: round(value) for name, value in stage.items()} for stage in parts]


def training_needs(estimate: Estimate, tokens: float | None) -> dict[str, float | None] | None:
    """Return days, device-hours and money to train on ``tokens``; None without a token count."""
    if tokens is None or estimate.tokens_per_s is None:
        return None
    seconds = tokens / estimate.tokens_per_s
    per_iteration = None if estimate.cost is None else estimate.cost.per_iteration
    return {
        "days": seconds / SECONDS_PER_DAY,
        "device_hours": seconds * len(estimate.strategy.placement) / SECONDS_PER_HOUR,
        "money": per_iteration and per_iteration * seconds / estimate.iteration_time_s,
    }


def flat_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ROW or a TRIAL without nested mappings, for tables and data frames.

    Keys of ``strategy`` move to the top level. Keys of ``breakdown_s``, ``cost``, ``training`` and
    ``memory_bytes`` move there too, prefixed with that name, those of ``memory_bytes`` as lists
    with a number per stage. Placements, stages and other lists of lists of ``strategy`` are left
    out.
    """
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key == "strategy":
            flat |= {
                name: _cell(item)
                for name, item in value.items()
                if name not in {"placement", "stages"} and not _is_nested(item)
            }
        elif key in {"breakdown_s", "cost", "training"}:
            prefix = key.removesuffix("_s")
            flat |= {f"{prefix}_{name}": item for name, item in (value or {}).items()}
        elif key == "memory_bytes":
            names = value[0] if value else ()
            flat |= {f"memory_{name}": [item[name] for item in value] for name in names}
        elif key == "idle_devices":
            flat[key] = sum(value.values())
        elif key == "remedies":
            flat[key] = "; ".join(remedy["change"] for remedy in value)
        else:
            flat[key] = _cell(value)
    return flat


def strategy_rows(records: Iterable[Mapping[str, Any]], cluster: Cluster) -> list[dict[str, Any]]:
    """Return rows of a ranking, or trials, as flat rows that can be read back.

    Where stages, token slices or a placement beside the default are no column, the column
    ``strategy`` has the STRATEGY object as JSON.
    """
    places = [list(place) for place in cluster.places]
    rows = []
    for record in records:
        strategy = record["strategy"]
        is_flat = not strategy.get("stages") and not strategy.get("token_slices")
        whole = not is_flat or strategy.get("placement") not in (None, places)
        rows.append(flat_row(record) | ({"strategy": json.dumps(strategy)} if whole else {}))
    return rows


def _is_nested(value: Any) -> bool:  # noqa: ANN401 - any value of JSON
    return isinstance(value, list) and any(isinstance(item, list) for item in value)


def _cell(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    if isinstance(value, list):
        return [_cell(item) for item in value]
    return f"{value['kind']}:{value['layers']}" if isinstance(value, dict) else value


def ranking_rows(
    ranking: Ranking,
    experiment: Experiment,
    planner: Planner | None = None,
    *,
    num_rows: int | None,
) -> list[dict[str, Any]]:
    """Return the first ``num_rows`` rows; None returns all, infeasible ones included."""
    shown = (
        ranking.results
        if num_rows is None
        else ranking.results[: min(num_rows, ranking.num_feasible)]
    )
    rows = [
        row(result, position, experiment, planner) for position, result in enumerate(shown, start=1)
    ]
    if ranking.objective == "time-cost":
        for position, shown_row in enumerate(rows):
            shown_row["pareto"] = position < ranking.num_front
    return rows


def _candidate(candidate: AnyCandidate) -> dict[str, Any]:
    """Return a STRATEGY object without cuts and placement; open choices are null."""
    options = candidate.options
    degrees: dict[str, int | None] = dict.fromkeys(("tp", "pp", "dp"))
    if isinstance(candidate, Candidate):
        degrees = {"tp": options.tp, "pp": candidate.pp, "dp": options.dp}
    return {
        **degrees,
        **options.others,
        "micro_batch_size": candidate.micro_batch_size,
        "num_micro_batches": candidate.num_micro_batches,
        "bounds": None,
        "recompute": options.recompute.to_json(),
        "placement": None,
    }


def stage_records(cost_model: CostModel, estimate: Estimate) -> list[dict[str, Any]]:
    """Return each stage's times per micro-batch and its memory.

    Times are those of the slowest replica; the bottleneck is the stage with the longest passes. A
    strategy whose bounds count operators has no such times.
    """
    strategy, cluster = estimate.strategy, cost_model.experiment.cluster
    passes_s, longest_s = None, np.zeros(strategy.pp)
    if not strategy.has_operators:
        stages = PlacedStages.of_strategy(strategy)
        passes_s, _ = cost_model.seconds(stages, strategy.chunk_bounds or strategy.bounds)
        chunks = (3, -1, strategy.pp, passes_s.shape[-1])
        passes_s = passes_s.reshape(chunks).sum(axis=1)  # sum over the chunks of each stage
        longest_s = (passes_s[0] + passes_s[1]).max(axis=1)
    records = []
    for index, stage in enumerate(strategy.stages):
        record: dict[str, Any] = {
            "layers": [stage.first_layer, stage.end_layer],
            "nodes": list(
                dict.fromkeys(cluster.places[device][0] for device in strategy.devices(index))
            ),
            "peak_memory_bytes": round(estimate.peak_memory_bytes[index]),
            "memory_limit_bytes": round(estimate.memory_limit_bytes[index]),
        }
        if passes_s is not None:
            part = int((passes_s[0, index] + passes_s[1, index]).argmax())
            forward_s, backward_s, talk_s = map(float, passes_s[:, index, part])
            record |= {
                "forward_s": forward_s,
                "backward_s": backward_s,
                "tensor_parallel_s": talk_s,
                "is_bottleneck": index == int(longest_s.argmax()),
            }
        records.append(record)
    return records


SCOPES: Final = ("within nodes", "within racks", "between nodes")
"""Links between the devices of a group, fastest first."""


def link_records(cost_model: CostModel, strategy: Strategy) -> list[dict[str, Any]]:
    """Return the links used by transfers between stages, within layers, and for gradients."""
    cluster = cost_model.experiment.cluster
    records: list[dict[str, Any]] = []
    if strategy.pp > 1 and not strategy.has_operators:
        stages = PlacedStages.of_strategy(strategy)
        _, sends_s = cost_model.seconds(stages, strategy.chunk_bounds or strategy.bounds)
        sends_s = sends_s[:, : strategy.pp - 1]
        for cut, seconds in enumerate(sends_s.max(axis=2).T.tolist()):
            devices = [*strategy.devices(cut), *strategy.devices(cut + 1)]
            records.append(
                {
                    "what": "activations and gradients",
                    "from_stage": cut,
                    "to_stage": cut + 1,
                    "scope": _scope(devices, cluster),
                    "activation_s": seconds[0],
                    "gradient_s": seconds[1],
                }
            )
    for what, groups in _groups(strategy).items():
        if groups and len(groups[0]) > 1:
            scope = max((_scope(group, cluster) for group in groups), key=SCOPES.index)
            records.append({"what": what, "num_groups": len(groups), "scope": scope})
    return records


def difference(one: Estimate, other: Estimate) -> dict[str, float]:
    """Return the extra seconds of each part of an iteration in the other plan."""
    seconds = {"iteration_time": other.iteration_time_s - one.iteration_time_s}
    if one.breakdown is None or other.breakdown is None:
        return seconds
    before, after = one.breakdown.to_json(), other.breakdown.to_json()
    return seconds | {part: after[part] - before[part] for part in before}


def _groups(strategy: Strategy) -> dict[str, list[list[int]]]:
    """Return the devices of every collective group, by kind of group."""
    tensor, data = [], []
    for grid in PlacedStages.of_strategy(strategy).grids:
        tensor += grid.tolist()
        data += grid.T.tolist()
    return {"tensor parallel groups": tensor, "data parallel groups": data}


def _scope(devices: Sequence[int], cluster: Cluster) -> str:
    """Return which of `SCOPES` the devices of a group are in."""
    if len({cluster.host_of_node[cluster.node_of_device[device]] for device in devices}) > 1:
        return "between nodes"
    hosts = {cluster.host_of_device[device] for device in devices}
    return "within nodes" if len(hosts) == 1 else "within racks"
