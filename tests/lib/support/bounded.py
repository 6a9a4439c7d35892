"""Bounds on the time and memory that a hostile input may take."""

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Final

LONGEST_S: Final = 60.0
"""A longer time means a hang, even on a slow machine."""

MOST_BYTES: Final = 500 * 2**20


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Check that the block takes neither long nor much memory."""
    before_bytes, started_s = _peak_bytes(), time.monotonic()
    yield
    assert time.monotonic() - started_s < LONGEST_S
    assert _peak_bytes() - before_bytes < MOST_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
