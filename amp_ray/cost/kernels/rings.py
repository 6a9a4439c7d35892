"""Paths of rings by number: the rates, steps and curves of collectives that run at once.

Typed Python that also compiles to C. Nothing but `RingTable.path` and the preparation of a table
touches Python objects, so that a search may ask for the rings of each of its layouts.
"""

from typing import Any

import cython
import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.cluster import RDMA_STEP_S, Cluster, Fabric, Link, Node
from amp_ray.clusters.constants import Constants
from amp_ray.cost import nccl
from amp_ray.cost.collective import NO_RING, RING_OVERHEAD_RANKS, Path
from amp_ray.cost.topology import Topology
from amp_ray.units import GIGA, MICROSECONDS_PER_SECOND

_OVERHEAD_RANKS = cython.declare(cython.double, RING_OVERHEAD_RANKS)
_RDMA_STEP_S = cython.declare(cython.double, RDMA_STEP_S)
_GIGA = cython.declare(cython.double, GIGA)
_MICRO = cython.declare(cython.double, 1.0 / MICROSECONDS_PER_SECOND)
_INF = cython.declare(cython.double, float("inf"))

# Figures of a ring: columns of `RingTable.figures`
_INSIDE_BYTES_PER_S = cython.declare(cython.Py_ssize_t, 0)  # slowest rate within its nodes
_INSIDE_STEP_S = cython.declare(cython.Py_ssize_t, 1)  # longest step within its nodes
_BETWEEN_BYTES_PER_S = cython.declare(cython.Py_ssize_t, 2)  # its share of the slowest hop's rate
_BETWEEN_STEP_S = cython.declare(cython.Py_ssize_t, 3)  # longest step between its nodes
_SWITCH_BYTES_PER_S = cython.declare(cython.Py_ssize_t, 4)  # slowest switch of its nodes
_NUM_FIGURES = cython.declare(cython.Py_ssize_t, 5)

# Traits of a ring: columns of `RingTable.traits`
_NUM_RANKS = cython.declare(cython.Py_ssize_t, 0)
_NUM_NODES = cython.declare(cython.Py_ssize_t, 1)
_LINKS = cython.declare(cython.Py_ssize_t, 2)  # bits of `_links_word`
_BOARD = cython.declare(cython.Py_ssize_t, 3)  # board of its node's measured times; -1 over nodes
_NUM_TRAITS = cython.declare(cython.Py_ssize_t, 4)

# Fields of a word of links, made so that ``|`` of two words is that of both their links
_NETWORK_SHIFT = cython.declare(cython.longlong, 4)  # fabric of the network; within the node at 0
_AGE_SHIFT = cython.declare(cython.longlong, 8)  # generations by which the boards miss the newest
_EFA = cython.declare(cython.longlong, 1 << 12)
_OTHER_PROTOCOL = cython.declare(cython.longlong, 1 << 13)  # neither RDMA nor EFA
_SWITCHLESS = cython.declare(cython.longlong, 1 << 14)  # a board whose links have no switch
_FIELD = cython.declare(cython.longlong, 0b1111)

_NEWEST = cython.declare(cython.longlong, len(nccl.NVLS_SHARE) - 1)
_FABRICS: tuple[str | None, ...] = (*sorted(nccl.HOPS), None)
_NVLINK = cython.declare(cython.longlong, _FABRICS.index("nvlink"))
_STATED = cython.declare(cython.longlong, _FABRICS.index(None))
_FEWEST_PATHS = 64  # room of a new table

_NUM_SIZES = cython.declare(cython.Py_ssize_t, nccl.NUM_SIZES)
_FIRST_BYTES = cython.declare(cython.double, float(nccl.FIRST_BYTES))
_LAST_BYTES = cython.declare(cython.double, float(nccl.LAST_BYTES))
_LL = cython.declare(cython.Py_ssize_t, nccl.LL)
_LL128 = cython.declare(cython.Py_ssize_t, nccl.LL128)
_SIMPLE = cython.declare(cython.Py_ssize_t, nccl.SIMPLE)
_NUM_PROTOCOLS = cython.declare(cython.Py_ssize_t, 3)
_EVEN = cython.declare(cython.Py_ssize_t, 3)  # row of corrections that corrects nothing
_RING = cython.declare(cython.Py_ssize_t, nccl.RING)
_TREE = cython.declare(cython.Py_ssize_t, nccl.TREE)
_BASE_S = cython.declare(cython.double, nccl.BASE_S)
_NVLS_LATENCY_S = cython.declare(cython.double, nccl.NVLS_LATENCY_S)
_NVLS_SENT = cython.declare(cython.double, nccl.NVLS_SENT)
_PAT_SHARE = cython.declare(cython.double, nccl.PAT_SHARE)
_PAT_START_US = cython.declare(cython.double, nccl.PAT_START_US)
_PAT_RANK_US = cython.declare(cython.double, nccl.PAT_RANK_US)
_PAT_HOP_DIVISOR = cython.declare(cython.double, nccl.PAT_HOP_DIVISOR)


# ------------------------------------------------------------------------------------ curves


def curve_at(row: cython.double[::1], num_bytes: cython.double) -> cython.double:
    """Return the seconds of one size on a curve of `RingTable`, shape ``(num_sizes + 1,)``."""
    place: cython.Py_ssize_t
    if num_bytes < _FIRST_BYTES:
        return row[0]
    if num_bytes >= _LAST_BYTES:
        return row[_NUM_SIZES - 1] + (num_bytes - _LAST_BYTES) * row[_NUM_SIZES]
    place = _place(num_bytes)
    return row[place] + (row[place + 1] - row[place]) * _beyond(num_bytes, place)


