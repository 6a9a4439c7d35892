"""The controller's end of an agent: starts it, keeps its lease, passes messages on.

Nothing that a host sends is trusted: messages carry a keyed hash, are checked one by one, and are
bounded in length, number and rate. A host that does not keep to that is dropped and named.
"""

import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.agent.bundle import BOOTSTRAP, make_bundle
from amp_ray.runtime.hosts.agent.wire import (
    FROM_AGENT,
    FROM_CONTROLLER,
    KEY_BYTES,
    Lines,
    Opener,
    Sealer,
    WireError,
    printable,
)
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.messages import Message, check_message

Sink = Callable[[str, Message], None]  # takes the tag of an agent and its message, on any thread
MESSAGE_BYTES: Final = 16 * 1024 * 1024  # of messages of an agent in one trial, but for files
NOISE_BYTES: Final = 256 * 1024  # of what a login shell prints, or somebody writes into the pipe
_NUM_NOISE_LINES: Final = 5
_NOISE_LINE_BYTES: Final = 500
_SPARE_BEATS: Final = 100
_PIECE_BYTES: Final = 32 * 1024
_TOKEN_BYTES: Final = 8
POLL_S: Final = 0.1  # between two looks at whether a host is silent
_LATE_S: Final = 2 * POLL_S  # of the thread that looks; those that listen to hosts are late, too
_LATE_FACTOR: Final = 10.0  # for so many times as long no host is taken for silent


class Patience:
    """No silence of a host counts while this machine is too busy to listen."""

    def __init__(self) -> None:
        self._look_at = self._excused_until = time.monotonic()

    def is_over(self) -> bool:
        """Tell whether to look for silent hosts now; ask at least every `POLL_S` seconds."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        late_s = now - self._look_at
        if late_s > _LATE_S:
            self._excused_until = now + _LATE_FACTOR * late_s
        self._look_at = now + POLL_S
        return now > self._excused_until


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How agents behave."""

    lease_s: float = 20.0  # without a sign of life for so long, each side takes the other for gone
    heartbeat_s: float = 1.0  # between signs of life
    grace_s: float = 0.5  # between TERM and KILL
    # For an agent to start: a login shell and Python, from whatever file system. The lease counts
    # from its first word.
    start_timeout_s: float = 60.0
    import_timeout_s: float = 300.0
    settle_s: float = 0.2  # what a rank's peers get to tell their story when it has failed
    isolate: bool = True  # whether an agent takes a PID namespace of its own where it can
    base: str | None = None  # of all trials' folders on the hosts; None for TMPDIR, else /tmp

    def __post_init__(self) -> None:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s {self.lease_s} must be at least twice heartbeat_s {self.heartbeat_s}, "
                "or one late sign of life would end a trial"
            )


