"""A place where trials run: this machine, or one behind SSH (``ssh.py``)."""

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.agent.resources import DEVICE_VARIABLE

GIVEN_UP: Final = "given up: it has not read what was sent to it"
GIVE_UP_POLL_S: Final = 0.2

PIPE_BYTES: Final = 1024 * 1024


class Channel(Protocol):
    """A running command's stdin, and its stdout and stderr in one stream."""

    def read(self) -> bytes:
        """Wait for output; empty at its end."""

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Write all of it to its stdin, however long nobody reads there."""

    def close(self) -> None:
        """Close its stdin and forget it; a reader then sees the end."""


class Host(Protocol):
    """A host. Every method may raise HostError."""

    @property
    def name(self) -> str:
        """As the hostfile calls it."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses and names under which its peers may reach it, best first."""

    @property
    def python(self) -> str:
        """The interpreter that runs the agent."""

    @property
    def shares_slots(self) -> bool:
        """Whether a slot is a device that other studies may use at the same time."""

    def connect(self) -> None:
        """Make sure that it can be used; does nothing where it is."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command that is talked to."""

    def close(self) -> None:
        """End the connection."""


class LocalHost:
    """This machine, with the same agent and no SSH."""

    def __init__(
        self,
        name: str = "localhost",
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take variables to add for commands that are talked to; nothing is started."""
        self.name = name
        self._environment = dict(environment or {})
        self.addresses = ("127.0.0.1",)
        self.python = python
        # Of a CPU a slot is only a share: under each of its names this machine has all of them.
        self.shares_slots = DEVICE_VARIABLE in self._environment

    def connect(self) -> None:
        """Nothing to do: we are here."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command that is talked to; see ``Host.open_channel``."""
        try:
            return LocalChannel(argv, {**os.environ, **self._environment})
        except OSError as error:
            message = f"{self.name}: {argv[0]} cannot be started: {error.strerror}"
            raise HostError(message) from error

    def close(self) -> None:
        """Nothing to do."""


class LocalChannel:
    """A child process with pipes."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, in a session of its own: Ctrl-C is for us, and we end it in order."""
        self._process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # more than the user's share of pipes: slower, no more
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self) -> bytes:
        """Wait for output; the process is reaped at its end."""
        assert self._process.stdout is not None
        data: bytes = self._process.stdout.read(64 * 1024) or b""
        if not data:
            self._process.stdout.close()
            self._process.wait()
        return data

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Write all of it; see ``Channel.write``."""
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        waiting = select.poll()
        waiting.register(pipe, select.POLLOUT)
        view = memoryview(data)
        while view:
            if given_up is not None and given_up.is_set():
                raise OSError(GIVEN_UP)
            if waiting.poll(GIVE_UP_POLL_S * 1000):
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(pipe, view) :]

    def close(self) -> None:
        """Close stdin, which ends the agent's lease."""
        assert self._process.stdin is not None
        self._process.stdin.close()
