"""The lines of a study's journal: how a record is written, and what is wrong with a file of them.

A record is one line: ``{"v":1,"n":NUMBER,"crc":CHECKSUM,"body":BODY}``. Numbers count from 0
without gaps; the checksum is that of number and body. A record is safe on the disk before the next
one is begun, so a crash leaves at most one torn record, at the end. That one is dropped; anything
else that is wrong was no crash, and is refused.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

from amp_ray.errors import InputError, Where

SCHEMA: Final = 1
"""Of the lines; a body says for itself what it is."""

Body = Mapping[str, Any]

_LINE: Final = re.compile(
    rb'\{"v":([0-9]{1,9}),"n":([0-9]{1,18}),"crc":([0-9]{1,10}),"body":(\{.*\})\}\n'
)
_BEGIN: Final = b'{"v":'
_HEAD: Final = re.compile(rb'\{"v":\d+,"n":\d+,"crc":\d+,"body":')

_HELP: Final = "Restore the journal from a copy, or begin a new study"


class Bodies(Sequence[Body]):
    """The bodies of records, read when they are asked for: ten thousand are large as objects."""

    def __init__(self, texts: tuple[bytes, ...]) -> None:
        """Take them as JSON."""
        self._texts = texts

    def __len__(self) -> int:
        """Count them."""
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Body: ...

    @overload
    def __getitem__(self, index: slice) -> "Bodies": ...

    def __getitem__(self, index: int | slice) -> "Body | Bodies":
        """Return one of them, or a part."""
        if isinstance(index, slice):
            return Bodies(self._texts[index])
        body: Body = json.loads(self._texts[index])
        return body


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What stands in a journal.

    Args:
        bodies: Of all records, in order.
        num_bytes: Of the good lines.
        dropped: What was left out at the end, for people; None if nothing.
    """

    bodies: Bodies
    num_bytes: int
    dropped: str | None


def encode(number: int, body: Body) -> bytes:
    """Return a record as its line.

    Raises:
        ValueError: If a number in it is none that JSON has.

    Example:
        >>> print(encode(0, {"event": "study"}).decode(), end="")
        {"v":1,"n":0,"crc":1641593710,"body":{"event":"study"}}
    """
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    head = f'{{"v":{SCHEMA},"n":{number},"crc":{_checksum(number, text)},"body":'
    return head.encode() + text + b"}\n"


def parse(lines: Iterable[bytes], *, file: str) -> Contents:
    """Read a journal.

    Args:
        lines: All of them, each with its line feed, as an open file yields them.
        file: Its name, for messages.

    Raises:
        InputError: If records are changed, missing, doubled, out of order or of a newer version:
            a crash leaves none of these.
    """
    texts: list[bytes] = []
    num_bytes, dropped = 0, None
    source = iter(lines)
    for line in source:
        record = _decode(line)
        if record is None or record[0] != len(texts):
            where = Where(file=file, line=len(texts) + 1)
            dropped = f"line {where.line}: {_judge(line, texts, source, where)}"
            break
        texts.append(record[1])
        num_bytes += len(line)
    return Contents(bodies=Bodies(tuple(texts)), num_bytes=num_bytes, dropped=dropped)


def _judge(line: bytes, texts: Sequence[bytes], rest: Iterator[bytes], where: Where) -> str:
    """Say what is dropped with the first line that does not fit.

    Args:
        line: That line.
        texts: Bodies of the records before it.
        rest: Lines after it.
        where: Its place.

    Raises:
        InputError: If a crash cannot have left it.
    """
    record = _decode(line)
    if record is None:
        return _judge_damaged(line, next(rest, None), where)
    number, text = record
    after = tuple(rest)
    num_whole = sum(other.endswith(b"\n") for other in after)
    if texts and number == len(texts) - 1 and text == texts[-1] and not num_whole:
        return f"a second copy of record {number}"
    message = f"{_misplaced(number, text, texts, after)}. {_HELP}"
    raise InputError(message, where=where)


def _judge_damaged(line: bytes, following: bytes | None, where: Where) -> str:
    """Say what is dropped with a line that is no good record; refuse it if no crash left it."""
    version = _version(line)
    if version > SCHEMA:
        message = (
            f"written by a newer version of amp-ray (format {version}; this one knows {SCHEMA}): "
            "go on with that version"
        )
        raise InputError(message, where=where)
    written = line.strip(b"\0\n")  # after a power cut, bytes that never reached the disk are zero
    if where.line == 1 and written[: len(_BEGIN)] != _BEGIN[: len(written)]:
        message = "this is no journal of a study; name another folder by --study"
        raise InputError(message, where=where)
    if not line.endswith(b"\n"):
        return f"{len(line)} bytes of a record that was never completed"
    if following is not None or len(_HEAD.findall(line)) > 1:  # a line feed has changed
        message = (
            "bytes of this record have changed (its checksum does not fit), and more follows, so "
            f"this was no crash. {_HELP}"
        )
        raise InputError(message, where=where)
    return "a last record whose checksum does not fit"


def _misplaced(number: int, text: bytes, texts: Sequence[bytes], after: Iterable[bytes]) -> str:
    """Say what is wrong with a good record in a wrong place."""
    expected = len(texts)
    found = f"found record {number}, expected {expected}"
    if number < expected:
        first = f"line {number + 1}"
        if texts[number] == text:
            return f"{found}: it stands here a second time, first in {first}"
        return f"{found}: another one than in {first}, so two drivers have written"
    if expected in {record[0] for record in map(_decode, after) if record is not None}:
        return f"{found}, which comes later: records are out of order"
    return f"{found}: {number - expected} missing before it"


def _decode(line: bytes) -> tuple[int, bytes] | None:
    """Return number and body of a whole and good record; None if it is not."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1]) != SCHEMA:
        return None
    number, text = int(match[2]), match[4]
    return (number, text) if int(match[3]) == _checksum(number, text) else None


def _checksum(number: int, text: bytes) -> int:
    """Return the checksum of a record."""
    return zlib.crc32(text, zlib.crc32(b"%d:" % number))


def _version(line: bytes) -> int:
    """Return the format that a line says it has; 0 if it says nothing that can be read."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    version = record.get("v") if isinstance(record, dict) else None
    return version if isinstance(version, int) else 0
