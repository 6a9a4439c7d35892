"""Failures that only real hosts show: whose the cause is, and agents that are killed."""

import dataclasses
import os
import signal
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.outcome import Crashed, Unreachable

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench

pytestmark = pytest.mark.hosts

SLEEP = "ready(); time.sleep(600)"


def test_the_first_real_cause_wins_over_its_peers_broken_connections(bench: "Bench") -> None:
    program = """
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 1:
    with socket.create_server(("", address[1])) as server:
        peer = server.accept()[0]
        peer.close()
        time.sleep(1)  # the peer's complaint arrives first
        raise ValueError("the reason")
while True:
    try:
        peer = socket.create_connection((os.environ["PEER"], address[1]))
        break
    except ConnectionRefusedError:  # not listening yet
        time.sleep(0.02)
with peer:
    if not peer.recv(1):
        raise ConnectionResetError("Connection reset by peer")
"""
    peer = {"PEER": bench.cluster.hosts[1].address}
    settings = dataclasses.replace(bench.settings, settle_s=60.0)
    with bench.launcher(settings) as launcher:
        outcome = bench.run(launcher, program, environment=peer)
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank) == ("crash", 1)
    exits = [event["rank"] for event in bench.events() if event["kind"] == "exit"]
    assert exits == [0, 1]


def test_the_agent_is_killed(bench: "Bench", launcher: Launcher) -> None:
    second = bench.cluster.hosts[1]
    program = "subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + SLEEP

    def kill_agents() -> None:
        for process in bench.cluster.programs(second):
            if "amp_ray_agent" in process.command:
                os.kill(process.pid, signal.SIGKILL)
                break

    outcome, _ = bench.run_and_inject(launcher, program, kill_agents)
    assert isinstance(outcome, Unreachable)
    launcher.agents.sweep()
    bench.wait_for(lambda: bench.cluster.programs(second) == ())  # the sweeping agent goes last


def test_the_sweep_finds_what_an_agent_without_namespace_left(bench: "Bench") -> None:
    second = bench.cluster.hosts[1]
    program = "subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + SLEEP

    def kill_agents() -> None:
        for process in bench.cluster.programs(second):
            if "amp_ray_agent" in process.command:
                os.kill(process.pid, signal.SIGKILL)

    settings = dataclasses.replace(bench.settings, isolate=False)
    with bench.launcher(settings) as launcher:
        outcome, _ = bench.run_and_inject(launcher, program, kill_agents)
        assert isinstance(outcome, Unreachable)
        assert [p.command for p in bench.cluster.programs(second)] == ["sleep 600"]
        assert launcher.agents.sweep() == {second.address: []}
        assert bench.cluster.programs(second) == ()
        assert bench.folders_on(second) == []
