"""Slots belong to one study at a time, and a host may take its time to start."""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.agent.resources import DEVICE_VARIABLE
from amp_ray.runtime.hosts.agents import in_parallel
from amp_ray.runtime.hosts.host import Channel, LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured, Outcome, Unreachable
from support.launching import warm
from support.scripted_host import ScriptedHost, well_behaved

pytestmark = pytest.mark.integration

HANG_GUARD_S = 60.0
PROGRAM = """
import json, os
json.dump({"trial_id": os.environ["TRIAL"], "step_s": [1.0, 1.0]}, open("result.json", "w"))
"""


class Trials:
    """Trials on devices of this machine that no other test has."""

    def __init__(self, folder: Path) -> None:
        """Name the devices."""
        self.folder = folder
        self.settings = AgentSettings(base=str(folder / "host"), lease_s=10.0, heartbeat_s=0.3)
        token = secrets.token_hex(4)
        self.environment = {DEVICE_VARIABLE: f"GPU-{token}-0,GPU-{token}-1"}

    def launcher(self, *names: str) -> Launcher:
        hosts = [LocalHost(name, environment=self.environment) for name in names or ("a",)]
        return Launcher(hosts, self.settings)

    def run(self, launcher: Launcher, trial_id: str, *places: tuple[str, int]) -> Outcome:
        argv = [sys.executable, "-c", PROGRAM]
        launch = Launch(
            trial_id=trial_id,
            commands=rank_commands(argv, places or [("a", 0)]),
            files={},
            environment={"TRIAL": trial_id},
            timeout_s=HANG_GUARD_S,
        )
        return launcher.run(launch, self.folder / trial_id)


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    """Trials in a folder of the test's own."""
    return Trials(tmp_path)


def test_a_second_study_on_a_slot_is_refused_with_who_holds_it(trials: Trials) -> None:
    with trials.launcher() as first:
        assert isinstance(trials.run(first, "study-1"), Measured)
        with trials.launcher() as second:
            outcome = trials.run(second, "study-2")
            assert isinstance(outcome, Unreachable), outcome
            assert "a: slot 0 is in use by" in outcome.reason
            assert ": study-1 (process " in outcome.reason
            assert outcome.host == "a"
            assert isinstance(trials.run(second, "study-3", ("a", 1)), Measured)
            refused = trials.run(first, "study-4", ("a", 0), ("a", 1))
            assert isinstance(refused, Unreachable)
            assert "slot 1 is in use by" in refused.reason
        assert isinstance(trials.run(first, "study-5", ("a", 0), ("a", 1)), Measured)


def test_a_second_study_waits_for_one_that_is_about_to_end(trials: Trials) -> None:
    first = trials.launcher()
    assert isinstance(trials.run(first, "study-1"), Measured)
    thread = threading.Timer(0.5, first.close)
    thread.start()
    with trials.launcher() as second:
        assert isinstance(trials.run(second, "study-2"), Measured)
    thread.join()


def test_an_agent_that_is_killed_holds_nothing(trials: Trials) -> None:
    first = trials.launcher()
    assert isinstance(trials.run(first, "study-1"), Measured)
    with trials.launcher() as second:
        reason = str(trials.run(second, "study-2").reason)
        os.kill(int(reason.partition("(process ")[2].split()[0]), signal.SIGKILL)
        assert isinstance(trials.run(second, "study-3"), Measured)
    first.close()


def test_one_machine_under_two_names_runs_its_own_trial(trials: Trials) -> None:
    with trials.launcher("a", "b") as launcher:
        assert isinstance(trials.run(launcher, "t", ("a", 0), ("b", 0)), Measured)


def test_cores_of_this_machine_are_no_devices_of_anybody(trials: Trials) -> None:
    trials.environment = {}
    with trials.launcher() as first, trials.launcher() as second:
        assert isinstance(trials.run(first, "study-1"), Measured)
        assert isinstance(trials.run(second, "study-2"), Measured)


def test_names_of_others_that_only_look_like_claims_do_no_harm(trials: Trials) -> None:
    for name in ("amp-ray-slot/", "amp-ray-slot/a/b", "amp-ray-slot/x/0/o/no-number/1/u/\x1b[31m"):
        opened = socket.socket(socket.AF_UNIX)
        opened.bind(f"\0{name}{secrets.token_hex(4)}")
        with opened, trials.launcher() as launcher:
            assert isinstance(trials.run(launcher, secrets.token_hex(4)), Measured)


class SlowHost(LocalHost):
    """Takes its time until Python starts, as a login shell does that reads much."""

    START_S = 12.0

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Sleep first."""
        return super().open_channel(["sh", "-c", f'sleep {self.START_S}; exec "$@"', "sh", *argv])


def test_a_start_that_takes_longer_than_the_lease_is_no_lost_host(trials: Trials) -> None:
    settings = replace(trials.settings, lease_s=SlowHost.START_S - 1.0)
    with Launcher([SlowHost("a")], settings) as launcher:
        assert isinstance(trials.run(launcher, "t"), Measured)


def test_an_agent_that_never_starts_is_told_with_what_came_instead(trials: Trials) -> None:
    host = ScriptedHost("a", lambda _message: [b"Welcome \x1b[31m"], greets=False)
    settings = replace(trials.settings, start_timeout_s=0.5)
    with Launcher([host], settings) as launcher:
        outcome = trials.run(launcher, "t")
    assert isinstance(outcome, Unreachable)
    assert "a: the agent did not start within 0.5 s: Welcome" in outcome.reason


def test_waiting_for_a_start_can_be_interrupted(trials: Trials) -> None:
    host = ScriptedHost("a", lambda _message: [], greets=False)
    with Launcher([host], trials.settings) as launcher:
        threading.Timer(0.5, launcher.interrupt).start()
        with pytest.raises(Exception, match="interrupted"):
            trials.run(launcher, "t")


def test_many_hosts_are_opened_in_waves_each_with_the_whole_limit(tmp_path: Path) -> None:
    running: list[str] = []
    most = []
    names = [f"host{number}" for number in range(100)]

    def work(name: str) -> str:
        running.append(name)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(name)
        return name.upper()

    assert in_parallel(work, names) == {name: name.upper() for name in names}
    assert 1 < max(most) <= 32
    hosts = [ScriptedHost(name, well_behaved) for name in names]
    with Launcher(hosts, AgentSettings(base=str(tmp_path))) as launcher:
        assert warm(launcher) == {}
    assert all(host.num_agents == 1 for host in hosts)


def test_after_an_interruption_no_further_host_is_begun() -> None:
    begun = []

    def work(name: str) -> None:
        begun.append(name)
        time.sleep(0.3)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        in_parallel(work, [str(number) for number in range(200)], meanwhile=stop)
    time.sleep(1.0)
    assert len(begun) <= 32
