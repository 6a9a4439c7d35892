"""``amp-ray diff``: what differs between two plans, or two experiments and their best plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from amp_ray.cli.options import json_option, search_progress, verbose_option, write_json
from amp_ray.cli.output import table_console
from amp_ray.errors import InputError, Where
from amp_ray.inputs.json_text import parse_json
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.report.console import plain_table
from amp_ray.report.variants import figure_text
from amp_ray.runtime.files import load_experiment, read_text
from amp_ray.runtime.planning import plan_experiment
from amp_ray.search.planner import AMP_RAY
from amp_ray.search.rows import SCHEMA, row
from amp_ray.units import GIB

_FILE = click.Path(path_type=Path)

_NO_DIFFERENCE: Final = frozenset(
    {
        "schema",
        "name",
        "search_s",
        "position",
        "num_candidates",
        "num_feasible",
        "placement",
        "searched",
    }
)
"""Keys that say nothing about a plan, or too much."""

_TRANSPARENT: Final = frozenset({"best", "strategy"})  # keys that need not be said

_HOLDERS: Final = ("row", "best", "ranking", "rows")
"""Keys under which results of our commands hold their plans."""


@click.command()
@click.argument("first", metavar="A", type=_FILE)
@click.argument("second", metavar="B", type=_FILE)
@json_option
@verbose_option
def diff(*, first: Path, second: Path, json_target: str | None) -> None:
    """Show what differs between A and B.

    Each is an experiment file, of which the keys and the best plan are compared, or a JSON file
    with a strategy or the result of plan, score, tune or explain, of which the first plan is, or a
    study's folder, of which the best trial is.
    """
    with search_progress():
        one, other = _flat(_load(first)), _flat(_load(second))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    found = [{"key": key, "a": one.get(key), "b": other.get(key)} for key in keys]
    if json_target is not None:
        record = {"schema": SCHEMA, "a": str(first), "b": str(second), "differences": found}
        write_json(record, json_target)
    elif not found:
        click.echo("no difference")
    else:
        table_console().print(_table(found, first, second))


def _table(found: list[dict[str, Any]], first: Path, second: Path) -> Table:
    """Draw a line for each key."""
    table = plain_table()
    table.add_column("key", overflow="fold")
    for path in (first, second):
        table.add_column(Text(str(path)), overflow="fold")
    table.add_column("B to A", justify="right", no_wrap=True)
    for each in found:
        a, b = each["a"], each["b"]
        numbers = all(isinstance(value, int | float) and value > 0 for value in (a, b))
        ratio = f"{b / a - 1:+.1%}" if numbers else ""
        is_memory = each["key"].endswith("_bytes")
        cells = (_gib(value) if is_memory else _shown(value) for value in (a, b))
        table.add_row(*map(Text, (each["key"], *cells, ratio)))
    return table


def _shown(value: Any) -> str:  # noqa: ANN401 - any plain value
    """Write a value; nothing is a dash."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return figure_text(value) if isinstance(value, float) else str(value)


def _gib(value: Any) -> str:  # noqa: ANN401 - bytes, or a list of them
    """Write bytes in GiB."""
    values = value if isinstance(value, list) else [value]
    return " ".join("-" if each is None else f"{each / GIB:.1f}" for each in values) + " GiB"


def _load(path: Path) -> dict[str, Any]:
    """Return what is compared: the keys of an experiment with its best plan, or a plan."""
    path = path / "result.json" if path.is_dir() else path
    text = read_text(path)
    if text.lstrip()[:1] != "{":
        experiment = load_experiment(path)
        planned = plan_experiment(experiment, AMP_RAY, progress=lambda _done, _all: None)
        best = planned.ranking.best
        record = dict(parse_yaml(text, file=str(path)).values)
        return record | ({"best": row(best, 1, experiment)} if best else {})
    found: Any = parse_json(text, file=str(path))
    while not (isinstance(found, dict) and {"micro_batch_size", "strategy"} & found.keys()):
        if isinstance(found, list):
            found = found[0]
            continue
        held = [key for key in _HOLDERS if isinstance(found, dict) and found.get(key)]
        if not held:
            message = "no plan; expected a strategy, or what plan, score, tune or explain write"
            raise InputError(message, where=Where(file=str(path)))
        found = found[held[0]]
    return dict(found)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the plain values and lists of a record by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = prefix if key in _TRANSPARENT else f"{prefix}{key}."
        inside = value
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            inside = {str(index): entry for index, entry in enumerate(value)}
        if isinstance(inside, Mapping):
            flat |= _flat(inside, name)
        elif key not in _NO_DIFFERENCE:
            flat[name[:-1]] = value
    return flat
