"""``amp-ray import``: take in what other planners are given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from amp_ray.cli.options import PATH, verbose_option
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError
from amp_ray.formats.metis import profiled_type
from amp_ray.formats.metis_cluster import MetisCluster, metis_cluster, parse_metis_clusterfile
from amp_ray.formats.metis_experiment import MetisArguments, cluster_hostfile, experiment_yaml
from amp_ray.formats.metis_profile import SUFFIX, parse_metis_profile
from amp_ray.inputs.build import build_experiment
from amp_ray.inputs.published_profile import PublishedProfile
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.files import ExperimentFiles, read_text, read_texts, write_output

_COUNT = click.IntRange(min=1)


@click.group(name="import")
def import_files() -> None:
    """Take in what other planners are given, as an experiment file."""


@import_files.command()
@click.option("--hostfile", required=True, metavar="FILE", type=PATH, help="Lines 'IP slots=N'.")
@click.option("--clusterfile", required=True, metavar="FILE", type=PATH, help="JSON, by IP.")
@click.option("--profile", metavar="DIR", type=PATH, help="Its JSON files; else data sheets.")
@click.option(
    "--bandwidth-unit",
    "unit",
    type=click.Choice(["GB/s", "bytes/s"]),
    help="Of the cluster file; by default decided by the size of its numbers.",
)
@click.option("--num-layers", type=_COUNT, help="Input and output layer included.")
@click.option("--hidden-size", type=_COUNT, required=True)
@click.option("--sequence-length", type=_COUNT, required=True)
@click.option("--vocab-size", type=_COUNT, required=True)
@click.option("--num-heads", type=_COUNT, help="By default heads of 128, or else of 64.")
@click.option("--global-batch-size", "--gbs", type=_COUNT, required=True)
@click.option("--max-tp", type=_COUNT, help="Largest tensor parallel degree.")
@click.option("--max-batch-size", "max_size", type=_COUNT, help="Largest micro-batch size.")
@click.option(
    "-o", "--output", required=True, metavar="EXPERIMENT.yaml", type=PATH, help="File to write."
)
@verbose_option
def metis(
    *,
    hostfile: Path,
    clusterfile: Path,
    profile: Path | None,
    unit: Any,  # noqa: ANN401 - one of two words
    num_layers: int | None,
    output: Path,
    **figures: Any,  # noqa: ANN401 - other fields of MetisArguments
) -> None:
    """Write an experiment file from Metis's hostfile, cluster file and profiles.

    A hostfile in DeepSpeed's form is written beside it. What was recognised stands in the
    experiment file as comments, and on stderr.
    """
    if output.suffix not in {".yaml", ".yml"}:
        raise InputError(f"--output: found {str(output)!r}; name the experiment .yaml")
    described = parse_metis_clusterfile(read_text(clusterfile), file=str(clusterfile), unit=unit)
    cluster = metis_cluster(read_text(hostfile), described, file=str(hostfile))
    published = _published(profile, cluster.cluster.device_types)
    arguments = MetisArguments(num_layers=_num_layers(num_layers, published, profile), **figures)
    _write(output, arguments, cluster, profile)
    for note in cluster.notes:
        click.echo(f"amp-ray: {note}", err=True)
    click.echo(f"{output}: plan it with: amp-ray plan {output}")


def _published(profile: Path | None, devices: Iterable[Device]) -> PublishedProfile | None:
    """Read a profile folder, and look whether it has every device type."""
    if profile is None:
        return None
    published = parse_metis_profile(read_texts(profile, (SUFFIX,)), folder=str(profile))
    for device in devices:
        profiled_type(published, device, folder=str(profile))
    return published


def _num_layers(asked: int | None, published: PublishedProfile | None, profile: Path | None) -> int:
    """Return the number of layers of the profile, or the one that was asked for."""
    if published is None:
        if asked is None:
            raise InputError("--num-layers is needed where no --profile tells it")
        return asked
    if asked not in (None, published.num_layers):
        message = f"--num-layers: found {asked}; {profile} is of {published.num_layers} layers"
        raise InputError(message)
    return published.num_layers


def _write(
    output: Path, arguments: MetisArguments, cluster: MetisCluster, profile: Path | None
) -> None:
    """Write experiment and hostfile, once the experiment is known to load."""
    hosts = output.with_suffix(".hosts")
    text = experiment_yaml(
        output.stem,
        arguments,
        cluster.cluster,
        hostfile=hosts.name,
        profile_path=None if profile is None else _path_from(output.absolute().parent, profile),
        notes=cluster.notes,
    )
    hosts_text = cluster_hostfile(cluster.cluster)
    files = _Beside(base=output.parent, texts={hosts.name: hosts_text})
    build_experiment(parse_yaml(text, file=str(output)), files)
    write_output(hosts, hosts_text)
    write_output(output, text)


def _path_from(folder: Path, profile: Path) -> str:
    """Return the path of a profile from a folder that holds it; else in full."""
    whole = profile.absolute()
    return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside(ExperimentFiles):
    """Files of an experiment, some of which are not written yet: ``texts`` by name."""

    texts: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return the text of one file."""
        # Not super(): slots=True makes a new class, which super() without arguments misses.
        return self.texts[name] if name in self.texts else ExperimentFiles.text(self, name)