def seconds_at(
    curves: cython.double[:, ::1], number: cython.longlong, num_bytes: cython.double
) -> cython.double:
    """Return `curve_at` of one of several curves, shape ``(num_curves, num_sizes + 1)``."""
    place: cython.Py_ssize_t
    if num_bytes < _FIRST_BYTES:
        return curves[number, 0]
    if num_bytes >= _LAST_BYTES:
        more: cython.double = (num_bytes - _LAST_BYTES) * curves[number, _NUM_SIZES]
        return curves[number, _NUM_SIZES - 1] + more
    place = _place(num_bytes)
    low: cython.double = curves[number, place]
    return low + (curves[number, place + 1] - low) * _beyond(num_bytes, place)


def _place(num_bytes: cython.double) -> cython.Py_ssize_t:
    """Return the index of the largest of the sizes up to this one, which is in their range."""
    left: cython.longlong = int(num_bytes / _FIRST_BYTES)
    place: cython.Py_ssize_t = 0
    step: cython.Py_ssize_t = 16
    while step > 0:
        if left >> step > 0:
            left >>= step
            place += step
        step >>= 1
    return place


def _beyond(num_bytes: cython.double, place: cython.Py_ssize_t) -> cython.double:
    """Return the part of the way from a size to the next one, from 0 to 1."""
    one: cython.longlong = 1
    return num_bytes / (_FIRST_BYTES * (one << place)) - 1.0


def _ratio(number: cython.longlong, divisor: cython.double) -> cython.double:
    """Return a quotient: with C's division, ``/`` of two integers is an integer."""
    return number / divisor


def _depth(num_nodes: cython.longlong) -> cython.longlong:
    """Return the depth of a tree over so many nodes."""
    depth: cython.longlong = 0
    while (num_nodes - 1) >> depth > 0:
        depth += 1
    return depth


