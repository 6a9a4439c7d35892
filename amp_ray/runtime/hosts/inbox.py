"""Where the messages of all agents arrive; one that says too much at once has to wait."""

import queue
import threading
from collections import defaultdict
from typing import Final

from amp_ray.runtime.hosts.messages import Message

_WINDOW: Final = 8
"""Messages of one agent that may wait here: they are what a flood can take of our memory."""

_POLL_S: Final = 0.5


class Inbox:
    """A queue with a place of limited size for each agent, by its tag."""

    def __init__(self) -> None:
        """Start empty."""
        self._queue: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._rooms: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(_WINDOW)
        )
        self._lock = threading.Lock()
        self._gone: set[str] = set()

    def put(self, tag: str, message: Message) -> None:
        """Add a message, when there is room for one more of this agent and it is not gone."""
        room = self._room(tag)
        while tag not in self._gone:
            if room.acquire(timeout=_POLL_S):
                self._queue.put((tag, message))
                return

    def get(self, timeout_s: float) -> tuple[str, Message]:
        """Take the oldest message.

        Raises:
            queue.Empty: If none comes in time.
        """
        tag, message = self._queue.get(timeout=timeout_s)
        self._room(tag).release()
        return tag, message

    def forget(self, tag: str) -> None:
        """Let nobody wait for room that an agent's messages take, which nobody will read."""
        self._gone.add(tag)

    def _room(self, tag: str) -> threading.Semaphore:
        """Return the place of an agent."""
        with self._lock:
            return self._rooms[tag]
