"""Convert Metis's inputs (hostfile, cluster file, arguments) into an experiment file, and back.

Metis's code reads ``IP slots=8`` in a hostfile, but its README writes ``IP 8``.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from amp_ray.clusters.cluster import (
    DEFAULT_INTER_LATENCY_S,
    DEFAULT_INTRA_LATENCY_S,
    Cluster,
    Link,
    Node,
)
from amp_ray.clusters.device import CATALOGUE, Device
from amp_ray.errors import InputError, Mistakes, Where, placed, shown
from amp_ray.inputs.hostfile import HostSlots, format_hostfile, host_entries
from amp_ray.inputs.section import Positive, Section, Text, validate
from amp_ray.inputs.strict_text import content_lines, parse_json
from amp_ray.inputs.yaml_text import Document
from amp_ray.planners.metis2024.profile import parse_metis_profile, profiled_type
from amp_ray.units import (
    BITS_PER_BYTE,
    GIB,
    GIGA,
    MEGA,
    MICROSECONDS_PER_SECOND,
    gib_to_bytes,
)

BandwidthUnit = Literal["GB/s", "bytes/s"]

LARGEST_GBYTE_PER_S: Final = 10_000.0
"""No link between devices is faster; a larger number must be in bytes per second."""

SMALLEST_BYTES_PER_S: Final = float(MEGA)
"""No link used for training is slower; a smaller number must be in GB per second."""

BOARD_FRACTION: Final = 1.1
"""Nominal memory of a board over usable memory: the driver and ECC take up to a tenth."""

_LARGEST_GIB: Final = 10_000.0  # more memory than this means a wrong unit


class HostSection(Section):
    """An entry of the cluster file for one address; Metis reads no other keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_type: Text
    inter_bandwidth: Positive
    intra_bandwidth: Positive
    memory: Annotated[float, Field(gt=0, le=_LARGEST_GIB, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisHost:
    """One line of the file."""

    address: str  # key of the cluster file; several nodes may share it
    num_slots: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisClusterFile:
    """A cluster file."""

    file: str
    hosts: Mapping[str, HostSection]  # by address, as in the file
    unit: BandwidthUnit  # of its bandwidths
    notes: tuple[str, ...]  # decisions of the reader, to be shown to the user

    def bytes_per_s(self, bandwidth: float) -> float:
        """Return a bandwidth of the file in SI units."""
        return bandwidth * GIGA if self.unit == "GB/s" else bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisCluster:
    """A cluster as an `amp_ray` value, and notes for the user on how the files were read."""

    cluster: Cluster
    notes: tuple[str, ...]


def parse_metis_clusterfile(
    text: str, *, file: str = "clusterfile.json", unit: BandwidthUnit | None = None
) -> MetisClusterFile:
    """Read a cluster file: ``{IP: {instance_type, inter_bandwidth, intra_bandwidth, memory}}``.

    Memory is in GiB. Bandwidth is in GB/s in the authors' files and in bytes/s in their README;
    without ``unit``, the size of the numbers decides.
    """
    values = parse_json(text, file=file)
    if not values:
        message = "no host in it: expected entries such as '0.0.0.1': {'instance_type': ...}"
        raise InputError(message, where=Where(file=file))
    document = Document(file=file, values=values)
    mistakes = Mistakes()
    hosts: dict[str, HostSection] = {}
    for address in values:
        with mistakes.collect():
            hosts[address] = validate(HostSection, document, address)
    mistakes.check()
    file_unit, seen_at = _unit(hosts, file, unit)
    notes = () if unit else (f"{file}: bandwidths are read as {file_unit}, {seen_at}",)
    return MetisClusterFile(file=file, hosts=hosts, unit=file_unit, notes=notes)


def metis_cluster(
    hostfile_text: str, clusterfile: MetisClusterFile, *, file: str = "hostfile"
) -> MetisCluster:
    """Build a cluster from the text of a hostfile (named ``file`` in errors) and a cluster file."""
    hosts = parse_metis_hostfile(hostfile_text, file=file)
    names = node_names(hosts)
    nodes = tuple(
        _node(name, host, clusterfile, file) for name, host in zip(names, hosts, strict=True)
    )
    notes = [
        f"{file}:{host.line}: {host.address} stands there again; this node is {name}"
        for name, host in zip(names, hosts, strict=True)
        if name != host.address
    ]
    for address, device in {
        host.address: node.device for host, node in zip(hosts, nodes, strict=True)
    }.items():
        section = clusterfile.hosts[address]
        notes.append(
            f"{clusterfile.file}: {address}: {section.instance_type} with {section.memory:g} GiB "
            f"is read as {device.name}, of which {device.memory_gib:.2f} GiB can be used"
        )
    return MetisCluster(cluster=Cluster(nodes=nodes), notes=(*clusterfile.notes, *notes))


def _unit(
    hosts: Mapping[str, HostSection], file: str, stated: BandwidthUnit | None
) -> tuple[BandwidthUnit, str]:
    """Return the unit of all bandwidths, and the range of numbers that decided it."""
    numbers = {
        f"{address}.{key}": getattr(host, key)
        for address, host in hosts.items()
        for key in ("inter_bandwidth", "intra_bandwidth")
    }
    fits: dict[str, BandwidthUnit | None] = {key: _fits(value) for key, value in numbers.items()}
    first = stated or next((unit for unit in fits.values() if unit is not None), None)
    wrong = next((key for key, unit in fits.items() if unit is None or unit != first), None)
    if first is None or wrong is not None:
        key = wrong or next(iter(numbers))
        other = "" if first is None else f", here all in {first}"
        message = (
            f"found {numbers[key]:g}; expected GB/s (at most {LARGEST_GBYTE_PER_S:g}) or bytes/s "
            f"(at least {SMALLEST_BYTES_PER_S:g}){other}"
        )
        raise InputError(message, where=Where(file=file, key=key))
    return first, f"found {min(numbers.values()):g} to {max(numbers.values()):g}"


def _fits(bandwidth: float) -> BandwidthUnit | None:
    """Return the only unit in which a number is a plausible bandwidth."""
    if bandwidth <= LARGEST_GBYTE_PER_S:
        return "GB/s"
    return "bytes/s" if bandwidth >= SMALLEST_BYTES_PER_S else None


def _node(name: str, host: MetisHost, clusterfile: MetisClusterFile, file: str) -> Node:
    section = clusterfile.hosts.get(host.address)
    if section is None:
        message = (
            f"found host {host.address!r}; {clusterfile.file} describes "
            f"{', '.join(clusterfile.hosts)}"
        )
        raise InputError(message, where=Where(file=file, line=host.line))
    where = Where(file=clusterfile.file, key=f"{host.address}.instance_type")
    device = _device(section, where)
    return Node(
        name=name,
        device=device,
        num_slots=host.num_slots,
        intra=Link(
            bandwidth_bytes_per_s=clusterfile.bytes_per_s(section.intra_bandwidth),
            latency_s=DEFAULT_INTRA_LATENCY_S[device.fabric or "pcie"],
        ),
        inter=Link(
            bandwidth_bytes_per_s=clusterfile.bytes_per_s(section.inter_bandwidth),
            latency_s=DEFAULT_INTER_LATENCY_S[None],
        ),
    )


def _device(section: HostSection, where: Where) -> Device:
    """Return the board of the catalogue whose memory is closest.

    Metis's memory is nominal. If it exceeds the usable memory of the catalogue by a tenth at most,
    the device gets the usable memory, and the number is kept for Metis's formulas; otherwise the
    number is the memory of the device.
    """
    kind = section.instance_type.casefold()
    boards = [
        device
        for name, device in CATALOGUE.items()
        if name.casefold() == kind or name.casefold().startswith(f"{kind}-")
    ]
    if not boards:
        message = (
            f"found {section.instance_type!r}; the catalogue knows "
            f"{', '.join(dict.fromkeys(name.partition('-')[0] for name in CATALOGUE))}"
        )
        raise InputError(message, where=where)
    board = min(boards, key=lambda device: (abs(device.memory_gib - section.memory), device.name))
    if board.memory_gib <= section.memory <= BOARD_FRACTION * board.memory_gib:
        return replace(board, nominal_bytes=gib_to_bytes(section.memory))
    return replace(board, memory_bytes=gib_to_bytes(section.memory))


def parse_metis_hostfile(text: str, *, file: str = "hostfile") -> tuple[MetisHost, ...]:
    r"""Read the lines of a hostfile in either form, skipping comments (``#``) and blank lines.

    An address may occur several times: in Metis's files it names a kind of node.

    Example:
        >>> [host.num_slots for host in parse_metis_hostfile("0.0.0.1 slots=16\n\n0.0.0.2  8\n")]
        [16, 8]
    """
    hosts = []
    mistakes = Mistakes()
    for where, content in content_lines(text, file):
        with mistakes.collect(), placed(where, ValueError):
            for entry in host_entries(content):
                if entry.num_slots is None:
                    raise ValueError(f"found {shown(content)}; expected 'IP slots=N' or 'IP N'")
                line = where.line or 0
                hosts.append(MetisHost(address=entry.host, num_slots=entry.num_slots, line=line))
    mistakes.check()
    if not hosts:
        message = "no host found: expected lines like '0.0.0.1 slots=8' or '0.0.0.1 8'"
        raise InputError(message, where=Where(file=file))
    return tuple(hosts)


def node_names(hosts: tuple[MetisHost, ...]) -> tuple[str, ...]:
    r"""Name every node by its address, with a number added to repeated addresses.

    Example:
        >>> node_names(parse_metis_hostfile("a 4\na 4\nb 4"))
        ('a', 'a-2', 'b')
    """
    names: dict[str, None] = {}
    numbers: dict[str, int] = {}
    for host in hosts:
        name, number = host.address, numbers.get(host.address, 1)
        while name in names:
            number += 1
            name = f"{host.address}-{number}"
        numbers[host.address] = number
        names[name] = None
    return tuple(names)


def metis_cluster_files(cluster: Cluster) -> dict[str, str]:
    """Return ``hostfile`` and ``clusterfile.json`` (GB/s, GiB) of a cluster, for Metis's planner.

    Metis reads only one digit of the slots, and takes every node to be as large as the first.

    Raises:
        InputError: If a host has boards of several kinds, for which its files have no place.
    """
    mixed = next((nodes for nodes in cluster.machines if len(nodes) > 1), None)
    if mixed:
        raise InputError(f"Metis knows one kind of boards in a host; {mixed[0].name!r} has several")
    described = {
        node.name: {
            "instance_type": node.device.name.partition("-")[0].upper(),
            "inter_bandwidth": node.inter.bandwidth_bytes_per_s / GIGA,
            "intra_bandwidth": node.intra.bandwidth_bytes_per_s / GIGA,
            "memory": (node.device.nominal_bytes or node.device.memory_bytes) / GIB,
        }
        for node in cluster.nodes
    }
    return {
        "hostfile": cluster_hostfile(cluster),
        "clusterfile.json": json.dumps(described, indent=1) + "\n",
    }


ENDS: Final = 2  # Metis counts an input and an output layer; experiment files count blocks

HEAD_SIZES: Final = (128, 64)
"""Widths of an attention head to try, since Metis has no such input: the first divisor is used."""


def cluster_yaml(cluster: Cluster, *, hostfile: str) -> str:
    """Write a Metis cluster as the text of the ``cluster:`` mapping of an experiment file.

    The hostfile named ``hostfile`` holds the names of the nodes; see `cluster_hostfile`.
    """
    lines = ["cluster:", f'  hostfile: "{hostfile}"', "  nodes:"]
    for entry, nodes in groupby(cluster.nodes, key=_entry):
        lines.append(f"    - {{count: {len(list(nodes))}, {entry}}}")
    return "\n".join(lines) + "\n"


def cluster_hostfile(cluster: Cluster) -> str:
    """Write the names and slots of a cluster's nodes as a hostfile of our own form."""
    return format_hostfile(
        tuple(HostSlots(host=node.name, num_slots=node.num_slots) for node in cluster.nodes)
    )


def _entry(node: Node) -> str:
    """Write the values that equal nodes share, as an entry of the cluster mapping."""
    figures = {
        "intra_gbit_per_s": node.intra.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "inter_gbit_per_s": node.inter.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA,
        "intra_latency_us": node.intra.latency_s * MICROSECONDS_PER_SECOND,
        "inter_latency_us": node.inter.latency_s * MICROSECONDS_PER_SECOND,
    }
    if CATALOGUE[node.device.name].memory_bytes != node.device.memory_bytes:
        figures["memory_gib"] = node.device.memory_bytes / GIB
    if node.device.nominal_bytes is not None:
        figures["nominal_memory_gib"] = node.device.nominal_bytes / GIB
    written = [f"{key}: {_number(value)}" for key, value in figures.items()]
    return ", ".join([f"device: {node.device.name}", f"slots: {node.num_slots}", *written])


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedExperiment:
    """An experiment file and its hostfile, with notes for the user."""

    text: str
    hosts_text: str
    notes: tuple[str, ...]


def import_inputs(
    hostfile: tuple[str, str],
    clusterfile: tuple[str, str],
    profile: tuple[str, Mapping[str, str]] | None,
    *,
    unit: BandwidthUnit | None,
    figures: Mapping[str, int | None],
    names: Mapping[str, str | None],
) -> ImportedExperiment:
    """Write Metis's inputs as an experiment, for ``amp-ray import metis``.

    Args:
        hostfile: Its name and text.
        clusterfile: Its name and text.
        profile: Name of the folder and text of its files; None takes layer times from data sheets.
        unit: Unit of the cluster file's bandwidths; None lets the numbers decide.
        figures: Metis's arguments: ``num_layers`` (with both ends; None takes it from the profile),
            ``hidden_size``, ``sequence_length``, ``vocab_size``, ``global_batch_size``; and, each
            None or a number, ``num_heads`` (None gives heads of a usual width), ``max_tp`` and
            ``max_size``.
        names: ``name`` of the experiment, and the ``hostfile`` and ``profile_path`` that it names.

    Raises:
        InputError: If a file is wrong, the number of layers is unknown or has no block between the
            ends, or no usual head divides the width.
    """
    file, text = clusterfile
    described = parse_metis_clusterfile(text, file=file, unit=unit)
    file, text = hostfile
    metis = metis_cluster(text, described, file=file)
    num_layers = _num_layers(figures["num_layers"], profile, metis.cluster.device_types)
    source = "analytic"
    if profile is not None:
        source = f"metis, path: {json.dumps(names['profile_path'])}"
    lines = [
        *(f"# {' '.join(note.split())}" for note in metis.notes),
        f"name: {json.dumps(names['name'])}",
        f"model: {{{_model(figures, num_layers)}}}",
        cluster_yaml(metis.cluster, hostfile=str(names["hostfile"])).rstrip(),
        f"profile: {{source: {source}}}",
        "precision: fp16",
        "optimizer: adam",
        f"global_batch_size: {figures['global_batch_size']}",
        f"search: {{{_search(figures['max_tp'], figures['max_size'])}}}",
    ]
    return ImportedExperiment(
        text="\n".join(lines) + "\n",
        hosts_text=cluster_hostfile(metis.cluster),
        notes=metis.notes,
    )


def _num_layers(
    stated: int | None,
    profile: tuple[str, Mapping[str, str]] | None,
    devices: Iterable[Device],
) -> int:
    """Return the number of layers of a profile that has every device type, or the stated one."""
    if profile is None:
        if stated is None:
            raise InputError("--num-layers is needed where no --profile tells it")
        return stated
    folder, files = profile
    published = parse_metis_profile(files, folder=folder)
    for device in devices:
        profiled_type(published, device, folder=folder)
    if stated not in (None, published.num_layers):
        message = f"--num-layers: found {stated}; {folder} is of {published.num_layers} layers"
        raise InputError(message)
    return published.num_layers


def _model(figures: Mapping[str, int | None], num_layers: int) -> str:
    num_blocks, hidden_size = num_layers - ENDS, figures["hidden_size"] or 0
    if num_blocks < 1:
        raise InputError(
            f"found {num_layers} layers; Metis counts an input and an output layer, so "
            f"at least {ENDS + 1} are expected"
        )
    entries = {
        "num_layers": num_blocks,
        "hidden_size": hidden_size,
        "num_heads": figures["num_heads"] or _num_heads(hidden_size),
        "sequence_length": figures["sequence_length"],
        "vocab_size": figures["vocab_size"],
    }
    return ", ".join(["family: gpt2", *(f"{key}: {value}" for key, value in entries.items())])


def _num_heads(hidden_size: int) -> int:
    width = next((width for width in HEAD_SIZES if hidden_size % width == 0), None)
    if width is None:
        raise InputError(
            f"hidden size {hidden_size} is no multiple of {' or '.join(map(str, HEAD_SIZES))}: "
            "tell the number of attention heads"
        )
    return hidden_size // width


def _search(max_tp: int | None, max_size: int | None) -> str:
    limits = ["space: heterogeneous"]
    if max_tp is not None:
        limits.append(f"max_tp: {max_tp}")
    if max_size is not None:
        sizes = [size for size in range(1, max_size + 1) if size & (size - 1) == 0]
        limits.append(f"micro_batch_sizes: {sizes}")
    return ", ".join(limits)
