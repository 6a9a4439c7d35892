"""The controller's side of an agent: start it, renew its lease, check and deliver its messages.

Hosts are not trusted: messages carry a keyed hash, are checked one by one, and are limited in
length, number and rate. A host that violates this is dropped, and the error names it.
"""

import contextlib
import json
import logging
import math
import queue
import reprlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.agent.wire import (
    BOOTSTRAP,
    FROM_AGENT,
    FROM_CONTROLLER,
    KEY_BYTES,
    MODULES,
    TEXT_CHARACTERS,
    Lines,
    Seal,
    WireError,
    make_bundle,
    printable,
)
from amp_ray.runtime.hosts.host import Host
from amp_ray.trials.causes import TROUBLE_KINDS

Message = dict[str, Any]
Inbox = queue.SimpleQueue["tuple[AgentLink, Message]"]  # shared by the agents of several hosts
MESSAGE_BYTES: Final = 16 * 1024 * 1024  # limit per agent and trial, without collected files
NOISE_BYTES: Final = 256 * 1024  # limit of lines that are no messages, as of a login shell
POLL_S: Final = 0.1  # interval of the checks for silent hosts
_NUM_NOISE_LINES: Final = 5
_NOISE_LINE_BYTES: Final = 500
_SPARE_BEATS: Final = 100
_WINDOW: Final = 8  # maximum of unread messages per agent, to limit memory
_ROOM_POLL_S: Final = 0.5
_PIECE_BYTES: Final = 32 * 1024
_TOKEN_BYTES: Final = 8
_LATE_S: Final = 2 * POLL_S  # if a check is this late, this machine is too busy to hear its hosts
_LATE_FACTOR: Final = 10.0  # after a late check, no host counts as silent for this many delays
_ANSWERS_ONLY: Final = frozenset({"claimed", "swept", "facts", "reach"})  # not for the inbox
_ANSWERS: Final = _ANSWERS_ONLY | {"hello", "warm"}  # kinds that ``answer`` returns
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of agents, sent to each at its start."""

    lease_s: float = 20.0  # each side gives up the other after this long without a message
    heartbeat_s: float = 1.0  # interval of keep-alive messages
    grace_s: float = 0.5  # time between TERM and KILL
    # Limit for the start of an agent: a login shell, and Python, maybe from a slow file system. The
    # lease begins with the agent's first message.
    start_timeout_s: float = 60.0
    import_timeout_s: float = 300.0
    settle_s: float = 0.2  # time for the peers of a failed rank to report their errors
    isolate: bool = True  # use a new PID namespace where the kernel allows it
    base: str | None = None  # parent of all trials' folders on hosts; None for TMPDIR, else /tmp

    def __post_init__(self) -> None:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s {self.lease_s} must be at least twice heartbeat_s {self.heartbeat_s}, "
                "or one late sign of life would end a trial"
            )


class AgentLink:
    """The connection to one agent, which runs trials one after the other, or to a probe."""

    def __init__(
        self,
        host: Host,
        settings: AgentSettings,
        inbox: Inbox,
        *,
        bootstrap: str = BOOTSTRAP,
        modules: Sequence[str] = MODULES,
        **start: float,
    ) -> None:
        """Start the agent, or the program of another list of modules, whose last one runs.

        The inbox gets the agent's messages about trials, and a message ``lost`` with the reason as
        ``text`` at the end. The agent's next messages wait while `_WINDOW` are unread, so the
        reader of the inbox must call ``make_room`` for each. ``start`` has more settings of the
        program.
        """
        self.host = host
        self.tag = f"amp-ray-{secrets.token_hex(_TOKEN_BYTES)}"
        self.slots: set[int] = set()  # claimed by the agent
        self.stored: set[str] = set()  # digests of contents that the agent has
        self.last_words = ""  # reason why the agent was lost
        self._inbox, self._room = inbox, threading.Semaphore(_WINDOW)
        self._settings = settings
        key = secrets.token_bytes(KEY_BYTES)
        self._ours, self._theirs = Seal(key, FROM_CONTROLLER), Seal(key, FROM_AGENT)
        self._start = self._last_heard = self._last_written = time.monotonic()
        self._is_delivering = self._is_writing = False
        self._closed, self._ended = threading.Event(), threading.Event()
        self._outbox: deque[Message] = deque()
        self._answers: dict[str, Message] = {}
        self._changed = threading.Condition()
        self._noise: deque[str] = deque(maxlen=_NUM_NOISE_LINES)
        self._num_noise_bytes = self._num_bytes = self._num_alive = 0
        argv = [host.python, "-I", "-u", "-c", bootstrap, modules[-1], self.tag]
        self._channel = host.open_channel(argv)
        line = json.dumps({**asdict(settings), "tag": self.tag, **start}).encode()
        first = b"\n".join((make_bundle(modules) + line, key.hex().encode(), b""))
        for work, arguments in ((self._listen, ()), (self._speak, (first,))):
            name = f"agent {host.name}"
            threading.Thread(target=work, args=arguments, name=name, daemon=True).start()

    @property
    def noise(self) -> tuple[str, ...]:
        """The last lines that were no messages, as of a login shell or a failing interpreter."""
        return tuple(self._noise)

    @property
    def is_alive(self) -> bool:
        """Whether the connection is open on both sides."""
        return not self._ended.is_set() and not self._closed.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since the agent's last data; 0 while one of its messages waits for room."""
        return 0.0 if self._is_delivering else time.monotonic() - self._last_heard

    @property
    def has_output(self) -> bool:
        """Whether messages to the host are queued or being written."""
        return bool(self._outbox) or self._is_writing

    @property
    def is_reading(self) -> bool:
        """Whether the host reads its input; false if a write is stuck for longer than the lease."""
        stuck_s = time.monotonic() - self._last_written if self._is_writing else 0.0
        return stuck_s <= self._settings.lease_s

    def send(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Queue a message; a lost agent is reported through the inbox, not here."""
        with self._changed:
            if message["kind"] == "prepare":
                self._num_bytes = 0
            self._outbox.append(message)
            self._changed.notify_all()

    def answer(self, kind: str, limit_s: float = 0.0) -> Message | None:
        """Wait for an answer of a kind; None after ``limit_s`` or if the agent is lost."""
        with self._changed:
            self._changed.wait_for(lambda: kind in self._answers or self._ended.is_set(), limit_s)
            return self._answers.get(kind)

    def ask(self, question: Message, kind: str, limit_s: float) -> Message:
        """Send a message and wait for an answer of ``kind``; `HostError` if none comes."""
        with self._changed:
            self._answers.pop(kind, None)
        self.send(**question)
        answer = self.answer(kind, limit_s)
        if answer is None:
            text = self.last_words or f"no answer within {limit_s:g} s"
            raise HostError(f"{self.host.name}: {text}")
        return answer

    def wait_for_start(self, limit_s: float) -> None:
        """Wait for the agent's ``hello``; raise `HostError` with the reason if none comes."""
        if self.answer("hello", limit_s) is None:
            printed = f": {' / '.join(self._noise)}" if self._noise else ""
            late = f"the agent did not start within {limit_s:g} s{printed}"
            raise HostError(f"{self.host.name}: {self.last_words or late}")

    def make_room(self) -> None:
        """Accept one more message; call it for each message taken out of the inbox."""
        self._room.release()

    def close(self) -> None:
        """End the lease without waiting; the agent then cleans up and exits."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the connection has ended; return whether it has."""
        return self._ended.wait(timeout_s)

    # ------------------------------------------------------------------ to the agent

    def _speak(self, first: bytes) -> None:
        """Write queued messages, and empty lines that renew the lease, until the link is closed."""
        with contextlib.suppress(OSError, ValueError, EOFError, HostError):
            self._write(first)
            while (message := self._next()) is not None:
                self._write(self._ours.seal(message) if message else b"\n")
        with contextlib.suppress(OSError, ValueError, EOFError, HostError):
            self._channel.close()

    def _next(self) -> Message | None:
        """Wait for the next message; ``{}`` means to renew the lease, None that the link closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._outbox or self._closed.is_set(), self._settings.heartbeat_s
            )
            if self._closed.is_set() or self._ended.is_set():
                return None
            return self._outbox.popleft() if self._outbox else {}

    def _write(self, data: bytes) -> None:
        """Write in pieces and note the time of each, for ``is_reading``."""
        self._last_written = time.monotonic()
        self._is_writing = True
        for start in range(0, len(data), _PIECE_BYTES):
            self._channel.write(data[start : start + _PIECE_BYTES], self._closed)
            self._last_written = time.monotonic()
        self._is_writing = False

    # ------------------------------------------------------------------ from the agent

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
        noise = " / ".join(self._noise)
        with self._changed:
            self.last_words = problem or noise or "the connection to the agent ended"
            self._ended.set()
            self._changed.notify_all()
        self._inbox.put((self, {"kind": "lost", "text": self.last_words}))

    def _hear(self, line: bytes) -> None:
        """Handle a line: a message, or noise of a login shell or a failing interpreter."""
        message = self._theirs.open(line)
        if message is None:
            self._hear_noise(line)
        elif message["kind"] == "alive":
            self._num_alive += 1
            beats = (time.monotonic() - self._start) / self._settings.heartbeat_s
            allowed = _SPARE_BEATS + 2 * beats
            if self._num_alive > allowed:
                raise WireError(f"{self._num_alive} signs of life, where {allowed:.0f} are due")
        else:
            if message["kind"] != "file":  # `HostFiles` limits the size of files
                self._num_bytes += len(line)
            if self._num_bytes > MESSAGE_BYTES:
                raise WireError(f"more than {MESSAGE_BYTES} bytes of messages in one trial")
            self._deliver(check_message(message))

    def _deliver(self, message: Message) -> None:
        """Store an answer; put messages about a trial into the inbox when it has room."""
        kind = message["kind"]
        with self._changed:
            if kind in _ANSWERS:
                self._answers[kind] = message
            elif kind == "warm-died":
                self._answers.pop("warm", None)
            self._changed.notify_all()
        if kind in _ANSWERS_ONLY:
            return
        if kind == "warm-died":
            text = f"{self.host.name}: {message['text']}; it is started once more"
            _LOGGER.warning(printable(text))
        self._is_delivering = True
        while not self._room.acquire(timeout=0.0 if self._closed.is_set() else _ROOM_POLL_S):
            if self._closed.is_set():  # the inbox is not read any more
                return
        self._inbox.put((self, message))
        self._last_heard = time.monotonic()
        self._is_delivering = False

    def _hear_noise(self, line: bytes) -> None:
        """Keep the last noise lines: they may explain why the agent did not start."""
        self._num_noise_bytes += len(line)
        if self._num_noise_bytes > NOISE_BYTES:
            raise WireError(f"more than {NOISE_BYTES} bytes that are no messages of our agent")
        if line.strip():
            text = line[:_NOISE_LINE_BYTES].decode("utf-8", "backslashreplace").strip()
            self._noise.append(printable(text))


class Patience:
    """Suspends the check for silent hosts while this machine is too busy to hear them."""

    def __init__(self) -> None:
        self._look_at = self._excused_until = time.monotonic()

    def is_over(self) -> bool:
        """Return whether to check for silent hosts now; call it at least every `POLL_S` seconds."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        late_s = now - self._look_at
        if late_s > _LATE_S:
            self._excused_until = now + _LATE_FACTOR * late_s
        self._look_at = now + POLL_S
        return now > self._excused_until


# ------------------------------------------------------------------------------------- messages

_MAX_DEPTH: Final = 8
_MAX_VALUES: Final = 20_000
_MAX_INTEGER: Final = 2**63

_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "hello": {"isolation": str, "hostname": str},
    "prepared": {
        "folder": str,
        "address": str,
        "interface": str,
        "port": int | None,
    },
    "stored": {"digest": str},
    "warm": {"problem": str, "import_s": int | float},
    "claimed": {"problem": str},
    "warm-died": {"text": str},
    "started": {"rank": int, "pid": int},
    "said": {"rank": int, "data": dict},
    "trouble": {"what": TROUBLE_KINDS, "rank": int | None, "text": str},
    "exit": {
        "rank": int,
        "code": int | None,
        "signal": int | None,
        "ended": bool,
        "tail": list[str],
    },
    "collecting": {"reason": str},
    "file": {"name": str, "data": str, "last": bool},
    "done": {"reason": str, "clean": bool, "left": list[str], "num_oom_kills": int},
    "lost": {"text": str},
    "swept": {"left": list[str]},
    "facts": {"version": str, "executable": str | None},
    "reach": {"peers": list},
}
"""Required keys per kind, with their type or the allowed words."""


