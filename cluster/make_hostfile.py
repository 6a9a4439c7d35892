#!/usr/bin/env python
"""Write a DeepSpeed hostfile of the machines that are alive in a Ray cluster, and count them.

On the head, or handed to it by ``ray submit``; Ray itself says who is there:

    ray submit cluster/X.yaml cluster/make_hostfile.py -- --output hostfile

After ``ray up`` it waits for every node that the cluster file asks for. A cluster that stays
smaller is an error: exit code 1, and nothing is written.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from amp_ray.cli.exits import run_command
from amp_ray.runtime.files import read_text, write_text
from amp_ray.runtime.ray.address import AUTO, require_ray
from amp_ray.runtime.ray.live_nodes import expected_nodes, to_hostfile, wait_for_nodes
from amp_ray.spec.hostfile import format_hostfile
from amp_ray.spec.yaml_text import parse_yaml

BOOTSTRAP: Final = "~/ray_bootstrap_config.yaml"
"""What ``ray up`` leaves on the head: the cluster file, with every default filled in."""

TIMEOUT_S: Final = 300.0
"""Time for workers to boot and to set themselves up; on AWS they need minutes."""


@contextlib.contextmanager
def nodes_of(address: str) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Connect to a live cluster and give a function that lists its nodes."""
    require_ray("a hostfile of a Ray cluster")
    import ray  # noqa: PLC0415 - an extra: said in words where it is missing

    from amp_ray.runtime.ray.actors import connect  # noqa: PLC0415 - needs Ray too

    with connect(address):
        yield ray.nodes


def wanted_number(expect: int | None) -> int:
    """Return how many nodes there should be: as told, else as ``ray up`` was told, else one."""
    if expect is not None:
        return expect
    bootstrap = Path(BOOTSTRAP).expanduser()
    if not bootstrap.exists():
        return 1
    document = parse_yaml(read_text(bootstrap), file=str(bootstrap))
    return expected_nodes(document.values) or 1


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--address",
    default=AUTO,
    show_default=True,
    envvar="RAY_ADDRESS",
    help="Of the Ray cluster; this machine is one of its nodes.",
)
@click.option(
    "--expect",
    type=click.IntRange(min=1),
    help="How many nodes there should be; otherwise as many as ray up was to start.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for them.",
)
@click.option("--slots", type=click.IntRange(min=1), help="Of every host; otherwise its GPUs.")
@click.option("--no-head", is_flag=True, help="Leave out the head.")
@click.option(
    "--order",
    default="",
    metavar="KIND,KIND",
    help="Kinds of device as the experiment file has them: V100,T4. Otherwise the head's first.",
)
@click.option("--output", type=click.Path(path_type=Path), help="The file; otherwise stdout.")
def make_hostfile(  # noqa: PLR0913 - one parameter per option
    *,
    address: str,
    expect: int | None,
    timeout_s: float,
    slots: int | None,
    no_head: bool,
    order: str,
    output: Path | None,
) -> None:
    """Wait for the nodes, and write their hostfile."""
    with nodes_of(address) as list_nodes:
        nodes = wait_for_nodes(list_nodes, wanted_number(expect), timeout_s=timeout_s)
    kinds = [kind.strip() for kind in order.split(",") if kind.strip()]
    hosts = to_hostfile(nodes, num_slots=slots, with_head=not no_head, kinds=kinds)
    text = format_hostfile(hosts)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    num_slots = sum(entry.num_slots for entry in hosts)
    place = "" if output is None else f" in {output}"
    click.echo(f"{len(nodes)} nodes alive; {len(hosts)} hosts, {num_slots} slots{place}", err=True)


if __name__ == "__main__":
    run_command(make_hostfile)
