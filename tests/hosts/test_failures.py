"""Every way in which a trial can fail: the right outcome, cause and rank, and nothing left."""

import dataclasses
import os
import signal
from typing import TYPE_CHECKING

import pytest

from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory, TimedOut, Unreachable

from .conftest import PROMPT_S

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench

pytestmark = pytest.mark.hosts

SLEEP = "ready(); time.sleep(600)"


def test_measured_when_all_ranks_end_well(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "result(peak_memory_bytes=7)", slots=2)
    assert isinstance(outcome, Measured)
    assert outcome.measured_s == 0.2
    assert outcome.num_warmup_steps == 1
    assert outcome.peak_memory_bytes == (7,)


def test_exit_0_without_a_result_is_a_failure(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "print('all went well')")
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.lines) == ("no-result", ("all went well",))


def test_a_result_of_another_trial_is_a_failure(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "sys.argv[1] = 'older'; result()")
    assert isinstance(outcome, Crashed)
    assert "older" in outcome.reason


def test_a_result_and_a_failed_rank_is_a_failure(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "result()\nif rank == 1: sys.exit(3)")
    assert isinstance(outcome, Crashed)
    assert outcome.rank == 1


def test_a_rank_that_raises(bench: "Bench", launcher: Launcher) -> None:
    program = "if rank == 3: raise ValueError('no such layer')\ntime.sleep(600)"
    outcome = bench.run(launcher, program, slots=2)
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank) == ("crash", 3)
    assert outcome.host == bench.cluster.hosts[1].address
    assert "ValueError: no such layer" in outcome.reason
    assert outcome.lines[-1] == "ValueError: no such layer"
    assert outcome.wall_s < PROMPT_S
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


def test_a_rank_that_is_killed(bench: "Bench", launcher: Launcher) -> None:
    program = f"if rank == 1: os.kill(os.getpid(), {signal.SIGKILL:d})\ntime.sleep(600)"
    outcome = bench.run(launcher, program)
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank) == ("killed", 1)
    assert outcome.wall_s < PROMPT_S


def test_an_allocation_that_fails(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "if rank == 1: bytearray(1 << 60)\ntime.sleep(600)")
    assert isinstance(outcome, OutOfMemory)
    assert outcome.rank == 1


def test_a_module_that_is_missing(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "import no_such_module")
    assert isinstance(outcome, Crashed)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in outcome.reason


def test_a_program_that_is_missing(bench: "Bench", launcher: Launcher) -> None:
    launch = bench.launch("")
    commands = tuple(
        dataclasses.replace(command, argv=("/no such program",)) for command in launch.commands
    )
    launch = dataclasses.replace(launch, commands=commands)
    outcome = launcher.run(launch, bench.folder / "trial")
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "start"
    assert "/no such program: No such file or directory" in outcome.reason


def test_a_hang_ends_at_the_deadline(bench: "Bench", launcher: Launcher) -> None:
    program = "print('step 3 begins')\ntime.sleep(0 if rank == 0 else 600)"
    outcome = bench.run(launcher, program, timeout_s=8.0)
    assert isinstance(outcome, TimedOut)
    assert outcome.lines == ("step 3 begins",)
    assert "rank 1" in outcome.reason
    assert outcome.wall_s < PROMPT_S
    assert [bench.ranks_on(host) for host in bench.cluster.hosts] == [[], []]


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


def test_a_taken_port_is_tried_once_more(bench: "Bench", launcher: Launcher) -> None:
    program = """
mark = os.path.expanduser("~/tried")
if rank == 0 and not os.path.exists(mark):
    open(mark, "w").close()
    servers = [socket.create_server(("", int(os.environ["MASTER_PORT"]))) for _ in range(2)]
result()
"""
    assert isinstance(bench.run(launcher, program), Measured)


def test_a_port_that_is_taken_for_ever_is_a_crash(bench: "Bench", launcher: Launcher) -> None:
    outcome = bench.run(launcher, "raise OSError(98, 'Address already in use')")
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "port"


def test_the_ssh_session_is_killed(bench: "Bench", launcher: Launcher) -> None:
    second = bench.cluster.hosts[1]
    outcome, seconds = bench.run_and_inject(
        launcher, SLEEP, lambda: bench.cluster.kill_ssh_sessions(second)
    )
    assert isinstance(outcome, Unreachable)
    assert outcome.host == second.address
    assert seconds < PROMPT_S
    assert isinstance(bench.run(launcher, "result()"), Measured)


def test_the_link_goes_down(bench: "Bench", launcher: Launcher) -> None:
    second = bench.cluster.hosts[1]
    outcome, seconds = bench.run_and_inject(
        launcher, SLEEP, lambda: bench.cluster.set_link(second, up=False)
    )
    assert isinstance(outcome, Unreachable)
    assert outcome.host == second.address
    assert seconds < PROMPT_S
    bench.cluster.set_link(second, up=True)
    assert isinstance(bench.run(launcher, "result()"), Measured)


def test_a_host_crashes(bench: "Bench", launcher: Launcher) -> None:
    second = bench.cluster.hosts[1]
    outcome, seconds = bench.run_and_inject(
        launcher, SLEEP, lambda: bench.cluster.kill_host(second)
    )
    assert isinstance(outcome, Unreachable)
    assert outcome.host == second.address
    assert seconds < PROMPT_S
    assert bench.ranks_on(bench.cluster.hosts[0]) == []


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
