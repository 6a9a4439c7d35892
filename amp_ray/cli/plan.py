"""``amp-ray plan``: search and rank."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    OURS,
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
from amp_ray.errors import InputError
from amp_ray.report.tables import moves_table, ranking_table
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import Planned, plan_experiment, why_infeasible
from amp_ray.runtime.ray.searching import Workers
from amp_ray.runtime.replanning import Replanned, replan, without_hosts
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
@click.option(
    "--without",
    "lost_hosts",
    multiple=True,
    metavar="HOST",
    help="Plan for the cluster without this host; may be given several times.",
)
@click.option(
    "--from",
    "before_path",
    metavar="PLAN.json",
    type=click.Path(path_type=Path),
    help="What runs today (plan --json, tune --json or a strategy): among ties the plan that moves "
    "the least state comes first, with what must move.",
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
    changes: tuple[str, ...],
    num_rows: int,
    show_all: bool,
    launchable: bool,
    objective: Objective | None,
    lost_hosts: tuple[str, ...],
    before_path: Path | None,
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
    if before_path is not None and cost_model != OURS:
        message = f"--from compares plans by cost model {OURS}; {cost_model} cannot"
        raise InputError(message)
    whole = with_calibration(
        load_experiment(experiment_path, changes=changes), calibration_path, transfer=transfer
    )
    experiment = without_hosts(whole, lost_hosts)
    if launchable:
        experiment = launchable_only(experiment)
    experiment = replace(experiment, objective=objective or experiment.objective)
    with search_progress() as progress:
        planned = plan_experiment(
            experiment,
            cost_model,
            workers=Workers(num=num_workers, address=ray_address),
            progress=progress,
        )
    if before_path is not None:
        planned = replan(planned, before_path, whole.cluster)
    shown = None if show_all else num_rows
    if json_target is not None:
        write_json(planned.to_json(num_rows=shown), json_target)
    else:
        _print(planned, num_rows=shown, wide=wide)
    return _exit_code(planned)


def _exit_code(planned: Planned) -> int:
    """Return how the command ends; say why where nothing is feasible."""
    if planned.ranking.num_feasible:
        return SUCCESS
    why = why_infeasible(planned.experiment, planned.cost_model, planned.ranking.results)
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
    moves = planned.moves() if isinstance(planned, Replanned) else None
    if moves is not None:
        table_console(wide=wide).print(moves_table(moves))
