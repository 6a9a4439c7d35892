"""The result of a study as the JSON contract has it, and its history as CSV and JSON lines."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from amp_ray.calibration import calibration_to_json
from amp_ray.runtime.driver import ENDINGS, Result
from amp_ray.search.rows import SCHEMA, ranking_rows
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_json import strategy_to_json
from amp_ray.trials.outcome import Measured, Outcome, OutOfMemory, outcome_to_json
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import Told

HISTORY_COLUMNS: Final = (
    *("number", "tp", "pp", "dp", "micro_batch_size", "num_micro_batches", "bounds", "recompute"),
    *("repeats", "predicted_s", "outcome", "measured_s", "spread_s", "peak_memory_bytes"),
    *("wall_s", "reason"),
)

MEASUREMENT_COLUMNS: Final = (
    *("tp", "pp", "dp", "micro_batch_size", "bounds", "recompute"),
    *("measured_s", "spread_s", "peak_memory_bytes"),
)
"""Of a strategies file: what `calibrate --measurements` and `tune --trials replay:` read."""


def trial_json(told: Told, cluster: Cluster) -> dict[str, Any]:
    """Return a TRIAL of the contract; one that has not ended has the outcome null."""
    trial = told.trial
    empty = dict.fromkeys(
        ("outcome", "measured_s", "spread_s", "peak_memory_bytes", "wall_s", "reason")
    )
    return {
        "number": trial.number,
        "strategy": strategy_to_json(trial.strategy, cluster),
        "predicted_s": trial.predicted_s,
        "predicted_sigma": trial.sigma,
        "repeats": trial.repeats,
        "chosen": trial.reason,
        **(empty if told.outcome is None else outcome_to_json(told.outcome)),
    }


def study_json(result: Result, study: str) -> dict[str, Any]:
    """Return the object of ``tune --json``.

    Args:
        result: How the study ended.
        study: Its folder.
    """
    state, knowledge = result.state, result.knowledge
    cluster = state.experiment.cluster
    trials = [trial_json(told, cluster) for told in state.trials]
    best = result.best_number
    recommendation = recommend(state, knowledge)
    certificate = result.certificate
    return {
        "schema": SCHEMA,
        "study": study,
        "experiment": state.experiment.name,
        "ending": result.ending,
        "ending_text": ENDINGS[result.ending],
        "trials": trials,
        "best": None if best is None else trials[best],
        "recommendation": None
        if recommendation is None
        else {
            "strategy": strategy_to_json(recommendation.strategy, cluster),
            "predicted_s": recommendation.predicted_s,
            "measured_s": recommendation.measured_s,
            "trial": recommendation.number,
            "ties": [
                {
                    "strategy": strategy_to_json(tie.strategy, cluster),
                    "time_s": tie.time_s,
                    "measured": tie.measured,
                }
                for tie in recommendation.ties
            ],
            "reason": recommendation.reason,
        },
        "certificate": None
        if certificate is None
        else {
            "holds": certificate.holds,
            "bound_s": certificate.bound_s,
            "best_s": certificate.best_s,
            "gain_fraction": certificate.gain_fraction,
            "num_untested": certificate.num_untested,
            "text": certificate.text,
        },
        "calibration": None
        if knowledge.calibration is None
        else calibration_to_json(knowledge.calibration),
        "ranking": ranking_rows(knowledge.ranking, cluster, num_rows=None),
    }


def history_jsonl(trials: Iterable[Mapping[str, Any]]) -> str:
    """Return one TRIAL per line."""
    return "".join(json.dumps(trial) + "\n" for trial in trials)


def history_csv(told: Iterable[Told]) -> str:
    """Return a table of all trials, for spreadsheet programs."""
    rows = []
    for entry in told:
        trial = entry.trial
        outcome = {} if entry.outcome is None else outcome_to_json(entry.outcome)
        rows.append(
            {
                **_degrees(trial.strategy),
                "number": trial.number,
                "num_micro_batches": trial.strategy.num_micro_batches,
                "repeats": trial.repeats,
                "predicted_s": trial.predicted_s,
                **{key: outcome.get(key) for key in ("outcome", "measured_s", "spread_s")},
                "peak_memory_bytes": _spaced(outcome.get("peak_memory_bytes")),
                "wall_s": outcome.get("wall_s"),
                "reason": outcome.get("reason"),
            }
        )
    return _table(HISTORY_COLUMNS, rows)


def measurements_csv(told: Iterable[Told]) -> str:
    """Return what trials measured as a strategies file; repeats are left to the last one.

    Only strategies in the default placement with the same stages throughout have such a line.
    """
    last: dict[Strategy, Outcome] = {}
    for entry in told:
        plan, outcome = entry.trial.strategy, entry.outcome
        in_order = plan.placement == tuple(range(len(plan.placement)))
        plain = plan.is_uniform and plan.recompute is not None and in_order
        if plain and isinstance(outcome, Measured | OutOfMemory):
            last[plan] = outcome
    rows = [
        {
            **_degrees(strategy),
            "measured_s": outcome.iteration_time_s if isinstance(outcome, Measured) else "oom",
            "spread_s": outcome.spread_s if isinstance(outcome, Measured) else "",
            "peak_memory_bytes": _spaced(
                outcome.peak_memory_bytes if isinstance(outcome, Measured) else ()
            ),
        }
        for strategy, outcome in last.items()
    ]
    return _table(MEASUREMENT_COLUMNS, rows)


def _degrees(strategy: Strategy) -> dict[str, Any]:
    """Return the columns that tell a strategy."""
    return {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        "micro_batch_size": strategy.micro_batch_size,
        "bounds": _spaced(strategy.bounds),
        "recompute": strategy.recompute,
    }


def _spaced(numbers: Sequence[int] | None) -> str:
    """Return numbers with spaces between."""
    return " ".join(map(str, numbers or ()))


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
