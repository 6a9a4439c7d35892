"""Views of a study: its trials as lines and tables, live in a terminal, and its end."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from amp_ray.errors import printable
from amp_ray.report.console import FIGURE, TEXT, Row, table
from amp_ray.report.strategy_text import plan_text, strategy_text, used_texts
from amp_ray.runtime.study.result import (
    ENDINGS,
    MOST_TIES,
    StudyResult,
    best_trial,
    recommendation_json,
)
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import (
    Measured,
    Outcome,
    failure_reason,
    no_success_text,
    outcome_to_json,
    trial_tells_time,
)
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import Trial, TrialRecord, TunerState
from amp_ray.tuner.unexpected import Surprise
from amp_ray.units import counted, figure_text

_MOST_LIVE_ROWS: Final = 15  # most trials in the live table
# Lines of a terminal beside the trials: headline, column names, caption, running trials, notes
_OTHER_LINES: Final = 9
_MOST_END_ROWS: Final = 60  # most trials in the final table; the study's files have all
_MOST_WARNINGS: Final = 5  # most warnings of trials that the end writes out

# Most characters in a line or a table; the study's files have all
_MAX_BOUNDS: Final = 40
_MAX_REASON: Final = 60
_DOTS: Final = " ..."

_BEST: Final = "bold green"  # style of the best trial

_COLUMNS: Final = (
    *("trial", "tp", "dp", "pp", "micro"),
    *("predicted", "measured", "spread", "slower by"),
)
"""Columns with figures of a trial; times are in seconds."""

WAITING: Final = "waits to run again"
"""Shown in place of the outcome of a trial that lost its host or its driver."""


def describe(strategy: Strategy) -> str:
    """Name a strategy in one line.

    Example:
        >>> from amp_ray.strategies.candidate import Candidate, StageOptions
        >>> from amp_ray.strategies.recompute import FULL
        >>> from amp_ray.strategies.zero import Zero
        >>> options = StageOptions(tp=2, dp=2, zero=Zero(stage=1), recompute=FULL)
        >>> grid = Candidate(micro_batch_size=4, options=options, pp=2, num_micro_batches=8)
        >>> describe(Strategy.uniform(grid, (0, 5, 9)))
        'tp 2 dp 2 pp 2 micro 4 cuts 0 5 9, ZeRO 1, recompute full'
    """
    tp, dp = strategy.tp or "*", strategy.dp or "*"
    head = f"tp {tp} dp {dp} pp {strategy.pp} micro {strategy.micro_batch_size}"
    return f"{head} cuts {_cuts_and_options(strategy)}"


def outcome_text(trial_record: TrialRecord) -> str:
    """Describe the outcome of a trial in one line, with its prediction."""
    outcome, trial = trial_record.outcome, trial_record.trial
    predicted = figure_text(trial.predicted_s)
    if isinstance(outcome, Measured):
        spread = f" (spread {figure_text(outcome.spread_s, 2)} s)" if outcome.has_spread else ""
        text = f"measured {figure_text(outcome.mean_s)} s{spread}, predicted {predicted} s"
        if outcome.tells_time:
            excess = _excess(trial, outcome)
            text += f" ({abs(excess):.1%} {'faster' if excess < 0 else 'slower'} than predicted)"
        remarks = map(printable, outcome.remarks)
        return "; ".join([text, *warning_texts(outcome_to_json(outcome)), *remarks])
    if outcome is None:
        return f"runs, predicted {predicted} s"
    word, reason = _failure(outcome)
    return f"{word}: {reason}"


def warning_texts(record: Mapping[str, Any]) -> list[str]:
    """Describe the warnings of a measured trial, from its record as JSON."""
    mean, middle = figure_text(record.get("mean_s")), figure_text(record.get("measured_s"))
    texts = {
        "periodic": f"periodic: rare slow steps, median {middle} s, mean {mean} s",
        "trend": "trend: the steps were still changing when they ended; raise trials.steps",
        "unsteady": (
            f"unsteady: steps spread by {figure_text(record.get('spread_s'))} s, median {middle} "
            f"s, mean {mean} s; compare this time with no other"
        ),
        "warm_up": (
            "warm_up: the first steps were faster than the later ones, or more than a quarter of "
            "the steps were warm-up; raise trials.steps"
        ),
    }
    return [texts[warning] for warning in record.get("warnings") or () if warning in texts]


def trials_table(
    rows: Iterable[tuple[Trial, Outcome | str]],
    *,
    title: str,
    best: int | None,
    one_line_each: bool = False,
) -> Table:
    """Draw trials for a terminal of 80 columns or more; ``best`` is the number of the marked one.

    With ``one_line_each``, long lines are cut off instead of continued on the next line.
    """

    def last(text: str | Text) -> str | Text:
        """Return a cell of the last column, which gets the remaining width."""
        return Text(str(text), no_wrap=True, overflow="ellipsis") if one_line_each else text

    drawn = [_row(trial, outcome, is_best=trial.number == best) for trial, outcome in rows]
    return table(
        [*((name, FIGURE) for name in _COLUMNS), (last("cuts, options, or why not"), TEXT)],
        [Row((*row.cells[:-1], last(row.cells[-1])), row.style) for row in drawn],
        title=title,
        caption="times in seconds; slower by: measured against predicted",
    )


def _cuts_and_options(strategy: Strategy) -> str:
    """List the cuts of a strategy, shortened if they are many, and what else it uses."""
    cuts = " ".join(map(str, strategy.given_bounds))
    return ", ".join((_shortened(cuts, _MAX_BOUNDS), *used_texts(strategy)))


def _shortened(text: str, length: int) -> str:
    """Return the first words of a text, with dots if it is longer."""
    if len(text) <= length:
        return text
    return f"{text[: length - len(_DOTS)].rsplit(maxsplit=1)[0]}{_DOTS}"


def errors_text(trials: Iterable[TrialRecord]) -> str | None:
    """Describe the errors of earlier predictions; None without measured times.

    Repeated trials are left out, since their prediction is an earlier measurement. Unsteady trials
    are left out, since their times cannot be compared.
    """
    errors = [
        abs(_excess(trial_record.trial, trial_record.outcome))
        for trial_record in trials
        if isinstance(trial_record.outcome, Measured)
        and trial_record.outcome.tells_time
        and trial_record.trial.repeats is None
    ]
    if not errors:
        return None
    if len(errors) == 1:
        return f"the prediction of 1 trial was off by {errors[0]:.1%}"
    return (
        f"the predictions of {len(errors)} trials were off by {median(errors):.1%} in the median, "
        f"{max(errors):.1%} at most"
    )


def _excess(trial: Trial, outcome: Measured) -> float:
    """Return how much longer a trial took than predicted, as a fraction of the prediction."""
    return outcome.mean_s / trial.predicted_s - 1


def _row(trial: Trial, outcome: Outcome | str, *, is_best: bool) -> Row:
    plan = trial.strategy
    degrees = [str(value or "*") for value in (plan.tp, plan.dp, plan.pp, plan.micro_batch_size)]
    number = f"{'*' if is_best else ''}{trial.number}"
    head = [number, *degrees, figure_text(trial.predicted_s)]
    style = _BEST if is_best else None
    remark = _cuts_and_options(plan)
    if trial.repeats is not None:
        remark += f"; repeats {trial.repeats}"
    if isinstance(outcome, Measured):
        spread = figure_text(outcome.spread_s, 2) if outcome.has_spread else "-"
        excess = f"{_excess(trial, outcome):+.1%}" if outcome.tells_time else "-"
        remark = "; ".join([remark, *outcome.warnings])
        return Row([*head, figure_text(outcome.mean_s), spread, excess, remark], style)
    if isinstance(outcome, str):
        return Row([*head, "...", "", "", f"{remark}; {outcome}"], style)
    word, reason = _failure(outcome)
    return Row([*head, word, "", "", _shortened(reason, _MAX_REASON)], "red")


def _failure(outcome: Outcome) -> tuple[str, str]:
    """Return the keyword of a failure, and its reason with the host's name."""
    record = outcome_to_json(outcome)
    return str(record["outcome"]), failure_reason(record)


