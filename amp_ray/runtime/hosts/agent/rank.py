"""A rank's process as the agent sees it: output, log, last lines, exit."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

from .log import Log
from .wire import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Message = dict[str, Any]

EVENT_START = b'{"event"'
"""How a line begins that may be a message to the controller, a JSON object."""

TAG_KEY = "tag"
"""In such a message: the tag of this agent. Whatever else looks like one is text of a library."""

EVENT_BYTES = 16 * 1024
"""Of one event; a longer line is text."""

EVENTS_BYTES = 8 * 1024 * 1024
"""Of all events of all ranks of a host; what they say beyond that is text."""

TAIL_LINES = 40
TAIL_CHARACTERS = 500
"""Of each of the last lines."""

TAIL_BYTES = 64 * 1024
"""From which the last lines are taken."""

READ_BYTES = 64 * 1024


class RankProcess:
    """One rank."""

    def __init__(
        self,
        number: int,
        pipe: int,
        folder: str,
        *,
        tag: str | None,
        room: int = EVENTS_BYTES,
        words: Sequence[str] = (),
    ) -> None:
        """Open the log.

        ``pipe`` does not block; a line of a long log with one of ``words`` is kept wherever
        it stands.
        """
        self.number, self.pid = number, 0
        self._tag = tag
        self.pipe: int | None = pipe
        self.status: int | None = None
        self.state = ""
        self.reported = False
        self._last = bytearray()
        self._rest = b""
        self._room = room
        self._is_log_whole = True
        self.log = Log(folder, words)

    def read(self, *, everything: bool) -> Iterator[Message]:
        """Take what it has printed; yield its messages and troubles with its log."""
        while self.pipe is not None:
            try:
                data = os.read(self.pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe()
            yield from self._store(data)
            yield from self._hear(data)
            if not everything:
                return

    def close(self) -> None:
        """Close log and pipe."""
        self.log.close()
        self._close_pipe()

    def exit_message(self, *, ended: bool) -> Message:
        """Say how it ended, and whether that was the agent's doing."""
        status = self.status
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        lines = (bytes(self._last) + self._rest).split(b"\n")
        tail = [_text(line) for line in (lines if lines[-1] else lines[:-1])[-TAIL_LINES:]]
        end = {"code": code, "signal": number, "ended": ended}
        return {"kind": "exit", "rank": self.number, **end, "state": self.state, "tail": tail}

    def _hear(self, data: bytes) -> Iterator[Message]:
        """Tell messages from text, of which the end is remembered."""
        whole = self._rest + data
        end = whole.rfind(b"\n") + 1
        if not data or (not end and len(whole) > READ_BYTES):
            end = len(whole)
        lines, self._rest = whole[:end], whole[end:]
        if self._tag is not None and EVENT_START in lines:
            texts = []
            for line in lines.splitlines(keepends=True):
                event = self._event(line)
                if event is None:
                    texts.append(line)
                else:
                    yield {"kind": "said", "rank": self.number, "data": event}
            lines = b"".join(texts)
        self._last += lines
        if len(self._last) > 2 * TAIL_BYTES:
            del self._last[:-TAIL_BYTES]

    def _event(self, line: bytes) -> Message | None:
        """Read a message with our tag; None for anything else, however much it looks like one."""
        if not line.startswith(EVENT_START) or len(line) > min(EVENT_BYTES, self._room):
            return None
        try:
            event: Message = json.loads(line.decode())
        except (ValueError, RecursionError):
            return None
        if event.pop(TAG_KEY, None) != self._tag:
            return None
        self._room -= len(line)
        return event

    def _store(self, data: bytes) -> Iterator[Message]:
        """Write to the log, as long as the disk lets us."""
        try:
            if self._is_log_whole:
                self.log.write(data)
        except OSError as error:
            self._is_log_whole = False
            error.filename = f"rank-{self.number}.log"
            yield trouble(error, rank=self.number)

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


def _text(line: bytes) -> str:
    """Read a line that may be anything, and may be long."""
    text = line[: 4 * TAIL_CHARACTERS].decode("utf-8", "backslashreplace").rstrip("\r")
    return printable(text, TAIL_CHARACTERS)


def trouble(error: OSError, *, rank: int | None = None, what: str = "folder") -> Message:
    """Report a system error, sorted by what mends it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    place = f"{error.filename}: " if error.filename else ""
    text = f"{place}{error.strerror or error}"
    return {"kind": "trouble", "what": "disk-full" if full else what, "rank": rank, "text": text}
