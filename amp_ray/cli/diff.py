"""``amp-ray diff``: differences between two plans, or two experiments and their best plans."""

from pathlib import Path

import click

from amp_ray.api import differences
from amp_ray.cli.options import file_argument, result_options, search_progress, write_result


@click.command()
@file_argument("first", metavar="A")
@file_argument("second", metavar="B")
@result_options
def diff(*, first: Path, second: Path, json_target: str | None) -> None:
    """Show what differs between A and B.

    Each is an experiment file (its keys and its best plan are compared), a JSON file with a
    strategy or the result of plan, score, tune or explain (its first plan), or a study's folder
    (its best trial).
    """
    with search_progress():
        result = differences.diff(first, second)
    write_result(result.to_json, result, json_target)
