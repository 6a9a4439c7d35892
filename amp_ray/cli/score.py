"""``amp-ray score``: estimate given strategies, without search."""

from pathlib import Path

import click

from amp_ray.cli.options import (
    calibration_options,
    configure_logging,
    cost_model_option,
    experiment_argument,
    json_option,
    refuse_useless,
    verbose_option,
    wide_option,
    write_json,
)
from amp_ray.cli.output import table_console
from amp_ray.report.tables import ResultsTable
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment, load_strategies
from amp_ray.runtime.planning import make_planner, score_given
from amp_ray.search.rows import SCHEMA, row
from amp_ray.units import counted


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
    cost_model: str,
    calibration_path: Path | None,
    transfer: bool,
    json_target: str | None,
    verbose: bool,
) -> None:
    """Estimate given strategies: what would this take?"""
    configure_logging(verbose=verbose)
    refuse_useless(cost_model, calibration_path)
    experiment = with_calibration(
        load_experiment(experiment_path, changes=changes), calibration_path, transfer=transfer
    )
    given = load_strategies(strategies_path, experiment)
    results = score_given(make_planner(experiment, cost_model), given)
    if json_target is not None:
        rows = [row(result, None, experiment.cluster) for result in results]
        write_json({"schema": SCHEMA, "rows": rows}, json_target)
        return
    num_given = counted(len(results), "strategy", "strategies")
    title = f"{experiment.name}: {num_given}, cost model {cost_model}"
    drawn = ResultsTable(results=results, experiment=experiment, title=title)
    table_console(wide=wide).print(drawn)
