"""The protocol between controller and agent: a bundle of modules, then authenticated lines.

The bundle has the agent's modules, which run from memory. Each line after it is ``MARK``, a keyed
hash (BLAKE2b) in hexadecimal digits, a space and a JSON object. The hash covers the sender and the
number of the message: without the key, messages cannot be forged, repeated, left out or reordered.
All other lines are noise, such as the output of a login shell.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# In import order
MODULES = ("wire", "processes", "resources", "job", "warm", "main")
PROBE_MODULES = ("wire", "processes", "resources", "probe")

LENGTH_DIGITS = 10

BOOTSTRAP = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json, os, types
def take(num_bytes):
    data = b""
    while len(data) < num_bytes:
        piece = os.read(0, num_bytes - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
head = take(10)
body = take(int(head))
package = types.ModuleType("amp_ray_agent")
package.__path__, package.data = [], head + body
sys.modules["amp_ray_agent"] = package
for name, source in json.loads(body.decode()):
    module = types.ModuleType("amp_ray_agent." + name)
    module.__package__ = "amp_ray_agent"
    sys.modules[module.__name__] = module
    exec(compile(source, "amp_ray_agent/" + name + ".py", "exec"), module.__dict__)
sys.modules["amp_ray_agent." + sys.argv[1]].main()
"""
"""Program of ``python -c BOOTSTRAP MODULE ...``, which reads exactly the bundle from stdin and
imports nothing from the current folder."""

KEY_BYTES = 32
HASH_BYTES = 16
MARK = b"@amp-ray "

FROM_CONTROLLER, FROM_AGENT = b"controller", b"agent"
LINE_BYTES = 1024 * 1024  # limit per line from an agent; a longer one ends the connection
COMMAND_BYTES = 64 * 1024 * 1024  # limit per line from the controller; a job lists all its files
FIRST_BYTES = 1024 * 1024  # limit per line read byte by byte: settings, key, a probe's question
CHUNK_BYTES = 128 * 1024  # size of a file's piece per message, before compression
NAME_BYTES = 200  # limit of a collected file's name
SAMPLE_BYTES = 8 * 1024
# Compress a piece only if a sample shrinks to less than this fraction: zlib spends 20 ns on each
# incompressible byte
WORTH_FRACTION = 0.9
TEXT_CHARACTERS = 2000  # limit of a text shown to people
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def make_bundle(modules: Sequence[str] = MODULES) -> bytes:
    """Pack the agent's modules: the length in ten digits, then JSON."""
    folder = Path(__file__).parent
    pairs = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    body = json.dumps(pairs).encode()
    return f"{len(body):0{LENGTH_DIGITS}d}".encode() + body


# ---------------------------------------------------------------------------------------- lines


class WireError(Exception):
    """The other side has sent something invalid."""


class Seal:
    """Hashes and numbers the messages of one sender, who seals them; the receiver opens them."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """Return the line of the next message."""
        body = json.dumps(message).encode()
        line = b"".join((MARK, self._digits(body), b" ", body, b"\n"))
        self._number += 1
        return line

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return a line's message, or None for noise; raise `WireError` if the hash is wrong."""
        start, end = len(MARK), len(MARK) + 2 * HASH_BYTES
        body = line[end + 1 :]
        if not line.startswith(MARK) or not hmac.compare_digest(
            line[start:end], self._digits(body)
        ):
            return None
        self._number += 1
        try:
            message = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise WireError("a message is not JSON") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise WireError("a message has no kind")
        return message

    def _digits(self, body: bytes) -> bytes:
        state = hashlib.blake2b(key=self._key, person=self._sender, digest_size=HASH_BYTES)
        state.update(self._number.to_bytes(8, "big"))
        state.update(body)
        return state.hexdigest().encode()


class Lines:
    """Splits a stream into lines, in linear time."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()  # bytes after the last line feed

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes; raise `WireError` if one is too long."""
        first = len(self._rest) + len(data.partition(b"\n")[0])
        if first > self._limit:
            raise WireError(f"more than {self._limit} bytes without a line feed")
        self._rest += data
        if b"\n" not in data:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [bytes(line) for line in lines]

    def rest(self) -> bytes:
        """Return the bytes after the last line feed."""
        return bytes(self._rest)


def read_line() -> bytes:
    """Read exactly one line of stdin; exit at the end of stdin, or if the line is too long."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > FIRST_BYTES:
            sys.exit(0)
        line += byte
    return bytes(line)


# ---------------------------------------------------------------------------------------- files


def pieces(content: bytes) -> Iterator[dict[str, Any]]:
    """Cut a file into message fields ``data`` and ``last``; yield at least one piece."""
    for start in range(0, max(1, len(content)), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield {"data": pack(content[start:end]), "last": end >= len(content)}


def pack(data: bytes) -> str:
    """Encode a piece of a file as text, compressed where that pays."""
    sample = data[:SAMPLE_BYTES]
    level = 1 if len(zlib.compress(sample, 1)) < WORTH_FRACTION * len(sample) else 0
    return base64.b64encode(zlib.compress(data, level)).decode()


def unpack(text: str) -> bytes:
    """Decode the text of ``pack``; raise `ValueError` if it is invalid or too large."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), CHUNK_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) > CHUNK_BYTES or not inflater.eof:
        raise ValueError(f"a piece of a file is larger than {CHUNK_BYTES} bytes or incomplete")
    return data


def is_plain_name(name: str) -> bool:
    """Return whether a name has no folder and no characters unfit for messages."""
    plain = name.isprintable() and "/" not in name and "\\" not in name and name not in {".", ".."}
    return plain and 0 < len(name.encode()) <= NAME_BYTES


def printable(text: str, limit: int = TEXT_CHARACTERS) -> str:
    r"""Escape control characters, except tabs and line feeds, and cut a long text.

    Colour codes are removed.

    Example:
        >>> print(printable("\x1b[31mno\x1b[0m way\x07"))
        no way\x07
    """
    short = text[:limit]
    if not (short.isascii() and short.isprintable()):
        plain = COLOUR.sub("", short)
        short = "".join(
            letter
            if letter.isprintable() or letter in "\t\n"
            else letter.encode("unicode_escape").decode()
            for letter in plain
        )
    return short if len(text) <= limit else f"{short} [... {len(text) - limit} more]"
