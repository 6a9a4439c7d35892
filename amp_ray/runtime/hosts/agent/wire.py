"""How controller and agent talk: first the agent's own modules, then authenticated lines.

The modules travel over stdin as one bundle and run from memory. A line after that is ``MARK``, a
keyed hash (BLAKE2b) in hexadecimal digits, a space and a JSON object. The hash covers the sender
and the number of the message, so that none can be forged, repeated, left out or reordered by
whoever does not have the key. All other lines are noise: what a login shell prints, or what
somebody wrote into the pipe.
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

# In the order of their imports
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
"""Runs as ``python -c BOOTSTRAP MODULE ...`` and reads no byte more than the bundle; nothing is
imported from the folder that it is started in."""

KEY_BYTES = 32
HASH_BYTES = 16
DIGEST_BYTES = 32
MARK = b"@amp-ray "

FROM_CONTROLLER, FROM_AGENT = b"controller", b"agent"
LINE_BYTES = 1024 * 1024  # of a line from an agent; a longer one ends the connection
COMMAND_BYTES = 64 * 1024 * 1024  # of a line from the controller, which names all files and ranks
FIRST_BYTES = 1024 * 1024  # of a line that is read byte by byte: settings, key, or a question
CHUNK_BYTES = 128 * 1024  # of a file in one message, before compression
NAME_BYTES = 200  # of the name of a file that comes back
SAMPLE_BYTES = 8 * 1024
# A sample that shrinks to less than this is worth compressing: zlib takes 20 ns for each byte that
# it cannot compress
WORTH_FRACTION = 0.9
TEXT_CHARACTERS = 2000  # of a text that is passed on to people
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def make_bundle(modules: Sequence[str] = MODULES) -> bytes:
    """Pack modules for the other end: the length in ten digits, then JSON."""
    folder = Path(__file__).parent
    pairs = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    body = json.dumps(pairs).encode()
    return f"{len(body):0{LENGTH_DIGITS}d}".encode() + body


# ---------------------------------------------------------------------------------------- lines


class WireError(Exception):
    """What arrives is not what the other end may send."""


class Seal:
    """The messages of one sender in their order; the sender seals them, the receiver opens them."""

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """Return the line of the next message."""
        body = json.dumps(message).encode()
        line = b"".join((MARK, self._digits(body), b" ", body, b"\n"))
        self._number += 1
        return line

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return the message on a line, None for noise; `WireError` if a sealed line is none."""
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
    """Cuts a stream into lines, in time that is linear in its length."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now; one that is too long raises `WireError`."""
        first, *more = data.split(b"\n")
        self._pieces.append(first)
        self._num_bytes += len(first)
        if self._num_bytes > self._limit:
            raise WireError(f"more than {self._limit} bytes without a line feed")
        if not more:
            return []
        lines = [b"".join(self._pieces), *more[:-1]]
        self._pieces, self._num_bytes = [more[-1]], len(more[-1])
        return lines

    def rest(self) -> bytes:
        """Return what has come since the last line feed."""
        return b"".join(self._pieces)


def read_line() -> bytes:
    """Read a line of stdin and not a byte more; at its end, or a long one's, this process ends."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > FIRST_BYTES:
            sys.exit(0)
        line += byte
    return bytes(line)


# ---------------------------------------------------------------------------------------- files


def pieces(content: bytes) -> Iterator[dict[str, Any]]:
    """Cut a file into the ``data`` of messages, at least one; the last one says so."""
    for start in range(0, max(1, len(content)), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield {"data": pack(content[start:end]), "last": end >= len(content)}


def pack(data: bytes) -> str:
    """Make a piece of a file fit for a message."""
    sample = data[:SAMPLE_BYTES]
    level = 1 if len(zlib.compress(sample, 1)) < WORTH_FRACTION * len(sample) else 0
    return base64.b64encode(zlib.compress(data, level)).decode()


def unpack(text: str) -> bytes:
    """Undo ``pack``; `ValueError` for what is no piece, or too large a one."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), CHUNK_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) > CHUNK_BYTES or not inflater.eof:
        raise ValueError(f"a piece of a file is larger than {CHUNK_BYTES} bytes or incomplete")
    return data


def new_hash() -> Any:  # noqa: ANN401 - hashlib names no public type
    """Return the hash by which contents of files are named."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def is_plain_name(name: str) -> bool:
    """Tell whether a name is that of a file in the same folder, and can be shown to people."""
    plain = name.isprintable() and "/" not in name and "\\" not in name and name not in {".", ".."}
    return plain and 0 < len(name.encode()) <= NAME_BYTES


def printable(text: str, limit: int = TEXT_CHARACTERS) -> str:
    r"""Show control characters escaped, but for tabs and line feeds, and cut a long text.

    Colours are left out.

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
