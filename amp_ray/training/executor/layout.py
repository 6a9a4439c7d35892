"""Messages between stages that differ in tp and dp: which ranks exchange which data; no torch."""

from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

from amp_ray.training.grid import Coordinates, Grid, Passage, shard_range


class Piece(NamedTuple):
    """The part of an activation or a gradient in one message."""

    process: int  # process at the other end of the message
    first: int  # first sample, as an index into this rank's samples of the passage
    end: int  # index after the last sample
    feature_part: int  # index of the part of the features
    num_feature_parts: int  # number of parts of the features

    @property
    def is_whole_width(self) -> bool:
        """Whether the message contains all features of its samples."""
        return self.num_feature_parts == 1


class RowRange(NamedTuple):
    """Rows of a sharded table held by both this rank and a process of another stage."""

    process: int
    first: int  # first row, as an index into this rank's shard
    end: int


def incoming(grid: Grid, place: Coordinates, source: int, passage: Passage) -> tuple[Piece, ...]:
    """Return the pieces that a rank receives from a stage for one passage.

    Every rank of a stage holds all features of its samples. If the sender's tp is larger, each
    sender sends a part of the features; if the receiver's is larger, a rank sends to several.
    """
    return tuple(
        Piece(grid.process(source, dp, tp, place.cp), *span, part, num_parts)
        for dp, span in _shared(grid, place, source, passage)
        for tp, part, num_parts in _feature_senders(
            grid.stages[source].tp, grid.stages[place.pp].tp, place.tp
        )
    )


def outgoing(grid: Grid, place: Coordinates, target: int, passage: Passage) -> tuple[Piece, ...]:
    """Return the pieces that a rank sends to a stage for one passage; see `incoming`."""
    own_tp, tp = grid.stages[place.pp].tp, grid.stages[target].tp
    return tuple(
        Piece(grid.process(target, dp, receiver, place.cp), *span, part, num_parts)
        for dp, span in _shared(grid, place, target, passage)
        for receiver in range(tp)
        for sender, part, num_parts in _feature_senders(own_tp, tp, receiver)
        if sender == place.tp
    )


def shared_rows(grid: Grid, place: Coordinates, other: int, num_rows: int) -> tuple[RowRange, ...]:
    """Return the rows of a table, sharded over tp, that a rank shares with ranks of a stage.

    Both ends hold the table; each rank exchanges rows with one replica of the other stage.

    Returns:
        Ranges to receive, which cover the rows of this rank's shard once.
    """
    dp = place.dp % grid.stages[other].dp
    return tuple(_rows(grid, place, (other, dp), num_rows))


def rows_for_others(
    grid: Grid, place: Coordinates, other: int, num_rows: int
) -> tuple[RowRange, ...]:
    """Return the rows that a rank must send so that the other stage gets its `shared_rows`."""
    replicas = range(place.dp, grid.stages[other].dp, grid.stages[place.pp].dp)
    return tuple(rows for dp in replicas for rows in _rows(grid, place, (other, dp), num_rows))


def _rows(
    grid: Grid, place: Coordinates, replica: tuple[int, int], num_rows: int
) -> Iterator[RowRange]:
    """Yield the rows that a rank shares with each rank of ``replica`` (stage, dp index)."""
    own_first, own_end = shard_range(num_rows, place.tp, grid.stages[place.pp].tp)
    num_shards = grid.stages[replica[0]].tp
    for tp in range(num_shards):
        span = shard_range(num_rows, tp, num_shards)
        first, end = max(span[0], own_first), min(span[1], own_end)
        if first < end:
            process = grid.process(*replica, tp, place.cp)
            yield RowRange(process, first - own_first, end - own_first)


def _shared(
    grid: Grid, place: Coordinates, other: int, passage: Passage
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the dp indices of a stage that share samples with this rank, with those samples."""
    own_first, own_end = grid.samples(place.pp, passage)[place.dp]
    for dp, span in enumerate(grid.samples(other, passage)):
        first, end = max(span[0], own_first), min(span[1], own_end)
        if first < end:
            yield dp, (first - own_first, end - own_first)


def _feature_senders(tp: int, receiving_tp: int, receiver: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tp indices that send to a receiver, each with its part of the features."""
    lanes = lcm(tp, receiving_tp)
    num_parts = lanes // receiving_tp
    for part in range(num_parts):
        yield (receiver * num_parts + part) * tp // lanes, part, num_parts
