"""Exports of all strategies at once: a table, and trials for Optuna."""

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.exports.chosen import Export
from amp_ray.exports.scripts import python_comment

_PARAMS: Final = ("tp", "pp", "dp", "micro_batch_size", "recompute", "bounds")

_OFF: Final = {"cp": 1, "ep": 1, "virtual_stages": 1, "zero_stage": 0, "sequence_parallel": False}

_OPTUNA_FILE: Final = "optuna_study.py"

_OPTUNA: Final = '''
import json
import sys

import optuna

ROWS = json.loads({rows})
PARAMS = {params}

choices = {{name: list(dict.fromkeys(row[name] for row in ROWS)) for name in PARAMS}}
distributions = {{
    name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()
}}


def fill(study):
    """Add what was measured as finished trials, and enqueue the rest, best first."""
    for row in ROWS:
        params = {{name: row[name] for name in PARAMS}}
        if row["measured_s"] is None and row["failed"] is None:
            study.enqueue_trial(params, user_attrs={{"predicted_s": row["predicted_s"]}})
            continue
        measured = row["measured_s"] is not None
        states = optuna.trial.TrialState
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=distributions,
                value=row["measured_s"] if measured else None,
                state=states.COMPLETE if measured else states.FAIL,
                user_attrs={{"predicted_s": row["predicted_s"], "failed": row["failed"]}},
            )
        )
    return study


if __name__ == "__main__":
    storage = sys.argv[1] if len(sys.argv) > 1 else None
    filled = fill(optuna.create_study(study_name={name}, direction="minimize", storage=storage))
    print(len(filled.get_trials()), "trials")
'''


def csv_table(rows: Sequence[Mapping[str, Any]]) -> Export:
    """Return flat rows as CSV, with all their columns in order of first appearance.

    Lists become texts, with spaces between the items. In columns of dimensions a strategy without
    one says so, since an empty cell stands for the experiment's choice.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    off = {name: value for name, value in _OFF.items() if name in columns}
    rows = [row if row.get("strategy") else {**off, **row} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    return Export(files={"strategies.csv": text.getvalue()})


def optuna_script(name: str, rows: Sequence[Mapping[str, Any]], file: str = "") -> Export:
    """Return a program that adds strategies to an Optuna study; ``*`` marks stages that differ.

    Args:
        name: Name of the study.
        rows: Flat rows, best first, with ``measured_s`` if a strategy has run.
        file: Name of the file to write; empty for standard output.
    """
    kept = [
        {
            **{param: "*" if row.get(param) is None else _text(row[param]) for param in _PARAMS},
            "predicted_s": row.get("predicted_s", row.get("iteration_time_s")),
            "measured_s": row.get("measured_s"),
            "failed": row.get("outcome") if row.get("outcome") != "measured" else None,
        }
        for row in rows
    ]
    head = (
        f"{name}: strategies for Optuna 3 or newer.\n"
        f"python {shlex.quote(file or _OPTUNA_FILE)} [STORAGE]; "
        "or import fill() and give it your study.\n"
        "An objective suggests every name of PARAMS by suggest_categorical(name, choices[name])."
    )
    text = python_comment(head) + _OPTUNA.format(
        rows=repr(json.dumps(kept)), params=repr(_PARAMS), name=repr(name)
    )
    notes = ("what is no parameter here (placement, stages that differ) is not in it",)
    return Export(files={_OPTUNA_FILE: text}, notes=notes)


def _text(value: Any) -> Any:  # noqa: ANN401 - any plain value
    """Return a list as a text, and any other value unchanged."""
    return " ".join(map(str, value)) if isinstance(value, list) else value
