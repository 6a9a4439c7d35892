"""``amp-ray export``: hand over what other programs read."""

from pathlib import Path

import click

from amp_ray.cli.options import configure_logging, experiment_argument, verbose_option
from amp_ray.errors import InputError, Where
from amp_ray.formats.metis_cluster import metis_cluster_files
from amp_ray.formats.metis_export import metis_files
from amp_ray.runtime.files import load_experiment, write_text
from amp_ray.runtime.metis_planning import published_profile


@click.command()
@experiment_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(["metis"]),
    help="Whose files: metis for hostfile, clusterfile.json and a folder profile.",
)
@click.option(
    "-o",
    "--output",
    "output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A folder that is new or empty.",
)
@verbose_option
def export(*, experiment_path: Path, target: str, output: Path, verbose: bool) -> None:
    """Write what other programs read of an experiment.

    A profile of Metis's is written as it was measured; any other one as its profiler would have
    measured it by our cost model.
    """
    configure_logging(verbose=verbose)
    assert target == "metis", target
    experiment = load_experiment(experiment_path)
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
