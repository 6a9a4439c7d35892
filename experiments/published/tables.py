"""Published tables as observations; each row is a strategy with what came of it.

``NAME.csv`` has the columns of a strategies file (docs/formats.md). The other columns are keys of
the experiment file ``NAME.yaml``, which holds what all rows have in common; `LABELS` are neither.
"""

import csv
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from amp_ray.calibration.observation import Observation
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import ExperimentFile, build_experiment
from amp_ray.inputs.strategies import OPTIONAL_COLUMNS, Entry, parse_strategies
from amp_ray.inputs.yaml_text import Document, parse_yaml
from amp_ray.runtime.files import ExperimentFiles, read_text
from amp_ray.runtimes.releases import RELEASES
from amp_ray.strategies.strategy import Strategy

STRATEGY: Final = ("tp", "pp", "dp", "micro_batch_size", *OPTIONAL_COLUMNS)
"""Columns of a strategies file."""

LABELS: Final = (
    *("experiment", "group", "doubt", "source_line", "predicted_s", "release", "recompute_modules"),
)
"""Columns about a row; README.md says what they mean."""

OFF: Final = MappingProxyType(
    {
        "sequence_parallel": "false",
        "training": "pretrain",
        **dict.fromkeys(("virtual_stages", "cp", "ep"), "1"),
        **dict.fromkeys(("etp", "shard_ranks", "mtp_layers", "defer_embedding_wgrad"), ""),
    }
)
"""Dimensions, and the value beside none that means that they are not used."""

FAMILY: Final = "model.family"

_SAID: Final = (*OFF, *ExperimentFile.model_fields)
"""What a row may say that the package cannot plan yet, beside keys of the file's sections."""

Cells = Mapping[str, str]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table.

    Args:
        observation: The strategy and what came of it.
        group: Rows of one group are alternatives to each other.
        tells_time: Whether its time is fit for comparison.
        doubt: Why it is doubted; empty where nothing speaks against it.
    """

    observation: Observation
    group: str
    tells_time: bool
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A table.

    Args:
        rows: Those that the package can express.
        not_expressible: How many it cannot, by what they have.
    """

    rows: tuple[Row, ...]
    not_expressible: Mapping[str, int]


def read_rows(folder: Path, name: str) -> list[Row]:
    """Read the rows of a table that can be expressed; an InputError where a file is absent."""
    return list(read_table(folder, name).rows)


def read_table(folder: Path, name: str) -> Published:
    """Read a table.

    Args:
        folder: Of the tables.
        name: Of the table, without its suffix.

    Raises:
        InputError: If a file is absent, or a row wrong in more than what it cannot express.
    """
    file = folder / f"{name}.yaml"
    template = parse_yaml(read_text(file), file=str(file))
    experiments: dict[Pairs, Experiment | str] = {}
    rows, left_out = [], Counter[str]()
    for line in _cells(folder / f"{name}.csv"):
        cells = {key: cell for key, cell in line.items() if cell and cell != OFF.get(key)}
        cells |= {key: line[key] for key in line if key in STRATEGY}
        keys = {key: cell for key, cell in cells.items() if key not in STRATEGY + LABELS}
        experiment = _experiment(template, keys, line.get("release") or "", experiments)
        if isinstance(experiment, str) or not cells["bounds"]:
            left_out[experiment if isinstance(experiment, str) else "bounds"] += 1
        else:
            rows.append(_row(cells, experiment))
    return Published(rows=tuple(rows), not_expressible=dict(sorted(left_out.items())))


def _row(cells: Cells, experiment: Experiment) -> Row:
    """Return the row of a strategy with cuts."""
    entry = _given(cells, experiment)
    assert entry.strategy is not None
    observation = Observation(
        experiment=experiment,
        strategy=entry.strategy,
        outcome=entry.failure or "measured",
        measured_s=entry.measured_s,
        peak_memory_bytes=entry.peak_memory_bytes,
    )
    tells_time = entry.measured_s is not None and not cells.get("doubt")
    return Row(
        observation=observation,
        group=cells["group"],
        tells_time=tells_time,
        doubt=cells.get("doubt", ""),
    )


def amp_strategies(folder: Path, experiment: Experiment) -> list[Strategy]:
    """Read the strategies of a published AMP experiment, measured or not."""
    entries = [
        _given(cells, experiment)
        for cells in _cells(folder / "amp-2022-planner.csv")
        if cells["experiment"] == experiment.name
    ]
    return [entry.strategy for entry in entries if entry.strategy is not None]


def _experiment(
    template: Document, keys: Cells, release: str, built: dict[Pairs, Experiment | str]
) -> Experiment | str:
    """Return the template's experiment with the values of a row, or what it cannot express."""
    pairs = (("release", release), *keys.items())
    if pairs not in built:
        try:
            built[pairs] = _build(template, keys, release)
        except InputError as error:
            places = [part.where.key or "" for part in error.parts if part.where is not None]
            named = [FAMILY if key == "model" else key for key in places]
            reasons = [key for key in named if key in keys and (key in _SAID or "." in key)]
            if not reasons:
                raise
            built[pairs] = f"{reasons[0]} {keys[reasons[0]]}"
    return built[pairs]


def release_at(runtime: str, container: str) -> str:
    """Return the newest release of a runtime that is no newer than a row's container."""
    known = [name for name in RELEASES[runtime] if name <= container]
    return known[0] if known else list(RELEASES[runtime])[-1]


def _build(template: Document, keys: Cells, release: str) -> Experiment:
    """Build the template's experiment with the values of a row at their keys.

    Where the template states no release of its program, ``release`` of the row tells it.
    """
    values: Any = deepcopy(template.values)
    for key, cell in keys.items():
        *outer, last = (int(part) if part.isdigit() else part for part in key.split("."))
        section = values
        for part in outer:
            section = section.setdefault(part, {}) if isinstance(part, str) else section[part]
        section[last] = yaml.safe_load(cell)
    if release and "release" not in values:
        values["release"] = release_at(values["runtime"], release)
    document = replace(template, values=values)
    return build_experiment(document, ExperimentFiles(base=Path(template.file).parent))


def _given(cells: Cells, experiment: Experiment) -> Entry:
    """Return the strategy of a row, which must fit its experiment.

    Expert degrees of a model without experts, as some sources state them, mean nothing.
    """
    idle = () if experiment.model.shape.num_experts else ("ep", "etp")
    columns = {name: cells[name] for name in STRATEGY if name in cells and name not in idle}
    text = f"{','.join(columns)}\n{','.join(columns.values())}\n"
    file = str(dict(cells))
    (entry,) = parse_strategies(text, file=file, experiment=experiment)
    return entry


def _cells(path: Path) -> list[Cells]:
    """Return the rows of a table by column."""
    return list(csv.DictReader(read_text(path).splitlines()))
