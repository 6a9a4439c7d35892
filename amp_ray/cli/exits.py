"""The end of a command: its exit code, its error messages, and guards for its output.

This is the only place that turns errors into exit codes. A standard output that cannot be written
is an error of the command; a standard error that cannot be written is not.
"""

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from amp_ray.errors import AmpRayError, InputError, NotFeasibleError, Where, told
from amp_ray.redaction import redact
from amp_ray.report.console import console
from amp_ray.runtime.own_inputs import remembered_inputs

SUCCESS: Final = 0
BAD_INPUT: Final = 2
NOT_FEASIBLE: Final = 3
TRIALS_FAILED: Final = 4
"""Also used if hosts, a disk, a Ray cluster or standard output fail."""

INTERRUPTED: Final = 130

LONGEST_LINE: Final = 1000  # characters of the message about one mistake

READER_GONE: Final = 141
"""128 + SIGPIPE: a shell's exit code for a program that writes into a pipe without a reader."""

_PIPE_WIDTH: Final = 180
"""Columns of a table in a pipe or file, unless COLUMNS is set."""


class OutputError(AmpRayError):
    """Standard output cannot be written: a full disk, a closed descriptor."""


class ReaderGoneError(OutputError):
    """The reader of standard output has ended, as ``head`` does after its last line."""


class _Output(io.FileIO):
    """A descriptor that raises an `OutputError` once; failures of standard error are ignored.

    click and rich end the process at any BrokenPipeError, but let an error of our own type pass to
    `run_command`.
    """

    def __init__(self, descriptor: int, *, is_log: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_log = is_log
        self._failed = False

    def write(self, data: object, /) -> int:
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

    Streams that were replaced, for instance by tests, are not changed. A standard input that was
    closed is empty.
    """
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - to the process's end
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, is_log=False)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, is_log=True)


def _guarded(stream: io.TextIOWrapper | None, *, is_log: bool) -> io.TextIOWrapper:
    """Return a stream to the same descriptor; every write fails if the descriptor was closed."""
    if stream is None:
        # Opened for reading, so that writing fails as on a closed descriptor. It also prevents
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


def run_command(command: click.Command) -> None:
    """Run a command on the process's arguments and end the process with its exit code."""
    guard_output()
    _forget_no_sizes()
    try:
        code = _run(command)
        sys.stdout.flush()  # a later failure would have no exit code
    except ReaderGoneError:  # quiet, like other programs
        code = READER_GONE
    except OutputError as error:
        code = _complain(str(error), TRIALS_FAILED)
    sys.exit(code)


def _forget_no_sizes() -> None:
    """Remove sizes of a terminal that are none, such as COLUMNS=0: rich would take them."""
    for name in ("COLUMNS", "LINES"):
        if re.fullmatch(r"[1-9][0-9]{0,4}", os.environ.get(name, "1")) is None:
            del os.environ[name]


def _run(command: click.Command) -> int:
    """Run a command; turn all errors except those of output into messages and exit codes."""
    try:
        with remembered_inputs(), _permissions():
            return command.main(standalone_mode=False) or SUCCESS
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        vars(error).update(message=redact(error.message))  # click sees it as final
        error.show()
        return BAD_INPUT
    except InputError as error:
        for message in told(error.parts):
            _complain("\n".join(map(_cut, message.split("\n"))), BAD_INPUT)
        return BAD_INPUT
    except NotFeasibleError as error:
        return _complain(str(error), NOT_FEASIBLE)
    except OutputError:
        raise
    except AmpRayError as error:
        return _complain(str(error), TRIALS_FAILED)


@contextmanager
def _permissions() -> Iterator[None]:
    """Turn a path in a folder that the user may not enter into an `InputError`."""
    try:
        yield
    except PermissionError as error:
        if error.filename is None:
            raise
        reason = error.strerror or "no permission"
        raise InputError(reason, where=Where(file=str(error.filename))) from error


def _cut(line: str) -> str:
    """Cut a line with a very long quotation."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def tell(notes: Iterable[object]) -> None:
    """Write notes to standard error, each once; see also `amp_ray.inputs.not_read`."""
    for note in dict.fromkeys(map(str, notes)):
        click.echo(f"amp-ray: {redact(note)}", err=True)


def _complain(message: str, code: int) -> int:
    click.echo(f"amp-ray: {message}", err=True)
    return code
