import csv
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from amp_ray.inputs.strategies import parse_strategies
from amp_ray.runtime.study.result import (
    ENDINGS,
    HISTORY_COLUMNS,
    MEASUREMENT_COLUMNS,
    Ending,
    StudyResult,
    best_trial,
    history_csv,
    history_jsonl,
    measurements_csv,
    study_text,
    trial_json,
)
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from amp_ray.trials.outcome import Crashed, Outcome, TimedOut, Unreachable
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.state import TrialRecord, TunerState
from support.driving import ScriptedPool, drive, make_driver, small_study
from support.replaying import crashed, measured, out_of_memory, ran

LOST = Unreachable(reason="no answer, twice", host="b", wall_s=1.0)
LATE = TimedOut(reason="still running after 9 s", timeout_s=9.0, lines=("a",), wall_s=9.5)
SECOND = replace(
    measured(0.05), spread_s=0.001, peak_memory_bytes=(3_000, 2_000), step_time_s=(0.05, 0.05)
)

TRIAL_KEYS = {
    *("number", "strategy", "predicted_s", "outcome", "measured_s", "mean_s", "spread_s"),
    *("warnings", "peak_memory_bytes", "wall_s", "reason"),
}
STRATEGY_KEYS = {
    *("tp", "pp", "dp", "micro_batch_size", "num_micro_batches", "bounds", "recompute"),
    "placement",
}


def ended(*outcomes: Outcome, **settings: Any) -> StudyResult:  # noqa: ANN401 - TunerSettings'
    """Drive a study in which trials come out so, one after the other."""
    turns = itertools.cycle(outcomes)
    chosen = {"budget": len(outcomes), **settings}
    return drive(small_study(**chosen), lambda _task, _group: next(turns))


def trial_record(outcome: Outcome) -> TrialRecord:
    """Return the first trial of a study, come out so."""
    return replace(ended(measured(0.04)).state.trials[0], outcome=outcome)


def answers(*outcomes: Outcome) -> Callable[..., Outcome]:
    turns = iter(outcomes)
    return lambda _task, _group: next(turns)


# ------------------------------------------------------------------------- endings and the best


def test_every_ending_has_a_sentence() -> None:
    assert [*ENDINGS] == [*get_args(Ending)]
    assert len({*ENDINGS.values()}) == len(ENDINGS)


@pytest.mark.parametrize(
    ("outcomes", "best"),
    [
        ((measured(3.0), measured(1.0), measured(2.0)), 1),
        ((measured(1.0), measured(1.0)), 0),
        ((out_of_memory(), measured(9.0)), 1),
        ((out_of_memory(), crashed()), None),
    ],
)
def test_the_best_trial_is_the_fastest_measured(
    outcomes: tuple[Outcome, ...], best: int | None
) -> None:
    assert ended(*outcomes).best_number == best


def repeated(*outcomes: Outcome) -> TunerState:
    """Return a study that ran its first strategy several times."""
    state = small_study(budget=9)
    for outcome in outcomes:
        state = ran(state, 0, outcome, predicted_s=1.0, repeats=0 if state.trials else None)
    return state


@pytest.mark.parametrize(
    ("times_s", "best"), [((1.0, 3.0, 2.0), 2), ((3.0, 1.0), 1), ((2.0, 2.0, 1.0), 0)]
)
def test_of_a_strategy_that_ran_several_times_the_middle_run_stands_for_it(
    times_s: tuple[float, ...], best: int, predictor: BoundedPredictor
) -> None:
    state = repeated(*map(measured, times_s))
    assert best_trial(learn(state, predictor)) == best


# ------------------------------------------------------------------------- JSON


def study_json(result: StudyResult, study: str) -> dict[str, Any]:
    """Return the object that the text is."""
    found: dict[str, Any] = json.loads("".join(study_text(result, study)))
    return found


