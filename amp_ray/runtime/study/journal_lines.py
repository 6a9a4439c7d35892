"""The lines of a study's journal: how a record is written, and what is wrong with a file of them.

A record is one line: ``{"v":1,"n":NUMBER,"crc":CHECKSUM,"body":BODY}``. Numbers count from 0
without gaps; the checksum is that of number and body. A record is safe on the disk before the next
one is begun, so a crash leaves at most one torn record, at the end. That one is dropped; anything
else that is wrong was no crash, and is refused unless the records before it are to be salvaged.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, overload

from amp_ray.errors import InputError, Where

SCHEMA: Final = 1
"""Of the lines; a body says for itself what it is."""

Body = Mapping[str, Any]

_LINE: Final = re.compile(
    rb'\{"v":([0-9]{1,9}),"n":([0-9]{1,18}),"crc":([0-9]{1,10}),"body":(\{.*\})\}\n'
)
_BEGIN: Final = b'{"v":'
_HEAD: Final = re.compile(rb'\{"v":\d+,"n":\d+,"crc":\d+,"body":')


class Bodies(Sequence[Body]):
    """The bodies of records, read when they are asked for: ten thousand are large as objects."""

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
    """What stands in a journal."""

    bodies: Bodies
    num_bytes: int
    dropped: str | None  # what was left out at the end, for people; None if nothing
    is_damaged: bool = False  # whether that is more than a crash leaves


def encode(number: int, body: Body) -> bytes:
    """Return a record as its line.

    Example:
        >>> print(encode(0, {"event": "study"}).decode(), end="")
        {"v":1,"n":0,"crc":1641593710,"body":{"event":"study"}}
    """
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    head = f'{{"v":{SCHEMA},"n":{number},"crc":{_checksum(number, text)},"body":'
    return head.encode() + text + b"}\n"


def parse(lines: Iterable[bytes], *, file: str, salvage: bool = False) -> Contents:
    """Read a journal.

    With ``salvage`` the records before a damage are returned.
    """
    texts: list[bytes] = []
    num_bytes, dropped, is_damaged = 0, None, False
    source = iter(lines)
    for line in source:
        record = _decode(line)
        if record is None or record[0] != len(texts):
            where = Where(file=file, line=len(texts) + 1)
            _check_is_ours(line, where)
            torn = _torn(line) if record is None and next(source, None) is None else None
            is_damaged = torn is None
            dropped = f"line {where.line}: {torn or 'a damaged record, and all that follows'}"
            if is_damaged and not (salvage and texts):
                raise InputError(_damage(len(texts)), where=where)
            break
        texts.append(record[1])
        num_bytes += len(line)
    return Contents(
        bodies=Bodies(tuple(texts)), num_bytes=num_bytes, dropped=dropped, is_damaged=is_damaged
    )


def _check_is_ours(line: bytes, where: Where) -> None:
    """Refuse a file of something else, and a journal of a newer version."""
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


def _torn(line: bytes) -> str | None:
    """Say what a crash has left in the last line; None if it was no crash."""
    if not line.endswith(b"\n"):
        return f"{len(line)} bytes of a record that was never completed"
    if len(_HEAD.findall(line)) > 1:  # a line feed has changed
        return None
    return "a last record whose checksum does not fit"


def _damage(num_good: int) -> str:
    """Say that a journal is damaged, and what can be done."""
    message = "this record is damaged or out of place, and no crash does that. "
    if not num_good:
        return f"{message}Restore the journal from a copy, or begin a new study"
    records = "the record" if num_good == 1 else f"the {num_good} records"
    return (
        f"{message}Restore the journal from a copy, or keep {records} before it: --resume "
        "--salvage sets the rest aside in a file beside it"
    )


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
