"""A study as people see it: a live table in a terminal, plain lines elsewhere, and its end."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from amp_ray.errors import printable
from amp_ray.report.recommendation import recommendation_lines
from amp_ray.report.study_table import (
    WAITING,
    describe,
    errors_text,
    outcome_text,
    surprise_text,
    trials_table,
    warning_texts,
)
from amp_ray.runtime.study.result import ENDINGS, StudyResult, best_trial, recommendation_json
from amp_ray.trials.outcome import Measured, Outcome, outcome_to_json
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import Trial, TrialRecord, TunerState
from amp_ray.tuner.surprise import Surprise
from amp_ray.units import counted

_MOST_LIVE_ROWS: Final = 15  # trials that the live table shows

_OTHER_LINES: Final = 9
"""Of a terminal beside those: headline, names of columns, caption, what runs, a few notes."""

_MOST_END_ROWS: Final = 60  # trials that the end shows; the study's files have all
_MOST_WARNINGS: Final = 5  # warnings of trials that the end has in words


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

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Print what came of a trial."""
        self._print(f"trial {trial_record.trial.number}: {outcome_text(trial_record)}")
        if surprise is not None:
            self._print(surprise_text(surprise))

    def halted(self, trial: Trial) -> None:
        """Print that a trial has to run again."""
        self._print(f"trial {trial.number}: {WAITING}")

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """Print how well times are predicted now, where something was told since the last time."""
        num_ended = len(state.trials) - len(state.running)
        shown = num_ended, knowledge.time_error
        if knowledge.calibration is None or shown == self._shown:
            return
        self._shown = shown
        best_s = knowledge.status.best_s
        best = "none" if best_s is None else f"{best_s:.4g} s"
        errors = errors_text(state.trials)
        parts = [f"best so far {best}", errors, f"{counted(state.budget_left, 'trial')} left"]
        self._print("; ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        """Print anything else."""
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a line as it is."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class _Seen:
    """What the live table shows."""

    state: TunerState | None = None  # of the study, when something was learnt last
    knowledge: Knowledge | None = None  # what that was
    # What runs, and on which group
    running: dict[int, tuple[Trial, int]] = field(default_factory=dict)
    ended: dict[int, TrialRecord] = field(default_factory=dict)  # what has ended since


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

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """Show what came of a trial."""
        self._seen.running.pop(trial_record.trial.number, None)
        self._seen.ended[trial_record.trial.number] = trial_record
        outcome = trial_record.outcome
        # The table has no room for a whole reason or a remark.
        if not isinstance(outcome, Measured) or outcome.remarks:
            self.note(f"trial {trial_record.trial.number}: {outcome_text(trial_record)}")
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
        self._seen.ended.clear()
        self._draw()

    def note(self, text: str) -> None:
        """Print anything else above the table, where it stays."""
        self._live.console.print(printable(text), style="yellow", markup=False, highlight=False)

    def _draw(self) -> None:
        """Put the table on the terminal."""
        room = self._live.console.height - _OTHER_LINES - len(self._seen.running)
        num_rows = max(1, min(_MOST_LIVE_ROWS, room))
        self._live.update(_live_table(self._seen, num_rows), refresh=True)


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


def end_view(result: StudyResult, folder: str) -> RenderableType:
    """Draw the end of a study: its trials, why it stopped, what is recommended."""
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
    """Say why a study stopped, and what to use."""
    lines = [f"stopped: {ENDINGS[result.ending]}"]
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
    """Say which measured times are to be read with care."""
    warned = [
        f"trial {trial_record.trial.number}: {text}"
        for trial_record in trials
        if isinstance(trial_record.outcome, Measured)
        for text in warning_texts(outcome_to_json(trial_record.outcome))
    ]
    more = len(warned) - _MOST_WARNINGS
    return warned[:_MOST_WARNINGS] + ([f"and {more} more such warnings"] if more > 0 else [])


def _live_table(seen: _Seen, num_rows: int) -> RenderableType:
    """Draw everything that is known."""
    rows, num_before = _last_rows(seen, num_rows)
    best = None if seen.knowledge is None else best_trial(seen.knowledge)
    table = trials_table(rows, title=_headline(seen), best=best, one_line_each=True)
    parts: list[RenderableType] = [table]
    if num_before:
        before = "trial before this is" if num_before == 1 else "trials before these are"
        parts.append(Text(f"{num_before} {before} in the study's history"))
    for trial, group in seen.running.values():
        text = f"group {group} runs trial {trial.number}: {trial.reason}"
        parts.append(Text(text, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _last_rows(seen: _Seen, num_rows: int) -> tuple[Sequence[tuple[Trial, Outcome | str]], int]:
    """Return the last trials by number, and how many there were before them."""
    trials = () if seen.state is None else seen.state.trials
    known = {trial_record.trial.number: trial_record for trial_record in trials[-num_rows:]}
    known |= seen.ended
    known |= {
        number: TrialRecord(trial=trial, candidate=-1)
        for number, (trial, _) in seen.running.items()
    }
    numbers = sorted(known)[-num_rows:]
    rows = [(known[number].trial, _outcome(seen, known[number])) for number in numbers]
    return rows, numbers[0] if numbers else 0


def _outcome(seen: _Seen, trial_record: TrialRecord) -> Outcome | str:
    """Return what came of a trial, or what it does."""
    if trial_record.outcome is not None:
        return trial_record.outcome
    number = trial_record.trial.number
    return f"group {seen.running[number][1]}" if number in seen.running else WAITING


def _headline(seen: _Seen) -> str:
    """Say what is left, what is best and how far predictions were off."""
    if seen.state is None or seen.knowledge is None:
        return "planning"
    knowledge, budget = seen.knowledge, seen.state.settings.budget
    num_trials = max([len(seen.state.trials), *(number + 1 for number in seen.running)])
    parts = [f"{num_trials} of {budget} trials"]
    best_s = knowledge.status.best_s
    if best_s is not None:
        parts.append(f"best {best_s:.4g} s")
    errors = errors_text(seen.state.trials)
    return ", ".join(parts if errors is None else [*parts, errors])
