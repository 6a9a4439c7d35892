"""Token slices as a table."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.table import Table


def slices_table(record: Mapping[str, Any]) -> Table:
    """Draw what ``slices --json`` writes; equal batch slices share a line."""
    proven = "the best there is"
    if record["lower_bound_s"] < record["time_s"]:
        proven = f"none takes less than {record['lower_bound_s']:.6g} s"
    table = Table(title=f"{record['time_s']:.6g} s, {proven}", title_justify="left")
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
