"""The journal of a study: an append-only file of events that survives a crash.

The body of a record is an event of the driver: ``{"event": "study" | "started" | "ended" |
"interrupted" | "set-aside" | "stopped" | "resumed", ...}``. The first record, ``study``, is the
header. `amp_ray.runtime.study.events` defines the keys of each event; this module only writes and
reads the lines.
"""

import errno
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn, Self, overload

from amp_ray.errors import AmpRayError, InputError, Where, advice_for
from amp_ray.runtime.files import private
from amp_ray.units import counted

_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND
_COPIED_BYTES: Final = 1 << 20  # size of a read when the damaged end of a journal is copied
# Errors of file systems that cannot fsync a folder
_NO_SYNC: Final = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


SCHEMA: Final = 1  # version of the line format; bodies are not versioned
Body = Mapping[str, Any]

_LINE: Final = re.compile(
    rb'\{"v":([0-9]{1,9}),"n":([0-9]{1,18}),"crc":([0-9]{1,10}),"body":(\{.*\})\}\n'
)
_BEGIN: Final = b'{"v":'
_HEAD: Final = re.compile(rb'\{"v":\d+,"n":\d+,"crc":\d+,"body":')
_WRITTEN: Final = re.compile(rb"[ -~]*")  # a record without its line feed: JSON in printable ASCII


class Bodies(Sequence[Body]):
    """The bodies of records, parsed on access to save memory: a journal may have ten thousand."""

    def __init__(self, texts: tuple[bytes, ...]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Body: ...

    @overload
    def __getitem__(self, index: slice) -> "Bodies": ...

    def __getitem__(self, index: int | slice) -> "Body | Bodies":
        if isinstance(index, slice):
            return Bodies(self._texts[index])
        try:
            body: Body = json.loads(self._texts[index], parse_constant=_refuse)
        except RecursionError:
            raise ValueError("the record is nested too deeply") from None
        return body


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the record has a number {constant}, which JSON has not")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """The parsed content of a journal."""

    bodies: Bodies
    num_bytes: int
    dropped: str | None  # message about the dropped end; None if nothing was dropped
    is_damaged: bool = False  # whether more than one torn record was dropped


def encode(number: int, body: Body) -> bytes:
    """Return the line of a record.

    Example:
        >>> print(encode(0, {"event": "study"}).decode(), end="")
        {"v":1,"n":0,"crc":1641593710,"body":{"event":"study"}}
    """
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    head = f'{{"v":{SCHEMA},"n":{number},"crc":{_checksum(number, text)},"body":'
    return head.encode() + text + b"}\n"


def parse(lines: Iterable[bytes], *, file: str, salvage: bool = False) -> Contents:
    """Read a journal; with ``salvage``, keep the records before the first damaged line.

    A crash leaves at most one incomplete record, at the end; it is dropped. Any other line that is
    no record raises `InputError`, which names the line, unless ``salvage`` is set.
    """
    texts: list[bytes] = []
    num_bytes, dropped, is_damaged = 0, None, False
    source = iter(lines)
    for line in source:
        record = _decode(line)
        if record is None or record[0] != len(texts):
            where = Where(file=file, line=len(texts) + 1)
            place = f"line {where.line}, byte {num_bytes}"
            if _is_torn(line, len(texts)):
                dropped = f"{place}: {len(line)} bytes of a record that was never completed"
                break
            num_later = sum(_decode(later) is not None for later in source)
            _check_is_ours(line, where, num_later)
            if not (salvage and texts):
                raise InputError(_damage(line, len(texts), num_bytes, num_later), where=where)
            is_damaged, dropped = True, f"{place}: a damaged record, and all that follows"
            break
        texts.append(record[1])
        num_bytes += len(line)
    return Contents(
        bodies=Bodies(tuple(texts)), num_bytes=num_bytes, dropped=dropped, is_damaged=is_damaged
    )


def _is_torn(line: bytes, number: int) -> bool:
    """Return whether a line is the beginning of one incomplete record, and not damage.

    Every record is synchronised before the next one begins, so a crash leaves at most one
    incomplete record. Zeros, which some file systems write after a power cut, count as damage,
    since the number of lost records is unknown.
    """
    head = b'{"v":%d,"n":%d,"crc":' % (SCHEMA, number)
    if not _WRITTEN.fullmatch(line) or line[: len(head)] != head[: len(line)]:
        return False
    try:  # a complete record, followed by other text instead of a line feed, is damage
        end = json.JSONDecoder().raw_decode(line.decode("ascii"))[1]
    except (ValueError, RecursionError):
        return len(_HEAD.findall(line)) <= 1
    return end == len(line)


def _check_is_ours(line: bytes, where: Where, num_later: int) -> None:
    """Refuse a file that is no journal, and a journal of a newer version."""
    version = _version(line)
    if version > SCHEMA:
        message = (
            f"written by a newer version of amp-ray (format {version}; this one knows {SCHEMA}): "
            "go on with that version"
        )
        raise InputError(message, where=where)
    is_damaged = num_later > 0 or b"\0" in line
    if where.line == 1 and not is_damaged and not line.startswith(_BEGIN):
        message = "this is no journal of a study; name another folder by --study"
        raise InputError(message, where=where)


def _damage(line: bytes, num_good: int, num_bytes: int, num_later: int) -> str:
    """Return the message about a damaged record: its place, the cause and the remedy."""
    cause = "no crash does that"
    if b"\0" in line:
        cause = (
            "bytes of it are zero, as a power cut may leave them, and nobody can tell how many "
            "records stood there"
        )
    message = f"at byte {num_bytes}, this record is damaged or out of place: {cause}. "
    if num_later:
        message += f"{counted(num_later, 'whole record follows', 'whole records follow')}. "
    if not num_good:
        return f"{message}Restore the journal from a copy, or begin a new study"
    records = "the record" if num_good == 1 else f"the {num_good} records"
    return (
        f"{message}Restore the journal from a copy, or keep {records} before it: --resume "
        "--salvage sets the rest aside in a file beside it"
    )


def _decode(line: bytes) -> tuple[int, bytes] | None:
    """Return number and body of a record; None if the line is incomplete or damaged."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1]) != SCHEMA:
        return None
    number, text = int(match[2]), match[4]
    return (number, text) if int(match[3]) == _checksum(number, text) else None


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(b"%d:" % number))


