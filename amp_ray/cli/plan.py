"""``amp-ray plan``: search and rank."""

from pathlib import Path

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    calibration_options,
    configure_logging,
    cost_model_option,
    experiment_argument,
    json_option,
    refuse_useless,
    search_progress,
    verbose_option,
    write_json,
)
from amp_ray.cli.output import table_console
from amp_ray.cli.workers import workers_options
from amp_ray.report.tables import ranking_table, reasons_text
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import Planned, plan_experiment
from amp_ray.runtime.searching import Workers
from amp_ray.spec.experiment import launchable_only

_DEFAULT_ROWS = 10


@click.command()
@experiment_argument
@click.option(
    "--top",
    "num_rows",
    type=click.IntRange(min=1),
    default=_DEFAULT_ROWS,
    show_default=True,
    help="How many strategies to show.",
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Every candidate, the infeasible last with their reason.",
)
@click.option(
    "--launchable",
    is_flag=True,
    help="Only strategies that the runtime launches as they are: one tp and dp for all stages.",
)
@cost_model_option
@calibration_options
@workers_options
@json_option
@verbose_option
def plan(
    *,
    experiment_path: Path,
    num_rows: int,
    show_all: bool,
    launchable: bool,
    cost_model: str,
    calibration_path: Path | None,
    transfer: bool,
    num_workers: int | None,
    ray_address: str | None,
    json_target: str | None,
    verbose: bool,
) -> int:
    """Search the strategies of an experiment and rank them by predicted time."""
    configure_logging(verbose=verbose)
    refuse_useless(cost_model, calibration_path)
    experiment = with_calibration(
        load_experiment(experiment_path), calibration_path, transfer=transfer
    )
    if launchable:
        experiment = launchable_only(experiment)
    with search_progress() as progress:
        planned = plan_experiment(
            experiment,
            cost_model,
            workers=Workers(num=num_workers, address=ray_address),
            progress=progress,
        )
    shown = None if show_all else num_rows
    if json_target is not None:
        write_json(planned.to_json(num_rows=shown), json_target)
    else:
        _print(planned, num_rows=shown)
    if planned.ranking.num_feasible:
        return SUCCESS
    click.echo(f"amp-ray: no feasible strategy: {reasons_text(planned.ranking)}", err=True)
    return NOT_FEASIBLE


def _print(planned: Planned, *, num_rows: int | None) -> None:
    """Print the ranking for people."""
    num = len(planned.ranking.results)
    title = (
        f"{planned.experiment.name}: {num} candidates in {planned.search_s:.3f} s, "
        f"cost model {planned.cost_model}, {planned.experiment.profile.source}"
    )
    cluster = planned.experiment.cluster
    table_console().print(ranking_table(planned.ranking, cluster, title=title, num_rows=num_rows))
