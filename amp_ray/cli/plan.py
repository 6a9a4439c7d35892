"""``amp-ray plan``: search and rank."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

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
    wide_option,
    workers_options,
    write_json,
)
from amp_ray.cli.output import table_console
from amp_ray.report.tables import ranking_table
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import Planned, plan_experiment, why_infeasible
from amp_ray.runtime.ray.searching import Workers
from amp_ray.spec.experiment import Objective, launchable_only
from amp_ray.units import counted

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
@click.option(
    "--objective",
    type=click.Choice(get_args(Objective)),
    help="Rank by time, by money, or show what no other strategy beats in both. Default: the "
    "experiment's.",
)
@wide_option
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
    objective: Objective | None,
    wide: bool,
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
    if objective is not None:
        experiment = replace(experiment, objective=objective)
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
        _print(planned, num_rows=shown, wide=wide)
    if planned.ranking.num_feasible:
        return SUCCESS
    why = why_infeasible(experiment, cost_model, planned.ranking.results)
    click.echo(f"amp-ray: no feasible strategy: {why}", err=True)
    return NOT_FEASIBLE


def _print(planned: Planned, *, num_rows: int | None, wide: bool) -> None:
    """Print the ranking for people."""
    experiment, ranking = planned.experiment, planned.ranking
    title = (
        f"{experiment.name}: {counted(len(ranking.results), 'candidate')} in "
        f"{planned.search_s:.3g} s, cost model {planned.cost_model}, {experiment.profile.source}"
    )
    drawn = ranking_table(ranking, experiment, title=title, num_rows=num_rows)
    table_console(wide=wide).print(drawn)
