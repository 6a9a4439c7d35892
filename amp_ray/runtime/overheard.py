"""A host whose ranks' events are heard as they come, not only when a trial is over."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amp_ray.runtime.host import Channel, Completed, Host

Listener = Callable[[Mapping[str, Any]], None]
"""Takes an event of a rank, on any thread."""


class OverheardHost:
    """Another host, and someone who listens to what its agents report."""

    def __init__(self, host: Host, listener: Listener) -> None:
        """Take both.

        Args:
            host: Does everything.
            listener: Gets every event of every rank.
        """
        self._host = host
        self._listener = listener

    @property
    def name(self) -> str:
        """As the hostfile calls it."""
        return self._host.name

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses and names under which its peers may reach it."""
        return self._host.addresses

    @property
    def python(self) -> str:
        """The interpreter that runs the agent."""
        return self._host.python

    def connect(self) -> None:
        """Make sure that it can be used."""
        self._host.connect()

    def run(self, argv: Sequence[str], *, timeout_s: float, text: str = "") -> Completed:
        """Run a short command; see ``Host.run``."""
        return self._host.run(argv, timeout_s=timeout_s, text=text)

    def put_text(self, path: str, text: str) -> None:
        """Write a file."""
        self._host.put_text(path, text)

    def get_text(self, path: str) -> str:
        """Read a file."""
        return self._host.get_text(path)

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command that is talked to, and listen."""
        return _OverheardChannel(self._host.open_channel(argv), self._listener)

    def close(self) -> None:
        """End the connection."""
        self._host.close()


class _OverheardChannel:
    """A channel that passes everything on and hears the ranks' events in it."""

    def __init__(self, channel: Channel, listener: Listener) -> None:
        """Take over a channel."""
        self._channel = channel
        self._listener = listener
        self._rest = b""

    def read(self) -> bytes:
        """Wait for output and listen to it; empty at its end."""
        data = self._channel.read()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._hear(line)
        return data

    def write(self, data: bytes) -> None:
        """Write to its stdin."""
        self._channel.write(data)

    def close(self) -> None:
        """Close its stdin."""
        self._channel.close()

    def _hear(self, line: bytes) -> None:
        """Tell events from heartbeats, logs and noise."""
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and message.get("kind") == "said":
                self._listener(message["data"])
