"""A study as people see it: a live table in a terminal, plain lines elsewhere, and its end."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from amp_ray.runtime.study_end import ENDINGS, Result, best_trial
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.outcome import Measured, Outcome, outcome_to_json
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import Told, Trial, TunerState
from amp_ray.tuner.surprise import Surprise

_MAX_BOUNDS: Final = 40
"""Characters of bounds that a line shows; the study's files have them whole."""

_LAST_ROWS: Final = 15
"""Trials that the live table shows: more do not fit a terminal."""

_LAST_NOTES: Final = 5


def describe(strategy: Strategy) -> str:
    """Name a strategy in one line.

    Example:
        >>> from amp_ray.spec.strategy import Candidate
        >>> grid = Candidate(micro_batch_size=4, tp=2, dp=1, pp=2, num_micro_batches=8)
        >>> describe(Strategy.uniform(grid, (0, 5, 9)))
        'tp 2 dp 1 pp 2 micro 4 bounds 0 5 9'
    """
    tp, dp = strategy.tp or "*", strategy.dp or "*"
    head = f"tp {tp} dp {dp} pp {strategy.pp} micro {strategy.micro_batch_size}"
    bounds = " ".join(map(str, strategy.bounds))
    if len(bounds) > _MAX_BOUNDS:
        bounds = f"{bounds[: _MAX_BOUNDS - 4].rsplit(' ', 1)[0]} ..."
    return f"{head} bounds {bounds}"


def told_text(told: Told) -> str:
    """Say in one line what came of a trial, beside what was predicted."""
    outcome, trial = told.outcome, told.trial
    if isinstance(outcome, Measured):
        error = trial.predicted_s / outcome.iteration_time_s - 1
        return (
            f"measured {outcome.iteration_time_s:.4g} s (spread {outcome.spread_s:.2g}), "
            f"predicted {trial.predicted_s:.4g} s, {error:+.1%}"
        )
    if outcome is None:
        return f"runs, predicted {trial.predicted_s:.4g} s"
    record = outcome_to_json(outcome)
    return f"{record['outcome']}: {record['reason']}"


def surprise_text(surprise: Surprise) -> str:
    """Say that a measurement lies outside of what was thought possible."""
    return f"surprise: {surprise.text}"


class PlainView:
    """Watches a study and prints a line for everything that happens."""

    def __init__(self, console: Console) -> None:
        """Take the console that lines go to."""
        self._console = console
        self._error: float | None = None

    def started(self, trial: Trial, group: int) -> None:
        """Print that an attempt begins."""
        repeat = "" if trial.repeats is None else f" (repeats {trial.repeats})"
        self._print(
            f"trial {trial.number}{repeat} on group {group}: {describe(trial.strategy)}, "
            f"predicted {trial.predicted_s:.4g} s: {trial.reason}"
        )

    def ended(self, told: Told, surprise: Surprise | None) -> None:
        """Print what came of a trial."""
        self._print(f"trial {told.trial.number}: {told_text(told)}")
        if surprise is not None:
            self._print(surprise_text(surprise))

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Print how well times are predicted now, where that has changed."""
        if knowledge.calibration is None or knowledge.time_error == self._error:
            return
        self._error = knowledge.time_error
        left = state.settings.budget - len(state.trials)
        best_s = knowledge.standing.best_s
        best = "none" if best_s is None else f"{best_s:.4g} s"
        self._print(
            f"best so far {best}; predictions are off by {knowledge.time_error:.1%}; "
            f"{left} trials left"
        )

    def note(self, text: str) -> None:
        """Print anything else."""
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a line as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class _Seen:
    """What the live table shows."""

    state: TunerState | None = None
    knowledge: Knowledge | None = None
    running: dict[int, tuple[Trial, int]] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class LiveView:
    """Watches a study and keeps one table of it on a terminal."""

    def __init__(self, live: Live) -> None:
        """Take the place on the terminal."""
        self._live = live
        self._seen = _Seen()

    def started(self, trial: Trial, group: int) -> None:
        """Show an attempt that runs."""
        self._seen.running[trial.number] = (trial, group)
        self._draw()

    def ended(self, told: Told, surprise: Surprise | None) -> None:
        """Show what came of a trial."""
        self._seen.running.pop(told.trial.number, None)
        self._seen.told[told.trial.number] = told
        if surprise is not None:
            self._seen.notes.append(surprise_text(surprise))
        self._draw()

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Show what is known now."""
        self._seen.state, self._seen.knowledge = state, knowledge
        for told in state.trials:
            if told.outcome is not None:
                self._seen.told[told.trial.number] = told
        self._draw()

    def note(self, text: str) -> None:
        """Show anything else."""
        self._seen.notes.append(text)
        self._draw()

    def _draw(self) -> None:
        """Put the table on the terminal."""
        self._live.update(_live_table(self._seen), refresh=True)


