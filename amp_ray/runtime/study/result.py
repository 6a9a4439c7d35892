"""The result of a study as JSON, and its history as CSV and JSON lines."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from amp_ray.calibration.calibration import calibration_to_json
from amp_ray.clusters.cluster import Cluster
from amp_ray.inputs.strategies import (
    DIMENSION_COLUMNS,
    STRATEGY_COLUMNS,
    strategy_cells,
    strategy_to_json,
)
from amp_ray.search.rows import SCHEMA, row
from amp_ray.trials.outcome import (
    NO_OUTCOME,
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
    blames_host,
    outcome_to_json,
)
from amp_ray.tuner.certificate import Certificate
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.recommendation import Recommendation, ranked, recommend
from amp_ray.tuner.state import TrialRecord, TunerState
from amp_ray.tuner.unexpected import CommonFailure

Ending = Literal[
    "certificate",
    "settled",
    "budget",
    "time-budget",
    "exhausted",
    "hosts",
    "crashes",
    "interrupted",
    "failed",
]

ENDINGS: Final[dict[Ending, str]] = {
    "certificate": "no untested strategy is likely to be better",
    "settled": "only a strategy far faster than predicted could be better, and the budget is too "
    "small to rule that out",
    "budget": "the budget of trials is spent",
    "time-budget": "the time budget is spent",
    "exhausted": "every strategy that is expected to run has run",
    "hosts": "no group of hosts is left that can be reached and has room on its disks",
    "crashes": "two strategies crashed in the same way before anything was measured",
    "interrupted": "it was interrupted",
    "failed": "it could not go on",
}
"""``--resume`` continues a study after any of these endings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study, or of one run of its driver."""

    state: TunerState
    knowledge: Knowledge
    certificate: Certificate | None  # bound on untested strategies' times; None without any trial
    ending: Ending
    # The trials that crashed in the same way, if the study stopped because of them
    common_failure: CommonFailure | None = None

    @property
    def recommendation(self) -> Recommendation | None:
        """The recommended strategy, as all outputs report it; None if there is none."""
        return recommend(self.state, self.knowledge)

    @property
    def best_number(self) -> int | None:
        """Trial number of the recommended strategy's median run; None if it has not run."""
        recommended = self.recommendation
        return best_trial(self.knowledge) if recommended and recommended.measured_s else None


def best_trial(knowledge: Knowledge) -> int | None:
    """Return the trial number of the best measured strategy's median run."""
    best = knowledge.status.best
    return None if best is None else knowledge.status.figures[best].typical_number


HISTORY_COLUMNS: Final = (
    *("number", *STRATEGY_COLUMNS[:4], "num_micro_batches", *STRATEGY_COLUMNS[4:]),
    *("repeats", "predicted_s", "outcome", "measured_s", "mean_s", "spread_s", "warnings"),
    *("peak_memory_bytes", "wall_s", "reason"),
)

MEASUREMENT_COLUMNS: Final = (
    *STRATEGY_COLUMNS,
    *("measured_s", "mean_s", "spread_s", "peak_memory_bytes"),
)
"""Columns of a strategies file, as `calibrate --measurements` and `tune --trials replay:` read."""


def trial_json(trial_record: TrialRecord, cluster: Cluster) -> dict[str, Any]:
    """Return an element of ``trials`` of ``tune --json``; its outcome is null until it ended."""
    trial = trial_record.trial
    return {
        "number": trial.number,
        "strategy": strategy_to_json(trial.strategy, cluster),
        "predicted_s": trial.predicted_s,
        "predicted_sigma": trial.sigma,
        "repeats": trial.repeats,
        "chosen": trial.reason,
        **(NO_OUTCOME if trial_record.outcome is None else outcome_to_json(trial_record.outcome)),
    }


def study_text(result: StudyResult, study: str) -> Iterator[str]:
    """Yield the object of ``tune --json`` as text: a line per key, trial and row.

    The standard library would take half a minute to indent thousands of trials, and would need all
    of them in memory; here only one trial at a time is in memory as an object.
    """
    yield "{"
    for number, (key, value) in enumerate(_parts(result, study)):
        yield f"{',' if number else ''}\n {json.dumps(key)}: "
        yield from _value_text(value)
    yield "\n}\n"


