"""Commands for files of other programs: `export` writes them, `import` reads them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from amp_ray import guests
from amp_ray.api.exports import FOLDERS, TARGETS, make_empty
from amp_ray.api.exports import export as write_export
from amp_ray.cli.exits import tell
from amp_ray.cli.options import (
    STDOUT,
    cost_model_option,
    experiment_argument,
    file_argument,
    file_option,
    hostfile_option,
    output_option,
    set_option,
    verbose_option,
)
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE, is_cpu
from amp_ray.errors import InputError, Where, shown
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.profiles.nccl_tests import COLLECTIVES, parse_nccl_tests
from amp_ray.inputs.profiles.torch_trace import MOST_CHARACTERS, RANGES, read_trace, trace_folder
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.files import ExperimentFiles, read_text, read_texts, write_output
from amp_ray.runtime.profile.links import links_of_tests, links_yaml
from amp_ray.runtime.profile.parts import load_unprofiled
from amp_ray.trials.profile.tables import model_text


@click.command()
@experiment_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(TARGETS),
    metavar="FORMAT",
    help=f"{', '.join(TARGETS)}: a program's flags or configuration for one strategy; csv and "
    "optuna: all strategies; metis: hostfile, clusterfile.json and a folder profile.",
)
@click.option(
    "--position",
    type=click.IntRange(min=1),
    help="Which strategy of the ranking.  [default: 1; of a study what it recommends]",
)
@file_option(
    "--strategies",
    help="Take the strategy at that position of this file, without search.",
)
@output_option(
    "PATH",
    f"File to write; for {', '.join(FOLDERS)} a folder that is new or empty. Default: "
    "standard output.",
    required=False,
)
@hostfile_option
@cost_model_option
@verbose_option
def export(
    *,
    experiment_path: Path,
    target: str,
    output: Path | None,
    **options: Any,  # noqa: ANN401 - those of api.export
) -> None:
    """Write a strategy, an experiment or a study as files of other programs.

    A study's folder may stand in place of the experiment file. What a program cannot express is
    refused, or noted on standard error and in the file. With --hostfile the nodes take the names of
    that file, in its order.

    metis: a profile of Metis is written as it was measured; for any other profile our cost model
    predicts the times.
    """
    if output is None and target in FOLDERS:
        raise InputError(f"--to {target} writes several files: name a folder by -o")
    path = None if output is None or str(output) == STDOUT else output
    exported = write_export(experiment_path, target, output=path, **options)
    tell(exported.notes)
    click.echo(f"{output}: {exported.title}" if path else exported.text, nl=path is not None)


_COUNT = click.IntRange(min=1)


@click.group(name="import")
def import_files() -> None:
    """Read what other programs wrote: planners' input files, traces and logs of your runs."""


@import_files.command()
@file_option("--hostfile", required=True, help="Lines 'IP slots=N'.")
@file_option("--clusterfile", required=True, help="JSON, by IP.")
@file_option("--profile", metavar="DIR", help="Its JSON files; else data sheets.")
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
@output_option("EXPERIMENT.yaml")
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
        None
        if profile is None
        else (str(profile), read_texts(profile, (guests.PROFILE_SUFFIXES["metis"],))),
        unit=unit,
        figures=figures,
        names={
            "name": output.stem,
            "hostfile": hosts.name,
            "profile_path": profile and _path_from(output.absolute().parent, profile),
        },
    )
    # Write nothing before the experiment has been loaded successfully.
    files = _Beside(base=output.parent, texts={hosts.name: imported.hosts_text})
    build_experiment(parse_yaml(imported.text, file=str(output)), files)
    write_output(hosts, imported.hosts_text)
    write_output(output, imported.text)
    tell(imported.notes)
    click.echo(f"{output}: plan it with: amp-ray plan {output}")


