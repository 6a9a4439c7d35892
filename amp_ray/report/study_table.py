"""Trials in lines and tables: what was tried, what was predicted, what came of it."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.errors import printable
from amp_ray.report.console import plain_table
from amp_ray.report.recommendation import recommendation_lines
from amp_ray.report.variants import figure_text, plan_text
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured, Outcome, outcome_to_json, trial_tells_time
from amp_ray.tuner.state import Trial, TrialRecord
from amp_ray.tuner.surprise import Surprise
from amp_ray.units import counted

_MAX_BOUNDS: Final = 40  # characters of bounds that a line shows; the study's files have them whole

_MAX_REASON: Final = 60
"""Characters of what went wrong that a table shows; lines and the study's files have it whole."""

_DOTS: Final = " ..."

_COLUMNS: Final = (
    "trial",
    "tp",
    "dp",
    "pp",
    "micro",
    "predicted",
    "measured",
    "spread",
    "slower by",
)
"""Of figures; times are in seconds."""

WAITING: Final = "waits to run again"
"""Instead of what happened, of a trial that lost its host or its driver."""


def describe(strategy: Strategy) -> str:
    """Name a strategy in one line.

    Example:
        >>> from amp_ray.strategies.candidate import Candidate, StageOptions
        >>> options = StageOptions(tp=2, dp=1)
        >>> grid = Candidate(micro_batch_size=4, options=options, pp=2, num_micro_batches=8)
        >>> describe(Strategy.uniform(grid, (0, 5, 9)))
        'tp 2 dp 1 pp 2 micro 4 bounds 0 5 9'
    """
    tp, dp = strategy.tp or "*", strategy.dp or "*"
    head = f"tp {tp} dp {dp} pp {strategy.pp} micro {strategy.micro_batch_size}"
    return f"{head} bounds {_bounds(strategy)}"


def outcome_text(trial_record: TrialRecord) -> str:
    """Say in one line what came of a trial, beside what was predicted."""
    outcome, trial = trial_record.outcome, trial_record.trial
    if isinstance(outcome, Measured):
        spread = f" (spread {outcome.spread_s:.2g} s)" if outcome.has_spread else ""
        text = f"measured {outcome.mean_s:.4g} s{spread}, predicted {trial.predicted_s:.4g} s"
        if outcome.tells_time:
            excess = _excess(trial, outcome)
            text += f" ({abs(excess):.1%} {'faster' if excess < 0 else 'slower'} than predicted)"
        remarks = map(printable, outcome.remarks)
        return "; ".join([text, *warning_texts(outcome_to_json(outcome)), *remarks])
    if outcome is None:
        return f"runs, predicted {trial.predicted_s:.4g} s"
    word, reason = _failure(outcome)
    return f"{word}: {reason}"


def warning_texts(record: Mapping[str, Any]) -> list[str]:
    """Put the warnings of a measured trial into words, from its record as JSON."""
    mean, middle = figure_text(record.get("mean_s")), figure_text(record.get("measured_s"))
    texts = {
        "periodic": f"periodic: rare slow steps, median {middle} s, mean {mean} s",
        "trend": "trend: the steps were still changing when they ended; raise trials.steps",
        "unsteady": (
            f"unsteady: steps spread by {figure_text(record.get('spread_s'))} s, median {middle} "
            f"s, mean {mean} s; compare this time with no other"
        ),
    }
    return [texts[warning] for warning in record.get("warnings") or () if warning in texts]


def surprise_text(surprise: Surprise) -> str:
    """Say that a measurement lies outside of what was thought possible."""
    return f"surprise: {surprise.text}"


def trials_table(
    rows: Iterable[tuple[Trial, Outcome | str]],
    *,
    title: str,
    best: int | None,
    one_line_each: bool = False,
) -> Table:
    """Draw trials, in a terminal of 80 columns too; ``best`` is the number of the marked one.

    With ``one_line_each``, what does not fit into a line is cut off instead of continued.
    """
    table = plain_table(
        title=title,
        title_justify="left",
        caption="times in seconds; slower by: measured against predicted",
        caption_justify="left",
        header_style="bold",
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_last("bounds or reason", one_line=one_line_each), overflow="fold")
    for trial, outcome in rows:
        is_best = trial.number == best
        style = "bold green" if is_best else None
        if not isinstance(outcome, Measured | str):
            style = "red"
        *figures, remark = _cells(trial, outcome, is_best=is_best)
        table.add_row(*map(Text, figures), _last(remark, one_line=one_line_each), style=style)
    return table


