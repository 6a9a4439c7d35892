"""``amp-ray init``: write a first experiment file."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from amp_ray.cli.options import file_option, output_option, verbose_option
from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError, Where, printable
from amp_ray.runtime.files import write_text
from amp_ray.runtime.first_file import (
    Answers,
    boards_of,
    built,
    config_of,
    experiment_text,
    hosts_of,
    longest_sequence,
    nodes_of_hosts,
    preset,
    presets,
    usual_gbit_per_s,
)
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.units import counted

_COUNT: Final = click.IntRange(min=1)
_RATE: Final = click.FloatRange(min=1e-3, max=1e5)
_BATCH: Final = 256
_KINDS: Final = "A100-80:4,V100-32:2"  # boards of two kinds in one host
_HISTORIC: Final = {name for name, traits in RUNTIMES.items() if traits.status == "historic"}


@click.command()
@output_option(
    "EXPERIMENT.yaml",
    "File to write; it must not exist yet.",
    required=False,
    default="experiment.yaml",
    show_default=True,
)
@click.option(
    "--model",
    metavar="NAME|config.json|DIR",
    help="A Hugging Face configuration, its folder, or a preset such as llama-3-8b; an unknown "
    "name lists them.",
)
@click.option(
    "--cluster",
    metavar="NAME",
    help="Nodes of a preset such as dgx-h100 or aws-p5; an unknown name lists them.",
)
@file_option(
    "--hostfile",
    help="The hosts, in lines such as 'host1 slots=8'; without --device they are asked by SSH. "
    "Lists of Slurm, Open MPI, Intel MPI and PBS are read too.",
)
@click.option(
    "--device",
    metavar="NAME",
    help=f"The board, as the catalogue names it; boards of several kinds in one host as {_KINDS}.",
)
@click.option("--nodes", "count", type=_COUNT, help="How many nodes.")
@click.option("--slots", type=_COUNT, help="Devices of a node.")
@click.option(
    "--inter-gbit-per-s",
    "inter",
    type=_RATE,
    help="Line rate of a node's network interfaces together.",
)
@click.option("--batch", type=_COUNT, help="Samples per optimizer step.")
@click.option(
    "--sequence-length",
    type=_COUNT,
    help="Tokens of a training sequence. Default: the model's most, which is stated.",
)
@click.option(
    "--runtime",
    type=click.Choice(sorted(RUNTIMES)),
    metavar="NAME",
    help=f"The training program: {', '.join(sorted(set(RUNTIMES) - _HISTORIC))}, or a historic "
    "one.  [default: deepspeed; megatron-core for experts and from 16,384 tokens on]",
)
@click.option("--name", help="Of the experiment.  [default: that of the file]")
@verbose_option
def init(*, output: Path, **options: Any) -> None:  # noqa: ANN401 - other options
    """Write a commented experiment file from a few answers.

    In a terminal it asks for every answer that no option gives.
    """
    if output.exists():
        raise InputError("is there already; name another file by -o", where=Where(file=str(output)))
    answers = _answers(output, options)
    text = experiment_text(answers, output)
    if options["runtime"] is None and sys.stdin.isatty():
        chosen = _asked(
            "--runtime",
            "training program",
            built(text, output).traits.name,
            click.Choice(sorted(RUNTIMES)),
        )
        text = experiment_text(replace(answers, runtime=chosen), output)
    write_text(output, text)
    kinds = [
        f"{node['count']} x {' + '.join(f'{slots} {device}' for device, slots in boards_of(node))}"
        for node in answers.nodes
    ]
    click.echo(f"{output}: {', '.join(kinds)}")
    click.echo(f"next: amp-ray plan {output}", err=True)


_OTHER: Final = "other"  # as the cluster: none of the presets
_ORDER: Final = ("count", "device", "slots", "boards", "inter_gbit_per_s", "protocol", "rack")


def _answers(output: Path, options: dict[str, Any]) -> Answers:
    """Fill in missing options from presets, files, the hosts, and questions."""
    model = options["model"]
    if model is None:
        model = _asked("--model", "model (a name or config.json)", "llama-3-8b", _model)
    answers = Answers(
        name=options["name"] or output.stem,
        model=_model(model),
        nodes=_entries(options),
        batch=options["batch"] or 1,
        sequence_length=options["sequence_length"] or _length(model),
        hostfile=options["hostfile"],
        runtime=options["runtime"],
    )
    nodes = answers.nodes
    if answers.hostfile is not None and not all("device" in node for node in nodes):
        nodes = nodes_of_hosts(answers, output)
    nodes = tuple(_completed(node, is_alone=len(nodes) == 1) for node in nodes)
    batch = options["batch"] or _asked("--batch", "samples per optimizer step", _BATCH, _COUNT)
    return replace(answers, nodes=nodes, batch=batch)


def _entries(options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return entries of `cluster.nodes` with what options, presets and the hostfile say."""
    keys = {"device": "device", "slots": "slots", "count": "count", "inter": "inter_gbit_per_s"}
    named = {key: options[name] for name, key in keys.items() if options[name] is not None}
    cluster, hostfile = options["cluster"], options["hostfile"]
    if cluster is None and hostfile is None and not named and sys.stdin.isatty():
        click.echo(f"clusters: {', '.join(presets()['clusters'])}", err=True)
        cluster = _asked("--cluster", f"cluster, or {_OTHER}", _OTHER, _cluster)
    node = {} if cluster in (None, _OTHER) else preset("clusters", cluster)
    if hostfile is None:
        return ({**node, **named},)
    runs = hosts_of(hostfile)
    total = sum(count for count, _ in runs)
    if named.pop("count", total) != total:
        raise InputError(f"--nodes {options['count']}: {hostfile} names {counted(total, 'host')}")
    stated = [{} if slots is None else {"slots": slots} for _, slots in runs]
    return tuple(
        {**node, **slots, **named, "count": count}
        for (count, _), slots in zip(runs, stated, strict=True)
    )


