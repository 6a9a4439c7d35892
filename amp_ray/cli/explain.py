"""``amp-ray explain``: why a plan is what it is, and what would help."""

from pathlib import Path
from typing import Any

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    OURS,
    calibration_options,
    configure_logging,
    experiment_argument,
    json_option,
    search_progress,
    verbose_option,
    write_json,
)
from amp_ray.cli.output import table_console
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.errors import InputError
from amp_ray.report.explanation import explanation_view
from amp_ray.runtime.advice import advise
from amp_ray.runtime.planning import Planned
from amp_ray.runtime.variants import Variants
from amp_ray.search.explanation import difference, link_records, stage_records
from amp_ray.search.rows import SCHEMA, row
from amp_ray.units import counted


@click.command()
@experiment_argument
@click.option(
    "--position",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Which strategy of the ranking.",
)
@click.option(
    "--advice/--no-advice",
    "wants_advice",
    default=True,
    help="Whether to plan again with more bandwidth, memory, nodes and the like.",
)
@calibration_options
@json_option
@verbose_option
def explain(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    position: int,
    wants_advice: bool,
    calibration_path: Path | None,
    transfer: bool,
    json_target: str | None,
    verbose: bool,
) -> int:
    """Say why a plan takes as long as it does, what the next one loses, and what would help.

    What would help is planned, not guessed: each line is the best plan of the experiment with that
    change, which --set makes too.
    """
    configure_logging(verbose=verbose)
    variants = Variants(
        path=experiment_path,
        cost_model=OURS,
        fixed=changes,
        calibration=calibration_path,
        transfer=transfer,
    )
    with search_progress() as progress:
        today = variants.plan(())
        if today.planned is None:
            raise InputError(today.problem)
        record = _record(today.planned, position)
        if wants_advice:
            found = advise(variants, today, progress)
            record["advice"] = [each.to_json() for each in found]
    if json_target is not None:
        write_json(record, json_target)
    else:
        table_console().print(explanation_view(record))
    if today.best is None:
        click.echo(f"amp-ray: no feasible strategy: {today.problem}", err=True)
        return NOT_FEASIBLE
    return SUCCESS


def _record(planned: Planned, position: int) -> dict[str, Any]:
    """Return the object of ``explain --json`` without advice."""
    experiment, ranking = planned.experiment, planned.ranking
    feasible = list(ranking.results[: ranking.num_feasible])
    record: dict[str, Any] = {"schema": SCHEMA, "experiment": experiment.name, "row": None}
    if not feasible:
        return record
    if position > len(feasible):
        there = counted(len(feasible), "feasible strategy", "feasible strategies")
        message = f"--position {position}: the ranking has {there}"
        raise InputError(message)
    chosen, cluster = feasible[position - 1], experiment.cluster
    assert isinstance(chosen, Estimate)
    # Against the next one, and any other one against the best.
    other = feasible[0] if position > 1 else next(iter(feasible[1:]), None)
    record |= {
        "row": row(chosen, position, cluster),
        "stages": stage_records(CostModel(experiment=experiment), chosen),
        "links": link_records(CostModel(experiment=experiment), chosen.strategy),
        "other": None,
    }
    if isinstance(other, Estimate):
        number = 1 if position > 1 else 2
        seconds = difference(chosen, other)
        record["other"] = {"row": row(other, number, cluster), "difference_s": seconds}
    return record
