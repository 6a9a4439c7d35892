"""``amp-ray slices``: divide a batch and its sequences into slices for a pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from amp_ray.cli.options import (
    file_argument,
    file_option,
    result_options,
    search_progress,
    set_option,
    write_result,
)
from amp_ray.errors import InputError, NotFeasibleError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.slice_table import SliceTable
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import SliceSolution, solve_slices, solve_unequal
from amp_ray.report.console import FIGURE, TEXT, Row, table
from amp_ray.runtime.files import load_experiment, load_slice_table
from amp_ray.runtime.planning import plan_experiment
from amp_ray.search.effort import EFFORT
from amp_ray.search.planner import AMP_RAY, choose_planner
from amp_ray.search.rows import row
from amp_ray.search.token_slices import Granules, slice_tables
from amp_ray.units import counted


@click.command()
@file_argument("experiment_path", metavar="[EXPERIMENT.yaml]", required=False)
@file_option(
    "--table",
    "table_path",
    help="JSON with the times of slices on a stage, instead of an experiment; see docs/formats.md.",
)
@set_option
@result_options
def slices(
    *,
    experiment_path: Path | None,
    changes: tuple[str, ...],
    table_path: Path | None,
    json_target: str | None,
) -> None:
    """Find the token slices with which a pipeline finishes a batch first.

    For an experiment, these are the slices of its fastest strategy, even if plan shows a plainer
    one first; for a table, the optimal ones.
    """
    if (experiment_path is None) == (table_path is None) or (changes and table_path):
        raise InputError("give an experiment file, with --set or without, or --table FILE")
    if experiment_path is not None:
        record = _of_experiment(load_experiment(experiment_path, changes=changes))
    else:
        assert table_path is not None
        record = _of_table(table_path)
    write_result(lambda: record, _table(record), json_target)


def _of_table(path: Path) -> dict[str, Any]:
    table = load_slice_table(path)
    solution = _best_slices(table)
    if isinstance(solution, InfeasiblePartition):
        raise NotFeasibleError(f"no feasible slices: {solution.detail}")
    granules = Granules(tokens=table.tokens, granularity=table.granularity)
    return {
        "slices": _slices_json(granules.in_tokens(solution.slices)),
        "time_s": solution.value_s,
        "lower_bound_s": solution.lower_bound_s,
    }


def _of_experiment(experiment: Experiment) -> dict[str, Any]:
    if experiment.space != "uniform":
        message = f"found {experiment.space}; token slices are planned in space uniform"
        raise InputError(message, where=experiment.where("search", "space"))
    experiment = replace(experiment, limits=replace(experiment.limits, token_slices=True))
    with search_progress() as progress:
        ours = choose_planner(experiment, AMP_RAY)
        planned = plan_experiment(experiment, ours, progress=progress)
    # The first row may be plainer: it passes on whole sequences, and takes little longer
    fastest = planned.ranking.fastest
    if fastest is None:
        raise NotFeasibleError(f"no feasible strategy: {planned.why_none()}")
    position = planned.ranking.results.index(fastest) + 1
    whole = ((fastest.strategy.micro_batch_size, (experiment.model.shape.sequence_length,)),)
    return {
        "slices": _slices_json(fastest.strategy.token_slices or whole),
        "time_s": fastest.iteration_time_s,
        "lower_bound_s": None,
        "row": row(fastest, position, experiment),
    }


def _slices_json(slices: Iterable[tuple[int, Sequence[int]]]) -> list[dict[str, Any]]:
    return [{"batch": sequences, "tokens": list(tokens)} for sequences, tokens in slices]


def _best_slices(table: SliceTable) -> SliceSolution | InfeasiblePartition:
    tables = slice_tables(table)
    factors = table.factors or (1.0,) * table.num_stages
    if len(set(factors)) == 1:
        return solve_slices(tables, (factors[0], factors[0] * (len(factors) - 1)))
    limits = {"most_steps": EFFORT.max_slice_steps, "most_cells": EFFORT.max_slice_cells}
    return solve_unequal(tables, factors, **limits)


def _table(record: Mapping[str, Any]) -> RenderableType:
    """Draw the object of ``slices --json``; equal batch slices share a line."""
    title = f"{record['time_s']:.6g} s"
    if "row" in record:
        plan = record["row"]["strategy"]
        degrees = ", ".join(f"{name} {plan[name]}" for name in ("tp", "pp", "dp"))
        batches = counted(plan["num_micro_batches"], "micro-batch", "micro-batches")
        title += f" per iteration: {degrees}, {batches} of"
    elif record["lower_bound_s"] < record["time_s"]:
        title += f", none takes less than {record['lower_bound_s']:.6g} s"
    else:
        title += ", the best there is"
    rows = [
        Row((str(len(list(equal))), str(entry["batch"]), _runs_text(entry["tokens"])))
        for entry, equal in groupby(record["slices"])
    ]
    columns = [("times", FIGURE), ("sequences", FIGURE), ("tokens of each slice", TEXT)]
    return Group(Text(title), table(columns, rows))


def _runs_text(tokens: list[int]) -> str:
    """Return slices as text; equal neighbours are grouped.

    Example:
        >>> _runs_text([256, 128, 128])
        '256 2x128'
    """
    runs = ((size, len(list(equal))) for size, equal in groupby(tokens))
    return " ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