def recommendation_lines(recommended: Mapping[str, Any]) -> list[str]:
    """State the recommended strategy, its time, the reason, and its ties.

    Args:
        recommended: The object ``recommendation`` of ``tune --json``.
    """
    return [
        f"recommended: {strategy_text(recommended['strategy'])}",
        f"  {_times_text(recommended)}; {recommended['reason']}",
        *(f"  as good: {_tie_text(tie)}" for tie in recommended["ties"][:MOST_TIES]),
    ]


def _tie_text(tie: Mapping[str, Any]) -> str:
    how = "measured" if tie["measured"] else "predicted"
    return f"{strategy_text(tie['strategy'])}, {how} {figure_text(tie['time_s'])} s"


def time_text(recommended: Mapping[str, Any]) -> str:
    """Write the expected time with its interval; results of older versions have no interval."""
    interval = recommended.get("interval_s")
    around = f" ({figure_text(interval[0])} to {figure_text(interval[1])})" if interval else ""
    return f"{figure_text(recommended['time_s'])} s{around}"


def _times_text(recommended: Mapping[str, Any]) -> str:
    """Write the expected, the measured and the predicted time."""
    expected, predicted_s = time_text(recommended), figure_text(recommended["predicted_s"])
    if recommended["rests_on"] == "predicted":
        return f"predicted {expected}, not measured"
    if recommended["rests_on"] == "measured":
        return f"measured {expected}, predicted {predicted_s} s"
    measured_s = figure_text(recommended["measured_s"])
    return f"expected {expected}: measured {measured_s} s, unsteadily, predicted {predicted_s} s"


