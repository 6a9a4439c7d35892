"""A study as people see it: a live table in a terminal, plain lines elsewhere, and its end."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from amp_ray.report.study_table import WAITING, describe, surprise_text, told_text, trials_table
from amp_ray.runtime.study_end import ENDINGS, Result, best_trial
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import Told, Trial, TunerState
from amp_ray.tuner.surprise import Surprise

_LAST_ROWS: Final = 15
"""Trials that the live table shows: more do not fit a terminal."""

_LAST_ERRORS: Final = 4
"""How well times were predicted before that is shown, to see it change."""


class PlainView:
    """Watches a study and prints a line for everything that happens."""

    def __init__(self, console: Console) -> None:
        """Take the console that lines go to."""
        self._console = console
        self._shown: tuple[int, float] | None = None

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

    def halted(self, trial: Trial) -> None:
        """Print that a trial has to run again."""
        self._print(f"trial {trial.number}: {WAITING}")

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Print how well times are predicted now, where something was told since the last time."""
        told = len(state.trials) - len(state.running)
        shown = told, knowledge.time_error
        if knowledge.calibration is None or shown == self._shown:
            return
        self._shown = shown
        best_s = knowledge.standing.best_s
        best = "none" if best_s is None else f"{best_s:.4g} s"
        self._print(
            f"best so far {best}; predictions are off by {knowledge.time_error:.1%}; "
            f"{state.budget_left} trials left"
        )

    def note(self, text: str) -> None:
        """Print anything else."""
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a line as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class _Seen:
    """What the live table shows.

    Args:
        state: Of the study, when something was learnt last.
        knowledge: What that was.
        running: What runs, and on which group.
        told: What has ended since.
        errors: By how much predictions were off, at most the last few.
    """

    state: TunerState | None = None
    knowledge: Knowledge | None = None
    running: dict[int, tuple[Trial, int]] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)


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
            self.note(surprise_text(surprise))
        self._draw()

    def halted(self, trial: Trial) -> None:
        """Show that a trial waits."""
        self._seen.running.pop(trial.number, None)
        self._draw()

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Show what is known now."""
        self._seen.state, self._seen.knowledge = state, knowledge
        self._seen.told.clear()
        errors = self._seen.errors
        if knowledge.calibration is not None and errors[-1:] != [knowledge.time_error]:
            errors.append(knowledge.time_error)
        self._draw()

    def note(self, text: str) -> None:
        """Print anything else above the table, where it stays."""
        self._live.console.print(text, style="yellow", markup=False, highlight=False)

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
        try:
            yield LiveView(live)
        except BaseException:
            live.transient = False  # nothing else will show what was reached
            raise


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
    rows = ((told.trial, told.outcome or WAITING) for told in result.state.trials)
    table = trials_table(rows, title=title, best=result.best_number)
    return Group(table, Text("\n".join(lines)))


def _live_table(seen: _Seen) -> RenderableType:
    """Draw everything that is known."""
    rows, num_before = _last_rows(seen)
    best = None if seen.knowledge is None else best_trial(seen.knowledge)
    parts: list[RenderableType] = [trials_table(rows, title=_headline(seen), best=best)]
    if num_before:
        parts.append(Text(f"the {num_before} trials before these are in the study's history"))
    for trial, group in seen.running.values():
        parts.append(Text(f"group {group} runs trial {trial.number}: {trial.reason}"))
    return Group(*parts)


def _last_rows(seen: _Seen) -> tuple[Sequence[tuple[Trial, Outcome | str]], int]:
    """Return the last trials by number, and how many there were before them."""
    trials = () if seen.state is None else seen.state.trials
    known = {told.trial.number: told for told in trials[-_LAST_ROWS:]}
    known |= seen.told
    known |= {
        number: Told(trial=trial, candidate=-1) for number, (trial, _) in seen.running.items()
    }
    numbers = sorted(known)[-_LAST_ROWS:]
    rows = [(known[number].trial, _outcome(seen, known[number])) for number in numbers]
    return rows, numbers[0] if numbers else 0


def _outcome(seen: _Seen, told: Told) -> Outcome | str:
    """Return what came of a trial, or what it does."""
    if told.outcome is not None:
        return told.outcome
    number = told.trial.number
    return f"group {seen.running[number][1]}" if number in seen.running else WAITING


def _headline(seen: _Seen) -> str:
    """Say what is left, what is best and how far predictions are off."""
    if seen.state is None or seen.knowledge is None:
        return "planning"
    knowledge, budget = seen.knowledge, seen.state.settings.budget
    num_trials = max([len(seen.state.trials), *(number + 1 for number in seen.running)])
    parts = [f"{num_trials} of {budget} trials"]
    best_s = knowledge.standing.best_s
    if best_s is not None:
        parts.append(f"best {best_s:.4g} s")
    if seen.errors:
        before = [f"{error:.1%}" for error in seen.errors[-_LAST_ERRORS:]]
        parts.append(f"predictions off by {' > '.join(before)}")
    return ", ".join(parts)
