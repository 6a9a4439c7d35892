"""Write the factors of intervals of predicted times that the published measurements ask for.

Run it after a change of the cost model, as it takes about a minute:

    python experiments/interval_widths.py > amp_ray/data/interval-widths.csv
"""

import csv
import sys

import click

from published.interval_widths import factors
from published.sections import Sources, timed_errors


@click.command(help="Print amp_ray/data/interval-widths.csv, from the published measurements.")
def main() -> None:
    """Compute the errors of every table and print a row for each kind of evidence."""
    rows = factors(timed_errors(Sources()))
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main()