def state_view(state: Mapping[str, Any], *, most: int | None = None) -> RenderableType:
    """Draw the object of ``show --json``; with ``most``, only the last trials up to that number."""
    trials = state["trials"]
    shown = trials if most is None else trials[-most:]
    names = ("trial", "predicted s", "measured s", "slower by")
    drawn = table(
        [*((name, FIGURE) for name in names), ("strategy, and what came of it", TEXT)],
        [_state_row(trial, is_best=trial["number"] == state["best"]) for trial in shown],
    )
    head = f"{state['experiment']}: {counted(len(trials), 'trial')}"
    if len(shown) < len(trials):
        head += f", the last {len(shown)} of them"
    failed = None if state["ending"] is None else no_success_text(trials)
    lines = [*filter(None, (failed,)), _state_summary(state)]
    if state["recommendation"] is not None:
        lines += recommendation_lines(state["recommendation"])
    return Group(Text(printable(head)), drawn, *(Text(printable(line)) for line in lines))


def _state_row(trial: Mapping[str, Any], *, is_best: bool) -> Row:
    mean_s, predicted_s = trial["mean_s"], trial["predicted_s"]
    is_comparable = predicted_s and trial_tells_time(trial)
    excess = f"{mean_s / predicted_s - 1:+.1%}" if is_comparable else "-"
    remark = plan_text(trial["strategy"])
    if trial["repeats"] is not None:
        remark += f", repeats {trial['repeats']}"
    if trial["outcome"] is None:
        remark += ": runs" if trial["running"] else ": waits"
    elif trial["outcome"] != "measured":
        remark += f": {trial['outcome']}: {printable(str(trial['reason']))}"
    remark = "; ".join([remark, *warning_texts(trial)])
    figures = (figure_text(predicted_s), figure_text(mean_s), excess)
    failed = trial["outcome"] not in {None, "measured"}
    style = _BEST if is_best else "red" if failed else None
    return Row([str(trial["number"]), *figures, remark], style)


