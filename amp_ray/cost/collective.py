"""Messages and collectives over links that others share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.nccl import SIZES, Curve
from amp_ray.runtimes.traits import RuntimeTraits

RING_OVERHEAD_RANKS = 0.5
"""A ring of n ranks in a node runs at 1 / (1 + 0.5 / n) of its asymptotic rate; from NCCL
all-reduce measurements of 2-8 A100 and V100 (arXiv:2312.12391)."""


COLLECTIVE_CHANNELS: Final = 24
"""Multiprocessors used by an NCCL ring in a node of eight A100: one per channel, with two channels
on each of twelve NVLinks."""

BUFFER_CHANNELS: Final = 9
"""The same where gathers and scatters of sequence parallelism overlap with products through user
buffers: the mean of the bulk transfers in Megatron-Bridge 0.3.1 (`training/comm_overlap.py`)."""

MOST_TAKEN: Final = 0.5
"""Maximum share on a device with few multiprocessors, or on a CPU core, which also copies."""


def taken_share(device: Device, channels: int = COLLECTIVE_CHANNELS) -> float:
    """Return the fraction of a device's compute rate that a running collective uses."""
    return min(channels / device.num_multiprocessors, MOST_TAKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Slowest rate and latencies along a ring, when all rings share the links."""

    bytes_per_s: float  # rate that one ring gets of the shared link
    step_s: float  # latency of one step
    num_nodes: int = 1  # nodes that the ring visits
    host_s: float = 0.0  # host seconds that each of its ranks adds to starting a collective
    # Latency from the leaves of a tree over its nodes to the root; 0 if there is no tree
    tree_s: float = 0.0
    # Times of its collectives by size; None for a plain ring whose every step takes ``step_s``
    all_reduce: Curve | None = None
    gather: Curve | None = None
    exchange: Curve | None = None  # all-to-all, if it was measured

    def __hash__(self) -> int:
        """Hash the plain figures: the curves follow from them, and have many values."""
        return hash((self.bytes_per_s, self.step_s, self.num_nodes, self.tree_s))


NO_RING = Path(bytes_per_s=float("inf"), step_s=0.0)
"""Path of a group of one rank, which sends nothing."""


_MOST_CURVED = float(SIZES[-1])


def fastest_path(bytes_per_s: float) -> Path:
    """Return a path over nodes that no ring, tree or switch undercuts at this rate.

    Every node sends at least what it holds once in an all-reduce, since there are two or more.
    """
    line = Curve(seconds=tuple((SIZES / bytes_per_s).tolist()), s_per_byte=1.0 / bytes_per_s)
    return Path(bytes_per_s=bytes_per_s, step_s=0.0, num_nodes=2, all_reduce=line)


def start_s(constants: Constants, traits: RuntimeTraits) -> float:
    """Return the start time of one message or collective: its call, and the runtime's waiting."""
    return constants.message_scale * (constants.collective_start_s + traits.synchronisation_s)


def all_reduce_s(num_bytes: float, num_ranks: int, path: Path, start: float) -> float:
    """Time an all-reduce by its path's curve, or else by a plain ring.

    A ring makes ``2 (n - 1)`` steps of ``1 / n`` of the bytes. Between nodes the latency is that of
    a ring or of a tree (once up and once down), whichever is shorter. NCCL uses two trees since
    2.4, which together send as many bytes as a ring. ``num_bytes`` is the size of the tensor on
    every rank; ``start`` are the seconds before the first step.

    Returns:
        Seconds; 0 for a single rank.

    References:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.

    Example:
        >>> path = Path(bytes_per_s=1e9, step_s=1e-3)
        >>> round(all_reduce_s(1e9, 2, path, start=0.5), 6)  # 0.5 + 2 x 0.001 + 1
        1.502
    """
    if num_ranks == 1:
        return 0.0
    if path.all_reduce is not None:
        return start + path.all_reduce.at(num_bytes)
    latency_s = 2 * (num_ranks - 1) * path.step_s
    if path.tree_s:
        latency_s = min(latency_s, 2 * path.tree_s)
    return start + latency_s + 2 * _carried_s(num_bytes, num_ranks, path)


def all_gather_s(num_bytes: float, num_ranks: int, path: Path, start: float) -> float:
    """Time an all-gather of ``num_bytes`` in total: a ring has half the steps of an all-reduce."""
    if num_ranks == 1:
        return 0.0
    if path.gather is not None:
        return start + path.gather.at(num_bytes)
    latency_s = (num_ranks - 1) * path.step_s
    return start + latency_s + _carried_s(num_bytes, num_ranks, path)


Collective = Callable[[float, int, Path, float], float]
"""`all_reduce_s` or `all_gather_s`."""


def in_buckets_s(
    collective: Collective,
    num_bytes: float,
    num_ranks: int,
    path: Path,
    start: float,
    bucket_bytes: float = inf,
) -> float:
    """Time a collective that is cut into buckets, one after the other: linear in the bytes.

    Full buckets take the time of their size, the last one at least that of an empty one. A single
    message goes at the rate of the largest ones.
    """
    empty_s, full_s = (collective(size, num_ranks, path, start) for size in (0.0, _MOST_CURVED))
    if bucket_bytes < _MOST_CURVED:
        bucket_s = collective(bucket_bytes, num_ranks, path, start)
        return empty_s + num_bytes / bucket_bytes * bucket_s
    more_s = collective(2 * _MOST_CURVED, num_ranks, path, start) - full_s
    fixed_s = max(empty_s, full_s - more_s) + (num_bytes / bucket_bytes) * empty_s
    return fixed_s + num_bytes / _MOST_CURVED * more_s


def exchange_s(num_bytes: float, path: Path, start: float) -> float:
    """Time an all-to-all in which a rank sends ``num_bytes`` in total; see `Topology.exchange`."""
    if path.exchange is not None:
        return start + path.exchange.at(num_bytes)
    return start + path.step_s * path.num_nodes + num_bytes / path.bytes_per_s


def _carried_s(num_bytes: float, num_ranks: int, path: Path) -> float:
    """Time one trip of the bytes around a ring, ``1 / num_ranks`` of them in each step."""
    return (num_ranks - 1) * (num_bytes / num_ranks / path.bytes_per_s)
