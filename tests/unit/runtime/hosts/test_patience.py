"""No host is given up because this machine was too busy to listen to it."""

import time

import pytest

from amp_ray.runtime.hosts.link import POLL_S, Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of day, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def looks(patience: Patience, clock: list[float], seconds: float) -> int:
    """Ask often for a while; return how often there was something to look for."""
    end_s = clock[0] + seconds
    found = 0
    while clock[0] < end_s:
        clock[0] += POLL_S / 4
        found += patience.is_over()
    return found


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