def _state_summary(state: Mapping[str, Any]) -> str:
    best, words = state["best"], []
    if state["recommendation"] is None:
        so_far = f"best so far {figure_text(state['best_s'])} s, trial {best}"
        words.append("nothing measured yet" if best is None else so_far)
    if state["ending"] is None:
        words.append(f"its last event was at {state['last_event_at']}")
    else:
        words.append(f"it ended: {state['ending_text'] or state['ending']}")
    return "; ".join(words)


class PlainView:
    """Watches a study, and prints a line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[int, float] | None = None

    def started(self, trial: Trial, group: int) -> None:
        """Print that an attempt of a trial begins."""
        repeat = "" if trial.repeats is None else f" (repeats {trial.repeats})"
        self._print(
            f"trial {trial.number}{repeat} on group {group}: {describe(trial.strategy)}, "
            f"predicted {figure_text(trial.predicted_s)} s: {trial.reason}"
        )

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Print the outcome of a trial."""
        self._print(f"trial {trial_record.trial.number}: {outcome_text(trial_record)}")
        if surprise is not None:
            self._print(f"surprise: {surprise.text}")

    def halted(self, trial: Trial) -> None:
        """Print that a trial must run again."""
        self._print(f"trial {trial.number}: {WAITING}")

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Print the error of predictions, if it has changed since the last line."""
        num_ended = len(state.trials) - len(state.running)
        shown = num_ended, knowledge.time_error
        if knowledge.calibration is None or shown == self._shown:
            return
        self._shown = shown
        best_s = knowledge.status.best_s
        best = "none" if best_s is None else f"{figure_text(best_s)} s"
        errors = errors_text(state.trials)
        parts = [f"best so far {best}", errors, f"{counted(state.budget_left, 'trial')} left"]
        self._print("; ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        """Print any other message."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class _Seen:
    # State and knowledge of the study at the tuner's last update
    state: TunerState | None = None
    knowledge: Knowledge | None = None
    running: dict[int, tuple[Trial, int]] = field(default_factory=dict)  # with group numbers
    ended: dict[int, TrialRecord] = field(default_factory=dict)  # since that update


class LiveView:
    """Watches a study, and keeps one live table of it on a terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._seen = _Seen()

    def started(self, trial: Trial, group: int) -> None:
        """Show an attempt that is running."""
        self._seen.running[trial.number] = (trial, group)
        self._draw()

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Show the outcome of a trial."""
        self._seen.running.pop(trial_record.trial.number, None)
        self._seen.ended[trial_record.trial.number] = trial_record
        outcome = trial_record.outcome
        # The table has no room for full reasons and remarks.
        if not isinstance(outcome, Measured) or outcome.remarks:
            self.note(f"trial {trial_record.trial.number}: {outcome_text(trial_record)}")
        if surprise is not None:
            self.note(f"surprise: {surprise.text}")
        self._draw()

    def halted(self, trial: Trial) -> None:
        """Show that a trial is waiting."""
        self._seen.running.pop(trial.number, None)
        self._draw()

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Show the knowledge after an update of the tuner."""
        self._seen.state, self._seen.knowledge = state, knowledge
        self._seen.ended.clear()
        self._draw()

    def note(self, text: str) -> None:
        """Print any other message above the table, where it remains."""
        self._live.console.print(printable(text), style="yellow", markup=False, highlight=False)

    def _draw(self) -> None:
        room = self._live.console.height - _OTHER_LINES - len(self._seen.running)
        num_rows = max(1, min(_MOST_LIVE_ROWS, room))
        self._live.update(_live_table(self._seen, num_rows), refresh=True)


@contextlib.contextmanager
def study_view(console: Console) -> Iterator[PlainView | LiveView]:
    """Return a view of a study: live on a terminal, line by line in a pipe or file."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            yield LiveView(live)
        except BaseException:
            live.transient = False  # the last state would disappear otherwise
            raise


