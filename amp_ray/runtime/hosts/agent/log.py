"""A rank's output on disk, of which a long one loses its middle."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_BYTES = 4 * 1024 * 1024
"""Of the first part."""

HALF_BYTES = 4 * 1024 * 1024
"""Of each half of the last part: the older one is overwritten when the newer one is full."""

KEPT_BYTES = 4 * 1024 * 1024
"""Of the lines between the two that are kept for their words."""

LINE_BYTES = 64 * 1024
"""Of a line that can be kept."""


class Log:
    """One file without a name: the first part, kept lines, and a ring for the last part.

    The middle of a long output is dropped, all but the lines with one of some words: those may tell
    the times of steps. Nobody but the agent can open the file.
    """

    def __init__(self, folder: str, words: Sequence[str] = ()) -> None:
        """Make the file.

        A line with one of ``words`` is always kept.
        """
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._words = [word.encode() for word in words]
        self._num_head = self._num_kept = self._num_ring = 0
        self._is_head_full = False
        self._line = b""

    def write(self, data: bytes) -> None:
        """Append."""
        if not self._is_head_full:
            room = HEAD_BYTES - self._num_head
            if len(data) > room:
                self._is_head_full = True
                room = data.rfind(b"\n", 0, room) + 1
            self._write(data[:room], self._num_head)
            self._num_head += len(data[:room])
            data = data[room:]
        while data:
            offset = self._num_ring % (2 * HALF_BYTES)
            if self._num_ring >= 2 * HALF_BYTES and offset % HALF_BYTES == 0:
                self._drop(offset)
            piece = data[: HALF_BYTES - offset % HALF_BYTES]
            self._write(piece, HEAD_BYTES + KEPT_BYTES + offset)
            self._num_ring += len(piece)
            data = data[len(piece) :]

    @property
    def num_dropped(self) -> int:
        """Bytes between first and last part."""
        return max(0, (self._num_ring - 1) // HALF_BYTES - 1) * HALF_BYTES

    def content(self, limit: int) -> bytes:
        """Return what is there, in order; where it is longer than a limit, less of the middle."""
        ring = HEAD_BYTES + KEPT_BYTES
        split = self._num_ring % (2 * HALF_BYTES) if self.num_dropped else 0
        newest = split % HALF_BYTES or HALF_BYTES  # in the half that is written to
        first, last = self._read(0, self._num_head), b""
        if not self.num_dropped:
            last = self._read(ring, self._num_ring)
        else:
            start = (self._num_ring - newest) % (2 * HALF_BYTES)
            older = self._read(ring + HALF_BYTES - start, HALF_BYTES)
            last = self._line + older + self._read(ring + start, newest)
        kept = self._read(HEAD_BYTES, self._num_kept)
        num_missing = self.num_dropped
        if len(first) + len(kept) + len(last) > limit:
            room = limit // 4
            end = first.rfind(b"\n", 0, room) + 1
            start = last.find(b"\n", max(0, len(last) - room)) + 1
            kept = self._select(first[end:]) + kept + self._select(last[:start])
            kept = kept[: limit // 2]
            num_missing += len(first) - end + start
            first, last = first[:end], last[start:]
        return first + self._note(num_missing) + kept + last

    def _note(self, num_missing: int) -> bytes:
        words = " or ".join(repr(word.decode()) for word in self._words)
        kept = f", but for the lines with {words} that follow" if words else ""
        text = f"[... {num_missing} bytes of this log were not kept{kept} ...]\n"
        return text.encode() if num_missing else b""

    def close(self) -> None:
        """Free the disk."""
        self._file.close()

    def _drop(self, offset: int) -> None:
        """Keep the lines with words of the half of the ring that is about to be overwritten."""
        if not self._words:
            return
        half = self._line + self._read(HEAD_BYTES + KEPT_BYTES + offset, HALF_BYTES)
        end = half.rfind(b"\n") + 1
        self._line = half[end:][-LINE_BYTES:]
        kept = self._select(half[:end])[: KEPT_BYTES - self._num_kept]
        self._write(kept, HEAD_BYTES + self._num_kept)
        self._num_kept += len(kept)

    def _select(self, data: bytes) -> bytes:
        lines = data.split(b"\n") if any(word in data for word in self._words) else []
        return b"".join(
            line[:LINE_BYTES] + b"\n" for line in lines if any(word in line for word in self._words)
        )

    def _write(self, data: bytes, offset: int) -> None:
        while data:
            num_bytes = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[num_bytes:], offset + num_bytes

    def _read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)
