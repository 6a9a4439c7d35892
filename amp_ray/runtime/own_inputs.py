"""The files that a command reads, which it must not overwrite."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Files that a command has read, as (device, inode); None outside of commands
_INPUTS: ContextVar[set[tuple[int, int]] | None] = ContextVar("inputs", default=None)


@contextmanager
def remembered_inputs() -> Iterator[None]:
    """Remember all files that are read in the block: `files.write_output` does not write them."""
    token = _INPUTS.set(set())
    try:
        yield
    finally:
        _INPUTS.reset(token)


def remember_input(descriptor: int) -> None:
    """Remember an open file as an input of the command."""
    inputs = _INPUTS.get()
    if inputs is not None:
        status = os.fstat(descriptor)
        inputs.add((status.st_dev, status.st_ino))


def is_input(status: os.stat_result) -> bool:
    """Return whether the command has read a file."""
    return (status.st_dev, status.st_ino) in (_INPUTS.get() or ())
