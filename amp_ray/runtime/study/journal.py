"""The journal of a study: what happened, one record after the other, safe against any crash.

The body of a record is an event of the driver: ``{"event": "study" | "started" | "ended" |
"interrupted" | "set-aside" | "stopped" | "resumed", ...}``. The first, ``study``, is the header: it
tells what the study is of. `amp_ray.runtime.study.events` knows what stands in the others; here
they are only kept, in the lines of `amp_ray.runtime.study.journal_lines`.
"""

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn, Self

from amp_ray.errors import AmpRayError, InputError, Where, advice_for
from amp_ray.runtime.files import private
from amp_ray.runtime.study.journal_lines import Body, Contents, encode, parse

_COPIED_BYTES: Final = 1 << 20
"""At once, when a damaged journal is set aside."""

_NO_SYNC: Final = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What file systems answer that cannot synchronise a folder."""


class JournalError(AmpRayError):
    """The journal cannot be written; nothing of what it has is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Where the good records end: one value, so that it changes at one instant."""

    num_records: int
    num_bytes: int


class Journal:
    """The open journal of the one driver of a study.

    Attributes:
        records: Bodies of the records that were there when it was opened.
        dropped: What a crash had left at its end and was cut off; None if nothing.
    """

    def __init__(self, path: Path, contents: Contents, descriptor: int) -> None:
        self.path = path
        self.records = contents.bodies
        self.dropped = contents.dropped
        self._end = _End(num_records=len(contents.bodies), num_bytes=contents.num_bytes)
        self._descriptor = descriptor
        self._is_torn = False
        self._problem: str | None = None

    @classmethod
    def open(cls, path: Path, *, salvage: bool = False) -> Self:
        """Open a journal for appending, and make it where there is none.

        What a crash left at its end is cut off. Only who holds the study's lock may do this.

        With ``salvage`` a damaged one is opened with the records before the damage; the
        rest is moved to a file beside it.
        """
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with open(descriptor, "rb", closefd=False) as stream:
                contents = parse(stream, file=str(path), salvage=salvage)
            if contents.is_damaged:
                aside = _set_aside(path, descriptor, contents.num_bytes)
                contents = replace(contents, dropped=f"{contents.dropped}, to {aside}")
            if os.fstat(descriptor).st_size > contents.num_bytes:
                os.ftruncate(descriptor, contents.num_bytes)
            os.fsync(descriptor)
            sync_folder(path.parent)
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError):
                message = f"cannot be opened for writing: {error.strerror}"
                raise InputError(message, where=Where(file=str(path))) from error
            raise
        return cls(path, contents, descriptor)

    def append(self, record: Body) -> None:
        """Write a record; when this returns, it survives a crash of process or machine.

        An interruption by a signal waits until the record is written: nobody has to find out
        whether it was. Raises `JournalError` if it cannot be written. What was begun is taken back,
        and the journal takes no more records: nothing may stand behind a gap.
        """
        if self._problem is not None:
            raise JournalError(self._problem)
        data = encode(self._end.num_records, record)
        after = _End(
            num_records=self._end.num_records + 1, num_bytes=self._end.num_bytes + len(data)
        )
        interruption: BaseException | None = None
        while self._end != after:
            try:
                self._write(data)
                self._end = after
            except OSError as error:
                self._fail(error)
            except (KeyboardInterrupt, SystemExit) as error:
                interruption = error
        self._is_torn = False
        if interruption is not None:
            raise interruption

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        """Write a record's line at the end, after what an interruption left has been cut off."""
        found = os.fstat(self._descriptor)
        if self._is_torn:
            os.ftruncate(self._descriptor, self._end.num_bytes)
        elif found.st_nlink == 0:
            raise OSError(errno.ENOENT, "it has been removed")
        elif found.st_size != self._end.num_bytes:
            message = f"{self._end.num_bytes} bytes were written, now it has {found.st_size}"
            raise OSError(errno.EBUSY, f"somebody else has changed it: {message}")
        self._is_torn = True
        rest = memoryview(data)
        while rest:  # a full disk takes a part first, then refuses
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)

    def _fail(self, error: OSError) -> NoReturn:
        """Take back what a failed write left, and take no more records."""
        self._problem = _describe(self.path, error)
        if self._is_torn:
            try:
                os.ftruncate(self._descriptor, self._end.num_bytes)
            except OSError as second:
                self._problem += f" (a torn record stays at its end: {second.strerror})"
        raise JournalError(self._problem) from error


def sync_folder(folder: Path) -> None:
    """Make sure that a new name in a folder survives a crash of the machine."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be entered and not listed: a folder above the study
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _set_aside(path: Path, descriptor: int, num_good: int) -> Path:
    """Copy what follows the good records of a journal to a new file beside it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    with open(aside, "xb", opener=private) as copy:
        while piece := os.pread(descriptor, _COPIED_BYTES, num_good):
            num_good += copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return aside


def _describe(path: Path, error: OSError) -> str:
    return (
        f"{path}: cannot be written: {error.strerror or error}. Everything before is kept. "
        f"{advice_for(error)}, and go on with --resume"
    )