@cython.initializedcheck(False)
class CollectiveTimes:
    """NCCL's times of collectives by size, of one group of ranks whose links are set as fields.

    NCCL estimates latency and rate of every algorithm and protocol and takes the quickest
    (``src/graph/tuning.cc``; the constants with their sources are in `nccl`). Every time is without
    the start ``nccl.BASE_S``.
    """

    # Of the group
    num_ranks: cython.longlong  # at least 2
    num_nodes: cython.longlong
    within_bytes_per_s: cython.double  # rate of a ring within a node
    network_bytes_per_s: cython.double  # rate of its hops between nodes
    within: cython.longlong  # index into `_FABRICS`
    network: cython.longlong
    within_step_s: cython.double  # a step within a node, if it is stated
    network_step_s: cython.double  # a step between nodes, if it is stated
    # Seconds by which a step over the network is longer than InfiniBand's. A ring passes all its
    # messages through its slowest hop one after the other, so that every step takes it.
    slower_s: cython.double
    generation: cython.longlong  # of its boards, as `nccl.generation` returns
    # Rate of a node's links through a switch that adds up what boards send; 0 if it cannot
    switch_bytes_per_s: cython.double
    has_ll: cython.bint  # whether the network keeps the order of bytes that LL and LL128 need
    has_ll128: cython.bint
    # Of all groups
    latency_scale: cython.double  # all latencies of NCCL against those stated in `nccl`
    rate_scale: cython.double  # limits of LL against those stated there
    has_pat: cython.bint  # whether NCCL has the algorithm PAT (2.23)

    def __init__(self, constants: Constants, *, has_pat: bool) -> None:
        self.latency_scale = constants.latency_scale
        self.rate_scale = constants.intra_efficiency
        self.has_pat = has_pat
        self.seconds = np.zeros(nccl.NUM_SIZES + 1)
        self.sizes = nccl.SIZES.copy()
        self.hop_s = np.array([nccl.HOPS[fabric] for fabric in _FABRICS if fabric])
        self.start_s = nccl.START_S.copy()
        self.share = np.array([nccl.RING_SHARE, nccl.TREE_SHARE])
        correction = np.ones((4, nccl.NUM_SIZES))
        correction[:3, : nccl.NUM_SIZES - 1] = nccl.TREE_CORRECTION
        self.correction = correction
        self.overhead_s = nccl.NETWORK_OVERHEAD_S.copy()
        self.most_ll = np.array(nccl.MOST_LL_GBYTE_PER_S)
        self.plateau = np.array(nccl.PLATEAU)
        self.switch_share = np.array(nccl.NVLS_SHARE)

    def write_reduce(self) -> cython.void:
        """Write the curve of an all-reduce."""
        self._begin()
        self._try_ring(2)
        if self.num_nodes > 1:
            self._try_tree()
        if self.num_ranks > 2 * self.num_nodes:
            self._try_switch()
        self._end()

    def write_gather(self) -> cython.void:
        """Write the curve of an all-gather; a reduce-scatter takes as long."""
        self._begin()
        self._try_ring(1)
        if self.has_pat and self.num_nodes == self.num_ranks:
            self._try_pat()
        self._end()

    def _begin(self) -> cython.void:
        index: cython.Py_ssize_t
        for index in range(_NUM_SIZES):
            self.seconds[index] = _INF

    def _end(self) -> cython.void:
        """Make the curve rise, and continue it with the slope of its end."""
        index: cython.Py_ssize_t
        most: cython.double = 0.0
        for index in range(_NUM_SIZES):
            most = max(most, self.seconds[index])
            self.seconds[index] = most
        rise: cython.double = most - self.seconds[_NUM_SIZES - 2]
        self.seconds[_NUM_SIZES] = rise / (_LAST_BYTES / 2)

    def _try_ring(self, trips: cython.longlong) -> cython.void:
        """Try rings, which pass the bytes around once or twice, by every protocol."""
        protocol: cython.Py_ssize_t
        latency: cython.double
        rate: cython.double = min(self.within_bytes_per_s, self.network_bytes_per_s)
        sent: cython.double = _ratio(trips * (self.num_ranks - 1), self.num_ranks)
        for protocol in range(_NUM_PROTOCOLS):
            if self._has(protocol):
                latency = self._ring_s(protocol) * trips
                if trips > 1 and self.num_nodes > 1 and self.network != _STATED:
                    latency *= self._plateau(protocol)
                latency += self.start_s[_RING, protocol] * self.latency_scale
                self._try(latency, sent, rate * self.share[_RING, protocol], protocol, _EVEN)

    def _plateau(self, protocol: cython.Py_ssize_t) -> cython.double:
        """Return the factor of the latency of an all-reduce by rings over nodes."""
        if protocol != _SIMPLE:
            return 1.0
        return self.plateau[1 if self.generation > 0 else 0]

    def _try_tree(self) -> cython.void:
        """Try an all-reduce over two trees of nodes, by every protocol.

        NCCL's channels have the network's rate within nodes, too, so that two nodes, which need to
        send only half as much, gain nothing from it.
        """
        protocol: cython.Py_ssize_t
        chain: cython.double
        latency: cython.double
        hop: cython.double
        depth: cython.longlong = _depth(self.num_nodes)
        most: cython.longlong = _most_in_a_node(self.num_ranks, self.num_nodes)
        rate: cython.double = min(self.within_bytes_per_s, self.network_bytes_per_s)
        for protocol in range(_NUM_PROTOCOLS):
            if self._has(protocol):
                chain = (most - 1) * self._within_s(_TREE, protocol)
                hop = self._network_s(_TREE, protocol) + self.slower_s
                latency = self.start_s[_TREE, protocol] * self.latency_scale
                latency += 2 * (chain + depth * hop)
                self._try(latency, 2.0, rate * self.share[_TREE, protocol], protocol, protocol)

    def _try_switch(self) -> cython.void:
        """Try an all-reduce whose sums the switches of nodes make (NVLS)."""
        rate: cython.double = self.switch_bytes_per_s * self.switch_share[self.generation]
        latency: cython.double = (_NVLS_LATENCY_S - _BASE_S) * self.latency_scale
        if rate == 0.0:
            return
        if self.num_nodes > 1:
            halves: cython.double = 1.0 if self.num_nodes == 2 else 2.0  # noqa: PLR2004
            rate = min(rate, self.network_bytes_per_s / halves)
            hop: cython.double = self._network_s(_TREE, _SIMPLE) + self.slower_s
            latency += 2 * _depth(self.num_nodes) * hop
        self._try_line(latency, _NVLS_SENT / rate)

    def _try_pat(self) -> cython.void:
        """Try a gather by the algorithm PAT."""
        hop: cython.double = self._network_s(_TREE, _SIMPLE) + self.slower_s
        latency: cython.double = (_PAT_START_US + _PAT_RANK_US * self.num_ranks) * _MICRO - _BASE_S
        latency *= self.latency_scale
        latency += _depth(self.num_ranks) * hop / _PAT_HOP_DIVISOR
        rate: cython.double = _PAT_SHARE * min(self.within_bytes_per_s, self.network_bytes_per_s)
        sent: cython.double = _ratio(self.num_ranks - 1, self.num_ranks)
        self._try_line(latency, sent / rate)

    def _try(
        self,
        latency: cython.double,
        sent: cython.double,
        rate: cython.double,
        protocol: cython.Py_ssize_t,
        correction: cython.Py_ssize_t,
    ) -> cython.void:
        """Lower the times to those of a protocol, with LL's own limit of its rate."""
        index: cython.Py_ssize_t
        reached: cython.double
        most: cython.double = _INF
        if protocol == _LL:
            most = self.most_ll[min(self.num_nodes, 3) - 1, self.generation] * _GIGA
            most *= self.rate_scale
        for index in range(_NUM_SIZES):
            reached = min(rate * self.correction[correction, index], most)
            self._lower(index, latency + sent * self.sizes[index] / reached)

    def _try_line(self, latency: cython.double, s_per_byte: cython.double) -> cython.void:
        index: cython.Py_ssize_t
        for index in range(_NUM_SIZES):
            self._lower(index, self.sizes[index] * s_per_byte + latency)

    def _lower(self, index: cython.Py_ssize_t, seconds: cython.double) -> cython.void:
        self.seconds[index] = min(self.seconds[index], seconds)

    def _has(self, protocol: cython.Py_ssize_t) -> cython.bint:
        if protocol == _SIMPLE:
            return True
        return self.has_ll and (protocol == _LL or self.has_ll128)

    def _ring_s(self, protocol: cython.Py_ssize_t) -> cython.double:
        """Return the latency of one trip around the ring."""
        within: cython.double = self._within_s(_RING, protocol)
        if self.num_nodes == 1:
            return (self.num_ranks - 1) * within
        way: cython.Py_ssize_t = _TREE if self.num_ranks == self.num_nodes else _RING
        between: cython.double = self._network_s(way, protocol)
        within = max(within, self.overhead_s[protocol] * self.latency_scale)
        if self.network == _STATED:
            within = max(within, between)
        chain: cython.double = (self.num_ranks - self.num_nodes) * within
        chain += (self.num_nodes - 1) * between
        return chain + (self.num_ranks - 1) * self.slower_s

    def _within_s(self, way: cython.Py_ssize_t, protocol: cython.Py_ssize_t) -> cython.double:
        """Return the latency of a hop within a node."""
        if self.within == _STATED:
            return self.within_step_s
        return self.hop_s[self.within, way, protocol] * self.latency_scale

    def _network_s(self, way: cython.Py_ssize_t, protocol: cython.Py_ssize_t) -> cython.double:
        """Return the latency of a hop between nodes."""
        if self.network == _STATED:
            return self.network_step_s
        return self.hop_s[self.network, way, protocol] * self.latency_scale


