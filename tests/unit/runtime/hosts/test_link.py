"""Messages of hosts wait for us in bounded room, and no host is given up because we are late."""

import queue
import time

import pytest

from amp_ray.runtime.hosts.link import POLL_S, AgentLink, AgentSettings, Inbox, Message, Patience
from support.scripted_host import ScriptedHost


def flooding(num_messages: int) -> tuple[AgentLink, Inbox]:
    """Return an agent that says much as soon as it has started, and its inbox."""
    messages = (
        {"kind": "said", "rank": 0, "data": {"n": number}} for number in range(num_messages)
    )
    inbox: Inbox = queue.SimpleQueue()
    link = AgentLink(ScriptedHost("a", lambda _: messages), AgentSettings(heartbeat_s=0.1), inbox)
    link.send(kind="begin")
    while inbox.qsize() < 8:
        time.sleep(0.01)
    time.sleep(0.2)
    assert inbox.qsize() == 8
    return link, inbox


def test_who_says_too_much_waits_and_all_of_it_comes_in_order() -> None:
    link, inbox = flooding(1000)
    messages: list[Message] = []
    while len(messages) < 1001:
        messages.append(inbox.get(timeout=600.0)[1])
        link.make_room()
    assert [message["data"]["n"] for message in messages[1:]] == [*range(1000)]
    link.close()


def test_who_is_left_waits_for_nobody() -> None:
    link, inbox = flooding(2000)
    link.close()
    assert link.wait(60.0)
    assert inbox.qsize() <= 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of day, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def looks(patience: Patience, clock: list[float], seconds: float) -> int:
    """Ask often for a while; return how often there was something to look for."""
    end_s = clock[0] + seconds
    number = 0
    while clock[0] < end_s:
        clock[0] += POLL_S / 4
        number += patience.is_over()
    return number


def test_silent_hosts_are_looked_for_about_once_per_poll(clock: list[float]) -> None:
    assert looks(Patience(), clock, 10.0) == pytest.approx(10.0 / POLL_S, rel=0.3)


def test_after_a_pause_of_this_machine_nobody_is_given_up_for_ten_times_as_long(
    clock: list[float],
) -> None:
    patience = Patience()
    assert looks(patience, clock, 1.0)
    clock[0] += 15.0
    assert not patience.is_over()
    assert looks(patience, clock, 145.0) == 0
    assert looks(patience, clock, 10.0) > 0
