"""Agents are started in parallel, and each host may take its time."""

import queue
import threading
from pathlib import Path

import pytest

from amp_ray.errors import HostError, InterruptedTrialError
from amp_ray.runtime.hosts.host_group import in_parallel
from amp_ray.runtime.hosts.link import AgentLink, AgentSettings, Inbox, Message
from amp_ray.runtime.launch.launcher import Launcher
from support.launching import warm
from support.scripted_host import ScriptedHost, well_behaved


def test_a_start_that_takes_longer_than_the_lease_is_no_lost_host() -> None:
    host = ScriptedHost("a", well_behaved, greets=False)
    settings = AgentSettings(lease_s=0.2, heartbeat_s=0.1)
    hello = {"kind": "hello", "isolation": "none", "hostname": "a"}
    with Launcher([host], settings) as launcher:
        threading.Timer(1.0, host.say, [hello]).start()
        assert warm(launcher) == {}


def test_an_agent_that_never_starts_is_told_with_what_came_instead() -> None:
    words: list[Message | bytes] = [b"Welcome \x1b[31m", {"kind": "started", "rank": 0, "pid": 7}]
    host = ScriptedHost("a", lambda _message: words, greets=False)
    inbox: Inbox = queue.SimpleQueue()
    link = AgentLink(host, AgentSettings(), inbox)
    inbox.get(timeout=600)  # what came before has been read
    with pytest.raises(HostError, match="a: the agent did not start within 0 s: Welcome"):
        link.wait_for_start(0.0)
    link.close()


def test_waiting_for_a_start_can_be_interrupted() -> None:
    host = ScriptedHost("a", lambda _message: [], greets=False)
    with Launcher([host]) as launcher:
        threading.Timer(0.5, launcher.group.interrupted.set).start()
        with pytest.raises(InterruptedTrialError):
            warm(launcher)


def test_many_hosts_are_opened_in_waves_each_with_the_whole_limit(tmp_path: Path) -> None:
    running: list[str] = []
    most = []
    names = [f"host{number}" for number in range(100)]
    meeting = threading.Barrier(10)  # waits until so many hosts are opened at the same time

    def work(name: str) -> str:
        running.append(name)
        most.append(len(running))
        meeting.wait(600)
        running.remove(name)
        return name.upper()

    assert in_parallel(work, names) == {name: name.upper() for name in names}
    assert 10 <= max(most) <= 32
    hosts = [ScriptedHost(name, well_behaved) for name in names]
    with Launcher(hosts, AgentSettings(base=str(tmp_path))) as launcher:
        assert warm(launcher) == {}
    assert all(host.num_agents == 1 for host in hosts)


def test_after_an_interruption_no_further_host_is_begun() -> None:
    begun = []
    interrupted = threading.Event()
    threads: list[threading.Thread] = []

    def work(name: str) -> None:
        begun.append(name)
        threads.append(threading.current_thread())
        interrupted.wait(60)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        in_parallel(work, [str(number) for number in range(200)], meanwhile=stop)
    interrupted.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(begun) <= 32
