"""The controller's end of an agent: starts it, keeps its lease, passes messages on."""

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
from amp_ray.runtime.agent.bundle import BOOTSTRAP, make_bundle
from amp_ray.runtime.host import Host

Message = dict[str, Any]

Sink = Callable[[str, Message], None]
"""Takes the tag of an agent and its message, on any thread."""

_NUM_NOISE_LINES: Final = 5
_TOKEN_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How agents behave.

    Args:
        lease_s: Without a sign of life for so long, each side takes the other for gone.
        heartbeat_s: Between signs of life.
        grace_s: Between TERM and KILL.
        import_timeout_s: For the imports of a warm process.
        settle_s: What a rank's peers get to tell their story when it has failed.
        isolate: Whether an agent takes a PID namespace of its own where it can.
        base: Folder of all trials' folders on the hosts; None for their TMPDIR, else /tmp.
    """

    lease_s: float = 6.0
    heartbeat_s: float = 1.0
    grace_s: float = 0.5
    import_timeout_s: float = 300.0
    settle_s: float = 0.2
    isolate: bool = True
    base: str | None = None

    def __post_init__(self) -> None:
        """Refuse a lease that heartbeats cannot keep.

        Raises:
            ValueError: If ``lease_s`` is not longer than two heartbeats.
        """
        if self.lease_s < 2 * self.heartbeat_s:
            message = (
                f"lease_s {self.lease_s} must be at least twice heartbeat_s {self.heartbeat_s}, "
                "or one late sign of life would end a trial"
            )
            raise ValueError(message)


class AgentLink:
    """One agent on one host, for one trial after the other."""

    def __init__(self, host: Host, settings: AgentSettings, sink: Sink) -> None:
        """Start the agent.

        Args:
            host: Where.
            settings: How it behaves.
            sink: Gets every message but ``alive``, and ``lost`` with ``text`` at the end.

        Raises:
            HostError: If it cannot be started.
        """
        self.host = host
        self.tag = f"amp-ray-{secrets.token_hex(_TOKEN_BYTES)}"
        self._sink = sink
        self._settings = settings
        self._last_heard = time.monotonic()
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._write_lock = threading.Lock()
        self._noise: deque[str] = deque(maxlen=_NUM_NOISE_LINES)
        argv = [host.python, "-I", "-u", "-c", BOOTSTRAP, "main", self.tag]
        self._channel = host.open_channel(argv)
        start = {**asdict(settings), "tag": self.tag}
        self._write(make_bundle() + json.dumps(start).encode() + b"\n")
        for work in (self._listen, self._keep_alive):
            threading.Thread(target=work, name=f"agent {host.name}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the agent can take another message."""
        return not self._ended.is_set() and not self._closed.is_set()

    @property
    def silent_s(self) -> float:
        """Since the agent's last sign of life."""
        return time.monotonic() - self._last_heard

    def send(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Send a message; a lost agent is reported through the sink, not here."""
        self._write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """End the lease; the agent cleans up and goes."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._channel.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has gone; tell whether it has."""
        return self._ended.wait(timeout_s)

    def _write(self, data: bytes) -> None:
        """Write, unless it is gone."""
        with contextlib.suppress(OSError, ValueError), self._write_lock:
            self._channel.write(data)

    def _keep_alive(self) -> None:
        """Renew the lease until the end."""
        while not self._closed.wait(self._settings.heartbeat_s) and not self._ended.is_set():
            self._write(b"\n")

    def _listen(self) -> None:
        """Pass messages on until the end."""
        rest = b""
        problem = ""
        try:
            while data := self._channel.read():
                self._last_heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._hear(line)
        except (OSError, HostError) as error:
            problem = str(error)
        if rest:
            self._hear(rest)
        self._ended.set()
        text = problem or " / ".join(self._noise) or "the connection to the agent ended"
        self._sink(self.tag, {"kind": "lost", "text": text})

    def _hear(self, line: bytes) -> None:
        """Tell a message from what a login shell or a failing interpreter prints."""
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and "kind" in message:
                if message["kind"] != "alive":
                    self._sink(self.tag, message)
                return
        if line.strip():
            self._noise.append(line.decode("utf-8", "replace").strip())
