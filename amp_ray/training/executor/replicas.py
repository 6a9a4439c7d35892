"""The ranks that hold the same layers, and the groups in which they share them out."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ranks that hold the same layers of a stage, from one of them."""

    # Processes of every shard group, which holds a whole; one each where nobody shares
    rows: tuple[tuple[int, ...], ...]
    group: Any  # of all these ranks; None if there is one
    shards: Any  # of those that this rank shares with; None if it shares with nobody
    copies: Any  # of those in other shard groups that hold what this rank holds; None likewise
    is_first_copy: bool  # whether this rank's shard group is the first

    @property
    def num_shards(self) -> int:
        """Ranks that hold a whole between them."""
        return len(self.rows[0])

    @property
    def shard(self) -> int:
        """Index of this rank's part."""
        return 0 if self.shards is None else int(torch.distributed.get_rank(self.shards))


def replicas_of(processes: Sequence[int], num_shards: int, limit: dt.timedelta) -> Replicas:
    """Make the groups of this process; all of ``processes`` do so at the same time.

    Args:
        processes: That hold the same layers, by their index.
        num_shards: Neighbours among them that share.
        limit: Of every collective.
    """
    rows = tuple(
        tuple(sorted(processes[first : first + num_shards]))
        for first in range(0, len(processes), num_shards)
    )
    own = torch.distributed.get_rank()
    row = next(row for row in rows if own in row)
    group = make_group(processes, limit)
    if num_shards in {1, len(processes)}:
        shards, copies = (None, group) if num_shards == 1 else (group, None)
    else:
        shards = make_group(row, limit)
        copies = make_group([other[row.index(own)] for other in rows], limit)
    return Replicas(
        rows=rows, group=group, shards=shards, copies=copies, is_first_copy=row == rows[0]
    )


def make_group(processes: Sequence[int], limit: dt.timedelta) -> Any:  # noqa: ANN401 - torch's
    """Make a group of this process and others; None for a process alone."""
    if len(processes) == 1:
        return None
    return torch.distributed.new_group(
        sorted(processes), timeout=limit, use_local_synchronization=True
    )