def _last(text: str, *, one_line: bool) -> Text:
    """Return a cell of the last column, which has to do with the room that the others leave."""
    return Text(text, no_wrap=True, overflow="ellipsis") if one_line else Text(text)


def _bounds(strategy: Strategy) -> str:
    """Write bounds, shortened where there are many."""
    chunks = f"{strategy.virtual_stages} chunks: " if strategy.virtual_stages > 1 else ""
    return _shortened(chunks + " ".join(map(str, strategy.given_bounds)), _MAX_BOUNDS)


def _shortened(text: str, length: int) -> str:
    """Return the first words of a text, with dots where it is longer."""
    if len(text) <= length:
        return text
    return f"{text[: length - len(_DOTS)].rsplit(maxsplit=1)[0]}{_DOTS}"


def errors_text(trials: Iterable[TrialRecord]) -> str | None:
    """Say how far measured times were from what was predicted before; None without any.

    Repeats play no part: what is told of them is what was measured before. Nor do unsteady
    trials, whose time can be compared with nothing.
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
    """Return how much longer a trial took than predicted, as a share of that."""
    return outcome.mean_s / trial.predicted_s - 1


def _cells(trial: Trial, outcome: Outcome | str, *, is_best: bool) -> list[str]:
    """Return one row."""
    plan = trial.strategy
    degrees = [str(value or "*") for value in (plan.tp, plan.dp, plan.pp, plan.micro_batch_size)]
    head = [f"{'*' if is_best else ''}{trial.number}", *degrees, f"{trial.predicted_s:.4g}"]
    remark = _bounds(plan)
    if trial.repeats is not None:
        remark += f"; repeats {trial.repeats}"
    if isinstance(outcome, Measured):
        spread = f"{outcome.spread_s:.2g}" if outcome.has_spread else "-"
        excess = f"{_excess(trial, outcome):+.1%}" if outcome.tells_time else "-"
        told = "; ".join([remark, *outcome.warnings])
        return [*head, f"{outcome.mean_s:.4g}", spread, excess, told]
    if isinstance(outcome, str):
        return [*head, "...", "", "", f"{remark}; {outcome}"]
    word, reason = _failure(outcome)
    return [*head, word, "", "", _shortened(reason, _MAX_REASON)]


def _failure(outcome: Outcome) -> tuple[str, str]:
    """Return the contract's word for a failure, and why it failed, with the host's own name."""
    record = outcome_to_json(outcome)
    host, reason = printable(record.get("host") or ""), printable(str(record["reason"]))
    return str(record["outcome"]), reason if host in reason else f"{host}: {reason}"


def state_view(state: Mapping[str, Any], *, most: int | None = None) -> RenderableType:
    """Draw what ``show --json`` writes; with ``most``, no more than the last trials."""
    trials = state["trials"]
    shown = trials if most is None else trials[-most:]
    table = plain_table()
    for name in ("trial", "predicted s", "measured s", "slower by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strategy, and what came of it", overflow="fold")
    for trial in shown:
        is_best = trial["number"] == state["best"]
        failed = trial["outcome"] not in {None, "measured"}
        style = "bold green" if is_best else "red" if failed else None
        table.add_row(*map(Text, _state_cells(trial)), style=style)
    head = f"{state['experiment']}: {counted(len(trials), 'trial')}"
    if len(shown) < len(trials):
        head += f", the last {len(shown)} of them"
    lines = [_summary(state)]
    if state["recommendation"] is not None:
        lines += recommendation_lines(state["recommendation"])
    return Group(Text(printable(head)), table, *(Text(printable(line)) for line in lines))


def _state_cells(trial: Mapping[str, Any]) -> list[str]:
    """Return the cells of one trial."""
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
    return [str(trial["number"]), *figures, remark]


def _summary(state: Mapping[str, Any]) -> str:
    """Say how far the study is."""
    best, words = state["best"], []
    if state["recommendation"] is None:
        told = f"best so far {figure_text(state['best_s'])} s, trial {best}"
        words.append("nothing measured yet" if best is None else told)
    if state["ending"] is None:
        words.append(f"its last event was at {state['last_event_at']}")
    else:
        words.append(f"it ended: {state['ending_text'] or state['ending']}")
    return "; ".join(words)
