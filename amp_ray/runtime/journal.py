"""The journal of a study: append-only records with checksums, safe against a crash at any byte.

A record is one line: its number, the checksum of number and body, and the body, an event such as
``{"event": "started", ...}`` (`amp_ray.runtime.study_events` has them all). The first record is the
study's header. A line counts once it ends with a line feed and its checksum fits; a last line that
does not is what a crash left of a record that nobody was told of, and is dropped.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from amp_ray.errors import AmpRayError, InputError, Where

SCHEMA: Final = 1
"""Of the lines; a body says for itself what it is."""

Body = Mapping[str, Any]


class JournalError(AmpRayError):
    """The journal cannot be written; nothing of what it has is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What stands in a journal.

    Args:
        bodies: Of all records, in order.
        num_bytes: Of the good lines.
        dropped: What was left out at the end, for people; None if nothing.
    """

    bodies: tuple[Body, ...]
    num_bytes: int
    dropped: str | None


def encode(number: int, body: Body) -> bytes:
    """Return a record as its line.

    Example:
        >>> parse(encode(0, {"event": "study"}), file="j").bodies
        ({'event': 'study'},)
    """
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f'{{"v":{SCHEMA},"n":{number},"crc":{_checksum(number, text)},"body":{text}}}\n'.encode()


def parse(data: bytes, *, file: str) -> Contents:
    """Read a journal's bytes.

    Args:
        data: All of them.
        file: Its name, for messages.

    Raises:
        InputError: If a line before the last is damaged, or records are missing, out of order or
            of a newer version: a crash leaves none of these.
    """
    lines = data.split(b"\n")
    torn = lines.pop()
    bodies: list[Body] = []
    num_bytes = 0
    dropped = f"{len(torn)} bytes of a record that was never completed" if torn else None
    for index, line in enumerate(lines):
        where = Where(file=file, line=index + 1)
        is_last = index == len(lines) - 1 and not torn
        number, body = _decode(line, where) if not is_last else _decode_last(line, where)
        if body is None:
            dropped = "a last record whose checksum does not fit"
            break
        if number == len(bodies) - 1 and bodies[-1] == body and index == len(lines) - 1:
            dropped = f"a second copy of record {number}"
            break
        if number != len(bodies):
            message = (
                f"found record {number}, expected {len(bodies)}: records are missing, doubled or "
                "out of order. Restore the journal from a copy, or begin a new study"
            )
            raise InputError(message, where=where)
        bodies.append(body)
        num_bytes += len(line) + 1
    return Contents(bodies=tuple(bodies), num_bytes=num_bytes, dropped=dropped)


class Journal:
    """The open journal of the one driver of a study."""

    def __init__(self, path: Path, contents: Contents, descriptor: int) -> None:
        """Take an open file; use `open_journal`."""
        self.path = path
        self.records = contents.bodies
        self.dropped = contents.dropped
        self._num_records = len(contents.bodies)
        self._num_bytes = contents.num_bytes
        self._descriptor = descriptor
        self._problem: str | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a journal for appending, and make it where there is none.

        What a crash left at its end is cut off. Only who holds the study's lock may do this.

        Raises:
            InputError: If its content is damaged.
            JournalError: If it cannot be opened or written.
        """
        try:
            is_new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(_problem(path, error)) from error
        try:
            contents = parse(_read_all(descriptor), file=str(path))
            os.ftruncate(descriptor, contents.num_bytes)
            os.fsync(descriptor)
            if is_new:
                sync_folder(path.parent)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(_problem(path, error)) from error
        except InputError:
            os.close(descriptor)
            raise
        return cls(path, contents, descriptor)

    def append(self, record: Body) -> None:
        """Write a record; when this returns, it survives a crash of process or machine.

        Raises:
            JournalError: If it cannot be written. What was begun is taken back, and the journal
                takes no more records: nothing may stand behind a gap.
            ValueError: If a number in it is none that JSON has.
        """
        if self._problem is not None:
            raise JournalError(self._problem)
        data = encode(self._num_records, record)
        try:
            rest = memoryview(data)
            while rest:  # a full disk takes a part first, then refuses
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._problem = _problem(self.path, error)
            self._take_back()
            raise JournalError(self._problem) from error
        self._num_records += 1
        self._num_bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_back(self) -> None:
        """Cut off what a failed write left; if that fails too, the next opening does it."""
        try:
            os.ftruncate(self._descriptor, self._num_bytes)
        except OSError as error:
            self._problem = f"{self._problem}; a torn record stays at its end: {error.strerror}"


def read_journal(path: Path) -> Contents:
    """Read a journal that somebody else may be writing, without touching it.

    Raises:
        InputError: If it cannot be read or its content is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(message, where=Where(file=str(path))) from error
    return parse(data, file=str(path))


def sync_folder(folder: Path) -> None:
    """Make sure that a new name in a folder survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(number: int, text: str) -> int:
    """Return the checksum of a record."""
    return zlib.crc32(f"{number}:{text}".encode())


def _decode(line: bytes, where: Where) -> tuple[int, Body]:
    """Read a line that was completed.

    Raises:
        InputError: If it is damaged or of a newer version.
    """
    try:
        record = json.loads(line)
        version, number, body = record["v"], record["n"], record["body"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        fits = record["crc"] == _checksum(number, text) and isinstance(body, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        version, number, body, fits = SCHEMA, -1, {}, False
    if isinstance(version, int) and version > SCHEMA:
        message = f"written by a newer version (format {version}; this one knows {SCHEMA})"
        raise InputError(message, where=where)
    if not fits:
        message = (
            "damaged: the checksum does not fit, and further records follow, so this was no crash. "
            "Restore the journal from a copy, or begin a new study"
        )
        raise InputError(message, where=where)
    return number, body


def _decode_last(line: bytes, where: Where) -> tuple[int, Body | None]:
    """Read the last line; a damaged one is what a crash left."""
    try:
        return _decode(line, where)
    except InputError as error:
        if "newer" in str(error):
            raise
        return -1, None


def _read_all(descriptor: int) -> bytes:
    """Read a file from its beginning."""
    parts = []
    os.lseek(descriptor, 0, os.SEEK_SET)
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _problem(path: Path, error: OSError) -> str:
    """Say what went wrong and what to do."""
    return (
        f"{path}: cannot be written: {error.strerror or error}. Everything before is kept: make "
        "room or rights and go on with --resume"
    )
