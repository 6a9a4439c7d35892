"""After an agent or a controller was lost: end and remove what it may have left, and verify it."""

import contextlib
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from amp_ray.errors import HostError
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.link import AgentLink, AgentSettings

if TYPE_CHECKING:
    from amp_ray.runtime.hosts.messages import Message

_TIMEOUT_S: Final = 15.0
"""More than an agent waits for a process that hangs in the kernel."""

_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a lost agent may have left on a host."""

    tag: str
    folder: str

    @property
    def folders(self) -> list[str]:
        """Names of the trial's folder and of the warm process's."""
        return [self.folder, f"{self.tag}-warm"]


def sweep_host(host: Host, settings: AgentSettings, leftovers: Iterable[Leftover]) -> list[str]:
    """Sweep a host with an agent of its own.

    Returns the processes that would not go, each described; empty after a verified sweep.
    """
    with _Sweeper.on(host, settings) as sweeper:
        return [
            process
            for leftover in leftovers
            for process in sweeper.ask(tag=leftover.tag, base=settings.base, names=leftover.folders)
        ]


def sweep_trials(host: Host, settings: AgentSettings, trial_ids: Sequence[str]) -> list[str]:
    """Sweep a host of all attempts at some trials, whichever controller made them.

    Their agents are known by no tag any more; folders carry the trials' names, and processes the
    folders'. No other process and no other folder is touched. Returns the processes that would not
    go, each described; empty after a verified sweep.
    """
    with _Sweeper.on(host, settings) as sweeper:
        return sweeper.ask(tag=None, base=settings.base, trials=[*trial_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweeper:
    """An agent that only sweeps."""

    link: AgentLink
    inbox: "queue.SimpleQueue[Message]"

    @classmethod
    @contextlib.contextmanager
    def on(cls, host: Host, settings: AgentSettings) -> "Iterator[_Sweeper]":
        """Start it on a host, and end it."""
        host.connect()
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Without isolation: from inside a PID namespace the lost processes cannot be seen.
        outside = replace(settings, isolate=False)
        link = AgentLink(host, outside, lambda _tag, message: inbox.put(message))
        problem = link.why_not_started(min(settings.start_timeout_s, 2 * _TIMEOUT_S))
        if problem:
            link.close()
            raise HostError(f"{host.name}: {problem}")
        try:
            yield cls(link=link, inbox=inbox)
        except BaseException:
            link.close()  # who does not answer need not be waited for
            raise
        link.close()
        link.wait(settings.grace_s + settings.lease_s)

    def ask(self, **what: Any) -> list[str]:  # noqa: ANN401 - JSON
        """Have it sweep, and wait for what is left."""
        self.link.send(kind="sweep", **what)
        deadline = time.monotonic() + _TIMEOUT_S
        message: Message = {"kind": "none"}
        while message["kind"] != "swept":
            with contextlib.suppress(queue.Empty):
                message = self.inbox.get(timeout=_POLL_S)
            if time.monotonic() > deadline or not self.link.is_reading:
                message = {"kind": "lost", "text": "no answer to a sweep"}
            if message["kind"] == "lost":
                raise HostError(f"{self.link.host.name}: {message['text']}")
        left: list[str] = message["left"]
        return left
