"""An agent on this machine and its answers, message by message."""

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_ray.runtime.hosts.host import LocalHost
from amp_ray.runtime.hosts.link import AgentLink, AgentSettings, Inbox
from support.waiting import HANG_GUARD_S

pytestmark = pytest.mark.integration


class Talk:
    """An agent and the messages that it sends."""

    def __init__(self, base: Path) -> None:
        """Start the agent."""
        self.inbox: Inbox = queue.SimpleQueue()
        host = LocalHost()
        self.base, self.addresses = str(base), list(host.addresses)
        settings = AgentSettings(base=self.base, grace_s=0.2)
        self.link = AgentLink(host, settings, self.inbox)

    def prepare(self, name: str) -> None:
        self.link.send(
            kind="prepare",
            name=name,
            addresses=self.addresses,
            port=True,
        )

    def begin(self, program: str) -> None:
        rank = {"rank": 0, "argv": [sys.executable, "-c", program], "environment": {}}
        self.link.send(
            kind="job",
            files={},
            cwd=None,
            events=False,
            slots=[0],
            ranks=[rank],
            deadline_s=HANG_GUARD_S,
            settle_s=0.2,
            collect=[],
            words=[],
            collect_bytes=1,
            collect_bytes_in_all=1,
        )

    def wait_for(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind; check that no message before it ends a job."""
        while True:
            link, message = self.inbox.get(timeout=HANG_GUARD_S)
            link.make_room()
            if message["kind"] == kind:
                return message
            assert message["kind"] != "done", message


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    agent = Talk(tmp_path)
    yield agent
    agent.link.close()
    assert agent.link.wait(HANG_GUARD_S)
    assert [*tmp_path.iterdir()] == []


def test_a_stop_that_comes_after_the_end_is_not_answered(talk: Talk) -> None:
    talk.prepare("first")
    talk.wait_for("prepared")
    talk.begin("pass")
    assert talk.wait_for("done")["reason"] == "exited"
    talk.link.send(kind="stop", reason="stopped")
    talk.prepare("second")
    assert talk.wait_for("prepared")["folder"].endswith("/second")


def test_a_stop_before_the_start_removes_the_folder(talk: Talk) -> None:
    talk.prepare("first")
    talk.wait_for("prepared")
    talk.link.send(kind="stop", reason="stopped")
    assert talk.wait_for("done")["reason"] == "stopped"
    assert not Path(talk.base, "first").exists()
