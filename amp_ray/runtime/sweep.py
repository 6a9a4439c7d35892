"""After an agent was lost: end and remove what it may have left, and verify that."""

import queue
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.errors import HostError
from amp_ray.runtime.host import Host
from amp_ray.runtime.link import AgentLink, AgentSettings, Message

_TIMEOUT_S: Final = 15.0
"""More than an agent waits for a process that hangs in the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Debt:
    """What a lost agent may have left on a host.

    Args:
        tag: Of the agent and all its descendants.
        folder: Name of the trial's folder.
    """

    tag: str
    folder: str


def sweep_host(host: Host, settings: AgentSettings, debts: Iterable[Debt]) -> list[str]:
    """Sweep a host with an agent of its own.

    Args:
        host: Connected or not.
        settings: Of the lost agents.
        debts: What to look for; nothing else is touched.

    Returns:
        The processes that would not go, each described; empty after a verified sweep.

    Raises:
        HostError: If the host cannot be reached or does not answer.
    """
    host.connect()
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    # Without isolation: from inside a PID namespace the lost agent's processes cannot be seen.
    outside = replace(settings, isolate=False)
    link = AgentLink(host, outside, lambda _tag, message: inbox.put(message))
    try:
        left: list[str] = []
        for debt in debts:
            link.send(kind="sweep", tag=debt.tag, base=settings.base, names=[debt.folder])
            left += _answer(inbox, host.name)
        return left
    finally:
        link.close()
        link.wait(_TIMEOUT_S)


def _answer(inbox: "queue.SimpleQueue[Message]", name: str) -> list[str]:
    """Wait for the result of a sweep."""
    message: Message = {"kind": "none"}
    while message["kind"] != "swept":
        try:
            message = inbox.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            message = {"kind": "lost", "text": f"no answer to a sweep within {_TIMEOUT_S} s"}
        if message["kind"] == "lost":
            text = f"{name}: {message['text']}"
            raise HostError(text)
    left: list[str] = message["left"]
    return left
