"""Messages on stdin and stdout, neither of which ever blocks, and the lease on stdin."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .wire import COMMAND_BYTES, FROM_AGENT, FROM_CONTROLLER, Lines, Opener, Sealer, WireError

FIRST_BYTES = 1024 * 1024  # of a line that is read byte by byte: settings, key, or a question
READ_BYTES = 256 * 1024
FULL_BYTES = 1024 * 1024  # with so much that the controller has not read, ranks have to wait too
LATE_S = 1.0  # between two turns of the agent's loop: a host that needs longer is too busy for it


def read_line() -> bytes:
    """Read a line of stdin and not a byte more; at its end, or a long one's, nothing is to do."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > FIRST_BYTES:
            sys.exit(0)
        line += byte
    return bytes(line)


class Stdio:
    """The line to the controller."""

    def __init__(self, key: bytes, *, lease_s: float, heartbeat_s: float) -> None:
        """Take over descriptors 0 and 1; ``lease_s`` without a byte end the lease."""
        self.over: str | None = None
        self._lease_s, self._heartbeat_s = lease_s, heartbeat_s
        self._sealer, self._opener = Sealer(key, FROM_AGENT), Opener(key, FROM_CONTROLLER)
        self._lines = Lines(COMMAND_BYTES)
        self._inbox: list[dict[str, Any]] = []
        self._outbox = bytearray(b"\n")  # ends whatever the login shell has printed
        self._last_heard = self._last_beat = self._last_listened = time.monotonic()
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    @property
    def has_output(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        """Whether too much waits to be written."""
        return len(self._outbox) > FULL_BYTES

    def say(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Queue a message."""
        self._outbox += self._sealer.seal(message)

    def beat(self) -> None:
        """Give a sign of life, unless the last message still waits."""
        now = time.monotonic()
        if now - self._last_beat > self._heartbeat_s and not self._outbox:
            self._last_beat = now
            self.say(kind="alive")

    def flush(self) -> None:
        """Write what stdout takes."""
        try:
            num_bytes = os.write(1, self._outbox) if self._outbox else 0
        except BlockingIOError:
            return
        except OSError:
            num_bytes = len(self._outbox)  # nobody listens; stdin will say so too
        del self._outbox[:num_bytes]

    def listen(self, *, readable: bool) -> None:
        """Read stdin, or notice that the controller has been silent for too long.

        A host that was too busy for this process may have been so for what brings bytes to it too:
        the lease does not count the time in which nobody listened.
        """
        now = time.monotonic()
        if now > self._last_listened + LATE_S:
            self._last_heard += now - self._last_listened
        self._last_listened = now
        if not readable:
            if now - self._last_heard > self._lease_s:
                self.over = f"no sign of the controller for {self._lease_s} s"
            return
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._last_heard = time.monotonic()
        if not data:
            self.over = "stdin has ended"
        try:
            for line in filter(None, self._lines.feed(data)):  # an empty one is a sign of life
                message = self._opener.open(line)
                if message is None:
                    self.over = "a message is not the controller's"
                    return
                self._inbox.append(message)
        except WireError as error:
            self.over = str(error)

    def take_messages(self) -> list[dict[str, Any]]:
        """Take the messages that are complete."""
        messages, self._inbox = self._inbox, []
        return messages
