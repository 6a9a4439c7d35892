"""``amp-ray calibrate``: fit constants to measurements once, and say what came of it."""

from pathlib import Path

import click

from amp_ray import api
from amp_ray.calibration import calibration_to_json
from amp_ray.cli.options import PATH, experiment_argument, result_options, write_json, write_result
from amp_ray.report.calibration import calibration_view


@click.command("calibrate")
@experiment_argument
@click.option(
    "--measurements",
    "measurements_path",
    required=True,
    metavar="FILE",
    type=PATH,
    help="CSV of strategies with measured_s: seconds, oom or failed.",
)
@click.option(
    "-o",
    "--output",
    "output_path",
    required=True,
    metavar="CALIBRATION",
    type=PATH,
    help="File to write the calibration to (JSON).",
)
@click.option(
    "--constants",
    "names",
    metavar="A,B,...",
    help="Fit these constants; by default those that the measurements determine best.",
)
@result_options
def calibrate_command(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    measurements_path: Path,
    output_path: Path,
    names: str | None,
    json_target: str | None,
) -> None:
    """Fit a few named constants to measured trials of an experiment."""
    chosen = None if names is None else tuple(name.strip() for name in names.split(","))
    experiment = api.load(experiment_path, changes=changes)
    calibration = api.calibrate(experiment, measurements_path, constants=chosen)
    record = calibration_to_json(calibration)
    write_json(record, str(output_path))
    write_result(lambda: record, calibration_view(calibration), json_target)
    if json_target is None:
        click.echo(f"written to {output_path}; use it with --calibration {output_path}", err=True)
