"""However a trial ends, no process and no file of it stays on a host that is up."""

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import WarmUp
from amp_ray.trials.outcome import Crashed, Measured, Unreachable
from support.launching import warm
from support.trial_runs import events_of, were_warm
from support.waiting import wait_for

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

SLEEP = "ready(); time.sleep(600)"

CONTROLLER = """
import json, pathlib, sys
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.inputs.experiment import SshSettings
from amp_ray.trials.launch import Launch, rank_commands
known_hosts, identity, folder, program, *hosts = sys.argv[1:]
settings = SshSettings(known_hosts=known_hosts, identities=(identity,), config=None, user="root",
                       python=sys.executable)
commands = rank_commands([sys.executable, "stand_in.py"], [(host, 0) for host in hosts])
launch = Launch(trial_id="t", commands=commands, files={"stand_in.py": program.encode()},
                environment={})
agents = AgentSettings(lease_s=10.0)
with Launcher([SshHost(host, settings) for host in hosts], agents) as launcher:
    launcher.run(launch, pathlib.Path(folder))
"""


def test_children_that_ignore_signals_end_with_their_trial(
    bench: "Bench", launcher: Launcher
) -> None:
    for end, outcome in (("result()", Measured), ("sys.exit(rank)", Crashed)):
        assert isinstance(bench.run(launcher, STUBBORN + end), outcome)
        assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


def test_a_stopped_process_ends_too(bench: "Bench", launcher: Launcher) -> None:
    program = (
        f"if rank == 0: os.kill(os.getpid(), {signal.SIGSTOP:d})\ntime.sleep(0.2); sys.exit(3)"
    )
    outcome = bench.run(launcher, program)
    assert isinstance(outcome, Crashed)
    assert outcome.rank == 1
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


@contextmanager
def controller_of(bench: "Bench", program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a trial in a separate process; wait until its ranks have started."""
    cluster = bench.cluster
    names = [host.address for host in cluster.hosts]
    argv = [sys.executable, "-c", CONTROLLER, str(cluster.known_hosts), str(cluster.identity)]
    folder = bench.folder / secrets.token_hex(4)
    argv += [str(folder), bench.preface + program, *names]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as controller:
        try:
            bench.wait_until_ready()
            yield controller
            wait_for(lambda: not any(cluster.programs(host) for host in cluster.hosts))
        finally:
            controller.kill()


def test_the_controller_is_ended(bench: "Bench") -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with controller_of(bench, STUBBORN + "ready(); time.sleep(600)") as controller:
            controller.send_signal(number)
            controller.wait()
        assert [bench.folders_on(host) for host in bench.cluster.hosts] == [[], []]


def test_the_controller_is_frozen(bench: "Bench") -> None:
    with controller_of(bench, SLEEP) as controller:
        controller.send_signal(signal.SIGSTOP)


def test_a_log_that_fills_the_disk_is_told_unless_there_is_a_measurement(
    small_bench: "Bench",
) -> None:
    fill = "if rank == 1:\n    print('x' * (6 << 20))\n"
    with small_bench.launcher() as launcher:
        outcome = small_bench.run(launcher, fill + "    print('the end')\n    sys.exit(3)")
        assert isinstance(outcome, Crashed)
        assert (outcome.kind, outcome.rank) == ("disk", 1)
        tails = [event["tail"] for event in events_of(small_bench.last, "exit")]
        assert any("the end" in tail for tail in tails)
        assert isinstance(small_bench.run(launcher, fill + "result()"), Measured)


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
    launcher.group.sweep()


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
        assert launcher.group.sweep() == {second.address: []}
        wait_for(lambda: bench.cluster.programs(second) == ())  # the sweeping agent goes last
        assert bench.folders_on(second) == []


def test_ranks_are_forked_and_nothing_but_the_warm_process_stays(bench: "Bench") -> None:
    warm_up = WarmUp(python=sys.executable, modules=("decimal", "gc:collect"))
    with bench.launcher(warm_up=warm_up) as launcher:
        assert [answer["problem"] for answer in warm(launcher).values()] == ["", ""]
        before = [bench.cluster.programs(host) for host in bench.cluster.hosts]
        program = "assert 'decimal' in sys.modules\nimport decimal\nresult()"
        assert isinstance(bench.run(launcher, program, slots=2), Measured)
        assert were_warm(bench.last) == [True] * 4
        outcome = bench.run(launcher, "os.setsid(); sys.exit(rank)")
        assert isinstance(outcome, Crashed)
        assert outcome.rank == 1
        assert isinstance(bench.run(launcher, "result()"), Measured)
        assert [bench.cluster.programs(host) for host in bench.cluster.hosts] == before
