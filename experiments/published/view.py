"""Figures as tables for people."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from published.evaluation import BAND_PERCENTILES, predict
from published.sections import Figures
from published.tables import Row

_SHARES = ("error", "bias", "regret")
"""Figures with these words in their names are shares, shown in percent."""


def figures_table(title: str, figures: Figures) -> Table:
    """Draw one section: a row per case, a column per figure, bands as ``low .. high``."""
    columns = list(dict.fromkeys(_figure(name) for row in figures.values() for name in row))
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for label, row in figures.items():
        table.add_row(label, *(_cell(row, column) for column in columns))
    return table


def rows_table(rows: Sequence[Row]) -> Table:
    """Draw the rows that tell a time, the most underrated first."""
    timed = [row for row in rows if row.tells_time]
    predicted = predict([row.observation for row in timed])
    table = Table(header_style="bold", pad_edge=False)
    names = ("error", "predicted s", "measured s", "group", "blocks", "hidden", "heads")
    for name in (*names, "tp", "pp", "dp", "micro-batch"):
        table.add_column(name, justify="right")
    for row, ours, theirs in sorted(
        zip(timed, *predicted.times(), strict=True), key=lambda times: times[1] / times[2]
    ):
        plan, shape = row.observation.strategy, row.observation.experiment.model.shape
        sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, plan.tp, plan.pp, plan.dp)
        table.add_row(
            *(f"{100 * (ours / theirs - 1):+.1f} %", f"{ours:.2f}", f"{theirs:.2f}", row.group),
            *map(str, (*sizes, plan.micro_batch_size)),
        )
    return table


def _figure(name: str) -> str:
    """Return the figure that an end of a band belongs to."""
    for percentile in BAND_PERCENTILES:
        name = name.removesuffix(f"_p{percentile}")
    return name


def _cell(row: Mapping[str, float | str], column: str) -> str:
    """Render one figure, or both ends of its band."""
    ends = [f"{column}_p{percentile}" for percentile in BAND_PERCENTILES]
    names = [name for name in (column, *ends) if name in row]
    return " .. ".join(_text(column, row[name]) for name in names)


def _text(name: str, value: float | str) -> str:
    """Render one value: percent for shares, whole numbers as such."""
    if isinstance(value, str):
        return value
    if any(word in name for word in _SHARES):
        return f"{100 * value:.2f} %"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3f}"
