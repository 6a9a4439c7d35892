"""The cluster of an experiment file: its keys, and the cluster with the hosts of its hostfile."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby, islice, product
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, Tag

from amp_ray.clusters.cluster import (
    DEFAULT_INTER_LATENCY_S,
    DEFAULT_INTRA_LATENCY_S,
    Cluster,
    Fabric,
    Link,
    Node,
    Protocol,
    ZoneLink,
    assumed_protocol,
)
from amp_ray.clusters.device import Device, find_device, is_cpu
from amp_ray.errors import InputError, Mistakes
from amp_ray.inputs.hostfile import HostSlots, parse_hostfile, parse_target
from amp_ray.inputs.section import Name, Number, Section, Text, Within, by_type
from amp_ray.inputs.yaml_text import Document
from amp_ray.units import (
    BITS_PER_BYTE,
    GIGA,
    TERA,
    Precision,
    counted,
    gbit_per_s_to_bytes_per_s,
    gib_to_bytes,
    microseconds_to_s,
)

# Ranges are wide enough for a core of a CPU, a link of 1 Mbit/s and boards ten times as large as
# today's, and narrow enough to detect bytes in place of GiB.
Memory = Annotated[Number, AfterValidator(Within(1e-3, 1e4, "GiB"))]
MemoryRate = Annotated[Number, AfterValidator(Within(0.1, 1e5, "GB/s"))]
LinkRate = Annotated[Number, AfterValidator(Within(1e-3, 1e5, "Gbit/s"))]
_Size = Annotated[int, Field(ge=1, le=10**15, strict=True)]
RatesBySize = Annotated[list[tuple[_Size, LinkRate]], Field(min_length=1)]


AnyLinkRate = Annotated[
    Annotated[LinkRate, Tag("one")] | Annotated[RatesBySize, Tag("by size")],
    by_type(list, "by size", "one"),
]
Power = Annotated[Number, AfterValidator(Within(1, 1e4, "W"))]
Rate = Annotated[Number, AfterValidator(Within(1e-3, 1e5, "TFLOP/s"))]
Latency = Annotated[Number, AfterValidator(Within(1e-3, 1e6, "microseconds", or_zero=True))]
Price = Annotated[Number, AfterValidator(Within(1e-6, 1e6, "of the currency", or_zero=True))]
Few = Annotated[int, Field(ge=1, le=10**5, strict=True)]


class DeviceSection(Section):
    """``device`` as a mapping: a data sheet that is not in the catalogue."""

    name: Name
    """Name of the device, also of its table in a profile."""
    memory_gib: Memory
    """Memory that processes can allocate."""
    memory_gbyte_per_s: MemoryRate
    """Peak bandwidth of the memory."""
    num_multiprocessors: Few = 1
    """Number of units over which a matrix product is divided."""
    context_gib: Memory | None = None
    """Memory of a process before its first tensor. For a GPU the runtime's record has it; for the
    catalogue's `cpu` it is 0.39. Default: the runtime's `context_bytes`."""
    fp32_tflops: Rate | None = None
    """Dense peak rate; the rate of `precision` is needed."""
    fp16_tflops: Rate | None = None
    """Dense peak rate; the rate of `precision` is needed."""
    bf16_tflops: Rate | None = None
    """Dense peak rate; the rate of `precision` is needed."""
    fp8_tflops: Rate | None = None
    """Dense peak rate; the rate of `precision` is needed."""
    nvfp4_tflops: Rate | None = None
    """Dense peak rate; the rate of `precision` is needed."""


class RackSection(Section):
    """``rack`` of a node: hosts whose devices are joined by fast links."""

    nodes: Few
    """Hosts of a rack. In hostfile order, the hosts of an entry fill one rack after the other."""
    gbit_per_s: AnyLinkRate | None = None
    """Rate of a long all-reduce of one device with devices of other hosts of the rack. Default:
    that within a host."""
    gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    latency_us: Latency | None = None
    """Latency of a message between hosts of the rack. Default: that within a host."""
    collective_us: Latency | None = None
    """Latency of one step of a collective. Default: `latency_us`, else that within a host."""


class NodeSection(Section):
    """One entry of ``cluster.nodes``: ``count`` equal nodes, or boards of one kind in a host."""

    count: Few = 1
    """Number of such nodes."""
    host: Text | None = None
    """Name of the host, with a hostfile as there (`node0`, `node1`, ... stand for the hosts in its
    order). Entries that follow each other with one name are boards of several kinds [in one
    host](#hosts-with-boards-of-two-kinds). Default: the hostfile's name, else `node0`, ..."""
    device: Annotated[
        Annotated[Text, Tag("named")] | Annotated[DeviceSection, Tag("described")],
        by_type(dict | DeviceSection, "described", "named"),
    ]
    """Device in every slot."""
    slots: Few
    """Devices per node; must agree with the hostfile, where that states them."""
    intra_gbit_per_s: AnyLinkRate | None = None
    """Rate of a long all-reduce between the devices of the node (bus bandwidth as NCCL's tests
    define it). The default is .79 of the line rate of the board's own links if they meet in a
    switch (NVSwitch since A100), else half (`amp_ray/clusters/device.py`). A list gives the rate
    for messages or all-reduces of each size; between two sizes it is linear in the logarithm of the
    size. A rate below a quarter of the default gives a warning. Default: the rate of boards in the
    catalogue."""
    intra_gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    inter_gbit_per_s: AnyLinkRate | None = None
    """Line rate of all network interfaces of the node, in one direction. Default: needed, unless
    there is only one node, or one rack."""
    inter_gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    protocol: Protocol | None = None
    """Protocol of the network: TCP reaches .95 of the line rate and at most 38 Gbit/s, RDMA .96;
    EFA (AWS) .85; an unknown protocol .85 (`nic_efficiency`). Default, unless a
    latency is stated: RDMA from 200 Gbit/s on; TCP for T4, P100 and V100 up to 100 Gbit/s; else
    unknown."""
    intra_latency_us: Latency | None = None
    """Latency of a message within the node, and of every step of a collective. Default: 2 with
    NVLink or Infinity Fabric, 5 with PCIe, and NCCL's own latencies for collectives."""
    inter_latency_us: Latency | None = None
    """The same between nodes. Default: 5 with RDMA, 60 with EFA, 25 with TCP or an unknown
    protocol, and NCCL's own latencies for collectives, longer by what exceeds RDMA's 5."""
    intra_collective_us: Latency | None = None
    """Latency of one step of a collective within the node (gloo's takes twice as long as a
    message). Default: that of a message."""
    inter_collective_us: Latency | None = None
    """The same between nodes. Default: that of a message."""
    rack: RackSection | None = None
    """Hosts that share a rack: tensor-, context- and expert-parallel groups may span these as they
    may span the devices of a host, and `inter_gbit_per_s` counts between racks only.
    `{nodes: 1}` is no rack. Default: racks of 72 devices of GB200 and GB300 (NVL72), else none."""
    memory_gib: Memory | None = None
    """Memory that processes can allocate per device. Default: the device's."""
    nominal_memory_gib: Memory | None = None
    """Memory that the board is sold with, which `--cost-model metis-2024` uses. Default:
    `memory_gib`."""
    power_w: Power | None = None
    """Limit of the power that a device draws, as `nvidia-smi` shows it (`enforced.power.limit`). A
    lower one than the [board's](devices.md#catalogue) lowers the clock of products and attention,
    not the rate of the memory; `doctor` compares it. Default: the board's."""
    zone: Name | None = None
    """Region or data centre of the node, see `links`."""
    price_per_device_hour: Price | None = None
    """Price of one device for an hour. If all nodes have a price, rows have the
    [cost](formats.md#results) of an iteration."""


class LinkSection(Section):
    """One entry of ``cluster.links``: the link between one pair of nodes, or between two zones."""

    between: Annotated[list[Text], Field(min_length=2, max_length=2)]
    """Two hosts as named in the hostfile, or `node0`, ...; or two zones; or one host twice, for
    the link between its boards of different kinds."""
    gbit_per_s: AnyLinkRate | None = None
    """Rate in one direction. Default: needed."""
    gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    latency_us: Latency | None = None
    """Latency of a message. Default: 25."""
    collective_us: Latency | None = None
    """Latency of one step of a collective. Default: that of a message."""
    price_per_gbyte: Price | None = None
    """Zones: price of 10^9 bytes sent from either zone to the other. Default: 0."""


class ClusterSection(Section):
    """``cluster``: the hosts and their links."""

    hostfile: Text | None = None
    """Names of the hosts, in the order of the nodes. Without a hostfile they are `node0`, `node1`,
    ..., for planning only."""
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    """The hosts, as entries of equal nodes."""
    links: list[LinkSection] = Field(default_factory=list)
    """Links of single pairs of nodes, or of two zones."""


Rates = float | Sequence[tuple[int, float]]
"""One rate in Gbit/s, or rates by the size of a message."""

_MOST_DEVICES: Final = 1_000_000
_MOST_LISTED: Final = 20


def _limited(document: Document, index: int, limit_w: float | None, device: Device) -> Device:
    """Return a device with the limit of its power that a node's entry states."""
    if limit_w in {None, device.board_power_w}:
        return device
    with document.at("cluster", "nodes", index, "power_w"):
        return replace(device, power_limit_w=limit_w)


def build_cluster(
    document: Document, section: ClusterSection, precision: Precision, hostfile_text: str | None
) -> Cluster:
    """Build the cluster, with host names from the hostfile if there is one.

    It refuses a hostfile that disagrees with ``cluster.nodes``, an unknown device or one without
    the precision, and a link that does not join two nodes.
    """
    section, entries = _entries_of_hosts(document, section)
    names = [section.nodes[of[0]].host or f"node{index}" for index, of in enumerate(entries)]
    mistakes = Mistakes()
    with mistakes.collect():
        _check_size(document, section)
        if section.hostfile is not None and hostfile_text is not None:
            with document.at("cluster", "hostfile"):
                hosts = parse_hostfile(hostfile_text, file=section.hostfile)
            _check_hosts(document, section, hosts, entries)
            names = [host.host for host in hosts]
        positions = _positions(document, names, entries)
        zones = {entry.zone for entry in section.nodes if entry.zone is not None}
        several = {name for name, of in zip(names, entries, strict=True) if len(of) > 1}
        links, zone_links = _links(document, section.links, positions, zones, several)
    devices, links_of = list[Device](), list[tuple[Link, Link, Link]]()
    for index, entry in enumerate(section.nodes):
        with mistakes.collect(), document.at("cluster", "nodes", index, "device"):
            device = _limited(document, index, entry.power_w, _device(entry))
            device.peak_flops(precision)
            devices.append(device)
            with mistakes.collect(), document.at("cluster", "nodes", index):
                most = _rack_size(entry, device) if len(section.nodes) == 1 else 1
                links_of.append(_links_of_node(entry, device, is_alone=len(entries) <= most))
    mistakes.check()
    names_of = list[list[str]]([] for _ in section.nodes)
    for name, of in zip(names, entries, strict=True):
        for index in of:
            names_of[index].append(name)
    described = zip(names_of, section.nodes, devices, links_of, strict=True)
    nodes = _with_slots([node for entry in described for node in _nodes(*entry)])
    _check_racks(document, section, nodes)
    of_host: dict[str, list[int]] = {name: [] for name in names}
    for index, node in enumerate(nodes):
        for name in node.host_names:
            of_host[name].append(index)
    rates = section.nodes[0].inter_gbit_per_s, section.nodes[0].inter_gbyte_per_s
    pairs = _links_in_hosts(nodes, has_network=rates != (None, None))
    for (low, high), link in links.items():
        ends = of_host[names[low]], of_host[names[high]]
        pairs |= {(one, other): link for one, other in product(*ends) if one < other}
    with document.at("cluster"):
        return Cluster(nodes=tuple(nodes), pair_links=pairs, zone_links=zone_links)


def _positions(
    document: Document, names: Sequence[str], entries: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Return the position of every host; refuse entries of a host that are apart."""
    positions = {name: index for index, name in enumerate(names)}
    for name, of in zip(names, entries, strict=True):
        if entries[positions[name]] is not of:
            message = f"another host is named {name!r}; entries of one host follow each other"
            raise InputError(message, where=document.where("cluster", "nodes", of[0]))
    return positions


_OF_HOST: Final = (
    *("inter_gbit_per_s", "inter_gbyte_per_s", "inter_latency_us", "inter_collective_us"),
    *("protocol", "rack", "zone"),
)
"""Keys of an entry that hold for all boards of its host."""

_PCIE_SHARE: Final = 0.5
"""Share of a board's PCIe rate that messages to boards of other kinds in its host reach, as those
between boards that only PCIe joins do (`Device.link_fraction`)."""


def _entries_of_hosts(
    document: Document, section: ClusterSection
) -> tuple[ClusterSection, list[list[int]]]:
    """Return the entries of every host, after each has what another of its host states."""
    entries: list[list[int]] = []
    mistakes = Mistakes()
    for index, entry in enumerate(section.nodes):
        is_same = index and entry.host is not None and section.nodes[index - 1].host == entry.host
        if is_same:
            entries[-1].append(index)
        else:
            entries += [[index] for _ in range(entry.count)]
        if entry.host is not None:
            with mistakes.collect(), document.at("cluster", "nodes", index, "host"):
                parse_target(entry.host)
                if entry.count > 1:
                    raise ValueError(
                        f"found a name for {entry.count} hosts; write an entry for each"
                    )
    mistakes.check()
    nodes = list(section.nodes)
    for of in entries:
        if len(of) > 1:
            with mistakes.collect():
                shared = _shared_keys(document, section, of)
                for index in of:
                    nodes[index] = nodes[index].model_copy(update=shared)
    mistakes.check()
    return section.model_copy(update={"nodes": nodes}), entries


def _shared_keys(
    document: Document, section: ClusterSection, entries: Sequence[int]
) -> dict[str, Any]:
    """Return what entries of one host state of the host; refuse different figures, and CPUs."""
    shared: dict[str, Any] = {}
    for index in entries:
        entry = section.nodes[index]
        name = entry.device if isinstance(entry.device, str) else entry.device.name
        if is_cpu(name):
            message = f"found {name}; host {entry.host!r} has entries for boards of several kinds"
            raise InputError(message, where=document.where("cluster", "nodes", index, "device"))
        for key in _OF_HOST:
            value = getattr(entry, key)
            if value is not None and shared.setdefault(key, value) != value:
                message = f"found {value}; another entry of host {entry.host!r} has {shared[key]}"
                raise InputError(message, where=document.where("cluster", "nodes", index, key))
    return shared


def _with_slots(nodes: Sequence[Node]) -> list[Node]:
    """Number the slots of nodes in one host through, and give them the first one's network."""
    numbered = [*nodes[:1]]
    for node in nodes[1:]:
        before = numbered[-1]
        if before.name == node.name:
            first = before.first_slot + before.num_slots
            numbered.append(replace(node, first_slot=first, inter=before.inter))
        else:
            numbered.append(node)
    return numbered


def _links_in_hosts(nodes: Sequence[Node], *, has_network: bool) -> dict[tuple[int, int], Link]:
    """Return the links between boards of different kinds in one host."""
    indices = groupby(range(len(nodes)), lambda index: nodes[index].name)
    pairs = (pair for _, host in indices for pair in combinations(host, 2))
    return {
        (low, high): _link_in_host(nodes[low], nodes[high], has_network=has_network)
        for low, high in pairs
    }


def _link_in_host(one: Node, other: Node, *, has_network: bool) -> Link:
    """Return the path between boards of two kinds: over PCIe, unless the network is faster.

    What a host sends to others crosses the same PCIe, which therefore carries as much.
    """
    links = one.intra, other.intra
    pcie = _PCIE_SHARE * min(one.device.host_bytes_per_s, other.device.host_bytes_per_s)
    rate = min(pcie, *(link.bandwidth_bytes_per_s for link in links))
    latency_s = max(DEFAULT_INTRA_LATENCY_S["pcie"], *(link.latency_s for link in links))
    inter = one.inter
    if not has_network:
        return Link(bandwidth_bytes_per_s=rate, latency_s=latency_s, fabric="pcie")
    latency_s = min(latency_s, inter.latency_s)
    return Link(
        bandwidth_bytes_per_s=max(rate, inter.line_bytes_per_s),
        latency_s=latency_s,
        collective_latency_s=min(latency_s, inter.step_s),
        fabric=inter.fabric and "pcie",
    )


def _check_racks(document: Document, section: ClusterSection, nodes: Sequence[Node]) -> None:
    """Refuse a link of a host in a rack, which shares its links with the other hosts."""
    racked = {name for node in nodes for name in node.hosts}
    mistakes = Mistakes()
    for position, entry in enumerate(section.links):
        with mistakes.collect(), document.at("cluster", "links", position, "between"):
            inside = sorted(racked.intersection(entry.between))
            if inside:
                raise ValueError(
                    f"host {inside[0]!r} is in a rack, whose hosts share their links; state the "
                    "rate of `rack`, or a link of two zones, or rack: {nodes: 1}"
                )
    mistakes.check()


def _check_size(document: Document, section: ClusterSection) -> None:
    """Refuse more devices than any cluster has."""
    num_devices = sum(entry.count * entry.slots for entry in section.nodes)
    if num_devices > _MOST_DEVICES:
        message = f"found {num_devices:,} devices; expected at most {_MOST_DEVICES:,}"
        raise InputError(message, where=document.where("cluster", "nodes"))


def _check_hosts(
    document: Document,
    section: ClusterSection,
    hosts: Sequence[HostSlots],
    entries: Sequence[Sequence[int]],
) -> None:
    """Refuse a hostfile that disagrees with ``cluster.nodes``."""
    if len(hosts) != len(entries):
        message = (
            f"describes {counted(len(entries), 'host')}, hostfile {section.hostfile!r} names "
            f"{len(hosts)}: they are matched in order, so the counts must be equal (entries that "
            "follow each other with one `host` count once)"
        )
        raise InputError(message, where=document.where("cluster", "nodes"))
    mistakes = Mistakes()
    for position, (host, of) in enumerate(zip(hosts, entries, strict=True)):
        slots = [section.nodes[index].slots for index in of]
        name = section.nodes[of[0]].host
        with mistakes.collect():
            if name not in (None, f"node{position}", host.host, parse_target(host.host).host):
                message = (
                    f"found {name!r}; the host in its place in {section.hostfile!r} is "
                    f"{host.host!r}: they are matched in order"
                )
                raise InputError(message, where=document.where("cluster", "nodes", of[0], "host"))
            if host.num_slots not in (None, sum(slots)):
                message = (
                    f"found {' + '.join(map(str, slots))}; host {host.host!r} has "
                    f"slots={host.num_slots} in {section.hostfile!r}"
                )
                raise InputError(message, where=document.where("cluster", "nodes", of[-1], "slots"))
    mistakes.check()


def _device(entry: NodeSection) -> Device:
    if isinstance(entry.device, str):
        device = find_device(entry.device)
    else:
        device = _described_device(entry.device)
    if entry.memory_gib is not None:
        device = replace(device, memory_bytes=gib_to_bytes(entry.memory_gib))
    if entry.nominal_memory_gib is not None:
        device = replace(device, nominal_bytes=gib_to_bytes(entry.nominal_memory_gib))
    return device


def _described_device(section: DeviceSection) -> Device:
    rates = {
        precision: None if value is None else value * TERA
        for precision, value in (
            ("fp32", section.fp32_tflops),
            ("fp16", section.fp16_tflops),
            ("bf16", section.bf16_tflops),
            ("fp8", section.fp8_tflops),
            ("nvfp4", section.nvfp4_tflops),
        )
    }
    if all(rate is None for rate in rates.values()):
        raise ValueError(
            f"device {section.name!r} needs fp32_tflops, fp16_tflops, bf16_tflops, fp8_tflops or "
            "nvfp4_tflops"
        )
    return Device(
        name=section.name,
        memory_bytes=gib_to_bytes(section.memory_gib),
        memory_bytes_per_s=section.memory_gbyte_per_s * GIGA,
        num_multiprocessors=section.num_multiprocessors,
        fp32_flops=rates["fp32"],
        fp16_flops=rates["fp16"],
        bf16_flops=rates["bf16"],
        fp8_flops=rates["fp8"],
        nvfp4_flops=rates["nvfp4"],
        context_bytes=None if section.context_gib is None else gib_to_bytes(section.context_gib),
        source="the experiment file",
    )


def _links_of_node(
    entry: NodeSection, device: Device, *, is_alone: bool
) -> tuple[Link, Link, Link]:
    """Return the link within a host (by default that of its boards), in a rack, and outside.

    Where the file states no rate, latency or protocol, they are those of board and network. A node
    or rack that ``is_alone`` has no network, whose link then counts as that within a host.
    """
    reached = device.reached_link_bytes_per_s
    default = None if reached is None else reached * BITS_PER_BYTE / GIGA
    fabric = None if is_cpu(device.name) else device.fabric
    intra = _link(
        _gbit_per_s("intra_", entry.intra_gbit_per_s, entry.intra_gbyte_per_s, default),
        entry.intra_latency_us,
        entry.intra_collective_us,
        DEFAULT_INTRA_LATENCY_S[fabric or "pcie"],
        fabric,
    )
    is_stated = entry.intra_gbit_per_s is not None or entry.intra_gbyte_per_s is not None
    if intra.fabric is not None and not is_stated:
        intra = replace(intra, board=device.name)
    alone = intra.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA if is_alone else None
    rates = _gbit_per_s("inter_", entry.inter_gbit_per_s, entry.inter_gbyte_per_s, alone)
    line = max(rate for _, rate in rates) if isinstance(rates, Sequence) else rates
    # A file with latencies has measured its network, and its rate is what a profile wrote.
    is_measured = (entry.inter_latency_us, entry.inter_collective_us) != (None, None)
    assumed = None if is_measured else assumed_protocol(device, gbit_per_s_to_bytes_per_s(line))
    protocol = entry.protocol or assumed
    inter = _link(
        rates,
        entry.inter_latency_us,
        entry.inter_collective_us,
        DEFAULT_INTER_LATENCY_S[protocol],
        None if is_cpu(device.name) else "network",
    )
    is_assumed = entry.protocol is None and assumed is not None
    rack = intra if entry.rack is None else _rack_link(entry.rack, intra)
    return intra, rack, replace(inter, protocol=protocol, assumed=is_assumed)


def _gbit_per_s(
    prefix: str, gbit: Rates | None, gbyte: Rates | None, default: float | None = None
) -> Rates:
    if gbit is not None and gbyte is not None:
        raise ValueError(f"found {prefix}gbit_per_s and {prefix}gbyte_per_s; expected one of them")
    if isinstance(gbyte, Sequence):
        return [(size, rate * BITS_PER_BYTE) for size, rate in gbyte]
    stated = gbit if gbyte is None else gbyte * BITS_PER_BYTE
    if stated is not None:
        return stated
    if default is not None:
        return default
    raise ValueError(
        f"{prefix}gbit_per_s is missing (or {prefix}gbyte_per_s){_HINTS.get(prefix, '')}"
    )


_HINTS: Final = {
    "intra_": "; the catalogue knows no link of this device",
    "inter_": ": the line rate of all network interfaces of a node together, such as 400 or 3200",
}
"""What to write for a rate that is missing, by the beginning of its key."""


def _nodes(
    hosts: Sequence[str], entry: NodeSection, device: Device, links: tuple[Link, Link, Link]
) -> list[Node]:
    """Return the nodes of an entry: its racks, the last of which may have fewer hosts."""
    intra, joined, inter = links
    size = _rack_size(entry, device)
    host = Node(
        name="",
        device=device,
        num_slots=entry.slots,
        intra=joined,
        inter=inter,
        zone=entry.zone or "",
        price_per_device_hour=entry.price_per_device_hour,
        host_link=None if joined == intra else intra,
    )
    return [host.of_hosts(hosts[first : first + size]) for first in range(0, len(hosts), size)]


def _rack_size(entry: NodeSection, device: Device) -> int:
    return max(1, device.rack_devices // entry.slots) if entry.rack is None else entry.rack.nodes


def _rack_link(rack: RackSection, intra: Link) -> Link:
    """Return the link between hosts of a rack: by default that within a host."""
    joined = intra
    if rack.gbit_per_s is not None or rack.gbyte_per_s is not None:
        rates = _gbit_per_s("rack.", rack.gbit_per_s, rack.gbyte_per_s)
        link = _link(rates, None, None, intra.latency_s)
        joined = replace(
            intra, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, rates=link.rates, board=""
        )
    if rack.latency_us is not None:
        latency_s = microseconds_to_s(rack.latency_us)
        joined = replace(joined, latency_s=latency_s, collective_latency_s=None, fabric=None)
    if rack.collective_us is not None:
        collective_s = microseconds_to_s(rack.collective_us)
        joined = replace(joined, collective_latency_s=collective_s, fabric=None)
    return joined


def _link(
    gbit_per_s: Rates,
    latency_us: float | None,
    collective_us: float | None,
    default_latency_s: float,
    fabric: Fabric | None = None,
) -> Link:
    """Return a link; NCCL's latencies of its fabric hold unless the file states one."""
    table = gbit_per_s if isinstance(gbit_per_s, Sequence) else [(1, gbit_per_s)]
    rates = [(float(size), gbit_per_s_to_bytes_per_s(rate)) for size, rate in sorted(table)]
    if len({size for size, _ in rates}) < len(rates):
        raise ValueError(f"a table of rates names a size twice: {[list(entry) for entry in table]}")
    return Link(
        bandwidth_bytes_per_s=max(rate for _, rate in rates),
        rates=tuple(rates) if len(rates) > 1 else (),
        latency_s=default_latency_s if latency_us is None else microseconds_to_s(latency_us),
        collective_latency_s=None if collective_us is None else microseconds_to_s(collective_us),
        fabric=fabric if latency_us is None and collective_us is None else None,
    )


def _links(
    document: Document,
    entries: Sequence[LinkSection],
    names: Mapping[str, int],
    zones: set[str],
    several: Collection[str],
) -> tuple[dict[tuple[int, int], Link], dict[tuple[str, str], ZoneLink]]:
    """Return the links of single node pairs by node index, and those of zones by their names."""
    pairs: dict[tuple[int, int], Link] = {}
    joined: dict[tuple[str, str], ZoneLink] = {}
    seen: set[frozenset[str]] = set()
    mistakes = Mistakes()
    for position, entry in enumerate(entries):
        with mistakes.collect(), document.at("cluster", "links", position, "between"):
            one, other = sorted(entry.between)
            if one != other or one not in several:
                _check_pair(entry, names, zones)
            if frozenset(entry.between) in seen:
                raise ValueError(
                    f"the link between {' and '.join(entry.between)} stands here a second time"
                )
            seen.add(frozenset(entry.between))
            link = _link(
                _gbit_per_s("", entry.gbit_per_s, entry.gbyte_per_s),
                entry.latency_us,
                entry.collective_us,
                DEFAULT_INTER_LATENCY_S[None],
            )
            if one in zones:
                price = (entry.price_per_gbyte or 0.0) / GIGA
                joined[one, other] = ZoneLink(link=link, price_per_byte=price)
            else:
                low, high = sorted((names[one], names[other]))
                pairs[low, high] = link
    mistakes.check()
    return pairs, joined


def _check_pair(entry: LinkSection, names: Collection[str], zones: set[str]) -> None:
    """Refuse a pair that is neither two different hosts nor two different zones."""
    named = zones.intersection(entry.between)
    both = sorted(name for name in named if name in names)
    if both:
        raise ValueError(f"{both[0]!r} is a zone and a host; give the zone another name")
    kind, choices = ("zone", zones) if named else ("host", names)
    unknown = [name for name in entry.between if name not in choices]
    if unknown:
        raise ValueError(f"{kind} {unknown[0]!r} is not one of {_listed(choices)}")
    if entry.between[0] == entry.between[1]:
        message = (
            f"found {list(entry.between)}; expected two different {kind}s of {_listed(choices)}"
        )
        raise ValueError(message)
    if kind == "host" and entry.price_per_gbyte is not None:
        raise ValueError("price_per_gbyte belongs to a link between two zones; these are hosts")


def _listed(names: Collection[str]) -> str:
    more = len(names) - _MOST_LISTED
    ordered = sorted(names) if isinstance(names, set) else names
    return ", ".join(islice(ordered, _MOST_LISTED)) + (f" and {more} more" if more > 0 else "")
