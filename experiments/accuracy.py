"""Print how far the cost model is off on published measurements, as ``make accuracy`` does.

The tables lie in ``experiments/published``; ``--data`` (or AMP_RAY_DATA) names another folder with
tables of the same format, and what it lacks is named. A change of the cost model states its effect
by a new golden copy:

    python experiments/accuracy.py --golden tests/golden/accuracy.json
"""

import json
from pathlib import Path

import click
from rich.console import Console

from amp_ray.errors import InputError
from amp_ray.runtime.files import write_text
from published.sections import PUBLISHED, SECTIONS, Sources, rounded
from published.tables import read_rows
from published.view import figures_table, rows_table

WIDTH = 200


@click.command(help="Print the cost model's error on published measurements.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    envvar="AMP_RAY_DATA",
    default=PUBLISHED,
    show_default=True,
    help="Folder of the published tables.",
)
@click.option("--section", type=click.Choice(list(SECTIONS)), help="Compute this one only.")
@click.option("--rows", metavar="TABLE", help="Print the error of every row of TABLE instead.")
@click.option("--draws", type=click.IntRange(min=0), default=100, show_default=True)
@click.option("--golden", type=click.Path(path_type=Path), help="Write the figures to FILE too.")
def main(
    *, data: Path, section: str | None, rows: str | None, draws: int, golden: Path | None
) -> None:
    """Compute and print every section, or the rows of a table."""
    console = Console(width=WIDTH)
    if rows is not None:
        console.print(rows_table(read_rows(data, rows)))
        return
    if section and golden:
        message = "a golden copy holds every section; leave --section out"
        raise click.UsageError(message)
    sources = Sources(data=data, num_draws=draws)
    record = {}
    for name in [section] if section else SECTIONS:
        title, compute = SECTIONS[name].title, SECTIONS[name].compute
        try:
            figures = compute(sources)
        except InputError as error:
            console.print(title, f"left out: {error}\n", sep="\n", markup=False)
            continue
        record[name] = rounded(figures)
        console.print(figures_table(title, figures), "")
    if draws:
        console.print(
            f"bands: 5 .. 95 % of {draws} draws with every constant times its own lognormal(0.3)"
        )
    if golden is not None:
        write_text(golden, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
