"""Times of NCCL's collectives by size: measured on the board, otherwise NCCL's tuning model.

NCCL estimates latency and rate of every algorithm and protocol and takes the quickest
(``src/graph/tuning.cc`` of NCCL 2.23; its figures are read from the library as well). A collective
is a `Curve` of the least of these times.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil, inf, log2
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.units import GIGA, MICROSECONDS_PER_SECOND

_MICRO: Final = 1.0 / MICROSECONDS_PER_SECOND

FIRST_BYTES: Final = 2**9
NUM_SIZES: Final = 21
LAST_BYTES: Final = FIRST_BYTES << (NUM_SIZES - 1)
SIZES: Final = FIRST_BYTES * 2.0 ** np.arange(NUM_SIZES)
"""Sizes in bytes at which curves have points: powers of two from 512 B to 512 MiB."""

BASE_S: Final = 8.4 * _MICRO
"""Part of every collective's and message's start: ``baseLat`` of a ring with protocol Simple."""

LL, LL128, SIMPLE = range(3)
RING, TREE = range(2)

START_S: Final = np.array([[6.6, 14.0, 8.4], [6.8, 14.0, 8.4]]) * _MICRO - BASE_S
"""``baseLat`` of ring and tree by protocol (LL, LL128, Simple), beyond `BASE_S`."""

HOPS: Final[Mapping[str, FloatArray]] = {
    "nvlink": np.array([[0.6, 1.9, 3.4], [0.6, 1.25, 4.0]]) * _MICRO,
    "pcie": np.array([[1.0, 2.5, 5.7], [1.0, 1.9, 4.0]]) * _MICRO,
    "network": np.array([[2.7, 4.0, 14.0], [5.0, 8.5, 14.0]]) * _MICRO,
}
"""``hwLat``: latency of one hop of ring and tree by protocol; the network is InfiniBand."""

RING_SHARE: Final = np.array([0.5, 0.92, 1.0])
"""Share of a ring's rate by protocol: LL sends a flag with every 4 bytes, LL128 one per 120."""

TREE_SHARE: Final = 0.92 * np.array([1 / 3.8, 120 / 128, 1.0])
"""The same of a tree."""

MOST_LL_GBYTE_PER_S: Final = (
    (39.0, 87.7, 141.0, 282.0),
    (39.0, 39.0, 39.0, 39.0),
    (20.4, 20.4, 20.4, 20.4),
)
"""``llMaxBws`` in GB/s on one, two, and more nodes: by the boards' generation (Volta, Ampere,
Hopper, Blackwell, taken as twice Hopper); over nodes by the host, here Intel's."""

