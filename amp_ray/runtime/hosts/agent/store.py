"""The contents of the files that trials need, kept as long as the agent lives."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING

from .wire import CHUNK_BYTES, new_hash, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEPT_BYTES = 1024 * 1024 * 1024  # with more than this, contents of earlier trials are thrown away


class Store:
    """Contents by digest, in one file without a name.

    Nobody but the agent can open it, so that no program that is tried can change what the next one
    is; and it ends with the agent, however that ends.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=str(folder), buffering=0)  # noqa: SIM115
        self._end = 0
        self._offsets: dict[str, tuple[int, int]] = {}
        self._open = ""
        self._start, self._hash = 0, new_hash()

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Say which contents are not here."""
        if self._end > KEPT_BYTES:
            self._file.truncate(0)
            self._end = 0
            self._offsets.clear()
        self._open = ""
        return [digest for digest in digests if digest not in self._offsets]

    def add(self, digest: str, text: str, *, last: bool) -> None:
        """Take the next piece of a content; pieces of two never mix."""
        if self._open != digest:
            self._open, self._start, self._hash = digest, self._end, new_hash()
        data = unpack(text)
        self._hash.update(data)
        while data:
            num_bytes = os.pwrite(self._file.fileno(), data, self._end)
            self._end += num_bytes
            data = data[num_bytes:]
        if last:
            self._open = ""
            if self._hash.hexdigest() != digest:  # a piece before this one could not be written
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._offsets[digest] = self._start, self._end

    def write(self, digest: str, path: Path) -> None:
        """Copy a content to a new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        offset, end = self._offsets[digest]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(str(path), flags, 0o600), "wb") as file:
            while offset < end:
                data = os.pread(self._file.fileno(), min(CHUNK_BYTES, end - offset), offset)
                file.write(data)
                offset += len(data)
