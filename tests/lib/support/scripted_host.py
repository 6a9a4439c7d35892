"""A host without a machine: a script decides the answers of its agent."""

import contextlib
import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.agent.wire import (
    FROM_AGENT,
    FROM_CONTROLLER,
    LENGTH_DIGITS,
    Seal,
    pieces,
    unpack,
)
from amp_ray.runtime.hosts.host import Channel
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Outcome

Message = dict[str, Any]

Script = Callable[[Message], Iterable[Message | bytes]]
"""Returns the agent's answers to a message of the controller; bytes are sent unchanged.

In a ``job`` message, ``files`` has the files' contents.
"""

FOLDER: Final = "/scripted"

# Scripted hosts give no sign of life: no machine is so busy that a trial outlasts this lease.
SETTINGS: Final = AgentSettings(
    lease_s=600.0, heartbeat_s=0.1, grace_s=0.1, settle_s=0.05, start_timeout_s=600.0
)
IMPATIENT: Final = replace(SETTINGS, lease_s=2.0)
"""For tests of hosts that fall silent, whose end they wait for."""
RESULT: Final = b'{"trial_id": "t", "step_s": [0.5]}'
EXIT: Final[Message] = {
    "kind": "exit",
    "rank": 0,
    "code": 0,
    "signal": None,
    "ended": False,
    "tail": [],
}
DONE: Final[Message] = {
    "kind": "done",
    "reason": "exited",
    "clean": True,
    "left": [],
    "num_oom_kills": 0,
}


class ScriptedHost:
    """A host for tests of code that talks to agents; see ``Host``."""

    def __init__(
        self, name: str, script: Script, *, refuses: str | None = None, greets: bool = True
    ) -> None:
        """Take the script.

        Every connection fails with the text ``refuses``, if there is one; a
        ``close_channel()`` within ``script`` ends the connection.
        """
        self.name = name
        self.addresses = (name,)
        self.python = "python"
        self.shares_slots = True
        self.heard: list[Message] = []
        self.num_agents = 0
        self._script = script
        self._refuses = refuses
        self._greets = greets
        self._channels: list[ScriptedChannel] = []

    def connect(self) -> None:
        """Succeed, unless the host ``refuses``."""
        if self._refuses is not None:
            raise HostError(self._refuses)

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start another scripted agent."""
        del argv
        self.num_agents += 1
        self._channels.append(ScriptedChannel(self._answer, greets=self._greets))
        return self._channels[-1]

    def say(self, message: Message) -> None:
        """Let the last agent send a message that is no answer."""
        self._channels[-1].say(message)

    def close_channel(self) -> None:
        """End the connection to the last agent."""
        self._channels[-1].close()

    def close(self) -> None:
        """Do nothing."""

    def _answer(self, message: Message) -> Iterable[Message | bytes]:
        self.heard.append(message)
        return self._script(message)


class ScriptedChannel:
    """The controller's side of a scripted agent."""

    def __init__(self, answer: Script, *, greets: bool = True) -> None:
        self._answer = answer
        self._greets = greets
        self._output: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._input = b""
        self._has_bundle = False
        self._start: Message | None = None
        self._ends: tuple[Seal, Seal] | None = None
        self._contents: defaultdict[str, bytes] = defaultdict(bytes)

    def read(self) -> bytes:
        """Wait for the next answer."""
        return self._output.get()

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Take bytes; answer every complete line after the bundle."""
        del given_up
        self._input += data
        if not self._has_bundle:
            end = LENGTH_DIGITS + int(self._input[:LENGTH_DIGITS])
            if len(self._input) < end:
                return
            self._input = self._input[end:]
            self._has_bundle = True
        *lines, self._input = self._input.split(b"\n")
        for line in filter(None, lines):
            message = self._take(line)
            for answer in self._answer(message) if message is not None else ():
                self.say(answer)

    def say(self, message: Message | bytes) -> None:
        """Send any line of bytes, or a message, which is sealed with the agent's key."""
        if isinstance(message, bytes):
            self._output.put(message + b"\n")
        elif self._ends is not None:
            self._output.put(self._ends[0].seal(message))

    def close(self) -> None:
        """End the output."""
        with contextlib.suppress(ValueError):
            self._output.put(b"")

    def _take(self, line: bytes) -> Message | None:
        """Read a line as the agent does: settings, key, then messages."""
        if self._start is None:
            self._start = json.loads(line)
            return None
        if self._ends is None:
            key = bytes.fromhex(line.decode())
            self._ends = Seal(key, FROM_AGENT), Seal(key, FROM_CONTROLLER)
            if self._greets:
                self.say({"kind": "hello", "isolation": "none", "hostname": "scripted"})
            return self._start
        message = self._ends[1].open(line)
        assert message is not None, "every message is the controller's"
        if message["kind"] == "put":
            self._contents[message["digest"]] += unpack(message["data"])
        elif message["kind"] == "job":
            message["files"] = {
                name: self._contents[digest] for name, digest in message["files"].items()
            }
        return message


def well_behaved(message: Message) -> Iterable[Message | bytes]:
    """Answer like the agent of a host where all ranks succeed, but leave no measurement."""
    kind = message.get("kind")
    if kind == "prepare":
        prepared = {"folder": FOLDER, "address": "192.0.2.1", "interface": "eth0", "port": 20000}
        yield {"kind": "prepared", **prepared}
    elif kind == "claim":
        yield {"kind": "claimed", "problem": ""}
    elif kind == "put" and message["last"]:
        yield {"kind": "stored", "digest": message["digest"]}
    elif kind == "job":
        for rank in message["ranks"]:
            yield {**EXIT, "rank": rank["rank"]}
        yield DONE
    elif kind == "stop":
        yield {**DONE, "reason": "stopped"}
    elif kind == "sweep":
        yield {"kind": "swept", "left": []}


def file_messages(name: str, content: bytes) -> Iterable[Message]:
    """Return the messages in which an agent sends a file."""
    return [{"kind": "file", "name": name, **piece} for piece in pieces(content)]


def with_result(message: Message) -> Iterable[Message | bytes]:
    """Answer like the agent of a host whose ranks succeed and leave a measurement."""
    if message.get("kind") == "job":
        yield from file_messages("result.json", RESULT)
    yield from well_behaved(message)


def instead(kind: str, *answers: Message | bytes) -> Script:
    """Return a script that answers one kind of message with ``answers``, perhaps none."""

    def script(message: Message) -> Iterable[Message | bytes]:
        return answers if message.get("kind") == kind else well_behaved(message)

    return script


def launch_on(*names: str, **options: Any) -> Launch:  # noqa: ANN401 - Launch's own
    """Describe a trial with a rank on each host."""
    commands = rank_commands(["run"], [(name, 0) for name in names])
    values = {"files": {}, "environment": {}, "timeout_s": 600.0, "commands": commands, **options}
    return Launch(trial_id="t", **values)


def run_on(
    folder: Path,
    *hosts: ScriptedHost,
    settings: AgentSettings = SETTINGS,
    **options: Any,  # noqa: ANN401
) -> Outcome:
    """Run the trial of `launch_on` on these hosts."""
    with Launcher(hosts, settings) as launcher:
        return launcher.run(launch_on(*(host.name for host in hosts), **options), folder / "t")