@pytest.mark.parametrize(
    ("outcome", "word", "measured_s", "reason"),
    [
        (SECOND, "measured", 0.05, None),
        (out_of_memory(), "oom", None, "recorded as out of memory"),
        (LATE, "timeout", None, "still running after 9 s"),
        (crashed(), "crashed", None, "no result is recorded"),
        (LOST, "unreachable", None, "no answer, twice"),
    ],
)
def test_a_trial_has_the_keys_of_the_contract_whatever_came_of_it(
    outcome: Outcome, word: str, measured_s: float | None, reason: str | None
) -> None:
    cluster = small_study().experiment.cluster
    found = trial_json(trial_record(outcome), cluster)
    assert found.keys() >= TRIAL_KEYS
    assert found["strategy"].keys() >= STRATEGY_KEYS
    assert found["outcome"] == word
    assert found["measured_s"] == measured_s
    assert found["reason"] == reason


def test_a_trial_without_an_end_has_all_keys_too() -> None:
    entry = replace(trial_record(measured(1.0)), outcome=None)
    found = trial_json(entry, small_study().experiment.cluster)
    assert found.keys() >= TRIAL_KEYS
    assert (found["outcome"], found["measured_s"], found["wall_s"]) == (None, None, None)


def test_the_ranking_is_that_of_the_calibrated_model() -> None:
    first = small_study().candidates[0].iteration_time_s
    slower = [measured(1.2 * each.iteration_time_s) for each in small_study().candidates[:4]]
    rows = study_json(ended(*slower), "s")["ranking"]
    assert rows[0]["iteration_time_s"] > 1.1 * first


def test_everything_is_json_without_special_numbers() -> None:
    found = study_json(ended(measured(0.04), out_of_memory(), crashed(), LATE, LOST, LOST), "s")
    text = json.dumps(found, allow_nan=False)
    assert json.dumps(json.loads(text)) == text


def test_as_text_it_is_the_same_with_a_line_per_key_and_per_entry() -> None:
    result = ended(measured(0.04), crashed())
    found, text = study_json(result, "s"), "".join(study_text(result, "s"))
    lists = [found["trials"], found["ranking"]]
    assert len(text.splitlines()) == 2 + len(found) + sum(len(value) + 1 for value in lists)


def test_a_study_without_trials_is_json_too() -> None:
    result = make_driver(small_study(), ScriptedPool(answer=answers())).result("interrupted")
    assert json.loads("".join(study_text(result, "s")))["trials"] == []


# ------------------------------------------------------------------------- the history


def test_history_in_lines_is_one_trial_per_line() -> None:
    result = ended(measured(0.04), crashed())
    lines = [*history_jsonl(result.state.trials, result.state.experiment.cluster)]
    assert all(line.endswith("}\n") for line in lines)
    assert [json.loads(line) for line in lines] == study_json(result, "s")["trials"]


def test_an_empty_history_is_an_empty_file() -> None:
    assert [*history_jsonl([], small_study().experiment.cluster)] == []
    assert history_csv([]) == ",".join(HISTORY_COLUMNS) + "\n"


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_the_history_has_a_row_for_every_trial() -> None:
    result = ended(SECOND, crashed(), LOST, LOST)
    rows = rows_of(history_csv(result.state.trials))
    assert [(row["number"], row["outcome"]) for row in rows] == [
        ("0", "measured"),
        ("1", "crashed"),
        ("2", "unreachable"),
    ]
    assert rows[0]["measured_s"] == "0.05"
    assert rows[0]["spread_s"] == "0.001"
    assert rows[0]["peak_memory_bytes"] == "3000 2000"
    assert rows[1]["measured_s"] == ""
    assert rows[1]["reason"] == "no result is recorded"
    assert rows[2]["reason"] == "no answer, twice"
    strategy = result.state.trials[0].trial.strategy
    assert rows[0]["bounds"] == " ".join(map(str, strategy.bounds))
    assert float(rows[0]["predicted_s"]) == result.state.trials[0].trial.predicted_s


