import io
from dataclasses import replace

import pytest
from rich.console import Console

from amp_ray.report.study_table import WAITING, describe, errors_text, outcome_text, trials_table
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.tuner.state import Trial, TrialRecord
from support.replaying import measured, out_of_memory

WIDE = 200
TERMINAL = 80
GRID = Candidate(micro_batch_size=4, options=StageOptions(tp=2, dp=1), pp=2, num_micro_batches=8)
STRATEGY = Strategy.uniform(GRID, (0, 5, 9))
TRIAL = Trial(
    number=3, strategy=STRATEGY, predicted_s=1.5, sigma=0.05, repeats=None, reason="because"
)
MANY = Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=30, num_micro_batches=8)
LONG = replace(TRIAL, number=4, strategy=Strategy.uniform(MANY, tuple(range(31))))
SILENT = Unreachable(
    reason="no sign of life of host gpu-node-17 for 30 s, and none of its peers could reach it",
    host="gpu-node-17",
    wall_s=9.0,
)


def trial_record(outcome: Outcome | None, trial: Trial = TRIAL) -> TrialRecord:
    return TrialRecord(trial=trial, candidate=0, outcome=outcome)


def drawn(
    *rows: tuple[Trial, Outcome | str],
    best: int | None = None,
    width: int = WIDE,
    one_line_each: bool = False,
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(trials_table(rows, title="some", best=best, one_line_each=one_line_each))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def row_of(lines: list[str], number: str) -> list[str]:
    """Return the words of one row."""
    [row] = [line.split() for line in lines if line.split()[:1] == [number]]
    return row


def test_a_line_of_a_trial_has_its_remarks() -> None:
    outcome = replace(measured(1.2), remarks=("no timeline: it is\x1b[2J 7",))
    text = outcome_text(trial_record(outcome))
    assert text.startswith("measured 1.2 s")
    assert text.endswith(r"; no timeline: it is\x1b[2J 7")


def test_degrees_that_differ_between_stages_are_stars() -> None:
    stages = (
        Stage(first_layer=0, end_layer=5, options=StageOptions(tp=2, dp=1), shares=(2,)),
        Stage(first_layer=5, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
    )
    mixed = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2, 3))
    assert describe(mixed) == "tp * dp * pp 2 micro 2 bounds 0 5 9"
    row = row_of(drawn((replace(TRIAL, strategy=mixed), measured(1.2))), "3")
    assert row[1:5] == ["*", "*", "2", "2"]


def test_a_measurement_stands_beside_its_prediction() -> None:
    assert outcome_text(trial_record(measured(1.2, spread_fraction=0.1))) == (
        "measured 1.2 s (spread 0.12 s), predicted 1.5 s (20.0% faster than predicted)"
    )


def test_an_unsteady_trial_is_compared_with_no_prediction() -> None:
    unsteady = replace(measured(2.0, spread_fraction=0.5), warnings=("unsteady",))
    text = outcome_text(trial_record(unsteady))
    assert "than predicted" not in text
    assert text.endswith(
        "predicted 1.5 s; unsteady: steps spread by 1 s, median 2 s, mean 2 s; compare this time "
        "with no other"
    )
    assert row_of(drawn((TRIAL, unsteady)), "3")[7:9] == ["1", "-"]
    assert errors_text([trial_record(unsteady)]) is None


def test_the_mean_is_told_and_the_median_where_they_differ() -> None:
    periodic = replace(measured(1.0), mean_s=1.2, warnings=("periodic", "trend"))
    assert outcome_text(trial_record(periodic)) == (
        "measured 1.2 s, predicted 1.5 s (20.0% faster than predicted); periodic: rare slow steps, "
        "median 1 s, mean 1.2 s; trend: the steps were still changing when they ended; raise "
        "trials.steps"
    )
    assert row_of(drawn((TRIAL, periodic)), "3")[6] == "1.2"
    assert "0 5 9; periodic; trend" in "\n".join(drawn((TRIAL, periodic)))


def test_a_trial_that_took_longer_is_slower_than_predicted() -> None:
    assert outcome_text(trial_record(measured(1.6545))).endswith("(10.3% slower than predicted)")


