"""``amp-ray slices``: cut a batch and its sequences into what stages pass on at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    configure_logging,
    json_option,
    search_progress,
    set_option,
    verbose_option,
    write_json,
)
from amp_ray.cli.output import table_console
from amp_ray.errors import InputError
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.report.slices import slices_table
from amp_ray.runtime.files import load_experiment, load_slice_table
from amp_ray.runtime.planning import OURS, plan_experiment, why_infeasible
from amp_ray.search.rows import row
from amp_ray.search.token_slices.table import best_slices, slices_to_json
from amp_ray.spec.experiment import Experiment


@click.command()
@click.argument(
    "experiment_path",
    metavar="[EXPERIMENT.yaml]",
    required=False,
    type=click.Path(path_type=Path),
)
@click.option(
    "--table",
    "table_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSON of what slices take on a stage, instead of an experiment; docs/formats.md has its "
    "keys.",
)
@set_option
@json_option
@verbose_option
def slices(
    *,
    experiment_path: Path | None,
    changes: tuple[str, ...],
    table_path: Path | None,
    json_target: str | None,
    verbose: bool,
) -> int:
    """Find the token slices with which a pipeline runs a batch soonest.

    For an experiment, those of its fastest strategy; for a table, exactly the best there are.
    """
    configure_logging(verbose=verbose)
    if (experiment_path is None) == (table_path is None) or (changes and table_path):
        message = "give an experiment file, with --set or without, or --table FILE"
        raise InputError(message)
    if experiment_path is not None:
        found = _of_experiment(load_experiment(experiment_path, changes=changes))
    else:
        assert table_path is not None
        found = _of_table(table_path)
    if isinstance(found, str):
        click.echo(f"amp-ray: {found}", err=True)
        return NOT_FEASIBLE
    if json_target is not None:
        write_json(found, json_target)
    else:
        table_console().print(slices_table(found))
    return SUCCESS


def _of_table(path: Path) -> dict[str, Any] | str:
    """Return the result for a table, or why there is none."""
    table = load_slice_table(path)
    solution = best_slices(table)
    if isinstance(solution, InfeasiblePartition):
        return f"no feasible slices: {solution.detail}"
    return slices_to_json(solution, table)


def _of_experiment(given: Experiment) -> dict[str, Any] | str:
    """Return the result for an experiment, or why there is none."""
    if given.space != "uniform":
        message = f"found {given.space}; token slices are planned in space uniform"
        raise InputError(message, where=given.where("search", "space"))
    experiment = replace(given, limits=replace(given.limits, token_slices=True))
    with search_progress() as progress:
        ranking = plan_experiment(experiment, OURS, progress=progress).ranking
    best = ranking.best
    if best is None:
        return f"no feasible strategy: {why_infeasible(experiment, OURS, ranking.results)}"
    whole = ((best.strategy.micro_batch_size, (experiment.model.shape.sequence_length,)),)
    record = row(best, 1, experiment)
    return {
        "slices": [
            {"batch": sequences, "tokens": list(tokens)}
            for sequences, tokens in best.strategy.token_slices or whole
        ],
        "time_s": best.iteration_time_s,
        "lower_bound_s": None,
        "row": record,
    }
