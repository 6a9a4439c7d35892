"""Links between the ranks of a strategy, and the collectives that share them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import ceil, inf, log2
from typing import Self

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.clusters.cluster import RDMA_STEP_S, Cluster, Link, Node
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING, RING_OVERHEAD_RANKS, Path
from amp_ray.cost.kernels.stages import LinkTable
from amp_ray.cost.nccl import (
    Curve,
    Group,
    exchange_bytes_per_s,
    exchange_latency_s,
    generation,
    measured_curve,
)
from amp_ray.memo import memoised


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Rates and latencies of several rings."""

    paths: tuple[Path, ...]
    index: tuple[int, ...]  # length ``num_groups``. Index into ``paths`` of each ring.

    @property
    def of_groups(self) -> tuple[Path, ...]:
        """Path of every ring."""
        return tuple(self.paths[index] for index in self.index)

    def started_in(self, host_s: float) -> Self:
        """Return the rings with another host time of a collective for each rank."""
        return replace(self, paths=tuple(replace(path, host_s=host_s) for path in self.paths))

    def among(self, first: int, end: int) -> list[Path]:
        """Return the different paths of groups ``[first, end)``."""
        return [self.paths[index] for index in set(self.index[first:end])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """A cluster's links as arrays, in effective rates."""

    cluster: Cluster  # nodes and links as stated
    constants: Constants  # share of the stated rates that collectives reach
    has_pat: bool = False  # whether NCCL has the algorithm PAT

    @cached_property
    def node_of_device(self) -> IntArray:
        """Shape ``(num_devices,)``. Node of each device."""
        return np.array(self.cluster.node_of_device, dtype=np.int64)

    @cached_property
    def type_of_device(self) -> IntArray:
        """Shape ``(num_devices,)``. Index into the cluster's device types."""
        return np.array(self.cluster.type_of_device, dtype=np.int64)

    @cached_property
    def kind_of_node(self) -> IntArray:
        """Shape ``(num_nodes,)``. Kind of each node.

        Nodes of one kind have equal links; a node with a special link to another node is a kind.
        """
        return np.array(self._kinds[0], dtype=np.int64)

    @cached_property
    def _kinds(self) -> tuple[list[int], list[Node]]:
        number: dict[object, int] = {}
        kinds, first = list[int](), list[Node]()
        for node, link_key in zip(self.cluster.nodes, self.cluster.link_keys, strict=True):
            links = (node.intra, node.host_link, node.inter, node.zone)
            key = links, node.num_hosts, node.host_slots, link_key
            kinds.append(number.setdefault(key, len(number)))
            if kinds[-1] == len(first):
                first.append(node)
        return kinds, first

    @cached_property
    def has_pair(self) -> BoolArray:
        """Shape ``(num_kinds, num_kinds)``. Whether two different nodes have these kinds."""
        is_several = np.bincount(self.kind_of_node) > 1
        pairs: BoolArray = ~np.eye(len(is_several), dtype=np.bool_) | is_several
        return pairs

    @cached_property
    def links(self) -> LinkTable:
        """Rates and latencies of messages."""
        scale, nodes = self.constants.latency_scale, self._kinds[1]
        rates = self._between_kinds(np.minimum, lambda link: link.line_bytes_per_s, shared=True)
        steps = self._between_kinds(np.maximum, lambda link: link.latency_s)
        return LinkTable(
            kind_of_node=self.kind_of_node,
            host_of_node=np.array(self.cluster.host_of_node, np.int64),
            num_hosts=np.array([node.num_hosts for node in nodes], np.float64),
            intra_bytes_per_s=self.constants.intra_efficiency
            * np.array([node.intra.bandwidth_bytes_per_s for node in nodes]),
            intra_step_s=np.array([node.intra.latency_s for node in nodes]) * scale,
            inter_bytes_per_s=rates * self.constants.nic_efficiency,
            inter_step_s=steps * scale,
        )

    def _between_kinds(
        self, worse: np.ufunc, figure: Callable[[Link], float], *, shared: bool = False
    ) -> FloatArray:
        """Return a figure of the path between two nodes by kind, shape ``(num_kinds, num_kinds)``.

        It comes from the pair's link if there is one, otherwise from the worst of both interfaces
        and the link between their zones.

        Args:
            worse: Chooses between two figures.
            figure: Figure of a link.
            shared: Whether the hosts of a rack add up: each has an interface.
        """
        kinds, nodes = self._kinds
        hosts = np.array([node.num_hosts if shared else 1 for node in nodes])
        of_node = np.array([figure(node.inter) for node in nodes]) * hosts
        zones = np.array([node.zone for node in nodes])
        figures: FloatArray = worse.outer(of_node, of_node)
        for names, joined in self.cluster.zone_links.items():
            one, other = (np.flatnonzero(zones == name) for name in names)
            for block in (np.ix_(one, other), np.ix_(other, one)):
                paths = np.minimum.outer(hosts, hosts)[block]
                figures[block] = worse(figures[block], figure(joined.link) * paths)
        for (low, high), link in self.cluster.pair_links.items():
            pair = kinds[low], kinds[high]
            figures[pair] = figures[pair[::-1]] = figure(link)
        return figures

    def rings(self, groups: IntArray | Sequence[Sequence[int]]) -> Rings:
        """Return rates and latencies of several rings that run at once.

        Rings that leave a node share its network interfaces; within a node a ring runs at the
        node's own rate. A ring visits each node once, in the nodes' order.
        """
        if isinstance(groups, np.ndarray):
            if groups.shape[1] == 1:
                return Rings(paths=(NO_RING,), index=(0,) * len(groups))
            even = self.cluster.is_even and not self.cluster.has_host_links
            of_array = self._even_rings if even else self._uneven_rings
            return of_array(groups.shape, groups.tobytes())
        return self._rings(groups)

    @memoised
    def _uneven_rings(self, shape: tuple[int, ...], content: bytes) -> Rings:
        """Return `rings` for the devices of an array: candidates with the same degrees share it."""
        return self._rings(np.frombuffer(content, np.int64).reshape(shape).tolist())

    def _rings(self, groups: Sequence[Sequence[int]]) -> Rings:
        if max(map(len, groups), default=1) == 1:
            return Rings(paths=(NO_RING,), index=(0,) * len(groups))
        node_of_device = self.cluster.node_of_device
        rows = [
            (
                tuple(sorted({node_of_device[device] for device in group})),
                len(group),
                self.in_one_host(group),
            )
            for group in groups
        ]
        sharers: Counter[int] = Counter()
        for (nodes, _, _), count in Counter(rows).items():
            if len(nodes) > 1:
                sharers.update(dict.fromkeys(self._shared(nodes), count))
        paths: dict[Path, int] = {}
        index_of_row = {}
        for row in dict.fromkeys(rows):
            nodes, size, in_host = row
            shared = tuple([sharers[key] for key in self._shared(nodes)])
            path = self._ring(nodes, size, shared, in_host=in_host)
            index_of_row[row] = paths.setdefault(path, len(paths))
        return Rings(paths=tuple(paths), index=tuple(index_of_row[row] for row in rows))

    def _shared(self, nodes: Sequence[int]) -> list[int]:
        """Return by node a key of what its hops share: its host's interface, or its own PCIe."""
        hosts = [self.cluster.host_of_node[node] for node in nodes]
        return hosts if len({*hosts}) > 1 else [-1 - node for node in nodes]

    @memoised
    def _even_rings(self, shape: tuple[int, ...], content: bytes) -> Rings:
        """Return `rings` if a ring's path depends only on the number of its nodes."""
        groups = np.frombuffer(content, np.int64).reshape(shape)
        nodes = np.sort(self.node_of_device[groups], axis=1)
        is_first = np.diff(nodes, axis=1, prepend=-1) > 0
        visited = is_first.sum(axis=1)
        leaves = is_first & (visited > 1)[:, None]
        sharers = np.bincount(nodes[leaves], minlength=len(self.cluster.nodes))
        most = np.where(visited > 1, sharers[nodes].max(axis=1), 0)
        kinds, first, kind = np.unique(
            visited * len(self.node_of_device) + most, return_index=True, return_inverse=True
        )
        paths: dict[Path, int] = {}
        number = np.zeros(len(kinds), dtype=np.int64)
        for kind_index in np.argsort(first).tolist():
            ring = first[kind_index]
            count, shared = int(visited[ring]), int(most[ring])
            path = self._ring(tuple(range(count)), shape[1], (shared,) * count, in_host=False)
            number[kind_index] = paths.setdefault(path, len(paths))
        return Rings(paths=tuple(paths), index=tuple(number[kind].tolist()))

    def in_one_host(self, group: Sequence[int]) -> bool:
        """Return whether devices are in one host of a rack with links of its own."""
        hosts = self.cluster.host_of_device
        return self.cluster.has_host_links and len({hosts[device] for device in group}) == 1

    @memoised
    def _ring(
        self, nodes: tuple[int, ...], num_ranks: int, sharers: tuple[int, ...], *, in_host: bool
    ) -> Path:
        shared = dict(zip(nodes, sharers, strict=True))
        return self.ring(nodes, num_ranks, shared, in_host=in_host)

    def ring(
        self,
        nodes: tuple[int, ...],
        num_ranks: int,
        sharers: Mapping[int, int],
        *,
        in_host: bool | None = None,
    ) -> Path:
        """Return the slowest rate and the longest step of one ring.

        A rank passes on the data of the previous step, so every step lasts as long as the slowest
        hop. In a rack, a ring uses the interfaces of at most as many hosts as it has ranks there.
        ``nodes`` ascend; ``sharers`` has per node the number of rings that leave it, or its host,
        unused for a ring within a node. ``in_host``: all ranks are in one host of a rack, by
        default if they fit into one.
        """
        if num_ranks == 1:
            return NO_RING
        kinds, first = self._kinds
        overhead = 1.0 + RING_OVERHEAD_RANKS / num_ranks
        within_rate, within_step = self._within
        in_node_rate = min(within_rate[kinds[node]] for node in nodes)
        in_node_step = max(within_step[kinds[node]] for node in nodes)
        if len(nodes) == 1:
            node = first[kinds[nodes[0]]]
            fits = num_ranks <= node.host_slots if in_host is None else in_host
            if node.host_link is not None and fits:
                in_node_rate = (
                    node.host_link.bandwidth_bytes_per_s * self.constants.intra_efficiency
                )
                in_node_step = node.host_link.step_s * self.constants.latency_scale
            path = Path(bytes_per_s=in_node_rate / overhead, step_s=in_node_step)
            return self._timed(path, nodes, num_ranks, (in_node_rate / overhead, in_node_step))
        rates, steps = self._between
        spread = len(nodes) / num_ranks
        shares = [max(sharers[node], first[kinds[node]].num_hosts * spread) for node in nodes]
        places = [(kinds[node], share) for node, share in zip(nodes, shares, strict=True)]
        hops = list(zip(places, (*places[1:], places[0]), strict=True))
        rate = min(rates[a][b] / max(one, other) for (a, one), (b, other) in hops)
        step = max(steps[a][b] for (a, _), (b, _) in hops)
        # With one rank per node no hop stays inside, but every rank still feeds its interface.
        in_node_rate /= 1.0 if len(nodes) == num_ranks else overhead
        path = Path(
            bytes_per_s=min(rate, in_node_rate),
            step_s=max(in_node_step, step),
            num_nodes=len(nodes),
            tree_s=ceil(log2(len(nodes))) * step
            + (ceil(num_ranks / len(nodes)) - 1) * in_node_step,
        )
        return self._timed(path, nodes, num_ranks, (in_node_rate, in_node_step), (rate, step))

    def _timed(
        self,
        path: Path,
        nodes: tuple[int, ...],
        num_ranks: int,
        inside: tuple[float, float],
        network: tuple[float, float] = (inf, 0.0),
    ) -> Path:
        """Return the path with NCCL's times, unless the latencies of all its links are stated.

        ``inside`` is the rate and the step of the slowest hop within a node, ``network`` that
        between nodes.
        """
        of_ring = [self.cluster.nodes[node] for node in nodes]
        scale = self.constants.latency_scale
        fabrics = {node.intra.fabric for node in of_ring}
        within = inside[1] if None in fabrics else max(filter(None, fabrics))
        crosses, protocols = len(nodes) > 1, {node.inter.protocol for node in of_ring}
        between = {node.inter.fabric for node in of_ring}
        apart = sorted({*nodes})  # one node, twice, stands for two of its kind
        if len(apart) > 1 and len({self.cluster.host_of_node[node] for node in nodes}) == 1:
            between = {self.cluster.pair_links[pair].fabric for pair in combinations(apart, 2)}
            protocols.discard("efa")
        is_default = crosses and all(between)
        if not is_default and not isinstance(within, str):
            return path
        devices = [node.device for node in of_ring]
        boards = frozenset(node.intra.board for node in of_ring)
        is_plain = all(boards) and all(device.has_switch for device in devices)
        switch = min(self._within[0][self._kinds[0][node]] for node in nodes) if is_plain else 0.0
        group = Group(
            num_ranks=num_ranks,
            num_nodes=len(nodes),
            within_bytes_per_s=inside[0],
            network_bytes_per_s=network[0],
            within=within,
            network=str(max(filter(None, between))) if is_default else network[1],
            slower_s=max(0.0, network[1] - scale * RDMA_STEP_S) if is_default else 0.0,
            latency_scale=scale,
            rate_scale=self.constants.intra_efficiency,
            generation=min(generation(device.link_bytes_per_s) for device in devices),
            switch_bytes_per_s=switch,
            has_ll="efa" not in protocols or not crosses,
            has_ll128=within == "nvlink" and (protocols <= {"rdma", "efa"} or not crosses),
            has_pat=self.has_pat,
        )
        reduce, gather, step_s = self._curves(group, "" if crosses else max(boards))
        return replace(path, all_reduce=reduce, gather=gather, step_s=step_s)

    @memoised
    def _curves(self, group: Group, board: str) -> tuple[Curve, Curve, float]:
        """Return the curves of an all-reduce and of a gather, and the latter's latency per step."""
        size = group.num_ranks
        reduce = self._measured(board, ("all_reduce",), size) or group.all_reduce()
        gather = self._measured(board, ("all_gather", "reduce_scatter"), size) or group.gather()
        return reduce, gather, max(0.0, gather.seconds[0]) / (group.num_ranks - 1)

    def exchange(self, groups: IntArray | Sequence[Sequence[int]], copies: int = 1) -> Path:
        """Return rate and latencies of the slowest of several all-to-alls that run at once.

        A rank sends an equal part of its bytes to every rank of its group, itself included. Bytes
        for its own node use the node's links, at the rate that all-to-alls of the board reach. At
        the same time, bytes for other nodes use the network interfaces, which are shared by all
        ranks of the node that send to other nodes; a rank has at most the interface of its host. Of
        several copies for one node, only one crosses the network; it is sent on over the node's
        links, once to each rank that gets some of them. ``copies`` of a token go to random ranks,
        of which a node and a rank get one.

        Returns:
            The rate for all bytes of a rank, including those that it keeps.

        References:
            DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 3.2.2, on copies made in nodes.
        """
        nodes = self.node_of_device[np.asarray(groups)]
        if nodes.shape[1] == 1:
            return NO_RING
        if self.cluster.is_even:
            nodes -= nodes.min()  # only their differences matter
        return self._exchange(nodes.shape, nodes.tobytes(), copies)

    @memoised
    def _exchange(self, shape: tuple[int, ...], content: bytes, copies: int) -> Path:
        groups = np.frombuffer(content, np.int64).reshape(shape)
        size, counts = shape[1], [Counter(group.tolist()) for group in groups]
        sharers: Counter[int] = Counter()
        for count in counts:
            if len(count) > 1:
                for key, here in zip(self._shared([*count]), count.values(), strict=True):
                    sharers[key] += here
        rates, steps = self._between
        (kinds, first), (within_rate, within_step) = self._kinds, self._within
        slowest, step_s = 0.0, 0.0
        for nodes in {tuple(sorted(count.items())) for count in counts}:
            keys = self._shared([node for node, _ in nodes])
            for (node, here), key in zip(nodes, keys, strict=True):
                kind = kinds[node]
                peers = [(kinds[other], count) for other, count in nodes if other != node]
                share = (here if copies == 1 or not peers else size) / size
                share *= size * (1 - (1 - 1 / size) ** copies) / copies
                rate = within_rate[kind]
                if first[kind].intra.board:
                    reached = exchange_bytes_per_s(first[kind].intra.board)
                    rate = min(rate, reached * self.constants.intra_efficiency)
                inside = share * (here - 1) / here / rate
                slowest = max(slowest, inside)
                step_s = max(step_s, within_step[kind])
                if peers:
                    reached = min(rates[kind][other] for other, _ in peers)
                    sent = sum(1 - (1 - count / size) ** copies for _, count in peers) / copies
                    shared = max(sharers[key], first[kind].num_hosts)
                    slowest = max(slowest, sent * shared / reached)
                    step_s = max(step_s, *(steps[kind][other] for other, _ in peers))
        most = max(map(len, counts))
        if most > 1 and all(node.inter.fabric for node in self.cluster.nodes):
            remote = size - min(min(count.values()) for count in counts)
            scale = self.constants.latency_scale
            slower_s = step_s - scale * RDMA_STEP_S
            step_s = (scale * exchange_latency_s(remote) + max(0.0, slower_s)) / most
        path = Path(bytes_per_s=1.0 / slowest, step_s=step_s, num_nodes=most)
        boards = {self.cluster.nodes[node].intra.board for count in counts for node in count}
        if most > 1 or len(boards) > 1:
            return path
        return replace(path, exchange=self._measured(max(boards), ("all_to_all",), size))

    @memoised
    def _measured(self, board: str, collectives: tuple[str, ...], num_ranks: int) -> Curve | None:
        """Return the mean curve of collectives within a node, if they were measured."""
        return measured_curve(
            board,
            collectives,
            num_ranks,
            latency=self.constants.latency_scale,
            rate=self.constants.intra_efficiency,
        )

    @cached_property
    def ring_step_s(self) -> FloatArray:
        """Latency of one step of a collective between nodes, shape ``(num_kinds, num_kinds)``."""
        steps = self._between_kinds(np.maximum, lambda link: link.step_s)
        scaled: FloatArray = steps * self.constants.latency_scale
        return scaled

    @cached_property
    def best_inter_bytes_per_s(self) -> float:
        """Fastest rate between two nodes; 0 if there is only one."""
        return float(self.links.inter_bytes_per_s.max(where=self.has_pair, initial=0.0))

    @cached_property
    def best_intra_bytes_per_s(self) -> float:
        """Fastest rate of a rank within a node or one of its hosts."""
        links = (node.host_link or node.intra for node in self._kinds[1])
        best = max(link.bandwidth_bytes_per_s for link in links) * self.constants.intra_efficiency
        return max(best, float(self.links.intra_bytes_per_s.max()))

    @cached_property
    def least_message_step_s(self) -> float:
        """Least latency of a message, within or between nodes."""
        between = self.links.inter_step_s.min(where=self.has_pair, initial=inf)
        return float(min(between, self.links.intra_step_s.min()))

    @cached_property
    def _within(self) -> tuple[list[float], list[float]]:
        """Rate and step of a ring within nodes, by kind, as lists: rings are short, arrays slow."""
        scale = self.constants.latency_scale
        steps = [node.intra.step_s * scale for node in self._kinds[1]]
        return self.links.intra_bytes_per_s.tolist(), steps

    @cached_property
    def _between(self) -> tuple[list[list[float]], list[list[float]]]:
        """Rate and step of a ring between two nodes by kind, as lists."""
        return self.links.inter_bytes_per_s.tolist(), self.ring_step_s.tolist()
