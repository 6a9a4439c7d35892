"""Clusters: nodes, their devices, and the links between them."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import inf
from typing import Final, Literal

import numpy as np

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device, is_cpu
from amp_ray.units import GIGA, gbit_per_s_to_bytes_per_s, microseconds_to_s

Protocol = Literal["tcp", "rdma", "efa"]

Fabric = Literal["nvlink", "pcie", "network"]
"""Kinds of links for which NCCL's tuning model has latencies."""

RDMA_STEP_S: Final = microseconds_to_s(5)
"""Message over InfiniBand or RoCE from rank to rank: 1-2 us on the wire and in a switch, the rest
for two host threads that post it and wait for it. NCCL's latencies of a network contain it."""

DEFAULT_INTRA_LATENCY_S: Final[Mapping[Fabric, float]] = {
    "nvlink": microseconds_to_s(2),
    "pcie": microseconds_to_s(5),
}
"""Latency of a message within a node, between NCCL's .6 and 3.4 us for NVLink, 1 and 5.7 for PCIe
(``hwLat`` in ``src/graph/tuning.cc``, by protocol)."""

DEFAULT_INTER_LATENCY_S: Final[Mapping[Protocol | None, float]] = {
    None: microseconds_to_s(25),
    "tcp": microseconds_to_s(25),
    "rdma": RDMA_STEP_S,
    "efa": microseconds_to_s(60),
}
"""Time of a step between nodes by protocol. TCP in a cloud takes 20-40 us. Steps over EFA took 54
to 70 us (docs/cost-model.md, "Steps over nodes"); AWS's plugin tells NCCL 75 for P4d and P5
(aws-ofi-nccl, ``platform-aws.c``), with which NCCL chooses algorithms. An unknown network is taken
for TCP."""

_REACHED: Final[Mapping[Protocol, tuple[float, float]]] = {
    "tcp": (0.95, gbit_per_s_to_bytes_per_s(38)),
    "rdma": (0.96, inf),
    "efa": (0.85, inf),
}
"""Share of the line rate that collectives reach, and the maximum rate. TCP of one host saturates
only slow lines: .95 of 10 Gbit/s, .79 of 50; InfiniBand reaches .96 at any rate."""

_TCP_RATE: Final = gbit_per_s_to_bytes_per_s(100)
_RDMA_RATE: Final = gbit_per_s_to_bytes_per_s(200)


def assumed_protocol(device: Device, bytes_per_s: float) -> Protocol | None:
    """Return the protocol of a node's network where nothing states it, from board and line rate.

    Nodes of T4, P100 and V100 with up to 100 Gbit/s are those of clouds, without RDMA; a single
    host's TCP does not fill 200 Gbit/s, which are sold with InfiniBand or RoCE. Else unknown.
    """
    if is_cpu(device.name) or device.link_bytes_per_s is None:
        return None
    if bytes_per_s >= _RDMA_RATE:
        return "rdma"
    is_old = not device.has_flash_attention
    return "tcp" if is_old and bytes_per_s <= _TCP_RATE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path between two devices."""

    # Rate in one direction, shared by all transfers of the node; the maximum if the rate depends
    # on the size of a message
    bandwidth_bytes_per_s: float
    latency_s: float  # time until the first byte of a message arrives
    # Time of one step of a collective, without its bytes; None if equal to ``latency_s``
    collective_latency_s: float | None = None
    # Pairs of size in bytes, ascending, and rate of a message or collective; empty if the rate is
    # the same for all sizes
    rates: tuple[tuple[float, float], ...] = ()
    protocol: Protocol | None = None  # protocol of a network interface, if known
    assumed: bool = False  # whether the protocol is `assumed_protocol`
    # Kind of link whose latencies NCCL's tuning model gives; None if ``latency_s`` is stated, then
    # every step takes it
    fabric: Fabric | None = None
    board: str = ""  # board whose measured collectives are those of this link; empty for none

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                f"a link needs bandwidth_bytes_per_s > 0 and latency_s >= 0, found "
                f"{self.bandwidth_bytes_per_s} and {self.latency_s}"
            )
        if not self.step_s >= 0:
            raise ValueError(f"a link needs collective_latency_s >= 0, found {self.step_s}")
        if self.rates and max(rate for _, rate in self.rates) != self.bandwidth_bytes_per_s:
            raise ValueError(
                f"bandwidth_bytes_per_s is the largest of rates, found {self.bandwidth_bytes_per_s}"
            )

    def at(self, num_bytes: float) -> "Link":
        """Return the link with the rate for a message size.

        The rate is interpolated linearly in the logarithm of the size, and constant outside the
        table.
        """
        if not self.rates:
            return self
        sizes, rates = zip(*self.rates, strict=True)
        rate = float(np.interp(np.log(max(num_bytes, 1.0)), np.log(sizes), rates))
        return replace(self, bandwidth_bytes_per_s=rate, rates=())

    @property
    def line_bytes_per_s(self) -> float:
        """Rate to which `Constants.nic_efficiency` applies.

        If the protocol is known, that constant corrects the protocol's efficiency.
        """
        if self.protocol is None:
            return self.bandwidth_bytes_per_s
        share, most = _REACHED[self.protocol]
        return min(share * self.bandwidth_bytes_per_s, most) / Constants().nic_efficiency

    @property
    def step_s(self) -> float:
        """Latency of one step of a collective."""
        return self.latency_s if self.collective_latency_s is None else self.collective_latency_s


KIND_KEYS: Final = ("device", "num_slots", "num_hosts", "host_link", "intra", "inter", "zone")
"""Fields of a node that affect an iteration's time; equal for nodes of one kind."""

