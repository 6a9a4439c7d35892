"""``amp-ray plan``: search and rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Group

from amp_ray import api
from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    PATH,
    calibration_options,
    cost_model_option,
    experiment_argument,
    result_options,
    search_progress,
    wide_option,
    workers_options,
    write_result,
)
from amp_ray.inputs.experiment import Objective

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
    multiple=True,
    metavar="HOST",
    help="Plan for the cluster without this host; may be given several times.",
)
@click.option(
    "--from",
    "before",
    metavar="PLAN.json",
    type=PATH,
    help="What runs today (plan --json, tune --json or a strategy): among ties the plan that moves "
    "the least state comes first, with what must move.",
)
@wide_option
@cost_model_option
@calibration_options
@workers_options
@result_options
def plan(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    num_rows: int,
    show_all: bool,
    wide: bool,
    json_target: str | None,
    **options: Any,  # noqa: ANN401 - those of api.plan
) -> int:
    """Search the strategies of an experiment and rank them by predicted time."""
    with search_progress() as progress:
        plan = api.plan(
            api.load(experiment_path, changes=changes),
            num_rows=None if show_all else num_rows,
            progress=progress,
            leading=progress.leading,
            **options,
        )
    plan = replace(plan, num_shown=None if show_all else num_rows)
    moves = plan.drawn_moves()
    drawn = plan if moves is None else Group(plan, moves)
    write_result(lambda: plan.to_json(num_rows=plan.num_shown), drawn, json_target, wide=wide)
    why_none = plan.why_none()
    if why_none is None:
        return SUCCESS
    click.echo(f"amp-ray: no feasible strategy: {why_none}", err=True)
    return NOT_FEASIBLE