def _fits(value: object, shape: Any) -> bool:  # noqa: ANN401 - a type, a list of texts, or words
    """Return whether a value has a shape; booleans are not numbers."""
    if shape == list[str]:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if shape is TROUBLE_KINDS:
        return isinstance(value, str) and value in shape
    return isinstance(value, shape) and (shape is bool or not isinstance(value, bool))


def check_message(message: Message) -> Message:
    """Check a message of a host; return it with cleaned texts.

    Texts are cut, and control characters escaped. Unknown kinds and keys are accepted. Raises
    `WireError` if a key is missing, or a value has the wrong type or is too large.
    """
    kind = message["kind"]
    for key, shape in _SHAPES.get(kind, {}).items():
        if key not in message or not _fits(message[key], shape):
            value = printable(reprlib.repr(message.get(key)))
            raise WireError(f"a message {printable(kind)!r} has {key} {value}")
    return message if kind == "file" else clean(message)


def clean(message: Message) -> Message:
    """Return a copy of a message without control characters and overlong texts.

    Numbers that JSON does not have (``nan``) become texts. Raises `WireError` if the message is
    nested too deeply, or has too many values or too large a number.
    """
    num_values = 0

    def visit(value: Any, depth: int) -> Any:  # noqa: ANN401 - JSON
        nonlocal num_values
        num_values += 1
        if depth > _MAX_DEPTH or num_values > _MAX_VALUES:
            text = f"a message is nested deeper than {_MAX_DEPTH} or has over {_MAX_VALUES} values"
            raise WireError(text)
        if isinstance(value, str):
            return printable(value, TEXT_CHARACTERS)
        if isinstance(value, list):
            return [visit(entry, depth + 1) for entry in value]
        if isinstance(value, dict):
            return {printable(key): visit(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
            raise WireError("a message has a number of more than 63 bits")
        return value

    cleaned: Message = visit(message, 0)
    return cleaned
