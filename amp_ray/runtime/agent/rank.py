"""A rank's process as the agent sees it: output, log, last lines, exit."""

from __future__ import annotations

import collections
import errno
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    Message = dict[str, Any]

EVENT_START = b'{"event"'
"""How a line begins that may be a message to the controller, a JSON object."""

TAG_KEY = "tag"
"""In such a message: the tag of this agent. Whatever else looks like one is text of a library."""

TAIL_LINES = 40
LINE_BYTES = 64 * 1024
"""Of a line; a longer one is cut in pieces."""

LOG_BYTES = 64 * 1024 * 1024
"""Of a rank's log that are kept on disk; its last lines are kept in any case."""


class Rank:
    """One rank."""

    def __init__(self, number: int, pipe: int, log_path: str, *, tag: str | None) -> None:
        """Open the log.

        Args:
            number: The rank.
            pipe: Where its output comes from; does not block.
            log_path: Where its output goes to.
            tag: What its messages to the controller carry; None if it sends none.
        """
        self.number, self.pid = number, 0
        self._tag = tag
        self.pipe: int | None = pipe
        self.status: int | None = None
        self.state = ""
        self.reported = False
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._rest = b""
        self._room = LOG_BYTES
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._log: int | None = os.open(log_path, flags, 0o600)

    def read(self, *, everything: bool) -> Iterator[Message]:
        """Take what it has printed; yield its messages and troubles with its log.

        Args:
            everything: Until nothing is left, or only one piece: ranks take turns.
        """
        while self.pipe is not None:
            try:
                data = os.read(self.pipe, LINE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe()
            yield from self._store(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if self._rest and (not data or len(self._rest) > LINE_BYTES):
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                yield from self._hear(line)
            if not everything:
                return

    def close(self) -> None:
        """Close log and pipe."""
        self._close_log()
        self._close_pipe()

    def exit_message(self, *, ended: bool) -> Message:
        """Say how it ended, and whether that was the agent's doing."""
        status = self.status
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        tail = [*self._tail, *([_text(self._rest)] if self._rest else [])]
        end = {"code": code, "signal": number, "ended": ended}
        return {"kind": "exit", "rank": self.number, **end, "state": self.state, "tail": tail}

    def _hear(self, line: bytes) -> Iterator[Message]:
        """Tell a message from text."""
        event = None if self._tag is None else _event(line, self._tag)
        if event is None:
            self._tail.append(_text(line))
        else:
            yield {"kind": "said", "rank": self.number, "data": event}

    def _store(self, data: bytes) -> Iterator[Message]:
        """Write to the log, as long as the disk lets us."""
        try:
            while data and self._log is not None and self._room > 0:
                num_bytes = os.write(self._log, data[: self._room])
                self._room -= num_bytes
                data = data[num_bytes:]
        except OSError as error:
            yield trouble(error, rank=self.number)
            self._close_log()

    def _close_log(self) -> None:
        """Close the log once."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _close_pipe(self) -> None:
        """Close the pipe once."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


def _event(line: bytes, tag: str) -> Message | None:
    """Read a message with this tag; None for anything else, however much it looks like one."""
    if not line.startswith(EVENT_START):
        return None
    try:
        event: Message = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return event if event.pop(TAG_KEY, None) == tag else None


def _text(line: bytes) -> str:
    """Read a line that may be anything."""
    return line.decode("utf-8", "replace").rstrip("\r")


def trouble(error: OSError, *, rank: int | None = None, what: str = "folder") -> Message:
    """Report a system error, sorted by what mends it.

    Args:
        error: Caught.
        rank: That it happened to, if to one.
        what: Its name, unless the disk is full.
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    place = f"{error.filename}: " if error.filename else ""
    text = f"{place}{error.strerror or error}"
    return {"kind": "trouble", "what": "disk-full" if full else what, "rank": rank, "text": text}