def test_the_error_is_that_of_the_trials_so_far_not_the_learnt_sigma() -> None:
    times = (1.6, 3.0, 1.5, 4.125)
    trials = [trial_record(measured(time_s)) for time_s in times]
    repeat = replace(trial_record(measured(9.0)), trial=replace(TRIAL, repeats=3))
    assert errors_text([*trials, trial_record(out_of_memory()), repeat, trial_record(None)]) == (
        "the predictions of 4 trials were off by 53.3% in the median, 175.0% at most"
    )
    assert errors_text(trials[:1]) == "the prediction of 1 trial was off by 6.7%"
    assert errors_text([trial_record(out_of_memory())]) is None


def test_a_spread_that_nobody_knows_is_not_told() -> None:
    assert (
        outcome_text(trial_record(measured(1.2)))
        == "measured 1.2 s, predicted 1.5 s (20.0% faster than predicted)"
    )
    assert row_of(drawn((TRIAL, measured(1.2))), "3")[7] == "-"


def test_steps_without_a_difference_have_a_spread_of_nothing() -> None:
    steady = replace(measured(1.2), step_time_s=(1.3, 1.2, 1.2), num_warmup_steps=1)
    assert outcome_text(trial_record(steady)).startswith("measured 1.2 s (spread 0 s)")
    assert row_of(drawn((TRIAL, steady)), "3")[7] == "0"


def test_a_failure_says_why() -> None:
    assert outcome_text(trial_record(out_of_memory())) == "oom: recorded as out of memory"
    assert outcome_text(trial_record(SILENT)) == f"unreachable: {SILENT.reason}"


def test_a_host_that_the_reason_calls_otherwise_has_its_name() -> None:
    outcome = Unreachable(reason="ada@[10.0.0.7]:22: no route", host="gpu-7", wall_s=1.0)
    assert outcome_text(trial_record(outcome)) == "unreachable: gpu-7: ada@[10.0.0.7]:22: no route"


def test_a_trial_that_runs_has_its_prediction() -> None:
    assert outcome_text(trial_record(None)) == "runs, predicted 1.5 s"


def test_a_row_has_degrees_times_and_bounds() -> None:
    assert row_of(drawn((TRIAL, measured(1.2, spread_fraction=0.1))), "3") == [
        *("3", "2", "1", "2", "4", "1.5", "1.2", "0.12", "-20.0%", "0", "5", "9")
    ]


def test_the_best_is_marked() -> None:
    lines = drawn((TRIAL, measured(1.2)), (replace(TRIAL, number=5), measured(1.3)), best=3)
    assert row_of(lines, "*3")[6] == "1.2"
    assert row_of(lines, "5")[6] == "1.3"


def test_a_repeat_names_what_it_repeats() -> None:
    [line] = [
        line for line in drawn((replace(TRIAL, repeats=1), measured(1.2))) if "repeats" in line
    ]
    assert line.endswith("0 5 9; repeats 1")


def test_a_failed_row_has_the_outcome_and_the_beginning_of_the_reason() -> None:
    row = row_of(drawn((TRIAL, SILENT)), "3")
    assert row[6] == "unreachable"
    assert " ".join(row[7:]) == "no sign of life of host gpu-node-17 for 30 s, and none ..."


def test_a_row_without_an_outcome_says_what_it_does() -> None:
    assert " ".join(row_of(drawn((TRIAL, WAITING)), "3")[6:]) == f"... 0 5 9; {WAITING}"


def test_many_bounds_are_shortened() -> None:
    text = describe(LONG.strategy)
    assert text.endswith("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 ...")


@pytest.mark.parametrize("one_line_each", [True, False])
def test_a_terminal_of_80_columns_shows_every_figure(one_line_each: bool) -> None:  # noqa: FBT001
    outcome = measured(0.0123456, spread_fraction=0.01)
    lines = drawn(
        (LONG, outcome), (TRIAL, SILENT), width=TERMINAL, one_line_each=one_line_each, best=4
    )
    assert max(map(len, lines)) <= TERMINAL
    assert row_of(lines, "*4")[:9] == [
        *("*4", "1", "1", "30", "1", "1.5", "0.01235", "0.00012", "-99.2%")
    ]
    assert row_of(lines, "3")[6] == "unreachable"


def test_one_line_each_cuts_off_what_does_not_fit() -> None:
    rows: list[tuple[Trial, Outcome | str]] = [(LONG, measured(1.2)), (TRIAL, SILENT)]
    folded = drawn(*rows, width=TERMINAL)
    cut = drawn(*rows, width=TERMINAL, one_line_each=True)
    assert len(cut) == len(["title", "names", "rule", *rows, "caption"])
    assert len(folded) > len(cut)
    assert all("\N{HORIZONTAL ELLIPSIS}" in line for line in cut[3:5])
