"""The ROW object of the JSON contract."""

from collections.abc import Mapping
from typing import Any

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.search.ranking import Ranking
from amp_ray.spec.candidate import AnyCandidate, GroupsCandidate
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy_json import strategy_to_json

SCHEMA = 1

_NESTED = ("placement", "stages", "token_slices")
"""Keys of a STRATEGY that are no cells."""


def row(result: Result, position: int | None, cluster: Cluster) -> dict[str, Any]:
    """Return one result as a ROW; what a model does not know is null.

    Args:
        result: An estimate, or a candidate from which nothing could be made.
        position: Place in the ranking from 1; None where rows are not ranked.
        cluster: Gives the placement its host names.
    """
    if not isinstance(result, Estimate):
        return {
            "position": position,
            "strategy": _candidate(result.candidate),
            "iteration_time_s": None,
            "breakdown_s": None,
            "peak_memory_bytes": None,
            "memory_limit_bytes": None,
            "feasible": False,
            "reason": str(result.reason),
            "launchable": False,
            "failure_probability": 1.0,
            "lower_bound_s": None,
            "cost": None,
            "tokens_per_s": None,
            "warnings": [],
        }
    return {
        "position": position,
        "strategy": strategy_to_json(result.strategy, cluster),
        "iteration_time_s": result.iteration_time_s,
        "breakdown_s": None if result.breakdown is None else result.breakdown.to_json(),
        "peak_memory_bytes": [round(value) for value in result.peak_memory_bytes] or None,
        "memory_limit_bytes": [round(value) for value in result.memory_limit_bytes] or None,
        "feasible": result.feasible,
        "reason": "; ".join(map(str, result.reasons)) or None,
        "launchable": result.launchable,
        "failure_probability": result.failure_probability,
        "lower_bound_s": result.lower_bound_s,
        "cost": None if result.cost is None else result.cost.to_json(),
        "tokens_per_s": result.tokens_per_s,
        "warnings": list(result.warnings),
    }


def flat_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ROW or a TRIAL without nested mappings, as tables and data frames take it.

    Keys of ``strategy`` stand beside the others, those of ``breakdown_s`` and ``cost`` with it in
    front; lists of numbers are texts with spaces between, placements and stages are left out.
    """
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key == "strategy":
            flat |= {name: _cell(each) for name, each in value.items() if name not in _NESTED}
        elif key in {"breakdown_s", "cost"}:
            prefix = key.removesuffix("_s")
            flat |= {f"{prefix}_{name}": each for name, each in (value or {}).items()}
        else:
            flat[key] = _cell(value)
    return flat


def _cell(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    """Return a value as a cell."""
    if isinstance(value, list):
        return " ".join(map(str, map(_cell, value)))
    return f"{value['kind']}:{value['layers']}" if isinstance(value, dict) else value


def ranking_rows(
    ranking: Ranking, cluster: Cluster, *, num_rows: int | None
) -> list[dict[str, Any]]:
    """Return the first rows of a ranking; None lists every one, the infeasible included."""
    shown = (
        ranking.results
        if num_rows is None
        else ranking.results[: min(num_rows, ranking.num_feasible)]
    )
    rows = [row(result, position, cluster) for position, result in enumerate(shown, start=1)]
    if ranking.objective == "time-cost":
        for position, each in enumerate(rows):
            each["pareto"] = position < ranking.num_front
    return rows


def _candidate(candidate: AnyCandidate) -> dict[str, Any]:
    """Return a STRATEGY object without cuts and placement; null is what stages would choose."""
    if isinstance(candidate, GroupsCandidate):
        tp, pp, dp, recompute = None, None, None, candidate.recompute
        others: dict[str, Any] = {}
    else:
        options = candidate.options
        tp, pp, dp, recompute = options.tp, candidate.pp, options.dp, options.recompute
        others = options.others
    return {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        **others,
        "micro_batch_size": candidate.micro_batch_size,
        "num_micro_batches": candidate.num_micro_batches,
        "bounds": None,
        "recompute": recompute.to_json(),
        "placement": None,
    }
