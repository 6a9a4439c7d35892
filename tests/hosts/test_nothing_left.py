"""Whatever ends a trial, no process and no file of it stays on a host that is up."""

import dataclasses
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.outcome import Crashed, Measured

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench

pytestmark = pytest.mark.hosts

STUBBORN = """
def stay(*, session, twice):
    if os.fork() == 0:
        if twice and os.fork():
            os._exit(0)
        if session:
            os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(60)
stay(session=False, twice=False)
stay(session=True, twice=False)
stay(session=True, twice=True)
time.sleep(0.1)
"""

CONTROLLER = """
import json, pathlib, sys
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.inputs.experiment import SshSettings
from amp_ray.trials.launch import Launch, rank_commands
known_hosts, identity, folder, program, *hosts = sys.argv[1:]
settings = SshSettings(known_hosts=known_hosts, identities=(identity,), config=None, user="root",
                       python=sys.executable)
commands = rank_commands([sys.executable, "stand_in.py"], [(host, 0) for host in hosts])
launch = Launch(trial_id="t", commands=commands, files={"stand_in.py": program.encode()},
                environment={})
with Launcher([SshHost(host, settings) for host in hosts]) as launcher:
    launcher.run(launch, pathlib.Path(folder))
"""


def test_children_that_ignore_signals_end_with_a_trial_that_succeeds(
    bench: "Bench", launcher: Launcher
) -> None:
    outcome = bench.run(launcher, STUBBORN + "result()")
    assert isinstance(outcome, Measured)
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


def test_children_that_ignore_signals_end_with_a_trial_that_fails(
    bench: "Bench", launcher: Launcher
) -> None:
    outcome = bench.run(launcher, STUBBORN + "sys.exit(rank)")
    assert isinstance(outcome, Crashed)
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


def test_a_stopped_process_ends_too(bench: "Bench", launcher: Launcher) -> None:
    program = (
        f"if rank == 0: os.kill(os.getpid(), {signal.SIGSTOP:d})\ntime.sleep(0.2); sys.exit(3)"
    )
    outcome = bench.run(launcher, program)
    assert isinstance(outcome, Crashed)
    assert outcome.rank == 1
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_controller_is_ended(bench: "Bench", number: signal.Signals) -> None:
    program = bench.preface + STUBBORN + "ready(); time.sleep(60)"
    cluster = bench.cluster
    names = [host.address for host in cluster.hosts]
    argv = [sys.executable, "-c", CONTROLLER, str(cluster.known_hosts), str(cluster.identity)]
    argv += [str(bench.folder / "trial"), program, *names]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as controller:
        bench.wait_until_ready()
        controller.send_signal(number)
        controller.wait()
        bench.wait_for(lambda: not any(cluster.programs(host) for host in cluster.hosts))
    assert [bench.folders_on(host) for host in cluster.hosts] == [[], []]


def test_the_controller_is_frozen(bench: "Bench") -> None:
    program = bench.preface + "ready(); time.sleep(60)"
    cluster = bench.cluster
    names = [host.address for host in cluster.hosts]
    argv = [sys.executable, "-c", CONTROLLER, str(cluster.known_hosts), str(cluster.identity)]
    argv += [str(bench.folder / "trial"), program, *names]
    with subprocess.Popen(argv) as controller:
        bench.wait_until_ready()
        controller.send_signal(signal.SIGSTOP)
        try:
            bench.wait_for(lambda: not any(cluster.programs(host) for host in cluster.hosts))
        finally:
            controller.kill()


def test_a_log_that_fills_the_disk_is_told_and_the_last_words_arrive(small_bench: "Bench") -> None:
    program = "if rank == 1:\n    print('x' * (6 << 20))\n    print('the end')\n    sys.exit(3)"
    with small_bench.launcher() as launcher:
        outcome = small_bench.run(launcher, program)
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank) == ("disk", 1)
    tails = [event["tail"] for event in small_bench.events() if event["kind"] == "exit"]
    assert any("the end" in tail for tail in tails)


def test_a_full_disk_alone_does_not_undo_a_measurement(small_bench: "Bench") -> None:
    program = "if rank == 1: print('x' * (6 << 20))\nresult()"
    with small_bench.launcher() as launcher:
        assert isinstance(small_bench.run(launcher, program), Measured)


def test_a_folder_that_cannot_be_made_is_told(bench: "Bench") -> None:
    settings = dataclasses.replace(bench.settings, base="/proc/nowhere")
    with bench.launcher(settings) as launcher:
        outcome = bench.run(launcher, "result()")
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "disk"
    assert "/proc/nowhere" in outcome.reason
