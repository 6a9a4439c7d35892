"""Messages and collectives over links that others share."""

from dataclasses import dataclass

from amp_ray.clusters.constants import Constants
from amp_ray.runtimes.traits import RuntimeTraits

RING_OVERHEAD_RANKS = 0.5
"""A ring of n ranks in a node runs at 1 / (1 + 0.5 / n) of its asymptotic rate; from NCCL
all-reduce measurements of 2-8 A100 and V100 (arXiv:2312.12391)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Slowest rate and latencies along a ring, when all rings share the links."""

    bytes_per_s: float  # rate that one ring gets of the shared link
    step_s: float  # latency of one step
    num_nodes: int = 1  # nodes that the ring visits
    host_s: float = 0.0  # host seconds that each of its ranks adds to starting a collective
    # Latency from the leaves of a tree over its nodes to the root; 0 if there is no tree
    tree_s: float = 0.0


NO_RING = Path(bytes_per_s=float("inf"), step_s=0.0)
"""Path of a group of one rank, which sends nothing."""


def start_s(constants: Constants, traits: RuntimeTraits) -> float:
    """Return the start time of one message or collective: its call, and the runtime's waiting."""
    return constants.message_scale * (constants.collective_start_s + traits.synchronisation_s)


def all_reduce_s(
    num_bytes: float, num_ranks: int, path: Path, start: float, num_messages: float = 1.0
) -> float:
    """Time an all-reduce by the rate of a ring: ``2 (n - 1)`` steps of ``1 / n`` of the bytes.

    Between nodes the latency is that of a ring or of a tree (once up and once down), whichever is
    shorter. NCCL uses two trees since 2.4, which together send as many bytes as a ring.

    Args:
        num_bytes: Size of the tensor on every rank.
        num_ranks: ``n``.
        path: Slowest rate and latencies of the ring.
        start: Seconds before the first step.
        num_messages: Parts that are sent one after the other, each with start and latency.

    Returns:
        Seconds; 0 for a single rank.

    References:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.

    Example:
        >>> path = Path(bytes_per_s=1e9, step_s=1e-3)
        >>> round(all_reduce_s(1e9, 2, path, start=0.5), 6)  # 0.5 + 2 x 0.001 + 1
        1.502
    """
    latency_s = 2 * (num_ranks - 1) * path.step_s
    if path.tree_s:
        latency_s = min(latency_s, 2 * path.tree_s)
    return _sent_s(num_ranks, start + latency_s, num_messages) + 2 * _carried_s(
        num_bytes, num_ranks, path
    )


def all_gather_s(
    num_bytes: float, num_ranks: int, path: Path, start: float, num_messages: float = 1.0
) -> float:
    """Time a ring all-gather of ``num_bytes`` in total: it has half the steps of an all-reduce."""
    latency_s = (num_ranks - 1) * path.step_s
    return _sent_s(num_ranks, start + latency_s, num_messages) + _carried_s(
        num_bytes, num_ranks, path
    )


def exchange_s(num_bytes: float, path: Path, start: float) -> float:
    """Time an all-to-all in which a rank sends ``num_bytes`` in total; see `Topology.exchange`."""
    return start + path.step_s * path.num_nodes + num_bytes / path.bytes_per_s


def _sent_s(num_ranks: int, message_s: float, num_messages: float) -> float:
    """Time the latency of all messages; 0 for a single rank."""
    return num_messages * message_s if num_ranks > 1 else 0.0


def _carried_s(num_bytes: float, num_ranks: int, path: Path) -> float:
    """Time one trip of the bytes around a ring, ``1 / num_ranks`` of them in each step."""
    return (num_ranks - 1) * (num_bytes / num_ranks / path.bytes_per_s)