def _parts(result: StudyResult, study: str) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of the object; long lists are iterators."""
    state, knowledge, certificate = result.state, result.knowledge, result.certificate
    cluster = state.experiment.cluster
    best, calibration = result.best_number, knowledge.calibration
    recommended = result.recommendation
    yield "schema", SCHEMA
    yield "study", study
    yield "experiment", state.experiment.name
    yield "experiment_file", str(Path(state.experiment.source.file).absolute())
    yield "backend", state.experiment.trials.backend
    yield "ending", result.ending
    yield "ending_text", ENDINGS[result.ending]
    yield "trials", (trial_json(trial_record, cluster) for trial_record in state.trials)
    yield "best", None if best is None else trial_json(state.trials[best], cluster)
    yield (
        "recommendation",
        None if recommended is None else recommendation_json(recommended, cluster),
    )
    yield "certificate", None if certificate is None else asdict(certificate)
    yield "calibration", None if calibration is None else calibration_to_json(calibration)
    yield "ranking", _ranking(result, recommended)


def _ranking(result: StudyResult, recommended: Recommendation | None) -> Iterator[dict[str, Any]]:
    """Yield all candidates as rows, with their measured and predicted times."""
    state, knowledge = result.state, result.knowledge
    for position, estimate in enumerate(ranked(knowledge, recommended), start=1):
        index = state.index_of[estimate.strategy]
        figure = knowledge.status.figures.get(index)
        yield row(estimate, position, state.experiment) | {
            "measured_s": None if figure is None else figure.measured_s,
            "predicted_s": knowledge.estimates[index].iteration_time_s,
        }


def _value_text(value: object) -> Iterator[str]:
    if not isinstance(value, Iterator):
        yield json.dumps(value, allow_nan=False)
        return
    yield "["
    for number, entry in enumerate(value):
        yield f"{',' if number else ''}\n  {json.dumps(entry, allow_nan=False)}"
    yield "\n ]"


MOST_TIES: Final = 3  # reported ties with the recommended strategy, in text and journal


def recommendation_json(recommended: Recommendation, cluster: Cluster) -> dict[str, Any]:
    """Return the object ``recommendation`` of ``tune --json``."""
    return {
        "strategy": strategy_to_json(recommended.strategy, cluster),
        "rests_on": recommended.rests_on,
        "time_s": recommended.time_s,
        "interval_s": list(recommended.interval_s),
        "predicted_s": recommended.predicted_s,
        "measured_s": recommended.measured_s,
        "trial": recommended.number,
        "ties": [
            {
                "strategy": strategy_to_json(tie.strategy, cluster),
                "time_s": tie.time_s,
                "measured": tie.measured,
            }
            for tie in recommended.ties
        ],
        "reason": recommended.reason,
    }


def history_jsonl(records: Iterable[TrialRecord], cluster: Cluster) -> Iterator[str]:
    """Yield the trials as JSON, one per line."""
    return (json.dumps(trial_json(entry, cluster)) + "\n" for entry in records)


def history_csv(records: Iterable[TrialRecord]) -> str:
    """Return a CSV table of all trials."""
    return _table(HISTORY_COLUMNS, [_history_row(entry) for entry in records])


def _history_row(trial_record: TrialRecord) -> dict[str, Any]:
    trial, outcome = trial_record.trial, trial_record.outcome
    record = NO_OUTCOME if outcome is None else outcome_to_json(outcome)
    return {
        **strategy_cells(trial.strategy),
        "number": trial.number,
        "num_micro_batches": trial.strategy.num_micro_batches,
        "repeats": trial.repeats,
        "predicted_s": trial.predicted_s,
        **{key: _spaced(record[key]) for key in NO_OUTCOME},
    }


def measurements_csv(records: Iterable[TrialRecord]) -> str:
    """Return the outcomes of all runs, repeats included, as a strategies file.

    Runs that failed because of a host are left out. So are strategies that a table cannot describe:
    those with different stages, a placement other than the default, or sliced sequences.
    """
    rows = []
    for entry in records:
        strategy, cells = entry.trial.strategy, _measurement(entry.outcome)
        in_order = strategy.placement == tuple(range(len(strategy.placement)))
        in_order &= not strategy.is_sliced
        if cells and strategy.is_uniform and in_order:
            rows.append({**strategy_cells(strategy), **cells})
    return _table(MEASUREMENT_COLUMNS, rows)


def _measurement(outcome: Outcome | None) -> dict[str, Any]:
    """Return the cells of an outcome; an empty mapping if a host or an interruption is to blame."""
    if isinstance(outcome, Measured):
        return {
            "measured_s": outcome.measured_s,
            "mean_s": outcome.mean_s,
            "spread_s": outcome.spread_s if outcome.has_spread else None,
            "peak_memory_bytes": _spaced(outcome.peak_memory_bytes),
        }
    if isinstance(outcome, OutOfMemory):
        return {"measured_s": "oom"}
    is_failure = isinstance(outcome, Crashed | TimedOut) and not blames_host(outcome)
    return {"measured_s": "failed"} if is_failure else {}


def _spaced(value: object) -> object:
    """Return the cell of a value: a sequence becomes its elements with spaces between them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return value


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text, table = io.StringIO(), list(rows)
    used = [name for name in DIMENSION_COLUMNS if any(name in row for row in table)]
    writer = csv.DictWriter(text, [*columns, *used], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
