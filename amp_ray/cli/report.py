"""``amp-ray report``: a plan or a study as one page."""

from pathlib import Path
from typing import Any

import click

from amp_ray import api
from amp_ray.cli.options import (
    PATH,
    calibration_options,
    cost_model_option,
    search_progress,
    set_option,
    verbose_option,
)


@click.command()
@click.argument("source", metavar="STUDY|EXPERIMENT.yaml", type=PATH)
@set_option
@click.option(
    "-o",
    "--output",
    "output",
    required=True,
    metavar="report.html",
    type=PATH,
    help="File to write.",
)
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