@import_files.command(name="trace")
@file_argument("traces", metavar="TRACE.json...", nargs=-1, required=True)
@file_option(
    *("--experiment", "experiment_path"),
    metavar="EXPERIMENT.yaml",
    required=True,
    help="Of the same model and precision.",
)
@set_option
@click.option("--tp", type=_COUNT, multiple=True, default=(1,), help="Of each trace, or of all.")
@click.option(
    *("--micro-batch-size", "sizes"),
    type=_COUNT,
    multiple=True,
    required=True,
    help="Of each trace, or of all.",
)
@click.option("--device", metavar="NAME", help="One of the experiment; needed if it has several.")
@click.option("--ranges", default=RANGES, show_default=True, help="Name of a layer's range.")
@output_option("DIR", "Profile folder to write; new or empty.")
@verbose_option
def import_trace(
    *,
    traces: tuple[Path, ...],
    experiment_path: Path,
    changes: tuple[str, ...],
    tp: tuple[int, ...],
    sizes: tuple[int, ...],
    device: str | None,
    ranges: str,
    output: Path,
) -> None:
    """Write a layer profile from traces of the PyTorch profiler, made in your own training run.

    Each trace is of one tp and micro-batch size. Ranges of torch.profiler.record_function around
    the entries of the model's list of layers, embedding first, say which kernels are a layer's.
    """
    experiment = load_unprofiled(experiment_path, changes)
    device = _one_device(
        device, [device_type.name for device_type in experiment.cluster.device_types]
    )
    of_tp = _for_each(tp, traces, "--tp")
    keys = list(zip(of_tp, _for_each(sizes, traces, "--micro-batch-size"), strict=True))
    if len(set(keys)) < len(keys):
        raise InputError("two traces have the same tp and micro-batch size; give one of each")
    read = {
        key: read_trace(
            read_text(path, MOST_CHARACTERS),
            file=str(path),
            num_layers=experiment.model.num_layers,
            ranges=ranges,
        )
        for key, path in zip(keys, traces, strict=True)
    }
    for path, trace_of_rank in zip(traces, read.values(), strict=True):
        if trace_of_rank.has_kernels is is_cpu(device):
            ran = "ran kernels of a GPU" if is_cpu(device) else "has no kernel of a GPU"
            message = f"{ran}; expected a trace of the experiment's device, {device}"
            raise InputError(message, where=Where(file=str(path)))
        tell((*trace_of_rank.not_read, *_other_device(trace_of_rank.devices, device, str(path))))
    files = trace_folder(
        read,
        device=device,
        model=model_text(experiment.model),
        precision=experiment.precision,
    )
    make_empty(output)
    for name, text in files.items():
        write_output(output / name, text)
    click.echo(f"{output}: plan with profile: {{source: table, path: {output}}}")


def _other_device(names: tuple[str, ...], device: str, file: str) -> Iterator[str]:
    """Say that a trace is of another board of the catalogue, judged by its name."""
    model = device.partition("-")[0]
    if device in CATALOGUE and not is_cpu(device) and names and model not in " ".join(names):
        yield f"{file} was recorded on {', '.join(map(shown, names))}, and is taken for {device}"


def _one_device(name: str | None, names: list[str]) -> str:
    """Return the device of the traces; refuse one that the experiment lacks."""
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        word = "none" if name is None else shown(name)
        raise InputError(f"--device: found {word}; expected {' or '.join(names)}")
    return name


def _for_each(values: tuple[int, ...], traces: tuple[Path, ...], option: str) -> tuple[int, ...]:
    """Return one value for each trace."""
    if len(values) not in {1, len(traces)}:
        message = f"{option}: found {len(values)} values; expected one, or one for each trace"
        raise InputError(message)
    return values * len(traces) if len(values) == 1 else values


@import_files.command("nccl-tests")
@file_argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--collective",
    type=click.Choice(COLLECTIVES),
    help="What the logs measured, if they do not say so (before nccl-tests 2.17).",
)
@output_option("LINKS.yaml", required=False)
@verbose_option
def nccl_tests(*, logs: tuple[Path, ...], collective: str | None, output: Path | None) -> None:
    """Turn logs of nccl-tests into the keys of a node for its links.

    A log is the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf or
    sendrecv_perf. Ranks on one host tell the link within a node, ranks on several hosts the
    network. The keys go into the node's entry in cluster.nodes, without a protocol.
    """
    tests = [
        test
        for log in logs
        for test in parse_nccl_tests(read_text(log), file=str(log), collective=collective)
    ]
    tell(note for test in tests for note in test.not_read)
    reports = links_of_tests(tests, Constants())
    text = links_yaml(reports)
    for report in reports:
        place = "within a node" if report.place.scope == "intra" else "between nodes"
        click.echo(
            f"amp-ray: {place}: {report.gbit_per_s:.4g} Gbit/s, typical error of one rate and "
            f"latency {100 * report.error_fraction:.0f} %",
            err=True,
        )
    if output is None:
        click.echo(text, nl=False)
    else:
        write_output(output, text)
        click.echo(f"{output}: keys of an entry in cluster.nodes")


def _path_from(folder: Path, profile: Path) -> str:
    """Return the path of a profile, relative to a folder that contains it, otherwise absolute."""
    whole = profile.absolute()
    return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside(ExperimentFiles):
    """Files of an experiment, including unwritten ones: ``texts`` by name."""

    texts: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return the text of one file."""
        # Not super(): slots=True makes a new class, so super() without arguments fails.
        return self.texts[name] if name in self.texts else ExperimentFiles.text(self, name)
