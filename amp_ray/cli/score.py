"""``amp-ray score``: estimate given strategies, without search."""

from pathlib import Path
from typing import Any

import click

from amp_ray import api
from amp_ray.cli.options import (
    PATH,
    calibration_options,
    cost_model_option,
    experiment_argument,
    result_options,
    search_progress,
    wide_option,
    write_result,
)
from amp_ray.cost.estimate import Estimate
from amp_ray.exports.reading import is_program
from amp_ray.runtime.files import read_text
from amp_ray.strategies.strategy import named


@click.command()
@experiment_argument
@click.option(
    "--strategies",
    "strategies_path",
    required=True,
    metavar="FILE",
    type=PATH,
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
    experiment = api.load(experiment_path, changes=changes)
    scores = api.score(experiment, strategies_path, **options)
    best, best_record = None, {}
    if is_program(read_text(strategies_path)):
        with search_progress() as progress:
            plan = api.plan(experiment, progress=progress, **options)
        [best_row] = plan.to_json(num_rows=1)["ranking"] or [None]
        best, best_record = plan.best, {"best": best_row}
    write_result(lambda: {**scores.to_json(), **best_record}, scores, json_target, wide=wide)
    if json_target is None and best is not None and isinstance(scores[0], Estimate):
        factor = scores[0].iteration_time_s / best.iteration_time_s
        click.echo(
            f"best by the same cost model: {named(best.strategy)}: {best.iteration_time_s:.4g} s; "
            f"this one takes {factor:.3g} times as long"
        )
