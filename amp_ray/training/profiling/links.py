"""Time of one message or collective."""

import statistics
from typing import Any, Final

import torch
from torch import Tensor

from amp_ray.training.clock import Clock
from amp_ray.training.profiling.group import Ranks
from amp_ray.training.profiling.job import LinkPoint

TARGET_S: Final = 0.25
MIN_REPEATS: Final = 4
MAX_REPEATS: Final = 30
WARMUP_REPEATS: Final = 2
BYTES_PER_ELEMENT: Final = 4
PAIR: Final = 2
"""Ranks that exchange messages, and messages of a round trip."""


def time_link(point: LinkPoint, ranks: Ranks, clock: Clock) -> float | None:
    """Time a message, there and back between pairs of ranks, or an all-reduce within groups.

    All groups talk at the same time, as in training.

    Returns:
        Seconds of one message or all-reduce, the median over repeats and groups; None where the
        tensor does not fit into memory.
    """
    value = ranks.attempt(
        lambda: torch.zeros(point.num_bytes // BYTES_PER_ELEMENT, device=ranks.device)
    )
    if value is None:
        return None
    once_s = max(_times(point, ranks, clock, value, WARMUP_REPEATS))
    repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, TARGET_S / max(once_s, 1e-9))))
    repeats = ranks.largest(repeats)
    times = _times(point, ranks, clock, value, repeats)
    share = PAIR if point.what == "p2p" else 1
    return statistics.median(ranks.gather(statistics.median(times) / share))


def _times(
    point: LinkPoint, ranks: Ranks, clock: Clock, value: Tensor, repeats: int
) -> list[float]:
    """Return the seconds of every repeat on this rank."""
    ranks.barrier()
    marks = []
    for _ in range(repeats):
        start = clock.mark()
        if point.what == "p2p":
            _there_and_back(ranks, value)
        else:
            torch.distributed.all_reduce(value, group=ranks.group(point.num_ranks))
        marks.append((start, clock.mark()))
    ranks.wait()
    return [clock.seconds(start, end) for start, end in marks]


def _there_and_back(ranks: Ranks, value: Tensor) -> None:
    """Exchange with the neighbour, even ranks first; the last of an odd number has none."""
    even = ranks.rank % PAIR == 0
    partner = ranks.rank + 1 if even else ranks.rank - 1
    if partner == ranks.size:
        return
    send: Any = torch.distributed.send
    receive: Any = torch.distributed.recv
    for exchange in (send, receive) if even else (receive, send):
        exchange(value, partner)
