"""Which unit of a stage sends to which unit of the next one.

The order of a stage's data-parallel replicas is free, so the units of two neighbouring stages may
be matched in any way. Messages within a node are fast, and those that cross share the interfaces.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final

ALL_MATCHINGS_UNITS: Final = 4
"""Stages of so many units are matched in every way (at most 24); larger ones keep all they can
within nodes, which is best unless single pairs of nodes have links of their own."""

MATCHINGS_OF_MANY: Final = 8
"""Ways to match what is left between nodes, for larger stages."""

Matching = tuple[tuple[int, int, int], ...]
"""Units that node ``i`` of the one stage sends to node ``j`` of the next: ``(i, j, number)``."""


@lru_cache(maxsize=4096)
def matchings(pairs: tuple[tuple[int, int], ...]) -> tuple[Matching, ...]:
    """Give ways to match the units of two stages.

    Args:
        pairs: Per node, its units in the one stage and in the next; both add up to the same.

    Returns:
        Matchings, first one that keeps all it can within nodes.

    Example:
        >>> matchings(((2, 1), (0, 1)))
        (((0, 0, 1), (0, 1, 1)),)
    """
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if sum(left) <= ALL_MATCHINGS_UNITS:
        return tuple(tuple(sorted(found)) for found in _tables(left, right))
    inside = [min(pair) for pair in pairs]
    kept = [(node, node, units) for node, units in enumerate(inside) if units]
    over = [units - same for units, same in zip(left, inside, strict=True)]
    lack = [units - same for units, same in zip(right, inside, strict=True)]
    between = islice(_tables(over, lack), MATCHINGS_OF_MANY)
    return tuple(tuple(sorted((*kept, *found))) for found in between)


def _tables(left: Sequence[int], right: Sequence[int]) -> Iterator[Matching]:
    """Give every table of numbers with these sums of rows and columns, diagonals first."""
    row = next((node for node, units in enumerate(left) if units), None)
    if row is None:
        yield ()
        return
    below = [0 if node == row else units for node, units in enumerate(left)]
    for shares in _shares(left[row], right, prefer=row):
        still = [units - share for units, share in zip(right, shares, strict=True)]
        own = tuple((row, node, share) for node, share in enumerate(shares) if share)
        for others in _tables(below, still):
            yield (*own, *others)


def _shares(units: int, room: Sequence[int], *, prefer: int) -> Iterator[tuple[int, ...]]:
    """Give every way to spread units over nodes with room, most on the preferred node first."""
    order = sorted(range(len(room)), key=lambda node: (node != prefer, node))

    def spread(left: int, nodes: Sequence[int]) -> Iterator[dict[int, int]]:
        if not nodes:
            if not left:
                yield {}
            return
        for share in range(min(left, room[nodes[0]]), -1, -1):
            for others in spread(left - share, nodes[1:]):
                yield {nodes[0]: share, **others}

    for found in spread(units, order):
        yield tuple(found[node] for node in range(len(room)))
