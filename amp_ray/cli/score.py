"""``amp-ray score``: estimate given strategies, without search."""

from pathlib import Path

import click

from amp_ray import api
from amp_ray.cli.options import (
    calibration_options,
    configure_logging,
    cost_model_option,
    experiment_argument,
    json_option,
    verbose_option,
    wide_option,
    write_json,
)
from amp_ray.cli.output import table_console


@click.command()
@experiment_argument
@click.option(
    "--strategies",
    "strategies_path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="CSV (tp,pp,dp,micro_batch_size[,bounds]) or JSON list of strategies.",
)
@wide_option
@cost_model_option
@calibration_options
@json_option
@verbose_option
def score(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    strategies_path: Path,
    wide: bool,
    cost_model: api.CostModel,
    calibration_path: Path | None,
    transfer: bool,
    json_target: str | None,
    verbose: bool,
) -> None:
    """Estimate given strategies: what would this take?"""
    configure_logging(verbose=verbose)
    scores = api.score(
        api.load(experiment_path, changes=changes),
        strategies_path,
        cost_model=cost_model,
        calibration=calibration_path,
        transfer=transfer,
    )
    if json_target is not None:
        write_json(scores.to_json(), json_target)
    else:
        table_console(wide=wide).print(scores)
