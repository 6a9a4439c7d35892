"""Plans of changed experiments side by side, as tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from amp_ray.report.console import plain_table
from amp_ray.units import GIB

Row = Mapping[str, Any]

_LONGEST_REASON: Final = 60

_FIGURES: Final[Mapping[str, Callable[[Row], float | None]]] = {
    "s/iter": lambda point: point["row"]["iteration_time_s"],
    "samples/s": lambda point: None if point["row"]["tokens_per_s"] else point["samples_per_s"],
    "tokens/s": lambda point: point["row"]["tokens_per_s"],
    "MFU %": lambda point: None if point["row"]["mfu"] is None else 100 * point["row"]["mfu"],
    "GiB": lambda point: _gib(point["row"]["peak_memory_bytes"]),
    "cost/iter": lambda point: point["row"]["cost"] and point["row"]["cost"]["per_iteration"],
}
"""Of a point with a ROW; what no row has gets no column."""


def sweep_view(record: Mapping[str, Any]) -> RenderableType:
    """Draw what ``sweep --json`` writes."""
    points = record["points"]
    planned = [point for point in points if point["row"]]
    shown = [name for name, figure in _FIGURES.items() if any(map(figure, planned))]
    table = plain_table(title_justify="left")
    for name in short_keys([change.partition("=")[0] for change in points[0]["set"]]):
        table.add_column(Text(name), overflow="fold")
    for name in ("devices", *shown):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan, or why none", overflow="fold")
    for number, point in enumerate(points):
        mark = " *" if number == record["knee"] else ""
        table.add_row(*map(Text, _cells(point, shown, mark)), style=None if point["row"] else "red")
    notes = []
    if record["knee"] is not None:
        text = "* from here on, added devices bring less than half of their share of samples/s"
        notes.append(Text(text))
    return Group(Text(f"{record['experiment']}, cost model {record['cost_model']}"), table, *notes)


def plan_text(strategy: Mapping[str, Any]) -> str:
    """Name a STRATEGY in a few words; stages that differ are counted.

    Example:
        >>> plan_text({"tp": 2, "pp": 2, "dp": 1, "micro_batch_size": 4, "recompute": "full"})
        'tp 2, dp 1, pp 2, micro-batch 4, recompute full'
    >>> kinds = ["none", {"kind": "full", "layers": 5}, "none"]
    >>> plan_text({"tp": 1, "pp": 3, "dp": 1, "micro_batch_size": 4, "recompute": kinds})
    'tp 1, dp 1, pp 3, micro-batch 4, recompute none / full of 5'
    >>> plan_text({"tp": None, "dp": None, "pp": None, "micro_batch_size": 4, "bounds": None})
    'stages of their own, micro-batch 4'
    """
    if strategy["tp"] is None or strategy["dp"] is None:
        stages = strategy.get("stages")  # a candidate that no plan fits has none
        degrees = [f"{len(stages)} stages of their own" if stages else "stages of their own"]
    else:
        degrees = [f"{name} {strategy[name]}" for name in ("tp", "dp", "pp")]
    skipped = {"tp", "dp", "pp", "micro_batch_size", "num_micro_batches", "recompute"}
    others = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in strategy.items()
        if name not in skipped and isinstance(value, int | str)
    ]
    recompute = strategy.get("recompute")
    kinds = [f"recompute {_kind(recompute)}"] if recompute and recompute != "none" else []
    return ", ".join([*degrees, *others, f"micro-batch {strategy['micro_batch_size']}", *kinds])


def figure_text(value: float | None) -> str:
    """Write a figure in four digits."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004


def _kind(recompute: Any) -> str:  # noqa: ANN401 - a word, one with a number of layers, or a list
    """Name kinds of recompute; of stages that differ, each kind once."""
    if isinstance(recompute, str):
        return recompute
    if isinstance(recompute, Mapping):
        return f"{recompute['kind']} of {recompute['layers']}"
    return " / ".join(dict.fromkeys(map(_kind, recompute)))


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the ends of dotted keys that tell them apart.

    Example:
        >>> short_keys(["cluster.nodes.0.count", "recompute"]), short_keys(["a.0.x", "a.1.x"])
        (['count', 'recompute'], ['0.x', '1.x'])
    """
    num_parts = 1
    while True:
        ends = [".".join(key.split(".")[-num_parts:]) for key in keys]
        if len(set(ends)) == len(keys) or num_parts > max(key.count(".") for key in keys):
            return ends
        num_parts += 1


def _gib(peak_memory_bytes: Sequence[float] | None) -> float | None:
    """Return the peak of the fullest stage in GiB."""
    return max(peak_memory_bytes) / GIB if peak_memory_bytes else None


def _cells(point: Row, shown: Sequence[str], mark: str) -> list[str]:
    """Return the cells of one point."""
    values = [change.partition("=")[2] for change in point["set"]]
    devices = "-" if point["num_devices"] is None else f"{point['num_devices']}{mark}"
    row = point["row"]
    if row is None:
        reason = point["reason"]
        cut = reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
        return [*values, devices, *("-" for _ in shown), cut]
    figures = [figure_text(_FIGURES[name](point)) for name in shown]
    return [*values, devices, *figures, plan_text(row["strategy"])]
