"""``amp-ray sweep``: the best plans of an experiment with some keys changed, side by side."""

from pathlib import Path
from typing import Any

import click

from amp_ray import api
from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    PATH,
    calibration_options,
    cost_model_option,
    result_options,
    search_progress,
    workers_options,
    write_result,
)


@click.command()
@click.argument("experiment_path", metavar="EXPERIMENT.yaml", type=PATH)
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
) -> int:
    """Plan an experiment for every value of some keys, and lay the best plans side by side.

    Where the values are sizes of the cluster, the table says up to which size more devices are
    worth it.
    """
    with search_progress() as progress:
        points = api.sweep(experiment_path, sets, progress=progress, **options)
    write_result(points.to_json, points, json_target)
    return SUCCESS if any(points.bests) else NOT_FEASIBLE