class AgentLink:
    """One agent on one host, for one trial after the other."""

    def __init__(self, host: Host, settings: AgentSettings, sink: Sink) -> None:
        """Start the agent.

        The sink gets every message but ``alive``, and ``lost`` with ``text`` at the end. It may
        wait, and then the agent does too.
        """
        self.host = host
        self.tag = f"amp-ray-{secrets.token_hex(_TOKEN_BYTES)}"
        self._sink = sink
        self._settings = settings
        key = secrets.token_bytes(KEY_BYTES)
        self._sealer, self._opener = Sealer(key, FROM_CONTROLLER), Opener(key, FROM_AGENT)
        self._start = self._last_heard = self._last_written = time.monotonic()
        self._is_delivering = False
        self._closed, self._ended = threading.Event(), threading.Event()
        self._last_words = ""
        self._begun = threading.Event()
        self._has_greeted = False
        self._outbox: deque[Message] = deque()
        self._changed = threading.Condition()
        self._is_writing = False
        self._noise: deque[str] = deque(maxlen=_NUM_NOISE_LINES)
        self._num_noise_bytes = self._num_bytes = self._num_alive = 0
        argv = [host.python, "-I", "-u", "-c", BOOTSTRAP, "main", self.tag]
        self._channel = host.open_channel(argv)
        start = json.dumps({**asdict(settings), "tag": self.tag}).encode()
        first = b"\n".join((make_bundle() + start, key.hex().encode(), b""))
        for work, arguments in ((self._listen, ()), (self._speak, (first,))):
            name = f"agent {host.name}"
            threading.Thread(target=work, args=arguments, name=name, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the agent can take another message."""
        return not self._ended.is_set() and not self._closed.is_set()

    @property
    def silent_s(self) -> float:
        """Since the agent's last sign of life; 0 while a message of its waits for us."""
        return 0.0 if self._is_delivering else time.monotonic() - self._last_heard

    @property
    def has_output(self) -> bool:
        """Whether something waits to be read by the host."""
        return bool(self._outbox) or self._is_writing

    @property
    def is_reading(self) -> bool:
        """Whether the host takes what it is sent; one that does not for a whole lease is lost."""
        stuck_s = time.monotonic() - self._last_written if self._is_writing else 0.0
        return stuck_s <= self._settings.lease_s

    def send(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Queue a message; a lost agent is reported through the sink, not here."""
        with self._changed:
            if message["kind"] == "prepare":
                self._num_bytes = 0
            self._outbox.append(message)
            self._changed.notify()

    def close(self) -> None:
        """End the lease, without waiting; the agent cleans up and goes."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def why_not_started(self, limit_s: float) -> str:
        """Wait until the agent has said hello; return what kept it from that, or nothing."""
        if not self._begun.wait(limit_s):
            return f"the agent did not start within {limit_s:g} s{self._printed()}"
        return "" if self._has_greeted else self._last_words

    def _printed(self) -> str:
        """Return what came instead of messages, ready to be added to a sentence."""
        return f": {' / '.join(self._noise)}" if self._noise else ""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has gone; tell whether it has."""
        return self._ended.wait(timeout_s)

    def _speak(self, first: bytes) -> None:
        """Write what is queued, or a sign of life that renews the lease, until the end."""
        with contextlib.suppress(OSError, ValueError, EOFError, HostError):
            self._write(first)
            while (message := self._next()) is not None:
                self._write(self._sealer.seal(message) if message else b"\n")
        with contextlib.suppress(OSError, ValueError, EOFError, HostError):
            self._channel.close()

    def _next(self) -> Message | None:
        """Wait for the next message; an empty one is a sign of life, None the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._outbox or self._closed.is_set(), self._settings.heartbeat_s
            )
            if self._closed.is_set() or self._ended.is_set():
                return None
            return self._outbox.popleft() if self._outbox else {}

    def _write(self, data: bytes) -> None:
        """Write in pieces: each that the host takes shows that it still reads."""
        self._last_written = time.monotonic()
        self._is_writing = True
        for start in range(0, len(data), _PIECE_BYTES):
            self._channel.write(data[start : start + _PIECE_BYTES], self._closed)
            self._last_written = time.monotonic()
        self._is_writing = False

    def _listen(self) -> None:
        lines = Lines()
        problem = ""
        try:
            while data := self._channel.read():
                self._last_heard = time.monotonic()
                for line in lines.feed(data):
                    self._hear(line)
            self._hear_noise(lines.rest())
        except WireError as error:
            problem = f"dropped, since it is not to be trusted: {error}"
            self.close()
        except (OSError, HostError) as error:
            problem = str(error)
        self._ended.set()
        self._last_words = text = (
            problem or " / ".join(self._noise) or "the connection to the agent ended"
        )
        self._begun.set()
        self._sink(self.tag, {"kind": "lost", "text": text})

    def _hear(self, line: bytes) -> None:
        """Tell a message from what a login shell or a failing interpreter prints."""
        message = self._opener.open(line)
        if message is None:
            self._hear_noise(line)
        elif message["kind"] == "alive":
            self._num_alive += 1
            allowed = (
                _SPARE_BEATS + 2 * (time.monotonic() - self._start) / self._settings.heartbeat_s
            )
            if self._num_alive > allowed:
                raise WireError(f"{self._num_alive} signs of life, where {allowed:.0f} are due")
        else:
            if message["kind"] != "file":  # those have their own bounds
                self._num_bytes += len(line)
            if self._num_bytes > MESSAGE_BYTES:
                raise WireError(f"more than {MESSAGE_BYTES} bytes of messages in one trial")
            checked = check_message(message)
            if checked["kind"] == "hello":
                self._has_greeted = True
                self._begun.set()
            self._is_delivering = True
            self._sink(self.tag, checked)
            self._last_heard = time.monotonic()
            self._is_delivering = False

    def _hear_noise(self, line: bytes) -> None:
        """Remember the last of it: it may say why there is no agent."""
        self._num_noise_bytes += len(line)
        if self._num_noise_bytes > NOISE_BYTES:
            raise WireError(f"more than {NOISE_BYTES} bytes that are no messages of our agent")
        if line.strip():
            text = line[:_NOISE_LINE_BYTES].decode("utf-8", "backslashreplace").strip()
            self._noise.append(printable(text))
