"""Published tables as observations; each row is a strategy with what came of it.

``NAME.csv`` has the columns of a strategies file (docs/formats.md). The other columns are keys of
the experiment file ``NAME.yaml``, which holds what all rows have in common; `LABELS` are neither.
"""

import csv
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from amp_ray.calibration import Observation
from amp_ray.runtime.files import ExperimentFiles, read_text
from amp_ray.spec.build import build_experiment
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.spec.strategy_file import Context, Given, parse_strategies
from amp_ray.spec.yaml_text import Document, parse_yaml

STRATEGY: Final = (
    "tp",
    "pp",
    "dp",
    "micro_batch_size",
    "bounds",
    "recompute",
    "measured_s",
    "peak_memory_bytes",
)
"""Columns of a strategies file."""

LABELS: Final = ("experiment", "group", "doubt", "source_line", "sequence_parallel", "predicted_s")
"""Columns about a row; README.md says what they mean."""

Cells = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table.

    Args:
        observation: The strategy and what came of it.
        group: Rows of one group are alternatives to each other.
        tells_time: Whether its time is fit for comparison.
    """

    observation: Observation
    group: str
    tells_time: bool


def read_rows(folder: Path, name: str) -> list[Row]:
    """Read the measured rows of a table.

    Rows with a recompute that cannot be expressed (``selective``) are left out.

    Args:
        folder: Of the tables.
        name: Of the table, without its suffix.

    Raises:
        InputError: If a file is absent or wrong.
    """
    file = folder / f"{name}.yaml"
    template = parse_yaml(read_text(file), file=str(file))
    experiments: dict[tuple[str, ...], Experiment] = {}
    rows = []
    for cells in _cells(folder / f"{name}.csv"):
        if cells.get("recompute") == "selective":
            continue
        keys = {key: cell for key, cell in cells.items() if key not in STRATEGY + LABELS}
        told = tuple(keys.values())
        if told not in experiments:
            experiments[told] = _experiment(template, keys)
        given = _given(cells, experiments[told])
        assert given.strategy is not None
        observation = Observation(
            experiment=experiments[told],
            strategy=given.strategy,
            outcome=given.failure or "measured",
            measured_s=given.measured_s,
            peak_memory_bytes=given.peak_memory_bytes,
        )
        tells_time = given.measured_s is not None and not cells.get("doubt")
        rows.append(Row(observation=observation, group=cells["group"], tells_time=tells_time))
    return rows


def amp_strategies(folder: Path, experiment: Experiment) -> list[Strategy]:
    """Read the strategies of a published AMP experiment, measured or not."""
    given = [
        _given(cells, experiment)
        for cells in _cells(folder / "amp-2022-planner.csv")
        if cells["experiment"] == experiment.name
    ]
    return [each.strategy for each in given if each.strategy is not None]


def _experiment(template: Document, keys: Cells) -> Experiment:
    """Return the template's experiment with the values of a row at their keys."""
    values: Any = deepcopy(template.values)
    for key, cell in keys.items():
        *outer, last = (int(part) if part.isdigit() else part for part in key.split("."))
        section = values
        for part in outer:
            section = section.setdefault(part, {}) if isinstance(part, str) else section[part]
        section[last] = yaml.safe_load(cell)
    document = replace(template, values=values)
    return build_experiment(document, ExperimentFiles(base=Path(template.file).parent))


def _given(cells: Cells, experiment: Experiment) -> Given:
    """Return the strategy of a row, which must fit its experiment."""
    told = {name: cells[name] for name in STRATEGY if name in cells}
    text = f"{','.join(told)}\n{','.join(told.values())}\n"
    context = Context(
        cluster=experiment.cluster,
        num_layers=experiment.model.num_layers,
        global_batch_size=experiment.global_batch_size,
        recompute=experiment.recompute,
        zero=experiment.zero,
    )
    (given,) = parse_strategies(text, file=str(dict(cells)), context=context)
    return given


def _cells(path: Path) -> list[Cells]:
    """Return the rows of a table by column."""
    return list(csv.DictReader(read_text(path).splitlines()))
