"""Trials in lines and tables: what was tried, what was predicted, what came of it."""

from collections.abc import Iterable
from typing import Final

from rich.table import Table
from rich.text import Text

from amp_ray.spec.strategy import Strategy
from amp_ray.trials.outcome import Measured, Outcome, outcome_to_json
from amp_ray.tuner.state import Told, Trial
from amp_ray.tuner.surprise import Surprise

_MAX_BOUNDS: Final = 40
"""Characters of bounds that a line shows; the study's files have them whole."""

WAITING: Final = "waits to run again"
"""Instead of what happened, of a trial that lost its host or its driver."""


def describe(strategy: Strategy) -> str:
    """Name a strategy in one line.

    Example:
        >>> from amp_ray.spec.candidate import Candidate
        >>> grid = Candidate(micro_batch_size=4, tp=2, dp=1, pp=2, num_micro_batches=8)
        >>> describe(Strategy.uniform(grid, (0, 5, 9)))
        'tp 2 dp 1 pp 2 micro 4 bounds 0 5 9'
    """
    tp, dp = strategy.tp or "*", strategy.dp or "*"
    head = f"tp {tp} dp {dp} pp {strategy.pp} micro {strategy.micro_batch_size}"
    return f"{head} bounds {_bounds(strategy)}"


def told_text(told: Told) -> str:
    """Say in one line what came of a trial, beside what was predicted."""
    outcome, trial = told.outcome, told.trial
    if isinstance(outcome, Measured):
        return (
            f"measured {outcome.iteration_time_s:.4g} s (spread {outcome.spread_s:.2g} s), "
            f"predicted {trial.predicted_s:.4g} s, {_error(trial, outcome)}"
        )
    if outcome is None:
        return f"runs, predicted {trial.predicted_s:.4g} s"
    record = outcome_to_json(outcome)
    return f"{record['outcome']}: {record['reason']}"


def surprise_text(surprise: Surprise) -> str:
    """Say that a measurement lies outside of what was thought possible."""
    return f"surprise: {surprise.text}"


def trials_table(
    rows: Iterable[tuple[Trial, Outcome | str]], *, title: str, best: int | None
) -> Table:
    """Draw trials.

    Args:
        rows: Trials with what came of them; text for those without an outcome.
        title: Headline.
        best: Number of the trial with the best time, marked; None for none.
    """
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in ("trial", "tp", "dp", "pp", "micro", "predicted s", "measured s", "spread", "off"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bounds, or what happened", overflow="fold")
    for trial, outcome in rows:
        is_best = trial.number == best
        style = "bold green" if is_best else None
        if not isinstance(outcome, Measured | str):
            style = "red"
        table.add_row(*map(Text, _cells(trial, outcome, is_best=is_best)), style=style)
    return table


def _bounds(strategy: Strategy) -> str:
    """Write bounds, shortened where there are many."""
    bounds = " ".join(map(str, strategy.bounds))
    if len(bounds) <= _MAX_BOUNDS:
        return bounds
    return f"{bounds[: _MAX_BOUNDS - 4].rsplit(' ', 1)[0]} ..."


def _error(trial: Trial, outcome: Measured) -> str:
    """Say by how much a prediction was off, in parts of what was measured."""
    return f"{trial.predicted_s / outcome.iteration_time_s - 1:+.1%}"


def _cells(trial: Trial, outcome: Outcome | str, *, is_best: bool) -> list[str]:
    """Return one row."""
    plan = trial.strategy
    degrees = [str(value or "*") for value in (plan.tp, plan.dp, plan.pp, plan.micro_batch_size)]
    head = [f"{'*' if is_best else ''}{trial.number}", *degrees, f"{trial.predicted_s:.4g}"]
    remark = _bounds(plan)
    if trial.repeats is not None:
        remark += f"; repeats {trial.repeats}"
    if isinstance(outcome, Measured):
        measured = [f"{outcome.iteration_time_s:.4g}", f"{outcome.spread_s:.2g}"]
        return [*head, *measured, _error(trial, outcome), remark]
    if isinstance(outcome, str):
        return [*head, "...", "", "", f"{remark}; {outcome}"]
    record = outcome_to_json(outcome)
    return [*head, str(record["outcome"]), "", "", str(record["reason"])]
