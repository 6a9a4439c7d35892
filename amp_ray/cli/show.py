"""``amp-ray show``: the state of a study, also while it runs."""

import sys
import time
from pathlib import Path
from typing import Any, Final

import click
from rich.live import Live

from amp_ray.cli.options import PATH, result_options, write_result
from amp_ray.cli.output import table_console
from amp_ray.report.study import state_view
from amp_ray.runtime.study.reading import study_state

_EVERY_S: Final = 1.0

_MOST_LIVE_ROWS: Final = 15


@click.command()
@click.argument("study_path", metavar="STUDY", type=PATH)
@click.option("--follow", is_flag=True, help="Keep it current until the study ends.")
@result_options
def show(*, study_path: Path, follow: bool, json_target: str | None) -> None:
    """Print the trials of a study so far; nothing is locked or changed."""
    if follow and json_target is None:
        _follow(study_path)
        return
    state = study_state(study_path)
    while follow and state["ending"] is None:
        time.sleep(_EVERY_S)
        state = study_state(study_path)
    write_result(lambda: state, state_view(state), json_target)


def _follow(path: Path) -> None:
    """Draw the state whenever it changes: in place on a terminal, else as another table."""
    console, shown, state = table_console(), None, study_state(path)
    if not sys.stdout.isatty():
        while shown is None or state["ending"] is None or state != shown:
            if state != shown:
                console.print(state_view(state))
            shown = state
            state = _next(path, state)
        return
    with Live(state_view(state, most=_MOST_LIVE_ROWS), console=console) as live:
        while state["ending"] is None:
            state = _next(path, state)
            live.update(state_view(state, most=_MOST_LIVE_ROWS), refresh=True)


def _next(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Wait a moment and return the state then; of a study that has ended, at once."""
    if state["ending"] is None:
        time.sleep(_EVERY_S)
    return study_state(path)