def _most_in_a_node(num_ranks: cython.longlong, num_nodes: cython.longlong) -> cython.longlong:
    """Return the ranks of the fullest node, if they are spread evenly."""
    return (num_ranks + num_nodes - 1) // num_nodes


# ------------------------------------------------------------------------------------ tables


def _links_word(node: Node) -> int:
    """Return the bits of a node's links, of its boards and of its network."""
    protocol = node.inter.protocol
    word = _height_bits(node.intra.fabric) | _height_bits(node.inter.fabric) << _NETWORK_SHIFT
    age = _NEWEST - nccl.generation(node.device.link_bytes_per_s)
    word |= ((1 << age) - 1) << _AGE_SHIFT
    word |= _EFA if protocol == "efa" else 0
    word |= 0 if protocol in {"efa", "rdma"} else _OTHER_PROTOCOL
    word |= 0 if node.intra.board and node.device.has_switch else _SWITCHLESS
    return int(word)


def _height_bits(fabric: Fabric | None) -> int:
    """Return as many bits as `_height` counts: ``|`` of them is the last of several fabrics."""
    return (1 << (_FABRICS.index(fabric) + 1)) - 1


def _height(word: cython.longlong, shift: cython.longlong) -> cython.longlong:
    """Return the number of bits of a field of a word."""
    field: cython.longlong = (word >> shift) & _FIELD
    height: cython.longlong = 0
    while field > 0:
        height += 1
        field >>= 1
    return height


def _kinds_of_nodes(topology: Topology) -> tuple[IntArray, list[int]]:
    """Return the kind of every node, and a node of each: their paths differ in nothing.

    The boards of nodes with equal links may still be of other generations.
    """
    first: dict[tuple[int, int], int] = {}
    keys = [
        (int(kind), _links_word(node))
        for kind, node in zip(topology.kind_of_node, topology.cluster.nodes, strict=True)
    ]
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    number = {key: kind for kind, key in enumerate(first)}
    return np.array([number[key] for key in keys], np.int64), list(first.values())


def _link_figures(link: Link, constants: Constants) -> tuple[float, float]:
    """Return the rate and the step of a ring over a link within a node."""
    rate = link.bandwidth_bytes_per_s * constants.intra_efficiency
    return rate, link.step_s * constants.latency_scale


def _joined_links(cluster: Cluster, kinds: IntArray) -> IntArray:
    """Return the bits of the fabric between two nodes of one host, by their kinds."""
    size = int(kinds.max()) + 1
    words = np.zeros((size, size), np.int64)
    for (low, high), link in cluster.pair_links.items():
        if cluster.host_of_node[low] == cluster.host_of_node[high]:
            bits = _height_bits(link.fabric) << _NETWORK_SHIFT
            words[kinds[low], kinds[high]] = words[kinds[high], kinds[low]] = bits
    return words


def _measured_curves(nodes: list[Node], constants: Constants) -> tuple[list[str], FloatArray]:
    """Return boards, and their measured curves of all-reduces and gathers by number of ranks.

    Shape ``(num_boards, max_ranks + 1, 2, num_sizes + 1)``; -1 where nothing was measured.
    """
    boards = sorted({node.intra.board for node in nodes} - {""})
    most = max(node.num_slots for node in nodes)
    curves = np.full((len(boards) or 1, most + 1, 2, nccl.NUM_SIZES + 1), -1.0)
    scales = {"latency": constants.latency_scale, "rate": constants.intra_efficiency}
    collectives = (("all_reduce",), ("all_gather", "reduce_scatter"))
    for board, ranks, kind in np.ndindex(len(boards), most + 1, 2):
        curve = nccl.measured_curve(boards[board], collectives[kind], ranks, **scales)
        if curve is not None:
            curves[board, ranks, kind] = (*curve.seconds, curve.s_per_byte)
    return boards, curves


