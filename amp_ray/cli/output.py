"""Standard output and error of a command, and what happens where they cannot be written."""

import io
import os
import sys
from typing import Final

from rich.console import Console

from amp_ray.errors import AmpRayError
from amp_ray.report.console import console

_PIPE_WIDTH: Final = 180
"""Columns of a table that goes into a pipe or file, unless COLUMNS says otherwise."""


class OutputError(AmpRayError):
    """Standard output cannot be written: a full disk, a closed descriptor."""


class ReaderGoneError(OutputError):
    """Whoever read standard output has ended, as ``head`` does after its last line."""


class _Output(io.FileIO):
    """A descriptor whose failure is told once, and to nobody if it is that of standard error.

    click and rich treat any BrokenPipeError as theirs and end the process; an error of our own
    reaches `amp_ray.cli.exits` instead.
    """

    def __init__(self, descriptor: int, *, is_log: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_log = is_log
        self._failed = False

    def write(self, data: object, /) -> int:
        """Write; after a failure nothing more is tried."""
        size = len(memoryview(data))  # type: ignore[arg-type]
        if self._failed:
            return size
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self._failed = True
            if self._is_log:
                return size
            kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputError
            raise kind(f"output cannot be written: {error.strerror}") from error


def guard_output() -> None:
    """Make failures of standard output an `OutputError`, and ignore those of standard error.

    Streams that something else has put in place, as tests do, stay as they are.
    """
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, is_log=False)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, is_log=True)


def _guarded(stream: io.TextIOWrapper | None, *, is_log: bool) -> io.TextIOWrapper:
    """Return a stream to the same descriptor; where that was closed, every write fails."""
    if stream is None:
        # Opened for reading, so that a write fails as it does on a closed descriptor. It also keeps
        # files that are opened later from becoming standard output.
        descriptor, encoding = os.open(os.devnull, os.O_RDONLY), "utf-8"
    else:
        descriptor, encoding = stream.fileno(), stream.encoding
    raw = io.BufferedWriter(_Output(descriptor, is_log=is_log))
    lines = is_log or raw.isatty()
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=lines)


def table_console(*, wide: bool = False) -> Console:
    """Return a console for tables; with ``wide``, or in a pipe or file, lines may be long."""
    narrow = not wide and (sys.stdout.isatty() or bool(os.environ.get("COLUMNS")))
    return console(width=None if narrow else _PIPE_WIDTH)
