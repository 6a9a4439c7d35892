"""Number the distinct rows of integer columns, and find the first place of each."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from amp_ray.arrays import IntArray

MOST_CODES: Final = 2**62
"""Limit on the codes of rows: one row becomes one 64-bit integer."""

TABLE_SIZE: Final = 2**17
"""Number of codes up to which a table is used: it is faster than sorting."""


def radix(sizes: Sequence[int]) -> IntArray:
    """Return place values of a mixed-radix number whose digits have these sizes."""
    return np.array([math.prod(sizes[:digit]) for digit in range(len(sizes))], dtype=np.int64)


def repeated(count: IntArray) -> tuple[IntArray, IntArray]:
    """Repeat index ``i`` ``count[i]`` times; return also the number of each repeat, from 0."""
    index = np.repeat(np.arange(len(count)), count)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)


def first_of_each(code: IntArray, num_codes: int) -> IntArray:
    """Return the first index of every code, by ascending code."""
    if num_codes > TABLE_SIZE:
        return np.unique(code, return_index=True)[1]
    first = np.full(num_codes, -1)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return first[first >= 0]


def distinct_rows(columns: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Number the distinct rows of several columns of integers, in ascending order.

    Returns:
        The first row of each number, and the number of each row.

    Example:
        >>> first, number = distinct_rows([np.array([1, 0, 1]), np.array([2, 2, 2])])
        >>> first.tolist(), number.tolist()
        ([1, 0], [1, 0, 1])
    """
    code, num_codes = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        span = high - low + 1
        if num_codes * span > MOST_CODES:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
            num_codes = int(code.max(initial=0)) + 1
        if span > 1:
            code, num_codes = code * span + (column - low), num_codes * span
    if num_codes > TABLE_SIZE:
        _, first, number = np.unique(code, return_index=True, return_inverse=True)
        return first, number.reshape(-1)
    there = np.zeros(num_codes, np.int64)
    there[code] = 1
    return first_of_each(code, num_codes), (np.cumsum(there) - 1)[code]
