"""``amp-ray tune``: plan, launch, measure, recalibrate, repeat."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS, TRIALS_FAILED
from amp_ray.cli.options import (
    STDOUT,
    calibration_options,
    configure_logging,
    experiment_argument,
    hostfile_option,
    json_option,
    search_progress,
    table_console,
    verbose_option,
    write_json,
)
from amp_ray.cli.tune_options import tune_options
from amp_ray.cli.workers import workers_options
from amp_ray.errors import InputError
from amp_ray.report.study import end_view, study_view
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.preflight import check_hosts
from amp_ray.runtime.searching import Workers
from amp_ray.runtime.study_result import study_json
from amp_ray.runtime.study_space import TuneOptions
from amp_ray.runtime.tuning import prepare
from amp_ray.spec.experiment import Experiment


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
    strategy that can run has run, or when the budget is spent.
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
    asked = _asked(experiment, **options)
    folder = study_path or Path(f"{experiment.name}-study")
    with search_progress() as progress:
        tuning = prepare(experiment, asked, progress)
    if not tuning.space.num_feasible:
        click.echo("amp-ray: no feasible strategy to try; amp-ray plan tells why", err=True)
        return NOT_FEASIBLE
    if asked.table is not None:
        click.echo(f"replay: outcomes come from {asked.table}, nothing is launched", err=True)
    elif doctor:
        check_hosts(tuning.experiment)
    with _ended_by_signals(), study_view(Console(stderr=True)) as view:
        try:
            ended = tuning.run(folder, view, resume=resume)
        except KeyboardInterrupt:
            click.echo(f"amp-ray: ended; go on with --study {folder} --resume", err=True)
            raise
    if json_target is not None:
        write_json(study_json(ended, str(folder)), json_target)
    if json_target != STDOUT:
        table_console().print(end_view(ended, str(folder)))
    if ended.best_number is not None:
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
) -> TuneOptions:
    """Complete what was asked by what the experiment says."""
    backend, table = trials or (experiment.trials.backend, None)
    budget = experiment.trials.budget if budget is None else budget
    if budget == 0:
        message = "a budget of 0 trials measures nothing; amp-ray plan ranks without trials"
        raise InputError(message)
    return TuneOptions(
        backend=backend,  # type: ignore[arg-type]
        table=table,
        budget=budget,
        workers=Workers(num=num_workers, address=ray_address),
        **options,
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End in order when asked to by a signal, as by Ctrl-C: trials first."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