@contextlib.contextmanager
def study_view(console: Console) -> Iterator[PlainView | LiveView]:
    """Watch a study: live on a terminal, line by line into a pipe or file."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live)


def trials_table(
    rows: Iterable[tuple[Trial, Outcome | None]], *, title: str, best: int | None
) -> Table:
    """Draw trials in the order in which they were launched.

    Args:
        rows: Trials with what came of them; None while they run.
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
        if outcome is not None and not isinstance(outcome, Measured):
            style = "red"
        table.add_row(*_cells(trial, outcome, is_best=is_best), style=style)
    return table


def end_view(result: Result, folder: str) -> RenderableType:
    """Draw the end of a study: its trials, why it stopped, what is recommended.

    Args:
        result: How it ended.
        folder: Where it is kept.
    """
    knowledge = result.knowledge
    title = f"{result.state.experiment.name}: {len(result.state.trials)} trials"
    lines = [f"stopped: {ENDINGS[result.ending]}"]
    if result.certificate is not None:
        lines.append(result.certificate.text)
    recommendation = recommend(result.state, knowledge)
    if recommendation is not None:
        lines.append(f"recommended: {describe(recommendation.strategy)}")
        lines.append(recommendation.reason)
    lines.append(f"kept in {folder}")
    rows = ((told.trial, told.outcome) for told in result.state.trials)
    table = trials_table(rows, title=title, best=result.best_number)
    return Group(table, Text("\n".join(lines)))


def _cells(trial: Trial, outcome: Outcome | None, *, is_best: bool) -> list[str]:
    """Return one row."""
    plan = trial.strategy
    degrees = [str(value or "*") for value in (plan.tp, plan.dp, plan.pp, plan.micro_batch_size)]
    number = f"{'*' if is_best else ''}{trial.number}"
    head = [number, *degrees, f"{trial.predicted_s:.4g}"]
    bounds = describe(plan).split(" bounds ")[1]
    remark = bounds if trial.repeats is None else f"{bounds}; repeats {trial.repeats}"
    if isinstance(outcome, Measured):
        off = trial.predicted_s / outcome.iteration_time_s - 1
        measured = [f"{outcome.iteration_time_s:.4g}", f"{outcome.spread_s:.2g}", f"{off:+.1%}"]
        return [*head, *measured, remark]
    if outcome is None:
        return [*head, "...", "", "", remark]
    record = outcome_to_json(outcome)
    return [*head, str(record["outcome"]), "", "", str(record["reason"])]


def _live_table(seen: _Seen) -> RenderableType:
    """Draw everything that is known."""
    told = [(entry.trial, entry.outcome) for entry in seen.told.values()]
    rows = [*told, *((trial, None) for trial, _ in seen.running.values())]
    best = None if seen.knowledge is None else best_trial(seen.knowledge)
    parts: list[RenderableType] = [
        trials_table(rows[-_LAST_ROWS:], title=_headline(seen), best=best)
    ]
    if len(rows) > _LAST_ROWS:
        parts.append(Text(f"{len(rows) - _LAST_ROWS} earlier trials are in the study's history"))
    for trial, group in seen.running.values():
        parts.append(Text(f"group {group} runs trial {trial.number}: {trial.reason}"))
    parts.extend(Text(note, style="yellow") for note in seen.notes[-_LAST_NOTES:])
    return Group(*parts)


def _headline(seen: _Seen) -> str:
    """Say what is left, what is best and how far predictions are off."""
    if seen.state is None or seen.knowledge is None:
        return "planning"
    knowledge, budget = seen.knowledge, seen.state.settings.budget
    parts = [f"trial {len(seen.state.trials)} of {budget}"]
    best_s = knowledge.standing.best_s
    if best_s is not None:
        parts.append(f"best {best_s:.4g} s")
    if knowledge.calibration is not None:
        parts.append(f"predictions off by {knowledge.time_error:.1%}")
    return ", ".join(parts)
