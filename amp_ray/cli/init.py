"""``amp-ray init``: write a first experiment file."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from amp_ray.cli.options import file_option, output_option, verbose_option
from amp_ray.errors import InputError, Where, printable
from amp_ray.runtime.files import write_text
from amp_ray.runtime.first_file import (
    Answers,
    config_of,
    device_of_hosts,
    experiment_text,
    hosts_of,
    longest_sequence,
    preset,
)
from amp_ray.runtimes.traits import RUNTIMES

_COUNT: Final = click.IntRange(min=1)
_BATCH: Final = 256
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
    help="The hosts, in lines such as 'host1 slots=8'; without --device they are asked by SSH.",
)
@click.option("--device", metavar="NAME", help="The board, as the catalogue names it.")
@click.option("--nodes", "count", type=_COUNT, help="How many nodes.")
@click.option("--slots", type=_COUNT, help="Devices of a node.")
@click.option(
    "--inter-gbit-per-s",
    "inter",
    type=click.FloatRange(min=1e-3, max=1e5),
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
    if answers.node["device"] == _ASK:
        device = device_of_hosts(answers, output)
        answers = replace(answers, node={**answers.node, "device": device})
    write_text(output, experiment_text(answers, output))
    node = answers.node
    click.echo(f"{output}: {node['count']} x {node['slots']} {node['device']}")
    click.echo(f"next: amp-ray plan {output}", err=True)


_ASK: Final = "?"  # as the device: ask the hosts for it


def _answers(output: Path, options: dict[str, Any]) -> Answers:
    """Fill in missing options from presets, files, and questions."""
    node = preset("clusters", options["cluster"]) if options["cluster"] else {}
    if options["hostfile"] is not None:
        count, slots = hosts_of(options["hostfile"])
        node |= {"count": count, "slots": slots} | ({} if "device" in node else {"device": _ASK})
    named = {"device": options["device"], "count": options["count"], "slots": options["slots"]}
    node |= {key: value for key, value in named.items() if value is not None}
    if options["inter"] is not None:
        node["inter_gbit_per_s"] = options["inter"]
    model = options["model"] or _asked("--model", "model (a name or config.json)", "llama-3-8b")
    if config_of(model) is None:
        preset("models", model)
    node.setdefault("device", None)
    for key, option, question, default in (
        ("device", "--device", "board", "H100"),
        ("count", "--nodes", "nodes", 4),
        ("slots", "--slots", "devices of a node", 8),
        ("inter_gbit_per_s", "--inter-gbit-per-s", "Gbit/s between nodes", 100),
    ):
        is_alone = key == "inter_gbit_per_s" and node["count"] == 1
        if node.get(key) is None and not is_alone:
            node[key] = _asked(option, question, default)
    order = ("count", "device", "slots", "inter_gbit_per_s", "protocol", "rack")
    return Answers(
        name=options["name"] or output.stem,
        model=model,
        node={key: node[key] for key in order if key in node},
        batch=options["batch"] or _asked("--batch", "samples per optimizer step", _BATCH),
        sequence_length=options["sequence_length"] or _config_length(model),
        hostfile=options["hostfile"],
        runtime=options["runtime"],
    )


def _config_length(model: str) -> int | None:
    """Ask for the tokens of a sequence, or state the configuration's; None for a preset's."""
    config = config_of(model)
    length = None if config is None else longest_sequence(config)
    if length is None:
        return None
    if sys.stdin.isatty():
        return int(_asked("--sequence-length", "tokens of a training sequence", length))
    note = f"sequence_length {length}: the most that {printable(model)} allows"
    click.echo(f"{note}; --sequence-length N sets that of your training", err=True)
    return length


def _asked(option: str, question: str, default: Any) -> Any:  # noqa: ANN401 - a word or a number
    """Ask for an answer; without a terminal, raise with the name of the option to set."""
    if not sys.stdin.isatty():
        raise InputError(f"{option} is missing: {question}, such as {option} {default}")
    return click.prompt(question, default=default, err=True)
