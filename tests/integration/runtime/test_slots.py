"""Slots belong to one study at a time."""

import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from amp_ray.runtime.hosts import host_group
from amp_ray.runtime.hosts.agent.resources import DEVICE_VARIABLE
from amp_ray.runtime.hosts.host import LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured, Outcome, Unreachable
from support.waiting import HANG_GUARD_S

pytestmark = pytest.mark.integration

PROGRAM = """
import json, os
json.dump({"trial_id": os.environ["TRIAL"], "step_s": [1.0, 1.0]}, open("result.json", "w"))
"""


class Trials:
    """Trials on devices of this machine that no other test uses."""

    def __init__(self, folder: Path) -> None:
        """Choose unique names for the devices."""
        self.folder = folder
        self.settings = AgentSettings(base=str(folder / "host"), lease_s=120.0, heartbeat_s=0.3)
        token = secrets.token_hex(4)
        self.environment = {DEVICE_VARIABLE: f"GPU-{token}-0,GPU-{token}-1"}

    def launcher(self, *names: str) -> Launcher:
        hosts = [LocalHost(name, environment=self.environment) for name in names or ("a",)]
        return Launcher(hosts, self.settings)

    def refused(self, launcher: Launcher, trial_id: str, *places: tuple[str, int]) -> str:
        """Run a trial that does not wait for slots; return why it cannot have them."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_group, "_ENDING_S", -self.settings.lease_s)
            outcome = self.run(launcher, trial_id, *places)
        assert isinstance(outcome, Unreachable), outcome
        assert outcome.host == "a"
        return outcome.reason

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
    """Trials in the test's folder."""
    return Trials(tmp_path)


def test_a_second_study_on_a_slot_is_refused_with_who_holds_it(trials: Trials) -> None:
    with trials.launcher() as first:
        assert isinstance(trials.run(first, "study-1"), Measured)
        with trials.launcher() as second:
            reason = trials.refused(second, "study-2")
            assert "a: slot 0 is in use by" in reason
            assert ": study-1 (process " in reason
            assert isinstance(trials.run(second, "study-3", ("a", 1)), Measured)
            assert "slot 1 is in use by" in trials.refused(first, "study-4", ("a", 0), ("a", 1))
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
        reason = trials.refused(second, "study-2")
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
