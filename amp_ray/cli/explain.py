"""``amp-ray explain``: why a plan is what it is, and what would help."""

from pathlib import Path
from typing import Any

import click

from amp_ray import api
from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    calibration_options,
    experiment_argument,
    result_options,
    search_progress,
    write_result,
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
) -> int:
    """Say why a plan takes as long as it does, what the next one loses, and what would help.

    What would help is planned, not guessed: each line is the best plan of the experiment with that
    change, which --set makes too.
    """
    with search_progress() as progress:
        explanation = api.explain(experiment_path, progress=progress, **options)
    write_result(explanation.to_json, explanation, json_target)
    if explanation.problem:
        click.echo(f"amp-ray: no feasible strategy: {explanation.problem}", err=True)
        return NOT_FEASIBLE
    return SUCCESS
