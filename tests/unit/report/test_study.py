import io
import itertools
from dataclasses import replace

import pytest
from rich.console import Console

from amp_ray.report.study import (
    WAITING,
    LiveView,
    PlainView,
    describe,
    end_view,
    errors_text,
    outcome_text,
    study_view,
    trials_table,
)
from amp_ray.runtime.study.driver import View
from amp_ray.runtime.study.pool import Task
from amp_ray.runtime.study.result import StudyResult
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.outcome import Crashed, Outcome, Unreachable
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.state import Trial, TrialRecord, TunerState
from support.driving import MemoryLog, ScriptedPool, drive, make_driver, small_study
from support.replaying import measured, out_of_memory

PREDICTOR = BoundedPredictor()
ERASED = "\x1b[2K"
"""What a terminal is told to empty a line."""

LOST = Unreachable(reason="host b fell silent", host="b", wall_s=1.0)
LONG_REASON = Crashed(
    reason="RuntimeError: the mean of the loss is not a number after 3 steps of 20 (exit code 1)",
    kind="crash",
    rank=1,
    host="b",
    lines=(),
    wall_s=1.0,
)


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all drivers remember the same predictions: it saves time and changes nothing."""
    monkeypatch.setattr("amp_ray.runtime.study.driver.BoundedPredictor", lambda: PREDICTOR)


def terminal(*, height: int = 40, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system=None,
        width=width,
        height=height,
        legacy_windows=False,
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), width=80)


def text_of(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def watched(view: View, *outcomes: Outcome, num_groups: int = 1, budget: int = 3) -> StudyResult:
    """Drive a study in front of a view."""
    turns = itertools.cycle(outcomes)
    pool = ScriptedPool(answer=lambda _task, _group: next(turns), num_groups=num_groups)
    driver = make_driver(small_study(budget=budget), pool, MemoryLog(), view)  # type: ignore[arg-type]
    return driver.run()


def lines_of(*outcomes: Outcome, budget: int = 3) -> list[str]:
    """Return what a pipe gets of a study."""
    console = pipe()
    watched(PlainView(console), *outcomes, budget=budget)
    return text_of(console).splitlines()


def result_of(*outcomes: Outcome, budget: int = 3) -> StudyResult:
    turns = itertools.cycle(outcomes)
    return drive(small_study(budget=budget), lambda _task, _group: next(turns))


def end_of(result: StudyResult, *, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(end_view(result, "a/study"))
    return text_of(console)


# ------------------------------------------------------------------------- into a pipe or file


def test_lines_are_never_broken() -> None:
    assert all(
        line.startswith(("trial ", "best so far ", "surprise: ")) for line in lines_of(LONG_REASON)
    )
    assert any(LONG_REASON.reason in line for line in lines_of(LONG_REASON))


def test_a_surprise_is_told() -> None:
    assert any(
        line.startswith("surprise: trial 0 was slower than expected: measured 50 s")
        for line in lines_of(measured(50.0), budget=1)
    )


def test_a_lost_host_is_told_and_the_trial_waits() -> None:
    lines = lines_of(LOST, measured(1.0), budget=1)
    assert "trial 0: waits to run again" in lines
    assert "trial 0: host b fell silent; it runs once more" in lines


# ------------------------------------------------------------------------- on a terminal


def test_a_pipe_gets_lines_and_a_terminal_the_live_table() -> None:
    with study_view(pipe()) as plain:
        assert isinstance(plain, PlainView)
    with study_view(terminal()) as live:
        assert isinstance(live, LiveView)


def test_a_trial_that_runs_says_where() -> None:
    console = terminal()
    with study_view(console) as view:
        watched(view, measured(1.0), num_groups=2, budget=4)
    assert "; group 1" in text_of(console)


def test_reasons_notes_and_surprises_stay_above_the_table() -> None:
    console = terminal(width=200)
    with study_view(console) as view:
        watched(view, LONG_REASON, LOST, measured(50.0))
    text = text_of(console)
    assert f"trial 0: crashed: {LONG_REASON.reason}" in text
    assert "host b fell silent; it runs once more" in text
    assert "was slower than expected" in text


def test_a_low_terminal_shows_the_last_trials_only() -> None:
    console = terminal(height=14)
    with study_view(console) as view:
        watched(view, measured(1.0), budget=16)
    assert "trials before these are in the study's history" in text_of(console)
    last = text_of(console).rpartition("16 of 16 trials")[2]
    numbers = [line.split()[0] for line in last.splitlines() if line[:5].strip("* ").isdigit()]
    assert numbers[-1] == "15"
    assert len(numbers) <= 14 - 9


def test_the_live_table_gives_way_to_the_end() -> None:
    console = terminal()
    with study_view(console) as view:
        watched(view, measured(1.0))
    assert text_of(console).endswith(ERASED)


def test_the_live_table_stays_where_nothing_else_will_show_what_was_reached() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt):
        _interrupted_before(console)
    assert not text_of(console).endswith(ERASED)


def _interrupted_before(console: Console) -> None:
    with study_view(console) as view:
        watched(view, measured(1.0))
        raise KeyboardInterrupt


# ------------------------------------------------------------------------- the end


def test_where_no_trial_succeeded_that_comes_first_with_the_causes() -> None:
    boom = Crashed(reason="boom\x1b[2J", kind="crash", rank=1, host="n1", lines=(), wall_s=1.0)
    text = end_of(result_of(out_of_memory(), boom, budget=2))
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("stopped: the budget of trials is spent")
    assert lines[at - 1] == (
        "No trial succeeded: 1 ran out of memory (recorded as out of memory), "
        r"1 crashed (n1: boom\x1b[2J)"
    )
    assert "recommended" not in text


def test_without_a_trial_there_is_no_table() -> None:
    result = make_driver(small_study(), ScriptedPool(answer=_never)).result("interrupted")
    text = end_of(result)
    assert "predicted  measured" not in text
    assert "stopped: it was interrupted" in text


def _never(_task: Task, _group: int) -> Outcome:
    raise AssertionError


def test_of_very_many_trials_the_last_ones_and_the_best_are_shown() -> None:
    result = result_of(measured(1.0), *(measured(2.0 + index) for index in range(11)), budget=12)
    many = replace(result, state=_repeated(result, 100))
    lines = end_of(many).splitlines()
    numbers = [line.split()[0] for line in lines if line[:5].strip("* ").isdigit()]
    assert numbers == ["*0", *map(str, range(40, 100))]
    assert "all 100 trials are in a/study/history.csv" in lines


def _repeated(result: StudyResult, number: int) -> TunerState:
    """Make a study longer by telling its last trial again and again."""
    state = result.state
    last = state.trials[-1]
    more = (
        replace(last, trial=replace(last.trial, number=index))
        for index in range(len(state.trials), number)
    )
    return replace(state, trials=(*state.trials, *more))


# ------------------------------------------------------------------------- lines and tables


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


UNSTEADY = replace(measured(2.0, spread_fraction=0.5), warnings=("unsteady",))
PERIODIC = replace(measured(1.0), mean_s=1.2, warnings=("periodic", "trend"))
STEADY = replace(measured(1.2), step_time_s=(1.3, 1.2, 1.2), num_warmup_steps=1)
FASTER = "predicted 1.5 s (20.0% faster than predicted)"
RARE = "periodic: rare slow steps, median 1 s, mean 1.2 s"
CHANGING = "trend: the steps were still changing when they ended; raise trials.steps"
APART = "unsteady: steps spread by 1 s, median 2 s, mean 2 s; compare this time with no other"
HEAD = ("3", "2", "1", "2", "4", "1.5")
"""Number, degrees, micro-batch size and prediction of `TRIAL` in a row."""


@pytest.mark.parametrize(
    ("outcome", "text", "row"),
    [
        (
            measured(1.2, spread_fraction=0.1),
            f"measured 1.2 s (spread 0.12 s), {FASTER}",
            "1.2 0.12 -20.0% 0 5 9",
        ),
        (
            measured(1.6545),  # the table says nothing of a spread that nobody knows
            "measured 1.655 s, predicted 1.5 s (10.3% slower than predicted)",
            "1.655 - +10.3% 0 5 9",
        ),
        (
            STEADY,
            f"measured 1.2 s (spread 0 s), {FASTER}",
            "1.2 0 -20.0% 0 5 9",
        ),
        (
            UNSTEADY,
            f"measured 2 s (spread 1 s), predicted 1.5 s; {APART}",
            "2 1 - 0 5 9; unsteady",
        ),
        (
            PERIODIC,
            f"measured 1.2 s, {FASTER}; {RARE}; {CHANGING}",
            "1.2 - -20.0% 0 5 9; periodic; trend",
        ),
        (
            replace(measured(1.2), remarks=("no timeline: it is\x1b[2J 7",)),
            rf"measured 1.2 s, {FASTER}; no timeline: it is\x1b[2J 7",
            "1.2 - -20.0% 0 5 9",
        ),
        (out_of_memory(), "oom: recorded as out of memory", "oom recorded as out of memory"),
        (
            SILENT,
            f"unreachable: {SILENT.reason}",
            "unreachable no sign of life of host gpu-node-17 for 30 s, and none ...",
        ),
        (
            Unreachable(reason="ada@[10.0.0.7]:22: no route", host="gpu-7", wall_s=1.0),
            "unreachable: gpu-7: ada@[10.0.0.7]:22: no route",
            "unreachable gpu-7: ada@[10.0.0.7]:22: no route",
        ),
        (None, "runs, predicted 1.5 s", f"... 0 5 9; {WAITING}"),
    ],
)
def test_a_trial_has_a_line_and_a_row(outcome: Outcome | None, text: str, row: str) -> None:
    assert outcome_text(trial_record(outcome)) == text
    words = row_of(drawn((TRIAL, outcome or WAITING)), "3")
    assert words == [*HEAD, *row.split()]


def test_a_repeat_names_its_trial() -> None:
    row = row_of(drawn((replace(TRIAL, repeats=1), measured(1.2))), "3")
    assert " ".join(row).endswith("0 5 9; repeats 1")


def test_degrees_that_differ_between_stages_are_stars() -> None:
    stages = (
        Stage(first_layer=0, end_layer=5, options=StageOptions(tp=2, dp=1), shares=(2,)),
        Stage(first_layer=5, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
    )
    mixed = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2, 3))
    assert describe(mixed) == "tp * dp * pp 2 micro 2 cuts 0 5 9"
    row = row_of(drawn((replace(TRIAL, strategy=mixed), measured(1.2))), "3")
    assert row[1:5] == ["*", "*", "2", "2"]


def test_the_error_is_that_of_the_trials_so_far_not_the_learnt_sigma() -> None:
    times = (1.6, 3.0, 1.5, 4.125)
    trials = [trial_record(measured(time_s)) for time_s in times]
    repeat = replace(trial_record(measured(9.0)), trial=replace(TRIAL, repeats=3))
    assert errors_text([*trials, trial_record(out_of_memory()), repeat, trial_record(None)]) == (
        "the predictions of 4 trials were off by 53.3% in the median, 175.0% at most"
    )
    assert errors_text(trials[:1]) == "the prediction of 1 trial was off by 6.7%"
    assert errors_text([trial_record(out_of_memory())]) is None
    assert errors_text([trial_record(UNSTEADY)]) is None


def test_the_best_is_marked() -> None:
    lines = drawn((TRIAL, measured(1.2)), (replace(TRIAL, number=5), measured(1.3)), best=3)
    assert row_of(lines, "*3")[6] == "1.2"
    assert row_of(lines, "5")[6] == "1.3"


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
