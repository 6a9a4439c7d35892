"""The contract's rank order: coordinates of a rank, shards, and the map from ranks to processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Place = tuple[str, int]
"""Host name and slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands in the grid of a strategy."""

    pp: int  # index of its stage
    dp: int  # index of its replica
    tp: int  # index among the ranks that share every layer of the stage
    cp: int = 0  # index among those that divide the sequences of a replica


def rank_map(placement: Sequence[Place], launch_order: Sequence[Place]) -> tuple[int, ...]:
    """Return for every rank of the strategy the ``RANK`` of the process at its place.

    A launcher that numbers its processes host by host cannot follow a free placement; the map makes
    up for it. ``launch_order`` has the place of every process, in the order of the launcher's
    ``RANK``; both name the same places, each once.

    Example:
        >>> rank_map([("b", 0), ("a", 0)], [("a", 0), ("b", 0)])
        (1, 0)
    """
    process_at = {place: process for process, place in enumerate(launch_order)}
    if len(process_at) != len(launch_order) or sorted(placement) != sorted(launch_order):
        raise ValueError(
            f"placement {[list(place) for place in placement]} and launch_order "
            f"{[list(place) for place in launch_order]} must name the same places, each once"
        )
    return tuple(process_at[place] for place in placement)


def read_places(value: Any, where: str, num_ranks: int) -> tuple[Place, ...]:  # noqa: ANN401 - JSON
    """Read ``[["host", slot], ...]``; raise ``ValueError`` unless there is one entry per rank."""
    message = f"{where} must be {num_ranks} pairs of host name and slot, found {value!r}"
    if not isinstance(value, list | tuple) or len(value) != num_ranks:
        raise ValueError(message)
    places = []
    for entry in value:
        match entry:
            case [str(host), int(slot)] if slot >= 0:
                places.append((host, slot))
            case _:
                raise ValueError(message)
    return tuple(places)


def shard_range(size: int, index: int, num_shards: int) -> tuple[int, int]:
    """Return the half-open range of one shard; sizes differ by one where they do not divide.

    Example:
        >>> [shard_range(10, index, 4) for index in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return index * size // num_shards, (index + 1) * size // num_shards
