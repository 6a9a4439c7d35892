"""The lease on stdin counts the time in which somebody listened."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from amp_ray.runtime.hosts.agent import main
from amp_ray.runtime.hosts.agent.main import Agent, Stdio


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


def test_a_folder_that_a_rank_still_writes_into_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    remove, removals = shutil.rmtree, list[str]()

    def rmtree(path: str, *, ignore_errors: bool) -> None:
        removals.append(path)
        if len(removals) > 1:
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setattr(main, "end_all", lambda *_: [])
    agent = Agent.__new__(Agent)
    vars(agent).update(
        _stdio=SimpleNamespace(over="the end"),
        _start={"grace_s": 0.0},
        _folder=str(folder),
        _remaining=[],
        **dict.fromkeys(("_job", "_warm", "_warm_folder")),
    )
    agent.run()
    assert removals == [str(folder)] * 2
    assert not folder.exists()
