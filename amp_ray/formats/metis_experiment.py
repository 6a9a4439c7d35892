"""An experiment file from what Metis is given: hostfile, cluster file, profiles and arguments."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from amp_ray.clusters.catalogue import CATALOGUE
from amp_ray.clusters.cluster import Cluster, Node
from amp_ray.errors import InputError
from amp_ray.inputs.hostfile import HostSlots, format_hostfile
from amp_ray.units import BITS_PER_BYTE, GIB, GIGA, MICROSECONDS_PER_SECOND, counted

ENDS: Final = 2  # Metis counts an input and an output layer; experiment files count blocks

HEAD_SIZES: Final = (128, 64)
"""Widths of an attention head, which Metis does not tell: the first one that divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisArguments:
    """What Metis's planner is told about the model, as its command line has it."""

    num_layers: int  # input and output layer included
    hidden_size: int
    sequence_length: int
    vocab_size: int
    global_batch_size: int
    num_heads: int | None = None  # attention heads; None to take a usual width
    max_tp: int | None = None  # largest tensor parallel degree; None for no limit
    max_size: int | None = None  # largest micro-batch size; None for no limit


def cluster_yaml(cluster: Cluster, *, hostfile: str | None = None) -> str:
    """Write a cluster as the ``cluster:`` mapping of an experiment file, as text with a line break.

    The hostfile of that name holds the nodes' names; see `cluster_hostfile`.

    Raises:
        ValueError: If a device is not in the catalogue, or pairs of nodes have their own links.
    """
    num_links = len(cluster.pair_links) + len(cluster.zone_links)
    if num_links:
        raise ValueError(
            f"{counted(num_links, 'link')} of single pairs of nodes or zones cannot be written"
        )
    lines = ["cluster:"] if hostfile is None else ["cluster:", f'  hostfile: "{hostfile}"']
    lines.append("  nodes:")
    for entry, nodes in groupby(cluster.nodes, key=_entry):
        lines.append(f"    - {{count: {len(list(nodes))}, {entry}}}")
    return "\n".join(lines) + "\n"


def cluster_hostfile(cluster: Cluster) -> str:
    """Write the names and slots of a cluster's nodes as a hostfile of our own form."""
    return format_hostfile(
        tuple(HostSlots(host=node.name, num_slots=node.num_slots) for node in cluster.nodes)
    )


def _entry(node: Node) -> str:
    """Write what equal nodes have in common."""
    board = CATALOGUE.get(node.device.name)
    if board is None:
        message = f"device {node.device.name!r} is not in the catalogue: describe it by hand"
        raise ValueError(message)
    figures = {
        "intra_gbit_per_s": node.intra.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "inter_gbit_per_s": node.inter.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "intra_latency_us": node.intra.latency_s * MICROSECONDS_PER_SECOND,
        "inter_latency_us": node.inter.latency_s * MICROSECONDS_PER_SECOND,
    }
    for scope, link in (("intra", node.intra), ("inter", node.inter)):
        if link.collective_latency_s is not None:
            figures[f"{scope}_collective_us"] = link.collective_latency_s * MICROSECONDS_PER_SECOND
    if board.memory_bytes != node.device.memory_bytes:
        figures["memory_gib"] = node.device.memory_bytes / GIB
    if node.device.nominal_bytes is not None:
        figures["nominal_memory_gib"] = node.device.nominal_bytes / GIB
    written = [f"{key}: {_number(value)}" for key, value in figures.items()]
    return ", ".join([f"device: {node.device.name}", f"slots: {node.num_slots}", *written])


def _number(value: float) -> str:
    """Write a number in full, without a fraction where it has none."""
    return str(int(value)) if value == int(value) else repr(value)


def experiment_yaml(
    name: str,
    arguments: MetisArguments,
    cluster: Cluster,
    *,
    hostfile: str,
    profile_path: str | None,
    notes: Sequence[str] = (),
) -> str:
    """Write the experiment file of what Metis is given.

    The hostfile in our form will lie beside it; the path of the profile starts there, and None
    takes layer times from data sheets. Notes become comments.

    Raises:
        InputError: If there is no block between the ends, or no usual head divides the width.
    """
    source = "analytic" if profile_path is None else f"metis, path: {json.dumps(profile_path)}"
    lines = [
        *(f"# {' '.join(note.split())}" for note in notes),
        f"name: {json.dumps(name)}",
        f"model: {{{_model(arguments)}}}",
        cluster_yaml(cluster, hostfile=hostfile).rstrip(),
        f"profile: {{source: {source}}}",
        "precision: fp16",
        "optimizer: adam",
        f"global_batch_size: {arguments.global_batch_size}",
        f"search: {{{_search(arguments)}}}",
    ]
    return "\n".join(lines) + "\n"


def _model(arguments: MetisArguments) -> str:
    """Write the figures of the model."""
    num_blocks = arguments.num_layers - ENDS
    if num_blocks < 1:
        raise InputError(
            f"found {arguments.num_layers} layers; Metis counts an input and an output layer, so "
            f"at least {ENDS + 1} are expected"
        )
    figures = {
        "num_layers": num_blocks,
        "hidden_size": arguments.hidden_size,
        "num_heads": arguments.num_heads or _num_heads(arguments.hidden_size),
        "sequence_length": arguments.sequence_length,
        "vocab_size": arguments.vocab_size,
    }
    return ", ".join(["family: gpt2", *(f"{key}: {value}" for key, value in figures.items())])


def _num_heads(hidden_size: int) -> int:
    """Return the heads of a usual width."""
    width = next((width for width in HEAD_SIZES if hidden_size % width == 0), None)
    if width is None:
        raise InputError(
            f"hidden size {hidden_size} is no multiple of {' or '.join(map(str, HEAD_SIZES))}: "
            "tell the number of attention heads"
        )
    return hidden_size // width


def _search(arguments: MetisArguments) -> str:
    """Write the limits of the search."""
    limits = ["space: heterogeneous"]
    if arguments.max_tp is not None:
        limits.append(f"max_tp: {arguments.max_tp}")
    if arguments.max_size is not None:
        sizes = [size for size in range(1, arguments.max_size + 1) if size & (size - 1) == 0]
        limits.append(f"micro_batch_sizes: {sizes}")
    return ", ".join(limits)
