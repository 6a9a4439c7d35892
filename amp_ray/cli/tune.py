"""``amp-ray tune``: plan, launch, measure, recalibrate, repeat."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS, TRIALS_FAILED
from amp_ray.cli.options import (
    STDOUT,
    calibration_options,
    configure_logging,
    experiment_argument,
    hostfile_option,
    json_option,
    search_progress,
    verbose_option,
    write_json_text,
)
from amp_ray.cli.output import console, table_console
from amp_ray.cli.tune_options import tune_options
from amp_ray.cli.workers import workers_options
from amp_ray.errors import InputError
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment
from amp_ray.spec.experiment import Experiment

if TYPE_CHECKING:  # loaded where a study runs, so that planning starts no slower
    from amp_ray.runtime.study.result import Result
    from amp_ray.runtime.study.space import TuneOptions
    from amp_ray.runtime.study.tuning import Tuning


@click.command()
@experiment_argument
@click.option(
    "--budget",
    type=click.IntRange(min=0),
    help="Trials to launch, those before --resume included. Default: trials.budget.",
)
@tune_options
@hostfile_option
@calibration_options
@workers_options
@json_option
@verbose_option
def tune(
    *,
    experiment_path: Path,
    hostfile_path: Path | None,
    calibration_path: Path | None,
    transfer: bool,
    json_target: str | None,
    verbose: bool,
    **options: Any,  # noqa: ANN401 - those of tune_options and workers_options
) -> int:
    """Launch the most promising strategies, measure, recalibrate, repeat.

    Stops when no untested strategy is likely to be better than the best measured one, when every
    strategy that is expected to run has run, or when the budget is spent.
    """
    configure_logging(verbose=verbose)
    experiment = with_calibration(
        load_experiment(experiment_path, hostfile_path), calibration_path, transfer=transfer
    )
    return tune_experiment(experiment, json_target=json_target, **options)


def tune_experiment(
    experiment: Experiment,
    *,
    json_target: str | None,
    study_path: Path | None,
    resume: bool,
    doctor: bool,
    **options: Any,  # noqa: ANN401 - those of tune_options and workers_options
) -> int:
    """Run a study to its end and show it.

    Args:
        experiment: What is tuned.
        json_target: Where the result goes, as `json_option` gives it.
        study_path: Folder of the study; None for the experiment's name.
        resume: Whether a study is gone on with.
        doctor: Whether hosts are checked before.
        options: The other options of `tune_options` and `workers_options`.

    Returns:
        The exit code of the contract.
    """
    from amp_ray.runtime.doctor.diagnosis import require_ready_hosts
    from amp_ray.runtime.study.folder import check_folder, folder_for
    from amp_ray.runtime.study.tuning import prepare

    asked = _asked(experiment, **options)
    folder = study_path or folder_for(experiment.name)
    check_folder(folder, resume=resume)  # before anybody waits for a search
    with search_progress() as progress:
        tuning = prepare(experiment, asked, progress)
    if not tuning.space.num_feasible:
        click.echo(f"amp-ray: {tuning.space.why_none(tuning.experiment)}", err=True)
        return NOT_FEASIBLE
    if asked.table is not None:
        click.echo(f"replay: outcomes come from {asked.table}, nothing is launched", err=True)
    elif doctor:
        require_ready_hosts(tuning.experiment)
    result = _run(tuning, folder, resume=resume)
    return _show(result, folder, json_target)


def _run(tuning: "Tuning", folder: Path, *, resume: bool) -> "Result":
    """Run a study before people's eyes; signals end it in order."""
    from amp_ray.report.study import study_view
    from amp_ray.runtime.study.interruption import Interruption

    with Interruption() as interruption:
        try:
            with study_view(console(stderr=True)) as view:
                return tuning.run(folder, view, resume=resume, steady=interruption.steady)
        except KeyboardInterrupt:
            text = f"everything is kept; the same command with --study {folder} --resume goes on"
            click.echo(f"amp-ray: {text}", err=True)
            raise


def _show(result: "Result", folder: Path, json_target: str | None) -> int:
    """Show how a study ended; return the exit code."""
    from amp_ray.report.study import end_view
    from amp_ray.runtime.study.tuning import RESULT

    if json_target is not None:
        with (folder / RESULT).open(encoding="utf-8") as lines:
            write_json_text(lines, json_target)
    if json_target != STDOUT:
        table_console().print(end_view(result, str(folder)))
    if result.ending == "hosts":
        click.echo(
            "amp-ray: no group of hosts is left that can be reached; amp-ray doctor tells why, "
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
    if result.best_number is not None:
        return SUCCESS
    click.echo("amp-ray: no trial was measured", err=True)
    return TRIALS_FAILED


def _asked(
    experiment: Experiment,
    *,
    trials: tuple[str, Path | None] | None,
    budget: int | None,
    num_workers: int | None,
    ray_address: str | None,
    **options: Any,  # noqa: ANN401 - fields of TuneOptions
) -> "TuneOptions":
    """Complete what was asked by what the experiment says.

    Raises:
        InputError: If there is no budget to measure with, or an option has no use.
    """
    from amp_ray.runtime.ray.searching import Workers
    from amp_ray.runtime.study.space import TuneOptions

    backend, table = trials or (experiment.trials.backend, None)
    budget = experiment.trials.budget if budget is None else budget
    if budget == 0:
        message = (
            "a budget of 0 trials measures nothing: give --budget 1 or more, or rank without "
            "trials by amp-ray plan"
        )
        raise InputError(message)
    workers = Workers(num=num_workers, address=ray_address)
    if table is not None and workers.forced:
        message = "--workers and --address have nothing to do: a table is scored in this process"
        raise InputError(message)
    return TuneOptions(
        backend=backend,  # type: ignore[arg-type]
        table=table,
        budget=budget,
        workers=workers,
        **options,
    )
