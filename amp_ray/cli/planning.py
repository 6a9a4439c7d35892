"""Commands that launch no trials: plan, score, explain, sweep, report and calibrate."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import click
from rich.console import Group

from amp_ray.api import functions as api
from amp_ray.calibration.calibration import calibration_to_json
from amp_ray.cli.exits import tell
from amp_ray.cli.options import (
    calibration_options,
    cost_model_option,
    experiment_argument,
    file_argument,
    file_option,
    output_option,
    result_options,
    search_progress,
    set_option,
    verbose_option,
    wide_option,
    workers_options,
    write_json,
    write_result,
)
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, NotFeasibleError
from amp_ray.inputs.experiment import DIMENSIONS, Objective
from amp_ray.report.views import calibration_view
from amp_ray.runtime.files import read_text
from amp_ray.strategies.strategy import named
from amp_ray.units import figure_text

_DEFAULT_ROWS: Final = 10


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
    "--only",
    metavar="A,B,...",
    help=f"Search these dimensions alone, of {', '.join(DIMENSIONS)}; others are off, or as the "
    "file sets them.",
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
@file_option(
    "--from",
    "before",
    metavar="PLAN.json",
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
    only: str | None,
    **options: Any,  # noqa: ANN401 - those of api.plan
) -> None:
    """Search the strategies of an experiment and rank them by predicted time."""
    with search_progress() as progress:
        plan = api.plan(
            experiment_path,
            changes=changes,
            num_rows=None if show_all else num_rows,
            only=None if only is None else [name.strip() for name in only.split(",")],
            progress=progress,
            leading=progress.leading,
            **options,
        )
    plan = replace(plan, num_shown=None if show_all else num_rows)
    moves = plan.drawn_moves()
    drawn = plan if moves is None else Group(plan, moves)
    write_result(lambda: plan.to_json(num_rows=plan.num_shown), drawn, json_target, wide=wide)
    why_none = plan.why_none()
    if why_none is not None:
        raise NotFeasibleError(f"no feasible strategy: {why_none}")


@click.command()
@experiment_argument
@file_option(
    "--strategies",
    "strategies_path",
    required=True,
    help="CSV (tp,pp,dp,micro_batch_size[,bounds]), a JSON list, or what you run today: "
    "a script with flags of Megatron-LM or torchtitan, its configuration, or a ds_config; the best "
    "plan is searched and shown beside it.",
)
@wide_option
@cost_model_option
@calibration_options
@result_options
def score(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    strategies_path: Path,
    wide: bool,
    json_target: str | None,
    **options: Any,  # noqa: ANN401 - those of api.score
) -> None:
    """Estimate given strategies: what would this take?"""
    from amp_ray.exports.reading import is_program

    experiment = api.load(experiment_path, changes=changes)
    scores = api.score(experiment, strategies_path, **options)
    best, best_record = None, {}
    if is_program(read_text(strategies_path)):
        with search_progress() as progress:
            plan = api.plan(experiment, num_rows=1, progress=progress, **options)
        [best_row] = plan.to_json(num_rows=1)["ranking"] or [None]
        best, best_record = plan.best, {"best": best_row}
    tell(scores.not_read)
    drawn = replace(scores, not_read=())
    write_result(lambda: {**scores.to_json(), **best_record}, drawn, json_target, wide=wide)
    if json_target is None and best is not None and isinstance(scores[0], Estimate):
        factor = scores[0].iteration_time_s / best.iteration_time_s
        refused = experiment.traits.why_not_launched(scores[0].strategy)
        unable = f", which runtime {experiment.traits.name} cannot run," if refused else ""
        click.echo(
            f"best by the same cost model: {named(best.strategy)}: "
            f"{figure_text(best.iteration_time_s)} s; this one{unable} takes {factor:.3g} times as "
            "long"
        )


@click.command()
@experiment_argument
@click.option(
    "--position",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Which strategy of the ranking.",
)
@click.option(
    "--advice/--no-advice",
    default=True,
    help="Whether to plan again with more bandwidth, memory, nodes and the like.",
)
@calibration_options
@result_options
def explain(
    *,
    experiment_path: Path,
    json_target: str | None,
    **options: Any,  # noqa: ANN401 - those of api.explain
) -> None:
    """Explain the time of a plan, what the next one loses, and which changes would help.

    Each change is planned again: its line is the best plan of the changed experiment. --set makes
    the same change.
    """
    with search_progress() as progress:
        explanation = api.explain(experiment_path, progress=progress, **options)
    write_result(explanation.to_json, explanation, json_target)
    if explanation.problem:
        raise NotFeasibleError(f"no feasible strategy: {explanation.problem}")


@click.command()
@file_argument("experiment_path", metavar="EXPERIMENT.yaml")
@click.option(
    "--set",
    "sets",
    multiple=True,
    required=True,
    metavar="KEY=V1,V2,...",
    help="Values of a key, such as recompute=none,full; with several keys, all combinations.",
)
@cost_model_option
@calibration_options
@workers_options
@result_options
def sweep(
    *,
    experiment_path: Path,
    sets: tuple[str, ...],
    json_target: str | None,
    **options: Any,  # noqa: ANN401 - those of api.sweep
) -> None:
    """Plan an experiment for every value of some keys, and compare the best plans.

    Where the values are sizes of the cluster, the table names the size beyond which more devices
    gain little. A wrong value takes a line with the reason, and the command then ends with 2.
    """
    with search_progress() as progress:
        points = api.sweep(experiment_path, sets, progress=progress, **options)
    write_result(points.to_json, points, json_target)
    wrong = [point.problem for point in points.points if point.planned is None]
    if wrong:
        raise InputError("\n".join(wrong))
    if (why_none := points.why_none()) is not None:
        raise NotFeasibleError(f"no feasible strategy: {why_none}")


@click.command()
@file_argument("source", metavar="STUDY|EXPERIMENT.yaml")
@set_option
@output_option("report.html")
@cost_model_option
@calibration_options
@verbose_option
def report(
    *,
    source: Path,
    output: Path,
    **options: Any,  # noqa: ANN401 - those of api.write_report
) -> None:
    """Write a plan or a study as one static page, which opens from disk without a network."""
    with search_progress() as progress:
        api.write_report(source, output, progress=progress, **options)
    click.echo(f"{output}: open it in a browser")


@click.command()
@experiment_argument
@file_option(
    "--measurements",
    "measurements_path",
    required=True,
    help="CSV of strategies with measured_s: seconds, oom or failed.",
)
@output_option("CALIBRATION", "File to write the calibration to (JSON).")
@click.option(
    "--constants",
    metavar="A,B,...",
    help="Fit these constants; by default those that the measurements determine best.",
)
@result_options
def calibrate(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    measurements_path: Path,
    output: Path,
    constants: str | None,
    json_target: str | None,
) -> None:
    """Fit a few named constants to measured trials of an experiment."""
    names = None if constants is None else [name.strip() for name in constants.split(",")]
    experiment = api.load(experiment_path, changes=changes)
    calibration = api.calibrate(experiment, measurements_path, constants=names)
    record = calibration_to_json(calibration)
    write_json(record, str(output))
    write_result(lambda: record, calibration_view(calibration), json_target)
    if json_target is None:
        click.echo(f"written to {output}; use it with --calibration {output}", err=True)