TREE_CORRECTION: Final = np.array(
    [
        [1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1],
        [1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, *([0.9] * 4), 1, 1],
        [*([0.9] * 4), 0.8, 0.7, 0.6, 0.6, *([0.5] * 4), 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
    ]
)
"""``treeCorrectionFactor`` by protocol from 512 B to 256 MiB; 1 beyond."""

NETWORK_OVERHEAD_S: Final = np.array([1.0, 1.0, 3.0]) * _MICRO
"""Least time of a hop within a node if the ring also crosses the network (``getNetOverhead``)."""

PLATEAU: Final = (1.9, 1.4)
"""Factor of the latency of ring all-reduces with protocol Simple over nodes: before Ampere, since
then."""

NVLS_LATENCY_S: Final = 25 * _MICRO
NVLS_SHARE: Final = (0.0, 0.0, 0.85, 0.74)
"""``nvlsEfficiency`` by generation: share of the ring's rate when the switch adds up."""

NVLS_SENT: Final = 6 / 5
"""Bytes on a rank's links per byte of an all-reduce that the switch adds up."""

PAT_SHARE: Final = 0.75
PAT_START_US: Final = 8.0
PAT_RANK_US: Final = 2.8
PAT_HOP_DIVISOR: Final = 3.5
"""PAT: share of the ring's rate; microseconds of its start and of each rank; hops overlap."""

_LINK_RATES: Final = (150.0, 300.0, 448.0, 900.0)
"""GB/s of a board's links from Volta, Ampere, Hopper and Blackwell on."""


def generation(link_bytes_per_s: float | None) -> int:
    """Return the generation of boards by the rate of their links: 0 is Volta and before."""
    rate = (link_bytes_per_s or 0.0) / GIGA
    return max(0, sum(rate >= least for least in _LINK_RATES) - 1)


def exchange_latency_s(num_remote: int) -> float:
    """Return the latency of an all-to-all with so many ranks of other nodes.

    The host posts one message after the other, and the last has one hop to go.
    """
    return float(HOPS["network"][RING, SIMPLE] + num_remote * NETWORK_OVERHEAD_S[SIMPLE])


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds of a collective by its bytes: linear between `SIZES`, monotone, never below 0."""

    seconds: tuple[float, ...]  # by size, without the start
    s_per_byte: float  # slope beyond the largest size

    @classmethod
    def of(cls, seconds: FloatArray) -> "Curve":
        """Return the curve through times by size; it goes on with the slope of its end."""
        rising = np.maximum.accumulate(np.maximum(seconds, 0.0))
        slope = float(rising[-1] - rising[-2]) / (LAST_BYTES / 2)
        return cls(tuple(rising.tolist()), slope)

    def at(self, num_bytes: float) -> float:
        """Return the seconds of one size."""
        place = int(num_bytes / FIRST_BYTES).bit_length() - 1
        if place < 0:
            return self.seconds[0]
        if place >= NUM_SIZES - 1:
            return self.seconds[-1] + (num_bytes - LAST_BYTES) * self.s_per_byte
        low, size = self.seconds[place], FIRST_BYTES << place
        return low + (self.seconds[place + 1] - low) * (num_bytes / size - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of a collective and the links between them, for NCCL's model."""

    num_ranks: int
    num_nodes: int = 1
    within_bytes_per_s: float  # rate of a ring within a node
    network_bytes_per_s: float = inf  # rate of its hops between nodes
    within: str | float  # key of `HOPS`, or the stated seconds of a step
    network: str | float = "network"
    # Seconds by which a step over the network is longer than InfiniBand's. A ring passes all its
    # messages through its slowest hop one after the other, so that every step takes it.
    slower_s: float = 0.0
    latency_scale: float = 1.0  # all latencies of NCCL against those stated here
    rate_scale: float = 1.0  # limits of LL against those stated here
    generation: int = 0  # of its boards, as `generation` returns
    # Rate of a node's links through a switch that adds up what boards send; 0 if it cannot
    switch_bytes_per_s: float = 0.0
    has_ll: bool = True  # whether the network keeps the order of bytes that LL and LL128 need
    has_ll128: bool = True
    has_pat: bool = False  # whether NCCL has the algorithm PAT (2.23)

    def hops(self, link: str | float) -> FloatArray:
        """Return the latency of a hop by algorithm and protocol, shape ``(2, 3)``."""
        if isinstance(link, str):
            return HOPS[link] * self.latency_scale
        return np.full((2, 3), link)

    @property
    def _ring_s(self) -> FloatArray:
        within = self.hops(self.within)[RING]
        if self.num_nodes == 1:
            chain: FloatArray = (self.num_ranks - 1) * within
            return chain
        alone = self.num_ranks == self.num_nodes
        between = self.hops(self.network)[TREE if alone else RING]
        inside = np.maximum(within, NETWORK_OVERHEAD_S * self.latency_scale)
        if not isinstance(self.network, str):
            inside = np.maximum(inside, between)
        crossing = self.num_nodes - 1
        chain = (self.num_ranks - self.num_nodes) * inside + crossing * between
        return chain + (self.num_ranks - 1) * self.slower_s

    @property
    def _protocols(self) -> list[int]:
        has = self.has_ll, self.has_ll and self.has_ll128, True
        return [protocol for protocol in range(3) if has[protocol]]

    def _carried_s(self, rates: FloatArray, sent: float | FloatArray) -> FloatArray:
        """Return the seconds of all sizes by protocol, with LL's own limit."""
        rates = rates.copy()
        most = MOST_LL_GBYTE_PER_S[min(self.num_nodes, 3) - 1][self.generation] * GIGA
        most *= self.rate_scale
        rates[LL] = np.minimum(rates[LL], most)
        seconds: FloatArray = sent * SIZES / rates
        return seconds

    def _ring(self, trips: int) -> FloatArray:
        """Return the least time of rings, which pass the bytes around once or twice."""
        rate = min(self.within_bytes_per_s, self.network_bytes_per_s)
        sent = trips * (self.num_ranks - 1) / self.num_ranks
        latency = self._ring_s * trips
        if trips > 1 and self.num_nodes > 1 and isinstance(self.network, str):
            latency[SIMPLE] *= PLATEAU[self.generation > 0]
        seconds = (START_S[RING] * self.latency_scale + latency)[:, None] + self._carried_s(
            rate * RING_SHARE[:, None], sent
        )
        least: FloatArray = seconds[self._protocols].min(axis=0)
        return least

    def _tree(self) -> FloatArray:
        """Return the least time of an all-reduce over two trees of nodes.

        NCCL's channels have the network's rate within nodes, too, so that two nodes, which need to
        send only half as much, gain nothing from it.
        """
        depth = ceil(log2(self.num_nodes))
        rate = min(self.within_bytes_per_s, self.network_bytes_per_s)
        within, between = self.hops(self.within)[TREE], self.hops(self.network)[TREE]
        chain = (ceil(self.num_ranks / self.num_nodes) - 1) * within
        latency = 2 * (chain + depth * (between + self.slower_s))
        correction = np.ones((3, NUM_SIZES))
        correction[:, :-1] = TREE_CORRECTION
        seconds = (START_S[TREE] * self.latency_scale + latency)[:, None] + self._carried_s(
            rate * TREE_SHARE[:, None] * correction, 2.0
        )
        least: FloatArray = seconds[self._protocols].min(axis=0)
        return least

    def _switch(self) -> FloatArray:
        """Return the time of an all-reduce whose sums the switches of nodes make (NVLS)."""
        rate = self.switch_bytes_per_s * NVLS_SHARE[self.generation]
        latency = (NVLS_LATENCY_S - BASE_S) * self.latency_scale
        if self.num_nodes > 1:
            halves = 1 if self.num_nodes == 2 else 2  # noqa: PLR2004
            rate = min(rate, self.network_bytes_per_s / halves)
            hop = float(self.hops(self.network)[TREE, SIMPLE]) + self.slower_s
            latency += 2 * ceil(log2(self.num_nodes)) * hop
        seconds: FloatArray = SIZES * (NVLS_SENT / rate) + np.full(NUM_SIZES, latency)
        return seconds

    def all_reduce(self) -> Curve:
        """Return the curve of an all-reduce."""
        times = [self._ring(trips=2)]
        if self.num_nodes > 1:
            times.append(self._tree())
        local = self.num_ranks / self.num_nodes
        if self.switch_bytes_per_s * NVLS_SHARE[self.generation] and local > 2:  # noqa: PLR2004
            times.append(self._switch())
        return Curve.of(np.min(times, axis=0))

    def gather(self) -> Curve:
        """Return the curve of an all-gather; a reduce-scatter takes as long."""
        times = [self._ring(trips=1)]
        if self.has_pat and self.num_nodes == self.num_ranks:
            hop = float(self.hops(self.network)[TREE, SIMPLE]) + self.slower_s
            latency = (PAT_START_US + PAT_RANK_US * self.num_ranks) * _MICRO - BASE_S
            latency *= self.latency_scale
            latency += ceil(log2(self.num_ranks)) * hop / PAT_HOP_DIVISOR
            rate = PAT_SHARE * min(self.within_bytes_per_s, self.network_bytes_per_s)
            sent = (self.num_ranks - 1) / self.num_ranks
            times.append(SIZES * (sent / rate) + np.full(NUM_SIZES, latency))
        return Curve.of(np.min(times, axis=0))


_SAME_LINKS: Final = {"A100-40": "A100-80"}
"""Boards whose links are those of a measured one."""


@cache
def _measured() -> Mapping[tuple[str, str], dict[int, FloatArray]]:
    """Return the shipped times in seconds by board and collective, then by number of ranks."""
    text = resources.files("amp_ray").joinpath("data/collectives.csv").read_text("utf-8")
    table: dict[tuple[str, str], dict[int, FloatArray]] = {}
    for row in csv.reader(text.splitlines()[1:]):
        board, collective, ranks, *cells = row
        seconds = np.array(cells, dtype=np.float64) * _MICRO
        table.setdefault((board, collective), {})[int(ranks)] = seconds
    return table


def measured_s(board: str, collective: str, num_ranks: int) -> FloatArray | None:
    """Return measured seconds by size of a collective within a node of these boards.

    Between two measured numbers of ranks they are linear in it; None outside.
    """
    by_ranks = _measured().get((_SAME_LINKS.get(board, board), collective), {})
    if not by_ranks or not min(by_ranks) <= num_ranks <= max(by_ranks):
        return None
    low = max(ranks for ranks in by_ranks if ranks <= num_ranks)
    high = min(ranks for ranks in by_ranks if ranks >= num_ranks)
    if low == high:
        return by_ranks[low]
    share = (num_ranks - low) / (high - low)
    between: FloatArray = (1 - share) * by_ranks[low] + share * by_ranks[high]
    return between


_EXCHANGES_LIKE: Final = {"H200": "H100", "GH200": "H100", "GB200": "B200", "GB300": "B300"}
"""Boards whose long all-to-alls over eight are taken for those of another one. H200 reaches 311
GB/s, H100 315. GB200 and GB300 were measured with four boards, which reach as much as four of B200
and B300 (488 and 512 against 488 and 502)."""

_EXCHANGING: Final = 8


def exchange_bytes_per_s(board: str) -> float:
    """Return the rate of a rank's bytes to others in an all-to-all of 512 MiB over eight boards.

    In whole GB/s; infinite if it was not measured.
    """
    seconds = measured_s(_EXCHANGES_LIKE.get(board, board), "all_to_all", _EXCHANGING)
    if seconds is None:
        return inf
    sent = (_EXCHANGING - 1) / _EXCHANGING * LAST_BYTES
    return GIGA * round(sent / float(seconds[-1]) / GIGA)


def measured_curve(
    board: str, collectives: tuple[str, ...], num_ranks: int, *, latency: float, rate: float
) -> Curve | None:
    """Return the mean curve of measured collectives; None if one was not measured.

    ``latency`` is a factor of the time of the smallest size; ``rate`` is one of the rate, which is
    what remains of the other times. All ranks are in one node.
    """
    times = [measured_s(board, name, num_ranks) for name in collectives]
    if any(seconds is None for seconds in times):
        return None
    seconds = np.mean([part for part in times if part is not None], axis=0)
    first = seconds[0]
    return Curve.of((first - BASE_S) * latency + (seconds - first) / rate)
