"""The controller's end of a probe: a short talk with one host, which keeps nothing of it."""

import contextlib
import json
import math
import queue
import reprlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final

from amp_ray.errors import HostError
from amp_ray.runtime.hosts import agent
from amp_ray.runtime.hosts.agent.bundle import BOOTSTRAP, LENGTH_DIGITS
from amp_ray.runtime.hosts.agent.wire import Lines, WireError, printable
from amp_ray.runtime.hosts.host import Channel, Host
from amp_ray.runtime.hosts.messages import clean
from amp_ray.trials.doctor.host_facts import Clock

Message = dict[str, Any]

AGENT_PYTHON: Final = (3, 8)
"""Oldest Python that can run the agent, and the probe with it."""

_MODULES: Final = (
    *("processes", "network", "wire", "stdio", "log", "rank", "job", "machine", "probe"),
)
"""In the order of their imports."""

_MAX_SHOWN: Final = 30
"""Characters of a kind that nobody knows."""

_NUM_NOISE_LINES: Final = 3
_MAX_NOISE: Final = 1000
"""Bytes of a line that is no message."""

_MAX_BYTES: Final = 4 * 2**20
"""Of all that a probe says: a few kilobytes are usual."""

_MAX_ANSWERS: Final = 100
"""A host is asked for its time, its facts and the way to its peers."""

_ANSWERS: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "old": {"version": str, "executable": (str, NoneType)},
    "time": {"time_s": (int, float)},
    "facts": {"version": str, "executable": (str, NoneType)},
    "reach": {"peers": list},
}
"""By kind: what has to be there, and of which type."""

_NUM_CLOCK_READINGS: Final = 5
_END_TIMEOUT_S: Final = 2.0

# Old enough to run everywhere: what comes after it could not even be parsed by an old Python.
_GUARD: Final = """
import json, sys
if sys.version_info < %r:
    version = "%%d.%%d.%%d" %% tuple(sys.version_info[:3])
    print(json.dumps({"kind": "old", "executable": sys.executable, "version": version}))
    sys.exit(0)
"""


def guarded(source: str) -> str:
    """Put a check of Python's own version in front of a program.

    Returns a program that, under too old a Python, prints one JSON object of kind ``old`` instead.
    """
    # As text within the program, since a file is parsed as a whole before any of it runs.
    return _GUARD % (AGENT_PYTHON,) + f"exec(compile({source!r}, 'amp_ray_probe', 'exec'))\n"


def software_script() -> str:
    """Return the program that the trial's Python runs to say what it has."""
    source = (Path(agent.__file__).parent / "software.py").read_text(encoding="utf-8")
    return guarded(source)


class Probe:
    """A probe on one host; it ends with ``close``, or with the connection."""

    def __init__(self, host: Host, *, limit_s: float) -> None:
        self.host = host
        self._noise: deque[str] = deque(maxlen=_NUM_NOISE_LINES)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._too_old: Message | None = None
        self._started_at = time.monotonic()
        self._first_at: float | None = None
        self._num_answers = 0
        self._channel: Channel = host.open_channel(
            [host.python, "-I", "-u", "-c", guarded(BOOTSTRAP), "probe"]
        )
        start = {"limit_s": math.ceil(limit_s)}
        self._listener = threading.Thread(
            target=self._listen, name=f"probe {host.name}", daemon=True
        )
        self._listener.start()
        self._write(_bundle() + json.dumps(start).encode() + b"\n")

    @property
    def start_s(self) -> float | None:
        """From the command to the first message: what the login's shell and Python took."""
        return None if self._first_at is None else self._first_at - self._started_at

    def ask(self, kind: str, timeout_s: float, **details: Any) -> Message:  # noqa: ANN401 - JSON
        """Ask one thing and wait for the answer.

        Returns the answer; of kind ``old`` where Python is too old for a probe.
        """
        if self._too_old is not None:
            return self._too_old
        self._write(json.dumps({"kind": kind, **details}).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise HostError(f"{self.host.name}: no answer within {timeout_s:g} s") from None
            if message["kind"] == "lost":
                self._inbox.put(message)
                raise HostError(f"{self.host.name}: {message['text']}")
            if message["kind"] == "old":  # said once, before it ends
                self._too_old = message
            if message["kind"] in {kind, "old"}:
                return message

    def clock(self, timeout_s: float) -> Clock | None:
        """Compare the host's clock with ours; the quickest of a few answers tells most.

        Returns the offset; None where Python is too old for a probe.
        """
        readings = []
        for _ in range(_NUM_CLOCK_READINGS):
            sent_s, start_s = time.time(), time.monotonic()
            message = self.ask("time", timeout_s)
            if message["kind"] == "old":
                return None
            trip_s = time.monotonic() - start_s
            offset_s = message["time_s"] - (sent_s + trip_s / 2)
            readings.append(Clock(offset_s=offset_s, uncertainty_s=trip_s / 2))
        return min(readings, key=lambda reading: reading.uncertainty_s)

    def close(self) -> None:
        """End it and whatever it has started; wait a moment until it has gone."""
        with contextlib.suppress(OSError):
            self._channel.close()
        self._listener.join(_END_TIMEOUT_S)

    def _write(self, data: bytes) -> None:
        """Write; whoever waits for an answer learns that it is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._channel.write(data)

    def _listen(self) -> None:
        """Sort messages from what a login shell or a failing interpreter prints."""
        lines = Lines()
        problem = ""
        num_bytes = 0
        try:
            while data := self._channel.read():
                num_bytes += len(data)
                if num_bytes > _MAX_BYTES:
                    text = f"it says more than {_MAX_BYTES // 2**20} MiB, as no probe does"
                    raise WireError(text)  # noqa: TRY301 - dropped like one that says the wrong
                for line in lines.feed(data):
                    self._hear(line)
            self._hear(lines.rest())
        except WireError as error:
            problem = f"not to be trusted: {error}"
            with contextlib.suppress(OSError, HostError):
                self._channel.close()
        except (OSError, HostError) as error:
            problem = str(error)
        text = problem or " / ".join(self._noise) or "the connection ended"
        self._inbox.put({"kind": "lost", "text": text})

    def _hear(self, line: bytes) -> None:
        """Take one line; one that is no JSON object with a kind is noise.

        Raises `WireError` if it is an answer that no probe gives.
        """
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
        if isinstance(message, dict) and "kind" in message:
            self._first_at = self._first_at or time.monotonic()
            self._num_answers += 1
            self._inbox.put(self._checked(message))
        elif line.strip():
            self._noise.append(printable(line[:_MAX_NOISE].decode("utf-8", "replace").strip()))

    def _checked(self, message: Message) -> Message:
        """Return an answer as it may be acted on.

        Raises `WireError` if it is none.
        """
        message = clean(message)
        kind = str(message["kind"])
        for key, known in _ANSWERS.get(kind, {"kind": ()}).items():
            if not isinstance(message.get(key), known):
                text = f"an answer {kind[:_MAX_SHOWN]!r} has {key} {reprlib.repr(message.get(key))}"
                raise WireError(text)
        if self._num_answers > _MAX_ANSWERS:
            raise WireError(f"more than {_MAX_ANSWERS} answers")
        return message


def _bundle() -> bytes:
    """Pack the probe's modules as the agent's are: the length in digits, then JSON."""
    folder = Path(agent.__file__).parent
    pairs = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    body = json.dumps(pairs).encode()
    return f"{len(body):0{LENGTH_DIGITS}d}".encode() + body
