#!/usr/bin/env python
"""Write a DeepSpeed hostfile of the machines that are alive in a Ray cluster, and count them.

On the head, or handed to it by ``ray submit``; Ray itself says who is there:

    ray submit cluster/X.yaml cluster/make_hostfile.py -- --output hostfile

After ``ray up`` it waits for every node that the cluster file asks for. A cluster that stays
smaller is an error: exit code 1, and nothing is written.
"""

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from amp_ray.cli.exits import run_command
from amp_ray.errors import AmpRayError, HostError, InputError
from amp_ray.inputs.hostfile import HostSlots, format_hostfile
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.files import read_text, write_text
from amp_ray.runtime.ray.address import AUTO, require_ray

BOOTSTRAP: Final = "~/ray_bootstrap_config.yaml"
"""What ``ray up`` leaves on the head: the cluster file, with every default filled in."""

TIMEOUT_S: Final = 300.0
"""Time for workers to boot and to set themselves up; on AWS they need minutes."""


Record = Mapping[str, Any]
"""One entry of ``ray.nodes()``."""

_HEAD: Final = "node:__internal_head__"
_KIND: Final = "accelerator_type:"
_POLL_S: Final = 0.5
"""How often the cluster is asked again while nodes are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A machine of a Ray cluster that is alive."""

    address: str
    num_devices: int  # GPUs that Ray counts there
    kind: str  # what Ray calls the GPU, e.g. ``V100``; empty where it knows none.
    is_head: bool


def live_nodes(records: Iterable[Record]) -> tuple[LiveNode, ...]:
    """List the machines that are alive.

    Ray may list a machine twice, after its node was restarted or where two nodes share it; its
    devices are the same ones, so the entry with most of them counts. Returns the head first, then
    the machines with the head's kind of device, then those with others by kind; by address within a
    kind.
    """
    best: dict[str, LiveNode] = {}
    for node in map(_node, records):
        if node is not None:
            known = best.get(node.address, node)
            best[node.address] = LiveNode(
                address=node.address,
                num_devices=max(node.num_devices, known.num_devices),
                kind=node.kind or known.kind,
                is_head=node.is_head or known.is_head,
            )
    first = next((node.kind for node in best.values() if node.is_head), "")
    return tuple(sorted(best.values(), key=lambda node: _order(node, (first,))))


def to_hostfile(
    nodes: Sequence[LiveNode],
    *,
    num_slots: int | None = None,
    with_head: bool = True,
    kinds: Sequence[str] = (),
) -> tuple[HostSlots, ...]:
    """Turn machines into the lines of a hostfile.

    Args:
        nodes: From ``live_nodes``.
        num_slots: Slots of every host; None takes Ray's count of GPUs, and leaves out the
            machines without any.
        with_head: Whether the head is a host too.
        kinds: Kinds of device in the order in which their hosts are wanted, as an experiment
            file has them; the head stays first among its kind.
    """
    unknown = [kind for kind in kinds if kind not in {node.kind for node in nodes}]
    if unknown:
        raise InputError(f"no node with {', '.join(unknown)}: found {_listing(nodes)}")
    wanted = [node for node in nodes if with_head or not node.is_head]
    if kinds:
        wanted.sort(key=lambda node: _order(node, kinds))
    if num_slots is None:
        wanted = [node for node in wanted if node.num_devices > 0]
    if not wanted:
        raise InputError(
            f"no host is left for the hostfile: found {_listing(nodes)}. Machines without GPUs "
            "need a number of slots to be given"
        )
    _refuse_loopback(wanted)
    return tuple(
        HostSlots(host=node.address, num_slots=num_slots or node.num_devices) for node in wanted
    )


def expected_nodes(cluster_file: Mapping[str, Any]) -> int | None:
    """Return how many nodes ``ray up`` was asked to start, the head among them.

    ``cluster_file`` is what ``ray up`` leaves on the head as ``~/ray_bootstrap_config.yaml``.
    Returns the number, or None where the file does not say.
    """
    types = cluster_file.get("available_node_types")
    if not isinstance(types, Mapping):
        return None
    return 1 + sum(int(kind.get("min_workers", 0)) for kind in types.values())


def wait_for_nodes(
    list_nodes: Callable[[], Iterable[Record]], num_nodes: int, *, timeout_s: float
) -> tuple[LiveNode, ...]:
    """Wait until enough machines are alive.

    It waits at most ``timeout_s``; 0 asks once. Returns all that are alive, which may be more.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = live_nodes(list_nodes())
        if len(nodes) >= num_nodes:
            return nodes
        if time.monotonic() >= deadline:
            raise AmpRayError(
                f"{len(nodes)} of {num_nodes} nodes are alive after {timeout_s:g} s: found "
                f"{_listing(nodes)}. What became of the others stands on the head, in "
                "session_latest/logs/monitor* of Ray's folder"
            )
        time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0)))


def _node(record: Record) -> LiveNode | None:
    """Read one entry of ``ray.nodes()``; None for the dead."""
    if not record["Alive"]:
        return None
    resources = record["Resources"]
    kinds = sorted(key.removeprefix(_KIND) for key in resources if key.startswith(_KIND))
    return LiveNode(
        address=record["NodeManagerAddress"],
        num_devices=int(resources.get("GPU", 0)),
        kind=kinds[0] if kinds else "",
        is_head=_HEAD in resources,
    )


def _order(node: LiveNode, kinds: Sequence[str]) -> tuple[object, ...]:
    """Return the sort key: kinds in the order given, then by name; head first, then addresses."""
    known = node.kind in kinds
    position = kinds.index(node.kind) if known else len(kinds)
    return position, node.kind, not node.is_head, *_address_order(node.address)


def _address_order(address: str) -> tuple[int, int, str]:
    """Order addresses by number, so that 10.0.0.9 comes before 10.0.0.10, and names after them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (0, 0, address)
    return (parsed.version, int(parsed), "")


def _refuse_loopback(nodes: Sequence[LiveNode]) -> None:
    """Refuse addresses that mean another machine wherever they are used."""
    for node in nodes:
        if len(nodes) > 1 and _is_loopback(node.address):
            raise HostError(
                f"Ray knows {'the head' if node.is_head else 'a node'} as {node.address}, where no "
                "other machine can reach it: start it with ray start --node-ip-address=ADDRESS"
            )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _listing(nodes: Sequence[LiveNode]) -> str:
    return ", ".join(f"{node.address} ({_devices(node)})" for node in nodes) or "none"


def _devices(node: LiveNode) -> str:
    return f"{node.num_devices} {node.kind or 'GPU'}" if node.num_devices else "no GPU"


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
    num_slots = sum(entry.num_slots or 0 for entry in hosts)
    place = "" if output is None else f" in {output}"
    click.echo(f"{len(nodes)} nodes alive; {len(hosts)} hosts, {num_slots} slots{place}", err=True)


if __name__ == "__main__":
    run_command(make_hostfile)
