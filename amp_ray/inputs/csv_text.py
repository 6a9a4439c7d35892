"""Rows and numbers of text files: hostfiles, tables, strategies."""

import csv
import math
import re
from collections.abc import Iterator
from typing import Final

from amp_ray.errors import InputError, Where, shown

_DIGITS: Final = re.compile(r"[0-9]{1,9}")
"""Below 10**9: more devices, layers or samples than that are a slip."""

_MOST_LINES: Final = 100_000

MOST_SECONDS: Final = 1e6  # of one iteration or one layer: eleven days


def read_rows(text: str, file: str) -> Iterator[tuple[Where, list[str]]]:
    """Yield the rows of a CSV text with their places, blank ones left out, cells stripped."""
    reader = csv.reader(text.splitlines(), skipinitialspace=True, strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield Where(file=file, line=reader.line_num), cells
    except csv.Error as error:
        message = f"not valid CSV: {error}"
        raise InputError(message, where=Where(file=file, line=reader.line_num)) from None


def content_lines(text: str, file: str) -> Iterator[tuple[Where, str]]:
    """Yield the lines of a hostfile with their places, without comments (``#``) and blank ones.

    A file with more lines than any cluster has hosts is refused.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        where = Where(file=file, line=number)
        if number > _MOST_LINES:
            message = f"expected at most {_MOST_LINES:,} lines: is this the right file?"
            raise InputError(message, where=where)
        content = line.partition("#")[0].strip()
        if content:
            yield where, content


def is_count(cell: str, low: int = 1) -> bool:
    """Tell whether a cell holds an integer of at least ``low``, in plain digits."""
    return _DIGITS.fullmatch(cell) is not None and int(cell) >= low


def read_count(cell: str | None, where: Where, *, low: int = 1) -> int:
    """Read an integer of at least ``low``; refuse anything else."""
    word = (cell or "").strip()
    if not is_count(word, low):
        raise InputError(f"found {shown(word)}; expected an integer of at least {low}", where=where)
    return int(word)


def read_seconds(cell: str | None) -> float | None:
    """Read seconds, from 0 to `MOST_SECONDS`; None if the cell does not hold such a number."""
    word = (cell or "").strip()
    try:
        seconds = math.nan if "_" in word else float(word)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MOST_SECONDS else None
