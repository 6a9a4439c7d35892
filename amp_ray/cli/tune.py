"""``amp-ray tune``: plan, launch, measure, recalibrate, repeat."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from amp_ray import api
from amp_ray.cli.exits import SUCCESS, TRIALS_FAILED
from amp_ray.cli.options import (
    PATH,
    STDOUT,
    calibration_options,
    experiment_argument,
    hostfile_option,
    result_options,
    search_progress,
    workers_options,
    write_json_text,
)
from amp_ray.cli.output import table_console
from amp_ray.report.console import console

_REPLAY: Final = "replay:"

_POLICIES: Final = ("best", "predicted-order", "random", "amp-2022")

Backend = Literal["ssh", "local", "replay"]


class TrialsType(click.ParamType[tuple[Backend, Path | None]]):
    """``ssh``, ``local`` or ``replay:TABLE.csv``."""

    name = "ssh|local|replay:TABLE.csv"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click calls it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[Backend, Path | None]:
        """Read the text of the option."""
        if isinstance(value, tuple):
            return value
        if value == "ssh":
            return "ssh", None
        if value == "local":
            return "local", None
        if not value.startswith(_REPLAY) or value == _REPLAY:
            self.fail(f"{value!r} is none of ssh, local, replay:TABLE.csv", param, ctx)
        return "replay", Path(value.removeprefix(_REPLAY))


if TYPE_CHECKING:  # loaded where a study runs, so that planning starts no slower
    from amp_ray.runtime.study.result import StudyResult


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
@click.option(
    "--study",
    metavar="DIR",
    type=PATH,
    help="Folder that everything is kept in. Default: NAME-study.",
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
    type=click.Choice(_POLICIES),
    default=_POLICIES[0],
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
    hostfile_path: Path | None,
    calibration: Path | None,
    transfer: bool,
    json_target: str | None,
    study: Path | None,
    trials: tuple[Backend, Path | None] | None,
    **options: Any,  # noqa: ANN401 - further ones of api.tune
) -> int:
    """Launch the most promising strategies, measure, recalibrate, repeat.

    Stops when no untested strategy is likely to be better than the best measured one, when every
    strategy that is expected to run has run, or when the budget is spent.
    """
    from amp_ray.runtime.study.folder import folder_for

    experiment = api.load(
        experiment_path,
        hostfile=hostfile_path,
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
                trials=None if backend == "replay" else backend,
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
    return _show(ended.result, folder, json_target)


def _show(result: "StudyResult", folder: Path, json_target: str | None) -> int:
    """Show how a study ended; return the exit code."""
    from amp_ray.report.study import end_view
    from amp_ray.runtime.study.result import ENDINGS
    from amp_ray.runtime.study.tuning import RESULT

    if json_target is not None:
        with (folder / RESULT).open(encoding="utf-8") as lines:
            write_json_text(lines, json_target)
    if json_target != STDOUT:
        table_console().print(end_view(result, str(folder)))
    if result.ending == "hosts":
        click.echo(
            f"amp-ray: {ENDINGS[result.ending]}; amp-ray doctor tells why, "
            f"and --study {folder} --resume goes on",
            err=True,
        )
        return TRIALS_FAILED
    if result.common_failure is not None:
        first, second = result.common_failure.numbers
        click.echo(
            f"amp-ray: trials {first} and {second} crashed in the same way, and nothing was "
            f"measured: {result.common_failure.reason}. Mend that, and --study {folder} --resume "
            "runs both again, at no cost to the budget; without a mend it goes on to the others",
            err=True,
        )
        return TRIALS_FAILED
    if result.knowledge.status.figures:
        return SUCCESS
    click.echo("amp-ray: no trial was measured", err=True)
    return TRIALS_FAILED
