"""Numbers for rows of small integers: which are the same, and where each stands first."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from amp_ray.cost.topology import IntArray

TABLE_SIZE: Final = 2**17
"""Integers below this are told apart by a table, which is faster than sorting them."""


def radix(sizes: Sequence[int]) -> IntArray:
    """Return the weights of digits with these numbers of values."""
    return np.array([math.prod(sizes[:place]) for place in range(len(sizes))], dtype=np.int64)


def repeated(count: IntArray) -> tuple[IntArray, IntArray]:
    """Return each index as often as told, and how often it came before."""
    index = np.repeat(np.arange(len(count)), count)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)


def first_of_each(code: IntArray, num_codes: int) -> IntArray:
    """Return the first index of every code, by ascending code."""
    if num_codes > TABLE_SIZE:
        return np.unique(code, return_index=True)[1]
    first = np.full(num_codes, -1)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return first[first >= 0]


def numbered(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Number the different rows of columns of small integers.

    Args:
        columns: None negative.

    Returns:
        The different rows, and the number of each row.
    """
    sizes = [int(column.max()) + 1 for column in columns]
    code = columns[0].astype(np.int64)
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        code = code * size + column
    num_codes = math.prod(sizes)
    if num_codes > TABLE_SIZE:
        _, first, number = np.unique(code, return_index=True, return_inverse=True)
        number = number.reshape(-1)
    else:
        there = np.zeros(num_codes, np.int64)
        there[code] = 1
        number = (np.cumsum(there) - 1)[code]
        first = np.empty(int(there.sum()), np.int64)
        first[number[::-1]] = np.arange(len(code))[::-1]
    rows: IntArray = np.stack([column[first] for column in columns], axis=1)
    return rows, number