def _completed(node: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Ask for what an entry lacks."""
    full = dict(node)
    if "device" not in full:
        question = f"board, or boards of several kinds in one host as {_KINDS}"
        full["device"] = _asked("--device", question, "H100", _checked_boards)
    full |= _boards(full["device"], full.get("slots"))
    for key, option, question, default, check in (
        ("count", "--nodes", "nodes", 4, _COUNT),
        ("slots", "--slots", "devices of a node", 8, _COUNT),
    ):
        if key not in full:
            full[key] = _asked(option, question, default, check)
    if "inter_gbit_per_s" not in full and not (is_alone and full["count"] == 1):
        usual = usual_gbit_per_s(_device(full["device"]), full["slots"])
        question = f"Gbit/s between nodes of {full['slots']} {full['device']}"
        full["inter_gbit_per_s"] = _asked("--inter-gbit-per-s", question, usual, _RATE)
    return {key: full[key] for key in _ORDER if key in full}


def _boards(text: str, num_slots: int | None) -> dict[str, Any]:
    """Return the keys of a board, or of boards of several kinds with the number of each."""
    kinds = [kind.strip().partition(":") for kind in text.split(",")]
    if len(kinds) == 1 and not kinds[0][1]:
        return {"device": _device(text)}
    counts = [int(count) if count.isdecimal() else 0 for _, _, count in kinds]
    if min(counts) < 1:
        raise InputError(f"found {printable(text)}; expected one board, or several as {_KINDS}")
    if num_slots not in (None, sum(counts)):
        message = f"--device {printable(text)}: {sum(counts)} boards; a node has {num_slots} slots"
        raise InputError(message)
    names = [_device(name.strip()) for name, _, _ in kinds]
    boards = [*zip(names, counts, strict=True)]
    return {"device": names[0], "slots": sum(counts), "boards": boards}


def _checked_boards(text: str) -> str:
    _boards(text, None)
    return text


def _length(model: str) -> int | None:
    """Ask for the tokens of a sequence, or state the configuration's; None for a preset's."""
    config = config_of(model)
    length = (
        preset("models", model)["sequence_length"] if config is None else longest_sequence(config)
    )
    if length is None:
        return None
    if sys.stdin.isatty():
        return int(_asked("--sequence-length", "tokens of a training sequence", length, _COUNT))
    if config is None:
        return None
    note = f"sequence_length {length}: the most that {printable(model)} allows"
    click.echo(f"{note}; --sequence-length N sets that of your training", err=True)
    return int(length)


def _model(name: str) -> str:
    config = config_of(name)
    if config is None:
        preset("models", name)
    else:
        longest_sequence(config)
    return name


def _cluster(name: str) -> str:
    if name != _OTHER:
        preset("clusters", name)
    return name


def _device(name: str) -> str:
    try:
        return find_device(name).name
    except ValueError as error:
        raise InputError(str(error)) from None


def _asked(
    option: str,
    question: str,
    default: Any,  # noqa: ANN401 - a word or a number
    check: click.ParamType[Any] | Callable[[str], Any],
) -> Any:  # noqa: ANN401 - as the check returns
    """Ask until an answer passes the check; without a terminal, name the option to set."""
    if not sys.stdin.isatty():
        such = "" if default is None else f", such as {option} {default}"
        raise InputError(f"{option} is missing: {question}{such}")

    def checked(answer: str) -> Any:  # noqa: ANN401
        try:
            if isinstance(check, click.ParamType):
                return check.convert(answer, None, None)
            return check(answer)
        except InputError as error:
            raise click.UsageError(str(error)) from None

    return click.prompt(question, default=default, err=True, value_proc=checked)