@cython.initializedcheck(False)
class RingTable:
    """Paths of rings by number, made when first met; number 0 is `NO_RING`.

    Paths are told apart by what their times depend on, so that rings over other nodes may share
    one. They are numbered in the order in which they are met.

    Arrays by number have room for more paths than there are, and are replaced when they grow:
    ``bytes_per_s``, ``step_s``, ``tree_s`` and ``num_nodes`` are fields of `Path`; where
    ``has_curves`` is 1, ``reduce_s`` and ``gather_s`` are the curves of its collectives, shape
    ``(num_paths, num_sizes + 1)``: seconds by size, then seconds per byte beyond.
    """

    def __init__(self, topology: Topology) -> None:
        kinds, first = _kinds_of_nodes(topology)
        self._prepare_devices(topology.cluster, kinds)
        self._prepare_kinds(topology, first)
        self._prepare_boards(topology, first)
        self.times = CollectiveTimes(topology.constants, has_pat=topology.has_pat)
        self.joined_links = _joined_links(topology.cluster, kinds)
        self._prepare_paths()

    def _prepare_paths(self) -> None:
        """Make the arrays by number, with `NO_RING`."""
        self.bytes_per_s, self.step_s, self.tree_s = np.zeros((3, 1))
        self.num_nodes, self.has_curves = np.ones((2, 1), np.int64)
        self.reduce_s, self.gather_s = np.zeros((2, 1, nccl.NUM_SIZES + 1))
        self.figures = np.zeros((1, _NUM_FIGURES))
        self.traits = np.zeros((1, _NUM_TRAITS), np.int64)
        self.bytes_per_s[0] = NO_RING.bytes_per_s
        self.has_curves[0] = 0
        self.num_paths = 1
        self.objects = {0: NO_RING}
        self._make_room(_FEWEST_PATHS)

    def _prepare_devices(self, cluster: Cluster, kinds: IntArray) -> None:
        self.has_host_links = cluster.has_host_links
        self.node_of_device = np.array(cluster.node_of_device, np.int64)
        self.host_of_device = np.array(cluster.host_of_device, np.int64)
        self.host_of_node = np.array(cluster.host_of_node, np.int64)
        self.kind_of_node = kinds
        self.sharers = np.zeros(2 * len(kinds))
        self.stamps = np.zeros(len(kinds), np.int64)
        self.stamp = 0
        self.visited = np.zeros(0, np.int64)
        self.begins = np.zeros(0, np.int64)
        self.in_host = np.zeros(0, np.int64)

    def _prepare_kinds(self, topology: Topology, first: list[int]) -> None:
        nodes = [topology.cluster.nodes[node] for node in first]
        whole = [_link_figures(node.intra, topology.constants) for node in nodes]
        host = [_link_figures(node.host_link or node.intra, topology.constants) for node in nodes]
        inside = np.array([whole, host]).transpose(2, 0, 1)
        self.num_kinds = len(nodes)
        self.inside_bytes_per_s, self.inside_step_s = inside[0].copy(), inside[1].copy()
        self.num_hosts = np.array([node.num_hosts for node in nodes], np.float64)
        self.links = np.array([_links_word(node) for node in nodes], np.int64)
        pairs = np.ix_(topology.kind_of_node[first], topology.kind_of_node[first])
        self.between_bytes_per_s = topology.links.inter_bytes_per_s[pairs]
        self.between_step_s = topology.ring_step_s[pairs]

    def _prepare_boards(self, topology: Topology, first: list[int]) -> None:
        nodes = [topology.cluster.nodes[node] for node in first]
        boards, self.measured_s = _measured_curves(nodes, topology.constants)
        number = {board: index for index, board in enumerate(boards)}
        self.board = np.array([number.get(node.intra.board, -1) for node in nodes], np.int64)
        most = max(node.num_slots for node in topology.cluster.nodes)
        self.inside_path = np.full((len(nodes), 2, most + 1), -1, np.int64)

    def path(self, number: int) -> Path:
        """Return the path of a number."""
        path = self.objects.get(number)
        if path is None:
            path = self.objects[number] = self._made(number)
        return path

    def _made(self, of_number: int) -> Path:
        number: cython.Py_ssize_t = of_number
        has_curves = bool(self.has_curves[number])
        return Path(
            bytes_per_s=float(self.bytes_per_s[number]),
            step_s=float(self.step_s[number]),
            num_nodes=int(self.num_nodes[number]),
            tree_s=float(self.tree_s[number]),
            all_reduce=_curve(np.asarray(self.reduce_s)[number]) if has_curves else None,
            gather=_curve(np.asarray(self.gather_s)[number]) if has_curves else None,
        )

    def at_once(
        self,
        members: cython.longlong[::1],
        first: cython.longlong[::1],
        num_rings: cython.Py_ssize_t,
        paths: cython.longlong[::1],
    ) -> cython.void:
        """Write the number of the path of each ring if all run at once.

        Rings that leave a node share its network interfaces; within a node a ring runs at the
        node's own rate. A ring visits each node once, in the nodes' order.

        Args:
            members: Devices, ring after ring.
            first: Shape ``(num_rings + 1,)``. Where each ring begins.
            num_rings: Number of rings.
            paths: Shape ``(num_rings,)`` or longer. Written.
        """
        ring: cython.Py_ssize_t
        size: cython.longlong
        last_size: cython.longlong = 0
        self._make_space(num_rings, first[num_rings] - first[0])
        for ring in range(num_rings):
            self._visit(members, first[ring], first[ring + 1], ring)
            self._add_sharers(ring, 1.0)
        for ring in range(num_rings):
            size = first[ring + 1] - first[ring]
            if size == last_size and self._is_like_last(ring):
                paths[ring] = paths[ring - 1]
            else:
                paths[ring] = self._path_of(ring, size)
            last_size = size
        for ring in range(num_rings):
            self._add_sharers(ring, -1.0)

    # -------------------------------------------------------------------------------- visits

    def _make_space(
        self, num_rings: cython.Py_ssize_t, num_members: cython.longlong
    ) -> cython.void:
        """Make the arrays of rings large enough."""
        if self.begins.shape[0] <= num_rings:
            self.begins = np.zeros(2 * num_rings + 1, np.int64)
            self.in_host = np.zeros(2 * num_rings + 1, np.int64)
        if self.visited.shape[0] < num_members:
            self.visited = np.zeros(2 * num_members, np.int64)

    def _visit(
        self,
        members: cython.longlong[::1],
        first: cython.longlong,
        end: cython.longlong,
        ring: cython.Py_ssize_t,
    ) -> cython.void:
        """Write the nodes of a ring after those of the last one."""
        index: cython.Py_ssize_t
        node: cython.longlong
        last: cython.longlong = -1
        at: cython.longlong = self.begins[ring]
        self.stamp += 1
        for index in range(first, end):
            node = self.node_of_device[members[index]]
            if node != last and self.stamps[node] != self.stamp:
                self.stamps[node] = self.stamp
                self._insert(node, self.begins[ring], at)
                at += 1
            last = node
        self.begins[ring + 1] = at
        if self.has_host_links and end - first > 1:
            self.in_host[ring] = self._are_in_one_host(members, first, end)

    def _insert(
        self, node: cython.longlong, begin: cython.longlong, end: cython.longlong
    ) -> cython.void:
        """Insert a node into those of a ring, which ascend; mostly it is the last one."""
        while end > begin and self.visited[end - 1] > node:
            self.visited[end] = self.visited[end - 1]
            end -= 1
        self.visited[end] = node

    def _are_in_one_host(
        self, members: cython.longlong[::1], first: cython.longlong, end: cython.longlong
    ) -> cython.longlong:
        """Return 1 if all devices of a ring are in one host, otherwise 0."""
        index: cython.Py_ssize_t
        host: cython.longlong = self.host_of_device[members[first]]
        for index in range(first + 1, end):
            if self.host_of_device[members[index]] != host:
                return 0
        return 1

    def _leaves_host(self, ring: cython.Py_ssize_t) -> cython.bint:
        """Return whether a ring over several nodes is in several hosts; a host's nodes follow."""
        first: cython.longlong = self.visited[self.begins[ring]]
        last: cython.longlong = self.visited[self.begins[ring + 1] - 1]
        return self.host_of_node[first] != self.host_of_node[last]

    def _shared(self, node: cython.longlong, leaves_host: cython.bint) -> cython.longlong:
        """Return the index into `sharers` of what hops from a node share with other rings.

        It is its host's network interface, or its own PCIe.
        """
        if leaves_host:
            return self.host_of_node[node]
        return self.host_of_node.shape[0] + node

    def _add_sharers(self, ring: cython.Py_ssize_t, number: cython.double) -> cython.void:
        """Count a ring over several nodes with what it shares: once for each host."""
        index: cython.Py_ssize_t
        shared: cython.longlong
        last: cython.longlong = -1
        begin: cython.longlong = self.begins[ring]
        end: cython.longlong = self.begins[ring + 1]
        if end - begin <= 1:
            return
        leaves_host: cython.bint = self._leaves_host(ring)
        for index in range(begin, end):
            shared = self._shared(self.visited[index], leaves_host)
            if shared != last:
                self.sharers[shared] += number
            last = shared

    def _is_like_last(self, ring: cython.Py_ssize_t) -> cython.bint:
        """Return whether a ring over several nodes visits those of the ring before it."""
        index: cython.Py_ssize_t
        begin: cython.longlong = self.begins[ring]
        size: cython.longlong = self.begins[ring + 1] - begin
        if size <= 1 or begin - self.begins[ring - 1] != size:
            return False
        for index in range(begin, begin + size):
            if self.visited[index] != self.visited[index - size]:
                return False
        return True

    # -------------------------------------------------------------------------------- figures

    def _path_of(self, ring: cython.Py_ssize_t, num_ranks: cython.longlong) -> cython.Py_ssize_t:
        """Return the number of the path of a ring."""
        if num_ranks <= 1:
            return 0
        if self.begins[ring + 1] - self.begins[ring] > 1:
            self._write_between(ring, num_ranks)
            return self._number()
        in_host: cython.longlong = self.in_host[ring]
        kind: cython.longlong = self.kind_of_node[self.visited[self.begins[ring]]]
        number: cython.longlong = self.inside_path[kind, in_host, num_ranks]
        if number < 0:
            self._write_inside(kind, in_host, num_ranks)
            number = self._number()
            self.inside_path[kind, in_host, num_ranks] = number
        return number

    def _write_inside(
        self, kind: cython.longlong, in_host: cython.longlong, num_ranks: cython.longlong
    ) -> cython.void:
        """Write what tells a ring within a node apart into the row after the last path."""
        row: cython.longlong = self.num_paths
        self.traits[row, _NUM_RANKS] = num_ranks
        self.traits[row, _NUM_NODES] = 1
        self.traits[row, _LINKS] = self.links[kind]
        self.traits[row, _BOARD] = self.board[kind]
        self.figures[row, _INSIDE_BYTES_PER_S] = self.inside_bytes_per_s[in_host, kind]
        self.figures[row, _INSIDE_STEP_S] = self.inside_step_s[in_host, kind]
        self.figures[row, _BETWEEN_BYTES_PER_S] = _INF
        self.figures[row, _BETWEEN_STEP_S] = 0.0
        self.figures[row, _SWITCH_BYTES_PER_S] = self.inside_bytes_per_s[0, kind]

    def _write_between(self, ring: cython.Py_ssize_t, num_ranks: cython.longlong) -> cython.void:
        """Write what tells a ring over several nodes apart into the row after the last path.

        A rank passes on the data of the previous step, so every step lasts as long as the slowest
        hop. In a rack, a ring uses the interfaces of at most as many hosts as it has ranks there.
        """
        index: cython.Py_ssize_t
        begin: cython.longlong = self.begins[ring]
        end: cython.longlong = self.begins[ring + 1]
        leaves_host: cython.bint = self._leaves_host(ring)
        spread: cython.double = _ratio(end - begin, num_ranks)
        last: cython.longlong = self.visited[end - 1]
        last_share: cython.double = self._share(last, leaves_host, spread)
        node: cython.longlong
        share: cython.double
        most: cython.double
        pair: cython.longlong
        known_pair: cython.longlong = -1
        known_most: cython.double = 0.0
        self._clear_figures(num_ranks, end - begin)
        for index in range(begin, end):
            node = self.visited[index]
            share = self._share(node, leaves_host, spread)
            most = max(share, last_share)
            pair = self.kind_of_node[last] * self.num_kinds + self.kind_of_node[node]
            if pair != known_pair or most != known_most:
                self._add_hop(self.kind_of_node[last], self.kind_of_node[node], most)
            known_pair, known_most = pair, most
            last, last_share = node, share
        if not leaves_host:
            self._join(ring)

    def _share(
        self, node: cython.longlong, leaves_host: cython.bint, spread: cython.double
    ) -> cython.double:
        """Return the divisor of the rate of a node's hops."""
        least: cython.double = self.num_hosts[self.kind_of_node[node]] * spread
        return max(self.sharers[self._shared(node, leaves_host)], least)

    def _clear_figures(self, num_ranks: cython.longlong, num_nodes: cython.longlong) -> cython.void:
        row: cython.longlong = self.num_paths
        self.traits[row, _NUM_RANKS] = num_ranks
        self.traits[row, _NUM_NODES] = num_nodes
        self.traits[row, _LINKS] = 0
        self.traits[row, _BOARD] = -1
        self.figures[row, _INSIDE_BYTES_PER_S] = _INF
        self.figures[row, _INSIDE_STEP_S] = 0.0
        self.figures[row, _BETWEEN_BYTES_PER_S] = _INF
        self.figures[row, _BETWEEN_STEP_S] = 0.0
        self.figures[row, _SWITCH_BYTES_PER_S] = _INF

    def _add_hop(
        self, one: cython.longlong, other: cython.longlong, share: cython.double
    ) -> cython.void:
        """Add a hop between nodes of two kinds, and the links within the latter."""
        row: cython.longlong = self.num_paths
        self._lower(_BETWEEN_BYTES_PER_S, self.between_bytes_per_s[one, other] / share)
        self._raise(_BETWEEN_STEP_S, self.between_step_s[one, other])
        self._lower(_INSIDE_BYTES_PER_S, self.inside_bytes_per_s[0, other])
        self._raise(_INSIDE_STEP_S, self.inside_step_s[0, other])
        self._lower(_SWITCH_BYTES_PER_S, self.inside_bytes_per_s[0, other])
        self.traits[row, _LINKS] |= self.links[other]

    def _lower(self, column: cython.Py_ssize_t, figure: cython.double) -> cython.void:
        row: cython.longlong = self.num_paths
        self.figures[row, column] = min(self.figures[row, column], figure)

    def _raise(self, column: cython.Py_ssize_t, figure: cython.double) -> cython.void:
        row: cython.longlong = self.num_paths
        self.figures[row, column] = max(self.figures[row, column], figure)

    def _join(self, ring: cython.Py_ssize_t) -> cython.void:
        """Replace the network's traits by those of the links between the nodes of a host."""
        row: cython.longlong = self.num_paths
        one: cython.Py_ssize_t
        other: cython.Py_ssize_t
        kind: cython.longlong
        links: cython.longlong = self.traits[row, _LINKS] & ~(_FIELD << _NETWORK_SHIFT | _EFA)
        for one in range(self.begins[ring], self.begins[ring + 1]):
            kind = self.kind_of_node[self.visited[one]]
            for other in range(self.begins[ring], one):
                links |= self.joined_links[kind, self.kind_of_node[self.visited[other]]]
        self.traits[row, _LINKS] = links

    # -------------------------------------------------------------------------------- numbers

    def _number(self) -> cython.Py_ssize_t:
        """Return the number of the path of the row after the last path, which may become one."""
        row: cython.longlong = self.num_paths
        slot: cython.longlong = self._first_slot(row)
        while self.slots[slot] >= 0:
            if self._are_alike(self.slots[slot], row):
                return self.slots[slot]
            slot = (slot + 1) & (self.slots.shape[0] - 1)
        self.slots[slot] = row
        self._write_path(row)
        self.num_paths += 1
        if self.num_paths == self.num_nodes.shape[0]:
            self._make_room(2 * self.num_paths)
        return row

    def _first_slot(self, row: cython.longlong) -> cython.longlong:
        """Return the slot of the hash table where the search for a row begins."""
        hashed: cython.longlong = _mixed(self.traits[row, _NUM_RANKS], self.traits[row, _NUM_NODES])
        hashed = _mixed(hashed, self.traits[row, _LINKS])
        hashed = _mixed(hashed, _whole(self.figures[row, _BETWEEN_BYTES_PER_S]))
        hashed = _mixed(hashed, _whole(self.figures[row, _INSIDE_BYTES_PER_S]))
        return hashed & (self.slots.shape[0] - 1)

    def _are_alike(self, one: cython.longlong, other: cython.longlong) -> cython.bint:
        """Return whether nothing tells the paths of two rows apart."""
        column: cython.Py_ssize_t
        for column in range(_NUM_TRAITS):
            if self.traits[one, column] != self.traits[other, column]:
                return False
        for column in range(_NUM_FIGURES):
            if self.figures[one, column] != self.figures[other, column]:
                return False
        return True

    def _make_room(self, room: cython.Py_ssize_t) -> cython.void:
        """Make room for so many paths, a power of two."""
        number: cython.Py_ssize_t
        self.bytes_per_s = _longer(self.bytes_per_s, room)
        self.step_s = _longer(self.step_s, room)
        self.tree_s = _longer(self.tree_s, room)
        self.num_nodes = _longer(self.num_nodes, room)
        self.has_curves = _longer(self.has_curves, room)
        self.reduce_s = _longer(self.reduce_s, room)
        self.gather_s = _longer(self.gather_s, room)
        self.figures = _longer(self.figures, room)
        self.traits = _longer(self.traits, room)
        self.slots = np.full(2 * room, -1, np.int64)
        for number in range(1, self.num_paths):
            self._occupy(number)

    def _occupy(self, number: cython.longlong) -> cython.void:
        """Take the first free slot for a path."""
        slot: cython.longlong = self._first_slot(number)
        while self.slots[slot] >= 0:
            slot = (slot + 1) & (self.slots.shape[0] - 1)
        self.slots[slot] = number

    # -------------------------------------------------------------------------------- paths

    def _write_path(self, row: cython.longlong) -> cython.void:
        """Write the path of a row from what tells it apart."""
        num_ranks: cython.longlong = self.traits[row, _NUM_RANKS]
        num_nodes: cython.longlong = self.traits[row, _NUM_NODES]
        inside_step_s: cython.double = self.figures[row, _INSIDE_STEP_S]
        step_s: cython.double = self.figures[row, _BETWEEN_STEP_S]
        # With one rank per node no hop stays inside, but every rank still feeds its interface.
        inside: cython.double = self.figures[row, _INSIDE_BYTES_PER_S]
        if num_ranks > num_nodes:
            inside /= 1.0 + _OVERHEAD_RANKS / num_ranks
        self.bytes_per_s[row] = min(self.figures[row, _BETWEEN_BYTES_PER_S], inside)
        self.step_s[row] = max(inside_step_s, step_s)
        self.num_nodes[row] = num_nodes
        self.tree_s[row] = 0.0
        if num_nodes > 1:
            chain: cython.double = (_most_in_a_node(num_ranks, num_nodes) - 1) * inside_step_s
            self.tree_s[row] = _depth(num_nodes) * step_s + chain
        self.has_curves[row] = 1 if self._has_times(row) else 0
        if self.has_curves[row]:
            self._set_group(row, inside)
            self._write_curves(row)

    def _has_times(self, row: cython.longlong) -> cython.bint:
        """Return whether NCCL's times apply: not where latencies of all links are stated."""
        links: cython.longlong = self.traits[row, _LINKS]
        if _height(links, 0) - 1 != _STATED:
            return True
        crosses: cython.bint = self.traits[row, _NUM_NODES] > 1
        return crosses and _height(links, _NETWORK_SHIFT) - 1 != _STATED

    def _set_group(self, row: cython.longlong, within_bytes_per_s: cython.double) -> cython.void:
        """Tell NCCL's model of the ranks of a path and of their links."""
        times: CollectiveTimes = self.times
        links: cython.longlong = self.traits[row, _LINKS]
        step_s: cython.double = self.figures[row, _BETWEEN_STEP_S]
        times.num_ranks = self.traits[row, _NUM_RANKS]
        times.num_nodes = self.traits[row, _NUM_NODES]
        times.within_bytes_per_s = within_bytes_per_s
        times.network_bytes_per_s = self.figures[row, _BETWEEN_BYTES_PER_S]
        times.within = _height(links, 0) - 1
        times.network = _height(links, _NETWORK_SHIFT) - 1
        times.within_step_s = self.figures[row, _INSIDE_STEP_S]
        times.network_step_s = step_s
        times.slower_s = 0.0
        if times.network != _STATED and times.num_nodes > 1:
            times.slower_s = max(0.0, step_s - times.latency_scale * _RDMA_STEP_S)
        times.generation = _NEWEST - _height(links, _AGE_SHIFT)
        times.switch_bytes_per_s = self.figures[row, _SWITCH_BYTES_PER_S]
        if links & _SWITCHLESS:
            times.switch_bytes_per_s = 0.0
        self._set_protocols(links)

    def _set_protocols(self, links: cython.longlong) -> cython.void:
        """Set the protocols that the network can carry."""
        times: CollectiveTimes = self.times
        is_fit: cython.bint = times.num_nodes == 1 or not links & _OTHER_PROTOCOL
        times.has_ll = times.num_nodes == 1 or not links & _EFA
        times.has_ll128 = times.within == _NVLINK and is_fit

    def _write_curves(self, row: cython.longlong) -> cython.void:
        """Write the curves of a path, and the latency per step of its gather."""
        if not self._take_measured(row, 0, self.reduce_s):
            self.times.write_reduce()
            self._keep(row, self.reduce_s)
        if not self._take_measured(row, 1, self.gather_s):
            self.times.write_gather()
            self._keep(row, self.gather_s)
        self.step_s[row] = max(0.0, self.gather_s[row, 0]) / (self.traits[row, _NUM_RANKS] - 1)

    def _keep(self, row: cython.longlong, curves: cython.double[:, ::1]) -> cython.void:
        """Copy the curve that NCCL's model wrote."""
        index: cython.Py_ssize_t
        for index in range(_NUM_SIZES + 1):
            curves[row, index] = self.times.seconds[index]

    def _take_measured(
        self,
        row: cython.longlong,
        collective: cython.Py_ssize_t,
        curves: cython.double[:, ::1],
    ) -> cython.bint:
        """Copy the measured curve of a collective; return whether there is one."""
        index: cython.Py_ssize_t
        board: cython.longlong = self.traits[row, _BOARD]
        num_ranks: cython.longlong = self.traits[row, _NUM_RANKS]
        if board < 0 or self.measured_s[board, num_ranks, collective, 0] < 0.0:
            return False
        for index in range(_NUM_SIZES + 1):
            curves[row, index] = self.measured_s[board, num_ranks, collective, index]
        return True


def _mixed(hashed: cython.longlong, word: cython.longlong) -> cython.longlong:
    """Mix a number up to 2**62 into a hash; products stay below 2**62, compiled or not."""
    low: cython.longlong = (hashed ^ word ^ (word >> 31)) & 0x7FFFFFFF
    low *= 0x5BD1E995
    return low ^ (low >> 29)


def _whole(bytes_per_s: cython.double) -> cython.longlong:
    """Return a rate as a whole number, to hash it."""
    return int(min(bytes_per_s, 4e18))


def _longer(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return a copy of an array with more rows, of zeros."""
    more = np.zeros((length, *np.shape(array)[1:]), np.asarray(array).dtype)
    more[: len(array)] = array
    return more


def _curve(row: FloatArray) -> nccl.Curve:
    """Return a curve from its row."""
    return nccl.Curve(tuple(row[: nccl.NUM_SIZES].tolist()), float(row[nccl.NUM_SIZES]))
