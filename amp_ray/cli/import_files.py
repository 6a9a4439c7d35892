"""``amp-ray import``: take in what other planners are given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from amp_ray import guests
from amp_ray.cli.options import PATH, verbose_option
from amp_ray.errors import InputError
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.profiles.metis import SUFFIX
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
    output: Path,
    **figures: Any,  # noqa: ANN401 - figures of the model and limits
) -> None:
    """Write an experiment file from Metis's hostfile, cluster file and profiles.

    A hostfile in DeepSpeed's form is written beside it. What was recognised stands in the
    experiment file as comments, and on stderr.
    """
    if output.suffix not in {".yaml", ".yml"}:
        raise InputError(f"--output: found {str(output)!r}; name the experiment .yaml")
    hosts = output.with_suffix(".hosts")
    read = guests.load(guests.IMPORTS["metis"], "amp-ray import metis")
    imported = read(
        (str(hostfile), read_text(hostfile)),
        (str(clusterfile), read_text(clusterfile)),
        None if profile is None else (str(profile), read_texts(profile, (SUFFIX,))),
        unit=unit,
        figures=figures,
        names={
            "name": output.stem,
            "hostfile": hosts.name,
            "profile_path": profile and _path_from(output.absolute().parent, profile),
        },
    )
    # Nothing is written before the experiment is known to load
    files = _Beside(base=output.parent, texts={hosts.name: imported.hosts_text})
    build_experiment(parse_yaml(imported.text, file=str(output)), files)
    write_output(hosts, imported.hosts_text)
    write_output(output, imported.text)
    for note in imported.notes:
        click.echo(f"amp-ray: {note}", err=True)
    click.echo(f"{output}: plan it with: amp-ray plan {output}")


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