def end_view(result: StudyResult, folder: str) -> RenderableType:
    """Draw the end of a study: its trials, its ending, the recommendation."""
    records, best = result.state.trials, result.best_number
    first = max(0, len(records) - _MOST_END_ROWS)
    numbers = range(first, len(records))
    shown = numbers if best is None or best in numbers else [best, *numbers]
    rows = [(records[number].trial, records[number].outcome or WAITING) for number in shown]
    title = f"{result.state.experiment.name}: {counted(len(records), 'trial')}"
    parts: list[RenderableType] = [trials_table(rows, title=title, best=best)] if rows else []
    if len(shown) < len(records):
        parts.append(Text(f"all {len(records)} trials are in {folder}/history.csv"))
    parts.append(Text("\n".join(_end_lines(result, folder))))
    return Group(*parts)


def _end_lines(result: StudyResult, folder: str) -> list[str]:
    """Return why a study stopped, and its recommendation, as lines."""
    outcomes = (entry.outcome for entry in result.state.trials)
    failed = no_success_text([outcome_to_json(outcome) for outcome in outcomes if outcome])
    lines = [*filter(None, (failed,)), f"stopped: {ENDINGS[result.ending]}"]
    errors = errors_text(result.state.trials)
    if errors is not None:
        lines.append(errors)
    if result.certificate is not None:
        lines.append(result.certificate.text)
    lines += _warning_lines(result.state.trials)
    recommended = result.recommendation
    if recommended is not None:
        cluster = result.state.experiment.cluster
        lines += recommendation_lines(recommendation_json(recommended, cluster))
    return [*lines, f"kept in {folder}"]


def _warning_lines(trials: Sequence[TrialRecord]) -> list[str]:
    warned = [
        f"trial {trial_record.trial.number}: {text}"
        for trial_record in trials
        if isinstance(trial_record.outcome, Measured)
        for text in warning_texts(outcome_to_json(trial_record.outcome))
    ]
    more = len(warned) - _MOST_WARNINGS
    return warned[:_MOST_WARNINGS] + ([f"and {more} more such warnings"] if more > 0 else [])


def _live_table(seen: _Seen, num_rows: int) -> RenderableType:
    rows, num_before = _last_rows(seen, num_rows)
    best = None if seen.knowledge is None else best_trial(seen.knowledge)
    trials = trials_table(rows, title=_headline(seen), best=best, one_line_each=True)
    parts: list[RenderableType] = [trials]
    if num_before:
        before = "trial before this is" if num_before == 1 else "trials before these are"
        parts.append(Text(f"{num_before} {before} in the study's history"))
    for trial, group in seen.running.values():
        text = f"group {group} runs trial {trial.number}: {trial.reason}"
        parts.append(Text(text, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _last_rows(seen: _Seen, num_rows: int) -> tuple[Sequence[tuple[Trial, Outcome | str]], int]:
    """Return the last trials by number, and the number of trials before them."""
    trials = () if seen.state is None else seen.state.trials
    records = {trial_record.trial.number: trial_record for trial_record in trials[-num_rows:]}
    records |= seen.ended
    records |= {
        number: TrialRecord(trial=trial, candidate=-1)
        for number, (trial, _) in seen.running.items()
    }
    numbers = sorted(records)[-num_rows:]
    rows = [(records[number].trial, _outcome(seen, records[number])) for number in numbers]
    return rows, numbers[0] if numbers else 0


def _outcome(seen: _Seen, trial_record: TrialRecord) -> Outcome | str:
    if trial_record.outcome is not None:
        return trial_record.outcome
    number = trial_record.trial.number
    return f"group {seen.running[number][1]}" if number in seen.running else WAITING


def _headline(seen: _Seen) -> str:
    """Return the number of trials, the best one and the errors of predictions, as text."""
    if seen.state is None or seen.knowledge is None:
        return "planning"
    knowledge, budget = seen.knowledge, seen.state.settings.budget
    num_trials = max([len(seen.state.trials), *(number + 1 for number in seen.running)])
    parts = [f"{num_trials} of {budget} trials"]
    best_s = knowledge.status.best_s
    if best_s is not None:
        parts.append(f"best {figure_text(best_s)} s")
    errors = errors_text(seen.state.trials)
    return ", ".join(parts if errors is None else [*parts, errors])
