"""The lease on stdin counts the time in which somebody listened."""

import os
import time

import pytest

from amp_ray.runtime.hosts.agent.main import Stdio


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of day, to be set; file descriptors stay as they are."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "set_blocking", lambda _number, _blocking: None)
    return now


def listen(stdio: Stdio, clock: list[float], *, until_s: float, turn_s: float) -> str | None:
    while clock[0] < until_s:
        clock[0] += turn_s
        stdio.listen(readable=False)
    return stdio.over


def test_a_silent_controller_loses_its_lease(clock: list[float]) -> None:
    stdio = Stdio(b"key", lease_s=6.0, heartbeat_s=0.1)
    assert listen(stdio, clock, until_s=5.9, turn_s=0.25) is None
    assert listen(stdio, clock, until_s=6.5, turn_s=0.25) == "no sign of the controller for 6.0 s"


def test_a_host_that_was_too_busy_to_listen_keeps_the_lease(clock: list[float]) -> None:
    stdio = Stdio(b"key", lease_s=6.0, heartbeat_s=0.1)
    assert listen(stdio, clock, until_s=60.0, turn_s=20.0) is None
    assert listen(stdio, clock, until_s=65.5, turn_s=0.25) is None
    assert listen(stdio, clock, until_s=66.5, turn_s=0.25) is not None