def _version(line: bytes) -> int:
    """Return the format version of a line; 0 if it cannot be read."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    version = record.get("v") if isinstance(record, dict) else None
    return version if isinstance(version, int) else 0


class JournalError(AmpRayError):
    """The journal cannot be written; the records in it are safe."""


class Journal:
    """The open journal of a study; only one driver may have it open.

    ``records`` has the records that were in the file when it was opened. ``dropped`` is a message
    about the end of the file that was cut off then; None if nothing was cut off.
    """

    def __init__(self, path: Path, contents: Contents, descriptor: int) -> None:
        self.path = path
        self.records = contents.bodies
        self.dropped = contents.dropped
        # Number of records and bytes: one tuple, so that a signal cannot come between the two
        self._end = len(contents.bodies), contents.num_bytes
        self._descriptor = descriptor
        self._is_torn = False
        self._problem: str | None = None

    @classmethod
    def open(cls, path: Path, *, salvage: bool = False) -> Self:
        """Open a journal for appending; create it if there is none.

        The caller must hold the study's lock. An incomplete record at the end is cut off.

        With ``salvage``, a damaged journal keeps the records before the damage; the rest is moved
        to a new file beside the journal.
        """
        descriptor = -1
        try:
            descriptor = private(str(path), _OPEN_FLAGS)
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

        A signal's `KeyboardInterrupt` is raised only after the record is written. Raises
        `JournalError` if it cannot be written: the incomplete record is cut off, and every later
        ``append`` fails, so that the journal has no gap.
        """
        if self._problem is not None:
            raise JournalError(self._problem)
        num_records, num_bytes = self._end
        data = encode(num_records, record)
        after = num_records + 1, num_bytes + len(data)
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
        """Append a line; first cut off the part that an interrupted attempt has written."""
        status = os.fstat(self._descriptor)
        if self._is_torn:
            os.ftruncate(self._descriptor, self._end[1])
        elif status.st_nlink == 0:
            raise OSError(errno.ENOENT, "it has been removed")
        elif status.st_size != self._end[1]:
            message = f"{self._end[1]} bytes were written, now it has {status.st_size}"
            raise OSError(errno.EBUSY, f"somebody else has changed it: {message}")
        self._is_torn = True
        rest = memoryview(data)
        while rest:  # a full disk may accept a part of the line and refuse the rest
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)

    def _fail(self, error: OSError) -> NoReturn:
        """Cut off an incomplete record, and refuse all later ones."""
        self._problem = _describe(self.path, error)
        if self._is_torn:
            try:
                os.ftruncate(self._descriptor, self._end[1])
            except OSError as second:
                self._problem += f" (a torn record stays at its end: {second.strerror})"
        raise JournalError(self._problem) from error


def sync_folder(folder: Path) -> None:
    """Synchronise a folder, so that a new file in it survives a crash of the machine."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # this user may enter the folder, but not list it
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _set_aside(path: Path, descriptor: int, num_good: int) -> Path:
    """Copy the damaged end of a journal, from byte ``num_good`` on, to a new file beside it."""
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