def test_an_open_trial_has_a_row_without_an_outcome() -> None:
    pool = ScriptedPool(answer=answers(measured(0.04)), at_close=lambda _task, _group: None)
    driver = make_driver(small_study(), pool)
    with pytest.raises(StopIteration):
        driver.run()
    rows = rows_of(history_csv(driver.result("failed").state.trials))
    assert [(row["number"], row["outcome"]) for row in rows] == [("0", "measured"), ("1", "")]


# ------------------------------------------------------------------------- measurements


def given_of(
    result: StudyResult,
) -> list[tuple[float | None, str | None, float | None, tuple[float, ...]]]:
    """Read the table again, as ``calibrate`` and ``tune --trials replay:`` do."""
    experiment = result.state.experiment
    text = measurements_csv(result.state.trials)
    assert text.startswith(",".join(MEASUREMENT_COLUMNS) + "\n")
    found = parse_strategies(text, file="measured.csv", experiment=experiment)
    return [
        (each.measured_s, each.failure, each.spread_s, each.peak_memory_bytes) for each in found
    ]


def test_measurements_can_be_read_as_a_strategies_file() -> None:
    assert given_of(ended(SECOND, out_of_memory(), crashed())) == [
        (0.05, None, 0.001, (3000.0, 2000.0)),
        (None, "oom", None, ()),
        (None, "failed", None, ()),
    ]


def test_the_mean_is_kept_beside_the_median() -> None:
    result = ended(replace(measured(0.04), mean_s=0.05, warnings=("periodic", "trend")))
    [row] = csv.DictReader(io.StringIO(measurements_csv(result.state.trials)))
    assert (row["measured_s"], row["mean_s"]) == ("0.04", "0.05")
    [row] = csv.DictReader(io.StringIO(history_csv(result.state.trials)))
    assert (row["mean_s"], row["warnings"]) == ("0.05", "periodic trend")


def test_sharing_is_read_as_it_was_measured() -> None:
    result = ended(measured(0.04))
    [entry], experiment = result.state.trials, result.state.experiment
    options = StageOptions(tp=1, dp=4)
    zeros = [Zero(stage=1), NO_ZERO, Zero(stage=3, shard_ranks=2, keeps_weights=True)]
    ends = (0, experiment.model.num_layers)
    plans = [
        Strategy.uniform(
            Candidate(
                options=replace(options, zero=zero), pp=1, micro_batch_size=1, num_micro_batches=2
            ),
            ends,
        )
        for zero in zeros
    ]
    trials = [replace(entry, trial=replace(entry.trial, strategy=plan)) for plan in plans]
    text = measurements_csv(trials)
    experiment = replace(experiment, zero_stage=0, global_batch_size=8)
    rows = parse_strategies(text, file="measured.csv", experiment=experiment)
    assert [row.strategy.zero for row in rows if row.strategy is not None] == zeros


def test_a_disk_without_room_has_no_line() -> None:
    full = Crashed(reason="full", kind="disk", rank=0, host="a", lines=(), wall_s=1.0)
    assert given_of(ended(measured(0.04), full, full)) == [(0.04, None, None, ())]


def test_every_run_of_a_strategy_has_a_row() -> None:
    times_s = (0.05, 0.03, 0.04)
    outcomes = [measured(time, spread_fraction=0.1 * n) for n, time in enumerate(times_s)]
    pool = ScriptedPool(answer=answers())
    result = make_driver(repeated(*outcomes), pool).result("budget")
    assert [each[0] for each in given_of(result)] == [0.05, 0.03, 0.04]


def test_an_order_of_devices_that_csv_cannot_tell_has_no_line() -> None:
    result = ended(measured(0.04), measured(0.041))
    state = result.state
    first = state.trials[0]
    strategy = first.trial.strategy
    turned = replace(strategy, placement=tuple(reversed(strategy.placement)))
    trial = replace(first.trial, strategy=turned)
    changed = replace(state, trials=(replace(first, trial=trial), *state.trials[1:]))
    assert [each[0] for each in given_of(replace(result, state=changed))] == [0.041]
