"""Commands for hosts: `doctor`, which checks them, and `profile`, which measures on them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from amp_ray.api import functions as api
from amp_ray.cli.exits import SUCCESS, TRIALS_FAILED, table_console, tell
from amp_ray.cli.options import (
    experiment_argument,
    json_option,
    output_option,
    verbose_flag,
    write_json,
)
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment, SshSettings
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.report.views import diagnosis_view
from amp_ray.runtime.files import read_text
from amp_ray.runtime.hosts.host import host_maker
from amp_ray.runtime.profile.links import (
    LinkReport,
    cluster_yaml,
    constants_yaml,
    link_reports,
)
from amp_ray.runtime.profile.parts import load_unprofiled, profile_parts
from amp_ray.runtime.profile.profiling import PartReport, ProfileFolder, Settings, measure
from amp_ray.search.token_slices import granules_of
from amp_ray.trials.profile.tables import slice_files
from amp_ray.units import BITS_PER_BYTE, GIGA, MICROSECONDS_PER_SECOND, counted


@click.command()
@experiment_argument
@click.option(
    "--trials",
    "backend",
    type=click.Choice(["ssh", "local"]),
    help="Where trials would run.  [what the experiment says]",
)
@json_option
@verbose_flag
def doctor(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    backend: Literal["ssh", "local"] | None,
    json_target: str | None,
    verbose: bool,
) -> int:
    """Check every host of EXPERIMENT.yaml, and print the command that fixes each problem.

    All hosts are checked at the same time; nothing on them is changed.
    """
    _refuse_ray_cluster(experiment_path)
    diagnosis = api.doctor(experiment_path, trials=backend, changes=changes).diagnosis
    if json_target is not None:
        write_json(diagnosis.to_json(), json_target)
    else:
        # Not cropped, so that commands can be pasted from a narrow terminal.
        table_console().print(diagnosis_view(diagnosis, show_all=verbose), crop=False)
    return TRIALS_FAILED if diagnosis.errors else SUCCESS


_OF_RAY = frozenset({"cluster_name", "provider", "auth"})
"""Keys of a file for Ray's cluster launcher, which an experiment file does not have."""


def _refuse_ray_cluster(path: Path) -> None:
    """Refuse a file for Ray's cluster launcher in place of an experiment."""
    if len(parse_yaml(read_text(path), file=str(path)).values.keys() & _OF_RAY) > 1:
        message = (
            "this is a file for Ray's cluster launcher ('ray up'), not an experiment; give the "
            "file that has 'model:' and 'cluster:'"
        )
        raise InputError(message, where=Where(file=str(path)))


_DEFAULT_SECONDS = 300.0
"""Time for four distinct layers, three tp and five micro-batch sizes of a few milliseconds to
half a second each."""


@click.command()
@experiment_argument
@output_option("DIR", "Folder of the profile; an unfinished profile in it is continued.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT_SECONDS,
    show_default=True,
    help="Time to measure, for each device type; run again to go on.",
)
@click.option(
    "--token-slices",
    is_flag=True,
    help="Measure slices of the sequences too, for search.token_slices and amp-ray slices --table.",
)
@click.option("--local", "is_local", is_flag=True, help="Measure on this machine.")
@click.option(
    "--identity",
    "identities",
    multiple=True,
    metavar="FILE",
    help="Private key file for SSH; by default those of trials.ssh, else of ~/.ssh/config.",
)
@click.option("--known-hosts", metavar="FILE", help="Keys of the hosts.  [trials.ssh.known_hosts]")
@click.option("--python", metavar="PATH", help="Interpreter on the hosts.  [trials.python]")
@json_option
@verbose_flag
def profile(
    *,
    experiment_path: Path,
    changes: tuple[str, ...],
    output: Path,
    seconds: float,
    token_slices: bool,
    is_local: bool,
    json_target: str | None,
    verbose: bool,
    **ssh: Any,  # noqa: ANN401 - the options that are fields of SshSettings
) -> int:
    """Measure the layers, memory and links that a plan of EXPERIMENT.yaml needs.

    One host of every device type measures, with all of its slots at work, as in training. Each
    measurement is kept at once: an interrupted run continues when the command is run again. Exits
    with 4 if a host could not measure, or if the time was too short for a device type to plan with.
    """
    experiment = load_unprofiled(experiment_path, changes)
    is_local = is_local or experiment.trials.backend == "local"
    if is_local:
        experiment = replace(experiment, trials=replace(experiment.trials, backend="local"))
    parts = profile_parts(experiment, is_local=is_local, token_slices=token_slices)
    folder = ProfileFolder(output, experiment.model, experiment.precision)
    settings = Settings(
        seconds=seconds,
        make_host=host_maker(experiment, _settings_of(experiment, ssh)),
        say=(lambda line: click.echo(line, err=True)) if verbose else lambda _line: None,
        python=ssh["python"] or experiment.trials.python,
    )
    try:
        reports = measure(experiment, parts, folder, settings)
    finally:
        # After any interruption, plans can use the complete parts.
        granularity = granules_of(experiment).granularity
        wanted = {part.place.devices: part.layers for part in parts if part.layers}
        files = folder.write(slice_files(folder.records, experiment, granularity, wanted))
    links = link_reports(folder.records, experiment)
    snippet = cluster_yaml(experiment, links) + constants_yaml(folder.records, experiment)
    if json_target is not None:
        write_json(_to_json(output, files, reports, links, snippet), json_target)
    else:
        _print(output, files, reports, links)
        click.echo(snippet)
    problems = [text for report in reports if (text := _problem(report, files, output))]
    tell(problems)
    return TRIALS_FAILED if problems else SUCCESS


