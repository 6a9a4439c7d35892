"""Messages between controller and agent: authenticated lines, by the same code at both ends.

A line is ``MARK``, a keyed hash (BLAKE2b) in hexadecimal digits, a space and a JSON object. The
hash covers the sender and the number of the message, so that none can be forged, repeated, left out
or reordered by whoever does not have the key. All other lines are noise: what a login shell prints,
or what somebody wrote into the pipe.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import zlib
from typing import Any

KEY_BYTES = 32
HASH_BYTES = 16
DIGEST_BYTES = 32
MARK = b"@amp-ray "

FROM_CONTROLLER, FROM_AGENT = b"controller", b"agent"

LINE_BYTES = 1024 * 1024
"""Of a line from an agent; a longer one ends the connection."""

COMMAND_BYTES = 64 * 1024 * 1024
"""Of a line from the controller, which names all files and all ranks of a trial."""

CHUNK_BYTES = 128 * 1024
"""Of a file in one message, before compression."""

NAME_BYTES = 200
"""Of the name of a file that comes back."""

_SAMPLE_BYTES = 8 * 1024
_WORTH_FRACTION = 0.9
"""A sample that shrinks to less than this is worth compressing: zlib takes 20 ns for each byte that
it cannot compress."""

TEXT_CHARACTERS = 2000
"""Of a text that is passed on to people."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class WireError(Exception):
    """What arrives is not what the other end may send."""


class Sealer:
    """Writes the messages of one sender."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """Return the line of the next message."""
        body = json.dumps(message).encode()
        digits = _hash(self._key, self._sender, self._number, body)
        self._number += 1
        return b"".join((MARK, digits, b" ", body, b"\n"))


class Opener:
    """Reads the messages of one sender."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        """Expect message number 0; see ``Sealer``."""
        self._key, self._sender, self._number = key, sender, 0

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return the message on a line without its line feed; None if the line is noise.

        Raises `WireError` if a line has the right hash and is no JSON object.
        """
        start, end = len(MARK), len(MARK) + 2 * HASH_BYTES
        body = line[end + 1 :]
        if not line.startswith(MARK):
            return None
        expected = _hash(self._key, self._sender, self._number, body)
        if not hmac.compare_digest(line[start:end], expected):
            return None
        self._number += 1
        try:
            message = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise WireError("a message is not JSON") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise WireError("a message has no kind")
        return message


class Lines:
    """Cuts a stream into lines, in time that is linear in its length."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their line feeds.

        Raises `WireError` if a line is too long.
        """
        first, *others = data.split(b"\n")
        self._pieces.append(first)
        self._num_bytes += len(first)
        if self._num_bytes > self._limit:
            raise WireError(f"more than {self._limit} bytes without a line feed")
        if not others:
            return []
        lines = [b"".join(self._pieces), *others[:-1]]
        self._pieces, self._num_bytes = [others[-1]], len(others[-1])
        return lines

    def rest(self) -> bytes:
        """Return what has come since the last line feed."""
        return b"".join(self._pieces)


def pack(data: bytes) -> str:
    """Make a piece of a file fit for a message."""
    sample = data[:_SAMPLE_BYTES]
    level = 1 if len(zlib.compress(sample, 1)) < _WORTH_FRACTION * len(sample) else 0
    return base64.b64encode(zlib.compress(data, level)).decode()


def unpack(text: str) -> bytes:
    """Undo ``pack``."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), CHUNK_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) > CHUNK_BYTES or not inflater.eof:
        raise ValueError(f"a piece of a file is larger than {CHUNK_BYTES} bytes or incomplete")
    return data


def is_plain_name(name: str) -> bool:
    """Tell whether a name is that of a file in the same folder, and can be shown to people."""
    plain = name.isprintable() and "/" not in name and "\\" not in name and name not in {".", ".."}
    return plain and 0 < len(name.encode()) <= NAME_BYTES


def new_hash() -> Any:  # noqa: ANN401 - hashlib names no public type
    """Return the hash by which contents are named."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def printable(text: str, limit: int = TEXT_CHARACTERS) -> str:
    r"""Show control characters escaped, but for tabs and line feeds, and cut a long text.

    Colours are left out.

    Example:
        >>> print(printable("\x1b[31mno\x1b[0m way\x07"))
        no way\x07
    """
    short = text[:limit]
    if not (short.isascii() and short.isprintable()):
        plain = _COLOUR.sub("", short)
        short = "".join(
            letter
            if letter.isprintable() or letter in "\t\n"
            else letter.encode("unicode_escape").decode()
            for letter in plain
        )
    return short if len(text) <= limit else f"{short} [... {len(text) - limit} more]"


def _hash(key: bytes, sender: bytes, number: int, body: bytes) -> bytes:
    """Compute the hash of a message in hexadecimal digits."""
    state = hashlib.blake2b(key=key, person=sender, digest_size=HASH_BYTES)
    state.update(number.to_bytes(8, "big"))
    state.update(body)
    return state.hexdigest().encode()
