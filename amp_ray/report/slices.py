"""Token slices as a table."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.table import Table


def slices_table(record: Mapping[str, Any]) -> Table:
    """Draw what ``slices --json`` writes; equal batch slices share a line."""
    title = f"{record['time_s']:.6g} s"
    if "row" in record:
        plan = record["row"]["strategy"]
        degrees = ", ".join(f"{name} {plan[name]}" for name in ("tp", "pp", "dp"))
        title += f" per iteration: {degrees}, {plan['num_micro_batches']} micro-batch(es) of"
    elif record["lower_bound_s"] < record["time_s"]:
        title += f", none takes less than {record['lower_bound_s']:.6g} s"
    else:
        title += ", the best there is"
    table = Table(title=title, title_justify="left")
    for name in ("times", "sequences", "tokens of each slice"):
        table.add_column(name, justify="left" if name.startswith("tokens") else "right")
    for entry, equal in groupby(record["slices"]):
        table.add_row(str(len(list(equal))), str(entry["batch"]), runs_text(entry["tokens"]))
    return table


def runs_text(tokens: list[int]) -> str:
    """Spell slices; those of one length in a row together.

    Example:
        >>> runs_text([256, 128, 128])
        '256 2x128'
    """
    runs = ((size, len(list(equal))) for size, equal in groupby(tokens))
    return " ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
