"""Commands of studies: `tune`, which launches trials, and `show`."""

import sys
import time
from pathlib import Path
from typing import Any, Final, Literal

import click
from rich.live import Live

from amp_ray.api import functions as api
from amp_ray.cli.exits import table_console
from amp_ray.cli.options import (
    STDOUT,
    calibration_options,
    experiment_argument,
    file_argument,
    file_option,
    hostfile_option,
    result_options,
    search_progress,
    workers_options,
    write_json_text,
    write_result,
)
from amp_ray.errors import AmpRayError
from amp_ray.report.console import console
from amp_ray.report.study import end_view, state_view
from amp_ray.runtime.study.reading import study_state
from amp_ray.runtime.study.result import ENDINGS, StudyResult
from amp_ray.tuner.state import POLICIES

_REPLAY: Final = "replay:"

Backend = Literal["ssh", "local"]


class TrialsType(click.ParamType[tuple[Backend | None, Path | None]]):
    """Option type for ``ssh``, ``local`` or ``replay:TABLE.csv``."""

    name = "ssh|local|replay:TABLE.csv"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click calls it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[Backend | None, Path | None]:
        """Return the backend, or the table of recorded measurements."""
        if isinstance(value, tuple):
            return value
        if value in {"ssh", "local"}:
            return value, None
        if not value.startswith(_REPLAY) or value == _REPLAY:
            self.fail(f"{value!r} is none of ssh, local, replay:TABLE.csv", param, ctx)
        return None, Path(value.removeprefix(_REPLAY))


@click.command()
@experiment_argument
@click.option(
    "--budget",
    type=click.IntRange(min=0),
    help="Trials to launch, those before --resume included. Default: trials.budget.",
)
@click.option(
    "--trials",
    "trials",
    type=TrialsType(),
    help="Where trials run: on the hosts by SSH, on this machine, or not at all: answered "
    "from a table of recorded measurements. Default: trials.backend of the experiment.",
)
@click.option(
    "--time-budget",
    "time_budget_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Wall time that the study may take; trials that run then are ended.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Trials side by side, one per host group (trials.host_groups). Default: all.",
)
@file_option(
    "--study", metavar="DIR", help="Folder that everything is kept in. Default: NAME-study."
)
@click.option("--resume", is_flag=True, help="Go on with the study in that folder.")
@click.option(
    "--salvage",
    is_flag=True,
    help="With --resume: of a damaged journal, keep the records before the damage and set the "
    "rest aside.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=POLICIES[0],
    show_default=True,
    help="Which strategy is tried next; all but the first are for comparison.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of --policy random.")
@click.option(
    "--pool",
    type=click.Choice(["auto", "threads", "ray"]),
    default="auto",
    show_default=True,
    help="What holds the hosts: threads of this process, or Ray actors. auto: actors over SSH "
    "where Ray is installed, and on a Ray cluster.",
)
@click.option("--doctor/--no-doctor", default=True, help="Whether hosts are checked before.")
@hostfile_option
@calibration_options
@workers_options
@result_options
def tune(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    hostfile: Path | None,
    calibration: Path | None,
    transfer: bool,
    json_target: str | None,
    study: Path | None,
    trials: tuple[Backend | None, Path | None] | None,
    **options: Any,  # noqa: ANN401 - further ones of api.tune
) -> None:
    """Launch the most promising strategies, measure, recalibrate, repeat.

    Stops when no untested strategy is likely to be better than the best measured one, when every
    strategy that is expected to run has run, or when the budget is spent.
    """
    from amp_ray.runtime.study.folder import folder_for

    experiment = api.load(
        experiment_path,
        hostfile=hostfile,
        changes=changes,
        calibration=calibration,
        transfer=transfer,
    )
    backend, table = trials or (None, None)
    folder = study or folder_for(experiment.name)
    try:
        with search_progress() as progress:
            ended = api.tune(
                experiment,
                trials=backend,
                replay=table,
                study=folder,
                progress=progress,
                console=console(stderr=True),
                **options,
            )
    except KeyboardInterrupt:
        if folder.is_dir():
            text = f"everything is kept; the same command with --study {folder} --resume goes on"
            click.echo(f"amp-ray: {text}", err=True)
        raise
    _show(ended.result, folder, json_target)


def _show(result: StudyResult, folder: Path, json_target: str | None) -> None:
    """Show the result of a study.

    Raises:
        AmpRayError: If hosts were lost, or nothing was measured.
    """
    from amp_ray.runtime.study.tuning import RESULT

    if json_target is not None:
        with (folder / RESULT).open(encoding="utf-8") as lines:
            write_json_text(lines, json_target)
    if json_target != STDOUT:
        table_console().print(end_view(result, str(folder)))
    if result.ending == "hosts":
        raise AmpRayError(
            f"{ENDINGS[result.ending]}; amp-ray doctor tells why, "
            f"and --study {folder} --resume goes on"
        )
    if result.common_failure is not None:
        first, second = result.common_failure.numbers
        raise AmpRayError(
            f"trials {first} and {second} crashed in the same way, and nothing was "
            f"measured: {result.common_failure.reason}. Mend that, and --study {folder} --resume "
            "runs both again, at no cost to the budget; without a mend it goes on to the others"
        )
    if not result.knowledge.status.figures:
        raise AmpRayError(f"no trial was measured; the logs of all ranks are in {folder}/trials")


_EVERY_S: Final = 1.0  # seconds between two refreshes of `show --follow`

_MOST_LIVE_ROWS: Final = 15  # most trials that it shows


@click.command()
@file_argument("study_path", metavar="STUDY")
@click.option("--follow", is_flag=True, help="Keep it current until the study ends.")
@result_options
def show(*, study_path: Path, follow: bool, json_target: str | None) -> None:
    """Print the trials of a study so far; nothing is locked or changed."""
    if follow and json_target is None:
        _follow(study_path)
        return
    state = api.show(study_path)
    while follow and state.record["ending"] is None:
        time.sleep(_EVERY_S)
        state = api.show(study_path)
    write_result(state.to_json, state, json_target)


def _follow(path: Path) -> None:
    """Draw the state whenever it changes: in place on a terminal, otherwise as a new table."""
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
    """Wait a moment and return the new state; return at once if the study has ended."""
    if state["ending"] is None:
        time.sleep(_EVERY_S)
    return study_state(path)
