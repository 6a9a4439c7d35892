import queue
import threading

import pytest

from amp_ray.runtime.hosts.messages import Inbox


def fill(inbox: Inbox, number: int) -> None:
    for each in range(number):
        inbox.put("a", {"number": each})


def test_messages_come_out_in_order() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put("a", {"number": number})
    assert [inbox.get(1.0)[1]["number"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        inbox.get(0.01)


def test_who_says_too_much_waits_and_nobody_else_does() -> None:
    inbox = Inbox()
    flood = threading.Thread(target=fill, args=(inbox, 1000))
    flood.start()
    flood.join(0.2)
    assert flood.is_alive()
    inbox.put("b", {})
    found = [inbox.get(10.0) for _ in range(1001)]
    flood.join()
    assert [tag for tag, _ in found].index("b") < 20
    assert [message["number"] for tag, message in found if tag == "a"] == [*range(1000)]


def test_who_is_gone_waits_for_nobody() -> None:
    inbox = Inbox()
    flood = threading.Thread(target=fill, args=(inbox, 100_000))
    flood.start()
    inbox.forget("a")
    flood.join(60.0)
    assert not flood.is_alive()
