"""``amp-ray export``: hand over what other programs read."""

from pathlib import Path

import click

from amp_ray.cli.exits import NOT_FEASIBLE, SUCCESS
from amp_ray.cli.options import (
    configure_logging,
    cost_model_option,
    experiment_argument,
    verbose_option,
)
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, Where
from amp_ray.formats.aceso_plan import aceso_plan_text
from amp_ray.formats.metis_cluster import metis_cluster_files
from amp_ray.formats.metis_export import metis_files
from amp_ray.runtime.files import load_experiment, load_strategies, write_text
from amp_ray.runtime.metis_planning import published_profile
from amp_ray.runtime.planning import (
    make_planner,
    plan_experiment,
    score_given,
    why_infeasible,
)
from amp_ray.spec.experiment import Experiment
from amp_ray.units import counted


@click.command()
@experiment_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(["metis", "aceso"]),
    help="Whose files: metis for hostfile, clusterfile.json and a folder profile; aceso for the "
    "JSON of one plan.",
)
@click.option(
    "--position",
    "position",
    type=click.IntRange(min=1),
    help="aceso: which strategy of the ranking.  [default: 1]",
)
@click.option(
    "--strategies",
    "strategies_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="aceso: take the strategy at that position of this file, without search.",
)
@click.option(
    "-o",
    "--output",
    "output",
    required=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="metis: a folder that is new or empty. aceso: a file.",
)
@cost_model_option
@verbose_option
def export(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    target: str,
    position: int | None,
    strategies_path: Path | None,
    output: Path,
    cost_model: str,
    verbose: bool,
) -> int:
    """Write what other programs read of an experiment.

    metis: a profile of Metis's is written as it was measured; any other one as its profiler would
    have measured it by our cost model.

    aceso: the strategy at a position of the ranking, as a plan of the profile's operators.
    """
    configure_logging(verbose=verbose)
    experiment = load_experiment(experiment_path, changes=changes)
    if target == "aceso":
        return _export_aceso(experiment, output, cost_model, position or 1, strategies_path)
    if position is not None or strategies_path is not None:
        message = "--to metis writes no strategy: leave --position and --strategies out"
        raise InputError(message)
    _export_metis(experiment, output)
    return SUCCESS


def _export_metis(experiment: Experiment, output: Path) -> None:
    """Write hostfile, cluster file and profile."""
    published = published_profile(experiment)
    profile = output / "profile"
    _make_empty(output)
    profile.mkdir()
    for name, text in metis_cluster_files(experiment.cluster).items():
        write_text(output / name, text)
    files = metis_files(published, model_name=experiment.model.name)
    for name, text in files.items():
        write_text(profile / name, text)
    click.echo(
        f"{output}: hostfile, clusterfile.json and {len(files)} profile files of "
        f"{published.num_layers} layers"
    )


def _export_aceso(
    experiment: Experiment, output: Path, cost_model: str, position: int, given: Path | None
) -> int:
    """Write one strategy as a plan file."""
    if given is None:
        planned = plan_experiment(experiment, cost_model, progress=lambda _done, _all: None)
        results = list(planned.ranking.results[: planned.ranking.num_feasible])
        if not results:
            why = why_infeasible(experiment, cost_model, planned.ranking.results)
            click.echo(f"amp-ray: no feasible strategy: {why}", err=True)
            return NOT_FEASIBLE
    else:
        planner = make_planner(experiment, cost_model)
        results = score_given(planner, load_strategies(given, experiment))
    if position > len(results):
        message = (
            f"--position {position}: there are {counted(len(results), 'strategy', 'strategies')}"
        )
        raise InputError(message)
    result = results[position - 1]
    if not isinstance(result, Estimate):
        raise InputError(str(result.reason))
    try:
        text = aceso_plan_text(result.strategy, experiment)
    except ValueError as error:
        raise InputError(str(error), where=experiment.where("profile")) from None
    write_text(output, text)
    seconds = f"{result.iteration_time_s:.4g} s by cost model {cost_model}"
    click.echo(f"{output}: {counted(result.strategy.pp, 'stage')}, {seconds}")
    return SUCCESS


def _make_empty(folder: Path) -> None:
    """Make a folder; refuse one that holds something."""
    where = Where(file=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise InputError(message, where=where) from error
    if found:
        message = f"holds {found[0]!r}; name a folder that is new or empty"
        raise InputError(message, where=where)