_SLOW: Final = 0.25
"""A stated rate below this share of the boards' rate probably has a wrong unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind in a host, or in the hosts of a rack, with fast links among them all.

    A host with boards of several kinds is a node for each kind, with the same name.
    A rack is one node to cost and search, since its links decide which groups of devices may be
    large; only launches and reports ask for the host and the slot of a device (`Cluster.places`).
    """

    name: str  # host name, as in the hostfile; of a rack the first one
    device: Device
    num_slots: int  # devices of all its hosts, which have equally many
    intra: Link  # link between two devices of this node; in a rack, also of different hosts
    inter: Link  # network interface of each host, shared by the host's devices
    zone: str = ""  # region or data centre of the node; may be empty
    first_slot: int = 0  # slot of its first device in its host
    hosts: tuple[str, ...] = ()  # hosts of a rack, in the hostfile's order; empty for a single host
    host_link: Link | None = None  # link within one host of a rack; None if it is ``intra``
    # Price of one device per hour, in any currency; None if unknown
    price_per_device_hour: float | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Values of `KIND_KEYS`."""
        return tuple(getattr(self, name) for name in KIND_KEYS)

    @property
    def nameless(self) -> "Node":
        """The node without its names, to compare nodes by all other fields."""
        return replace(self, name="", hosts=("",) * len(self.hosts))

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of its hosts."""
        return self.hosts or (self.name,)

    @property
    def num_hosts(self) -> int:
        """Number of its hosts."""
        return len(self.hosts) or 1

    @property
    def host_slots(self) -> int:
        """Devices of each host."""
        return self.num_slots // self.num_hosts

    def of_hosts(self, names: Sequence[str]) -> "Node":
        """Return a node with other hosts of the same kind, at least one."""
        num_slots = len(names) * self.host_slots
        if len(names) > 1:
            return replace(self, name=names[0], hosts=tuple(names), num_slots=num_slots)
        intra = self.host_link or self.intra
        host = replace(self, name=names[0], hosts=(), host_link=None, intra=intra)
        return replace(host, num_slots=num_slots)

    @property
    def is_slow_within(self) -> bool:
        """Whether its stated link rate is below a quarter of its boards' default rate."""
        reached = self.device.reached_link_bytes_per_s
        if reached is None or self.num_slots == 1:
            return False
        return self.intra.bandwidth_bytes_per_s < reached * _SLOW

    def __post_init__(self) -> None:
        if self.first_slot and self.hosts:
            raise ValueError(f"rack {self.name!r} begins at slot 0, found {self.first_slot}")
        if self.num_slots < 1:
            raise ValueError(f"node {self.name!r} needs at least one slot, found {self.num_slots}")
        if self.num_slots % self.num_hosts:
            raise ValueError(
                f"the {self.num_hosts} hosts of rack {self.name!r} must have equally many slots, "
                f"found {self.num_slots} in all"
            )
        if self.price_per_device_hour is not None and not self.price_per_device_hour >= 0:
            message = f"node {self.name!r} has a price below 0: {self.price_per_device_hour}"
            raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneLink:
    """The link between the nodes of two zones."""

    link: Link  # link of two nodes, if their network interfaces are faster
    price_per_byte: float = 0.0  # price of a byte sent between the zones


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes, in hostfile order; device numbers continue from host to host."""

    nodes: tuple[Node, ...]  # at least one; those of one host follow each other, by their slots
    # Links of node pairs ``(i, j)`` with ``i < j``, which replace the link derived from the two
    # network interfaces
    pair_links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    # Links between two zones, by their names in ascending order; nodes of other zones are joined by
    # their network interfaces
    zone_links: Mapping[tuple[str, str], ZoneLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names, num_nodes = [nodes[0].name for nodes in self.machines], len(self.nodes)
        pairs = (pair for nodes in self.machines for pair in pairwise(nodes))
        is_twice = any(two.first_slot < one.first_slot + one.num_slots for one, two in pairs)
        if not names or len(set(names)) != len(names) or is_twice:
            names = [host.name for host in self.hosts]
            raise ValueError(f"a cluster needs nodes with different names, found {names}")
        for index, first in enumerate(self.host_of_node):
            if any((one, index) not in self.pair_links for one in range(first, index)):
                message = f"nodes of host {self.nodes[index].name!r} need a link in pair_links"
                raise ValueError(message)
        for low, high in self.pair_links:
            if not 0 <= low < high < num_nodes:
                raise ValueError(
                    f"link between nodes {low} and {high}: there are nodes 0..{num_nodes - 1}"
                )

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        """Index of the node that holds each device."""
        return tuple(i for i, node in enumerate(self.nodes) for _ in range(node.num_slots))

    @cached_property
    def slot_of_device(self) -> tuple[int, ...]:
        """Slot of each device within its node."""
        return tuple(slot for node in self.nodes for slot in range(node.num_slots))

    @cached_property
    def host_names(self) -> tuple[str, ...]:
        """Names of all hosts, in hostfile order."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.host_names))

    @cached_property
    def machines(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes of every host, in the order of ``host_names``; one for each kind of boards."""
        return tuple(tuple(nodes) for _, nodes in groupby(self.hosts, lambda host: host.name))

    @cached_property
    def host_of_node(self) -> tuple[int, ...]:
        """Index of the first node in the same host, or rack, as each node."""
        first: dict[str, int] = {}
        return tuple(first.setdefault(node.name, index) for index, node in enumerate(self.nodes))

    @cached_property
    def hosts(self) -> tuple[Node, ...]:
        """Every host as a node, in hostfile order; a host with several kinds of boards as some."""
        return tuple(
            node.of_hosts((name,)) if node.hosts else node
            for node in self.nodes
            for name in node.host_names
        )

    @cached_property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Host of each device, and its slot there."""
        return tuple(
            (host.name, host.first_slot + slot)
            for host in self.hosts
            for slot in range(host.num_slots)
        )

    @cached_property
    def host_of_device(self) -> tuple[int, ...]:
        """Index into ``host_names`` of each device."""
        return tuple(
            i
            for i, nodes in enumerate(self.machines)
            for node in nodes
            for _ in range(node.num_slots)
        )

    @cached_property
    def has_racks(self) -> bool:
        """Whether some hosts share a rack."""
        return len(self.hosts) > len(self.nodes)

    @cached_property
    def has_host_links(self) -> bool:
        """Whether devices of one host of a rack have a link of their own."""
        return any(node.host_link is not None for node in self.nodes)

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return len(self.node_of_device)

    @cached_property
    def device_types(self) -> tuple[Device, ...]:
        """The distinct devices, in order of first appearance."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    @cached_property
    def type_of_device(self) -> tuple[int, ...]:
        """Index into ``device_types`` of each device."""
        index = {device: i for i, device in enumerate(self.device_types)}
        return tuple(index[self.nodes[node].device] for node in self.node_of_device)

    def at(self, num_bytes: float) -> "Cluster":
        """Return the cluster with the rates of all links for a message size."""
        nodes = tuple(
            replace(
                node,
                intra=node.intra.at(num_bytes),
                inter=node.inter.at(num_bytes),
                host_link=node.host_link and node.host_link.at(num_bytes),
            )
            for node in self.nodes
        )
        pairs = {pair: link.at(num_bytes) for pair, link in self.pair_links.items()}
        zones = {
            names: replace(joined, link=joined.link.at(num_bytes))
            for names, joined in self.zone_links.items()
        }
        return replace(self, nodes=nodes, pair_links=pairs, zone_links=zones)

    @cached_property
    def has_rates_by_size(self) -> bool:
        """Whether the rate of some link depends on the size of a message."""
        joined = (zone.link for zone in self.zone_links.values())
        of_nodes = (
            link for node in self.nodes for link in (node.intra, node.inter, node.host_link) if link
        )
        return any(link.rates for link in (*of_nodes, *joined, *self.pair_links.values()))

    @cached_property
    def is_even(self) -> bool:
        """Whether nodes differ only in names, and no pair of nodes has a special link.

        All nodes of a zone are joined alike.
        """
        return len({node.kind for node in self.nodes}) == 1 and not self.pair_links

    @cached_property
    def link_keys(self) -> tuple[int, ...]:
        """Index of each node that a pair of nodes gives a special link; -1 for all others."""
        linked = {node for pair in self.pair_links for node in pair}
        return tuple(index if index in linked else -1 for index in range(len(self.nodes)))

    def alike_nodes(self, key: Callable[[Node], Hashable]) -> list[list[int]]:
        """Group the indices of nodes by equal keys, in order of first appearance."""
        groups: dict[Hashable, list[int]] = {}
        for index, node in enumerate(self.nodes):
            groups.setdefault(key(node), []).append(index)
        return list(groups.values())

    def part(self, nodes: Sequence[int]) -> "Cluster":
        """Return a cluster with only these nodes, in this order."""
        position = {node: index for index, node in enumerate(nodes)}
        pairs = {
            (min(position[low], position[high]), max(position[low], position[high])): link
            for (low, high), link in self.pair_links.items()
            if low in position and high in position
        }
        return replace(self, nodes=tuple(self.nodes[node] for node in nodes), pair_links=pairs)

    def of_hosts(self, names: Collection[str]) -> "Cluster":
        """Return a cluster with only these hosts, in its order."""
        wanted = frozenset(names)
        kept = [[name for name in node.host_names if name in wanted] for node in self.nodes]
        present = [index for index, hosts in enumerate(kept) if hosts]
        part = self.part(present)
        nodes = tuple(
            node if len(kept[index]) == node.num_hosts else node.of_hosts(kept[index])
            for index, node in zip(present, part.nodes, strict=True)
        )
        return replace(part, nodes=nodes)

    @cached_property
    def slow_links(self) -> str:
        """Return a message that names nodes with suspiciously slow links; see `is_slow_within`."""
        slow = dict.fromkeys(
            f"{node.intra.bandwidth_bytes_per_s / GIGA:.3g} GB/s within nodes of {node.device.name}"
            for node in self.nodes
            if node.is_slow_within
        )
        return ", ".join(slow)

    @cached_property
    def assumed_network(self) -> str:
        """Name the protocols that are taken for the networks of several nodes; may be empty."""
        if not any(self.host_of_node):
            return ""
        assumed = {node.inter.protocol for node in self.nodes if node.inter.assumed}
        return " and ".join(sorted(filter(None, assumed)))

    @property
    def has_prices(self) -> bool:
        """Whether the price of every node is known."""
        return all(node.price_per_device_hour is not None for node in self.nodes)
