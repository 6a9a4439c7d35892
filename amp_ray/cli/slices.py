"""``amp-ray slices``: cut a batch and its sequences into what stages pass on at a time."""

from pathlib import Path
from typing import Any

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import configure_logging, json_option, verbose_option, write_json
from amp_ray.cli.output import table_console
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.report.slices import slices_table
from amp_ray.runtime.files import load_slice_table
from amp_ray.search.token_slices.table import best_slices, slices_to_json


@click.command()
@click.option(
    "--table",
    "table_path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSON of what slices take on a stage; docs/formats.md has its keys.",
)
@json_option
@verbose_option
def slices(*, table_path: Path, json_target: str | None, verbose: bool) -> int:
    """Find the token slices with which a pipeline runs a batch soonest."""
    configure_logging(verbose=verbose)
    table = load_slice_table(table_path)
    solution = best_slices(table)
    if isinstance(solution, InfeasiblePartition):
        click.echo(f"amp-ray: no feasible slices: {solution.detail}", err=True)
        return NOT_FEASIBLE
    _show(slices_to_json(solution, table), json_target)
    return SUCCESS


def _show(record: dict[str, Any], json_target: str | None) -> None:
    """Print for people, or write JSON."""
    if json_target is not None:
        write_json(record, json_target)
        return
    table_console().print(slices_table(record))
