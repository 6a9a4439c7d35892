"""`diff`: differences between two plans, or two experiments and their best plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.api.functions import AnyPath
from amp_ray.api.keywords import checks_keywords
from amp_ray.api.results import Listed, Plan
from amp_ray.errors import InputError, Where
from amp_ray.inputs.strict_text import parse_json
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.report.console import FIGURE, TEXT, Row, table
from amp_ray.runtime.files import load_experiment, read_text
from amp_ray.runtime.planning import plan_experiment
from amp_ray.search.planner import AMP_RAY, choose_planner
from amp_ray.search.rows import SCHEMA, row
from amp_ray.units import GIB, figure_text

_NO_DIFFERENCE: Final = frozenset(
    {"schema", "name", "search_s", "position", "num_candidates", "num_feasible"}
    | {"placement", "searched"}
)
"""Keys that are left out of the comparison."""

_TRANSPARENT: Final = frozenset({"best", "strategy"})  # left out of dotted keys

_HOLDERS: Final = ("row", "best", "ranking", "rows")
"""Keys of our commands' results that contain plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences(Listed[dict[str, Any]]):
    """What differs between two plans or experiments; a sequence of mappings.

    Args:
        first: Name of the first one.
        second: Name of the second one.
        rows: Each has the ``key``, and the values ``a`` and ``b``.
    """

    first: str
    second: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``diff --json``."""
        differences = [dict(row) for row in self.rows]
        return {"schema": SCHEMA, "a": self.first, "b": self.second, "differences": differences}

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping per difference."""
        return [dict(row) for row in self.rows]

    def drawn(self) -> RenderableType:
        """Draw every difference."""
        if not self.rows:
            return Text("no difference")
        return _table(self.rows, self.first, self.second)


@checks_keywords
def diff(first: AnyPath | Plan, second: AnyPath | Plan) -> Differences:
    """Return what differs between two plans, or two experiments and their best plans.

    Args:
        first: An experiment file, a JSON file with a strategy or the result of plan, score, tune or
            explain, the folder of a study, or a `Plan`.
        second: As the first one.

    Raises:
        InputError: If a file has no plan, or an experiment is wrong.
    """
    one, other = _flat(_keys_of(first)), _flat(_keys_of(second))
    rows = tuple(
        {"key": key, "a": one.get(key), "b": other.get(key)}
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    )
    names = [
        place.experiment.name if isinstance(place, Plan) else str(place)
        for place in (first, second)
    ]
    return Differences(first=names[0], second=names[1], rows=rows)


def _keys_of(place: AnyPath | Plan) -> dict[str, Any]:
    return (
        _first_plan(place.to_json(num_rows=1), "plan")
        if isinstance(place, Plan)
        else _load(Path(place))
    )


def _table(differences: Sequence[Mapping[str, Any]], first: str, second: str) -> Table:
    columns = [("key", TEXT), (first, TEXT), (second, TEXT), ("B to A", FIGURE)]
    return table(columns, map(_row, differences))


def _row(difference: Mapping[str, Any]) -> Row:
    key, a, b = (difference[name] for name in ("key", "a", "b"))
    are_numbers = all(isinstance(value, int | float) and value > 0 for value in (a, b))
    write = _gib if key.endswith("_bytes") else _shown
    return Row((key, write(a), write(b), f"{b / a - 1:+.1%}" if are_numbers else ""))


def _shown(value: Any) -> str:  # noqa: ANN401 - any plain value
    """Return a value as text; None becomes a dash."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return figure_text(value) if isinstance(value, float) else str(value)


def _gib(value: Any) -> str:  # noqa: ANN401 - bytes, or a list of them
    values = value if isinstance(value, list) else [value]
    return " ".join("-" if size is None else f"{size / GIB:.1f}" for size in values) + " GiB"


def _load(path: Path) -> dict[str, Any]:
    """Return the keys of an experiment with its best plan, or the plan of another file."""
    path = path / "result.json" if path.is_dir() else path
    text = read_text(path)
    if text.lstrip()[:1] != "{":
        experiment = load_experiment(path)
        ours = choose_planner(experiment, AMP_RAY)
        planned = plan_experiment(experiment, ours, progress=lambda _done, _all: None)
        best = planned.ranking.best
        record = dict(parse_yaml(text, file=str(path)).values)
        return record | ({"best": row(best, 1, experiment)} if best else {})
    return _first_plan(parse_json(text, file=str(path)), str(path))


def _first_plan(plan: Any, file: str) -> dict[str, Any]:  # noqa: ANN401 - any value of JSON
    """Return the first plan of a result of a command."""
    while not (isinstance(plan, dict) and {"micro_batch_size", "strategy"} & plan.keys()):
        if isinstance(plan, list):
            plan = plan[0]
            continue
        held = [key for key in _HOLDERS if isinstance(plan, dict) and plan.get(key)]
        if not held:
            message = "no plan; expected a strategy, or what plan, score, tune or explain write"
            raise InputError(message, where=Where(file=file))
        plan = plan[held[0]]
    return dict(plan)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the plain values and lists of a record, by dotted key."""
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