def _problem(report: PartReport, files: tuple[str, ...], output: Path) -> str | None:
    """Return why a part stopped, or why plans cannot use it yet; None if there is no problem."""
    device = report.part.place.devices
    if report.problem is not None:
        return f"{report.part.name}: {report.problem}"
    sliced = any(point.tokens for point in report.part.layers)
    if sliced and report.num_missing:
        return (
            f"{output}: unfinished, not all token slices were measured. Missing: "
            f"{'; '.join(report.missing)}. Run the command again, or with more --seconds: what was "
            "measured is kept, and it goes on"
        )
    if not report.part.layers or f"{device}.csv" in files:
        return None
    return (
        f"{output}: unfinished, no plan can be made for {device} yet: at no tp and micro-batch "
        f"size all layers were measured. Missing: {'; '.join(report.missing)}. Run the command "
        "again, or with more --seconds: what was measured is kept, and it goes on"
    )


def _settings_of(experiment: Experiment, options: Mapping[str, Any]) -> SshSettings:
    """Return the SSH settings: from the options, otherwise from the experiment file.

    Relative paths in options start at the current folder, those in the file at the file's folder.
    """
    chosen = {key: value for key, value in options.items() if value}
    if "known_hosts" in chosen:
        chosen["known_hosts"] = _absolute(chosen["known_hosts"])
    if "identities" in chosen:
        chosen["identities"] = tuple(map(_absolute, chosen["identities"]))
    return experiment.trials.ssh.model_copy(update=chosen)


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())


def _print(
    output: Path,
    files: tuple[str, ...],
    reports: tuple[PartReport, ...],
    links: tuple[LinkReport, ...],
) -> None:
    click.echo(f"{output}: {', '.join(files)}")
    for report in reports:
        missing = counted(report.num_missing, "measurement")
        state = f"{missing} missing ({'; '.join(report.missing)})"
        state = state if report.num_missing else "complete"
        large = "".join(
            f"; at tp {tp} micro-batch size {size} does not fit"
            for tp, size in sorted(report.too_large.items())
        )
        click.echo(f"{report.part.name}: {state}, {report.wall_s:.0f} s{large}")
    if any(report.num_missing for report in reports):
        click.echo("Run the command again, or with more --seconds, to measure the rest.")
    for link in links:
        apart = "; ".join(
            f"{what} alone {fit.bytes_per_s * BITS_PER_BYTE / GIGA:.3g} Gbit/s, "
            f"{fit.latency_s * MICROSECONDS_PER_SECOND:.3g} us"
            for what, fit in link.apart.items()
        )
        collective_us = link.collective_us
        collectives = "" if collective_us is None else f", {collective_us:.3g} us in collectives"
        click.echo(
            f"{link.place.scope} {link.place.devices}: {link.gbit_per_s:.3g} Gbit/s, "
            f"{link.latency_us:.3g} us{collectives}, typical error "
            f"{link.error_fraction:.0%} ({apart})"
        )
    click.echo(
        f"\nTo plan with it: profile: {{source: table, path: {output}}}, and for the links:\n"
    )


def _to_json(
    output: Path,
    files: tuple[str, ...],
    reports: tuple[PartReport, ...],
    links: tuple[LinkReport, ...],
    snippet: str,
) -> dict[str, Any]:
    measured = ("gbit_per_s", "latency_us", "collective_us", "error_fraction")
    return {
        "schema": 1,
        "folder": str(output),
        "files": list(files),
        "parts": [
            {
                "scope": report.part.place.scope,
                "devices": report.part.place.devices,
                "hosts": [node.name for node in report.part.nodes],
                "num_missing": report.num_missing,
                "missing": list(report.missing),
                "too_large": {str(tp): size for tp, size in report.too_large.items()},
                "problem": report.problem,
                "wall_s": report.wall_s,
            }
            for report in reports
        ],
        "links": [
            {"scope": link.place.scope, "devices": link.place.devices}
            | {name: getattr(link, name) for name in measured}
            for link in links
        ],
        "yaml": snippet,
    }
