"""How the samples of a micro-batch are shared out among the ranks of a stage."""

from collections.abc import Iterator, Sequence
from math import comb
from typing import Final

MOST_SPLITS: Final = 16
"""Splits between pieces up to which all of them are offered in a small cluster."""

Shares = tuple[int, ...]


def all_shares(num_samples: int, ranks: Sequence[int]) -> list[Shares]:
    """Return every way to split samples between pieces of equal ranks; within a piece evenly.

    Args:
        num_samples: To share out; at least one per rank.
        ranks: Data-parallel ranks of each piece.

    Returns:
        Samples of every rank, piece after piece; empty where there are too many ways.

    Example:
        >>> all_shares(5, [2])
        [(3, 2)]
        >>> all_shares(5, [1, 2])
        [(1, 2, 2), (2, 2, 1), (3, 1, 1)]
    """
    if comb(num_samples - sum(ranks) + len(ranks) - 1, len(ranks) - 1) > MOST_SPLITS:
        return []
    return [within_pieces(split, ranks) for split in _all_splits(num_samples, ranks)]


def split_by_speed(num_samples: int, ranks: Sequence[int], speeds: Sequence[float]) -> Shares:
    """Give sample after sample to the piece whose fullest rank would then be done first.

    Args:
        num_samples: To share out; at least one per rank.
        ranks: Data-parallel ranks of each piece.
        speeds: Samples per second of a rank of each piece.

    Returns:
        Samples of each piece.

    Example:
        >>> split_by_speed(10, [2, 1], [2.0, 1.0])
        (8, 2)
    """
    total = sum(count * speed for count, speed in zip(ranks, speeds, strict=True))
    held = [
        count * max(1, int(num_samples * speed / total))
        for count, speed in zip(ranks, speeds, strict=True)
    ]
    while sum(held) > num_samples:  # where slow ranks had to get one sample
        worst = max(
            (piece for piece, count in enumerate(ranks) if held[piece] > count),
            key=lambda piece: (_full(held[piece], ranks[piece]) / speeds[piece], -piece),
        )
        held[worst] -= 1
    for _ in range(num_samples - sum(held)):
        first = min(
            range(len(ranks)),
            key=lambda piece: (_full(held[piece] + 1, ranks[piece]) / speeds[piece], piece),
        )
        held[first] += 1
    return tuple(held)


def within_pieces(split: Shares, ranks: Sequence[int]) -> Shares:
    """Share each piece's samples out evenly.

    Returns:
        Samples of every rank, piece after piece; the first ranks of a piece may have one more.
    """
    shares: list[int] = []
    for samples, count in zip(split, ranks, strict=True):
        each, more = divmod(samples, count)
        shares += [each + 1] * more + [each] * (count - more)
    return tuple(shares)


def _full(samples: int, ranks: int) -> int:
    """Return the samples of a piece's fullest rank."""
    return -(-samples // ranks)


def _all_splits(num_samples: int, ranks: Sequence[int]) -> Iterator[Shares]:
    """Give every split with at least one sample per rank."""
    if len(ranks) == 1:
        yield (num_samples,)
        return
    for own in range(ranks[0], num_samples - sum(ranks[1:]) + 1):
        for others in _all_splits(num_samples - own, ranks[1:]):
            yield (own, *others)
