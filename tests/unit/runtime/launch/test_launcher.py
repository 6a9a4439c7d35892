"""The launcher against agents that follow a script."""

import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.errors import HostError, InterruptedTrialError
from amp_ray.runtime.hosts.agent.wire import CHUNK_BYTES
from amp_ray.runtime.launch import launcher as module
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.trial_folder import HostFiles
from amp_ray.trials.launch import FOLDER as FOLDER_PLACEHOLDER
from amp_ray.trials.launch import WarmUp, rank_commands
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory, TimedOut, Unreachable
from amp_ray.trials.own_program.metrics import read_told
from amp_ray.trials.result import Measurement
from support.launching import warm
from support.scripted_host import (
    DONE,
    EXIT,
    FOLDER,
    IMPATIENT,
    SETTINGS,
    Message,
    Script,
    ScriptedHost,
    file_messages,
    instead,
    launch_on,
    run_on,
    well_behaved,
    with_result,
)


def ending(*, reason: str = "failed", **more: object) -> Script:
    """Make an agent whose ranks all end in some way."""

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") != "job":
            yield from well_behaved(message)
            return
        for rank in message["ranks"]:
            yield {**EXIT, "rank": rank["rank"], "code": None, **more}
        yield {**DONE, "num_oom_kills": 1, "reason": reason}

    return script


def test_a_result_of_the_first_host_is_a_measurement(tmp_path: Path) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", with_result), ScriptedHost("b", well_behaved))
    assert isinstance(outcome, Measured)


def test_a_result_of_another_host_is_none(tmp_path: Path) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", well_behaved), ScriptedHost("b", with_result))
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "no-result"


def sending(name: str) -> Script:
    """Make an agent whose ranks succeed and leave a damaged file."""

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            yield from file_messages(name, b"{")
        yield from well_behaved(message)

    return script


@pytest.mark.parametrize(
    ("file", "rank", "host", "words"),
    [
        ("metric-rank-1.json", 1, "b", "metric-rank-1.json is not what amp_ray_metric.py writes"),
        ("metric-rank-0.json", 0, "b", "(b sent it, and rank 0 runs on a)"),
    ],
)
def test_a_damaged_file_is_told_with_its_rank_and_the_host_that_sent_it(
    tmp_path: Path, file: str, rank: int, host: str, words: str
) -> None:
    launch = launch_on("a", "b", collect=("metric-rank-*.json",))

    def read(files: Mapping[str, bytes], trial_id: str) -> Measurement:
        return read_told(files, trial_id, num_warmup_steps=0)

    with Launcher(
        [ScriptedHost("a", well_behaved), ScriptedHost("b", sending(file))], SETTINGS
    ) as it:
        outcome = it.run(launch, tmp_path / "t", reader=read)
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank, outcome.host) == ("no-result", rank, host)
    assert words in outcome.reason


def test_only_the_first_host_is_asked_for_a_port(tmp_path: Path) -> None:
    hosts = ScriptedHost("a", well_behaved), ScriptedHost("b", well_behaved)
    run_on(tmp_path, *hosts)
    asked = [
        message["port"]
        for host in hosts
        for message in host.heard
        if message.get("port") is not None
    ]
    assert asked == [True, False]


def test_ranks_get_address_port_interface_and_folder(tmp_path: Path) -> None:
    host = ScriptedHost("a", well_behaved)
    run_on(
        tmp_path,
        host,
        commands=rank_commands(["run", f"{FOLDER_PLACEHOLDER}/x"], [("a", 0)]),
        environment={"A": "b"},
    )
    (job,) = [message for message in host.heard if message.get("kind") == "job"]
    (rank,) = job["ranks"]
    assert rank["argv"] == ["run", f"{FOLDER}/x"]
    expected = {
        "A": "b",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "20000",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert expected.items() <= rank["environment"].items()


def test_a_host_that_refuses_makes_the_trial_unreachable_and_starts_nothing(tmp_path: Path) -> None:
    other = ScriptedHost("a", well_behaved)
    outcome = run_on(tmp_path, other, ScriptedHost("b", well_behaved, refuses="b: key unknown"))
    assert outcome == Unreachable(reason="b: key unknown", host="b", wall_s=outcome.wall_s)
    assert not [message for message in other.heard if message.get("kind") == "prepare"]


@pytest.mark.parametrize("kind", ["prepare", "job"])
def test_silence_makes_the_trial_unreachable(tmp_path: Path, kind: str) -> None:
    other = ScriptedHost("a", instead("job"))
    outcome = run_on(tmp_path, other, ScriptedHost("b", instead(kind)), settings=IMPATIENT)
    assert isinstance(outcome, Unreachable)


def test_a_connection_that_ends_makes_the_trial_unreachable(tmp_path: Path) -> None:
    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            host.close_channel()
            return ()
        return well_behaved(message)

    host = ScriptedHost("a", script)
    outcome = run_on(tmp_path, host)
    assert isinstance(outcome, Unreachable)
    assert "the connection to the agent ended" in outcome.reason


def test_a_lease_that_ran_out_on_the_host_makes_the_trial_unreachable(tmp_path: Path) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", ending(ended=True, reason="lease")))
    assert isinstance(outcome, Unreachable)
    assert "no sign of life from here for 600.0 s" in outcome.reason


def test_what_an_interpreter_complains_about_is_the_reason(tmp_path: Path) -> None:
    def script(_message: Message) -> Iterable[Message | bytes]:
        yield b"bash: python: command not found"
        host.close_channel()

    host = ScriptedHost("a", script)
    outcome = run_on(tmp_path, host)
    assert isinstance(outcome, Unreachable)
    assert "bash: python: command not found" in outcome.reason


def test_a_lost_host_is_swept_before_it_is_used_again(tmp_path: Path) -> None:
    host = ScriptedHost("a", instead("job"))
    run_on(tmp_path, host, settings=IMPATIENT)
    first = host.heard[0]["tag"]
    sweeps = [message for message in host.heard if message.get("kind") == "sweep"]
    assert [message["tag"] for message in sweeps] == [first]
    assert sweeps[0]["names"][0].startswith("amp-ray-t-")


class CountingHost(ScriptedHost):
    """Counts how often its connection is closed."""

    num_closed = 0

    def close(self) -> None:
        """Count."""
        self.num_closed += 1


@pytest.mark.parametrize("when", ["in a trial", "between trials"])
def test_a_connection_that_lost_an_agent_is_made_anew(tmp_path: Path, when: str) -> None:
    """It may be as dead as the agent, and not know it yet."""
    host = CountingHost("a", instead("job") if when == "in a trial" else well_behaved)
    launch = launch_on("a")
    with Launcher([host], IMPATIENT if when == "in a trial" else SETTINGS) as launcher:
        launcher.run(launch, tmp_path / "first")
        assert host.num_closed == 0
        if when == "between trials":
            host.close_channel()
            wait_for_threads("agent a")
        launcher.run(launch, tmp_path / "second")
        assert host.num_closed == 1


def wait_for_threads(name: str) -> None:
    """Wait until no thread of a name is left: then its link knows that the agent is gone."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def test_processes_that_would_not_go_make_the_host_unreachable_for_the_next_trial(
    tmp_path: Path,
) -> None:
    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "sweep":
            yield {"kind": "swept", "left": ["7 python"]}
        elif message.get("kind") == "job":
            yield {**DONE, "reason": "deadline", "clean": False, "left": ["7 python"]}
        else:
            yield from well_behaved(message)

    with Launcher([ScriptedHost("a", script)], SETTINGS) as launcher:
        assert isinstance(launcher.run(launch_on("a"), tmp_path / "first"), TimedOut)
        second = launcher.run(launch_on("a"), tmp_path / "second")
    assert isinstance(second, Unreachable)
    assert "7 python" in second.reason


def test_the_kernels_memory_killer_is_told_from_other_kills(tmp_path: Path) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", ending(signal=9)))
    assert isinstance(outcome, OutOfMemory)


def test_a_taken_port_is_tried_once_more_and_not_for_ever(tmp_path: Path) -> None:
    host = ScriptedHost("a", ending(code=44))
    outcome = run_on(tmp_path, host)
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "port"
    assert len([message for message in host.heard if message.get("kind") == "job"]) == 2


def test_the_other_hosts_are_told_to_stop(tmp_path: Path) -> None:
    waiting = ScriptedHost("b", instead("job"))
    run_on(tmp_path, ScriptedHost("a", ending(code=1)), waiting)
    assert [message["reason"] for message in waiting.heard if message.get("kind") == "stop"] == [
        "stopped"
    ]


WARM_UP = WarmUp(python="python", modules=("json",))


def test_a_silent_agent_is_no_warm_one() -> None:
    with Launcher([ScriptedHost("a", well_behaved)], IMPATIENT, warm_up=WARM_UP) as launcher:
        assert "no sign of life" in warm(launcher)["a"]["problem"]


def test_warming_up_an_unreachable_host_is_an_error() -> None:
    host = ScriptedHost("a", well_behaved, refuses="a: key unknown")
    with (
        Launcher([host], SETTINGS, warm_up=WARM_UP) as launcher,
        pytest.raises(HostError, match="a: key unknown"),
    ):
        warm(launcher)


def test_an_agent_that_cannot_be_ended_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives signs of life, but does not do what it is told."""
    monkeypatch.setattr(module, "_MARGIN_S", 0.5)

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            beats.set()
            return ()
        return () if message.get("kind") == "stop" else well_behaved(message)

    host = ScriptedHost("a", script)
    beats = threading.Event()
    ended = threading.Event()

    def beat() -> None:
        beats.wait()
        while not ended.wait(SETTINGS.heartbeat_s):
            host.say({"kind": "alive"})

    thread = threading.Thread(target=beat)
    thread.start()
    outcome = run_on(tmp_path, host, timeout_s=0.1)
    ended.set()
    thread.join()
    assert isinstance(outcome, Unreachable)
    assert "did not end the trial in time" in outcome.reason


def test_events_of_ranks_are_heard_as_they_come(tmp_path: Path) -> None:
    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            yield {"kind": "said", "rank": 0, "data": {"event": "step", "step": 3}}
        yield from with_result(message)

    heard: list[Mapping[str, object]] = []
    with Launcher([ScriptedHost("a", script)], SETTINGS, listener=heard.append) as launcher:
        launcher.run(launch_on("a"), tmp_path / "t")
    assert heard == [{"event": "step", "step": 3}]


def interrupted_when(event: threading.Event, launcher: Launcher, folder: Path) -> None:
    """Run a trial that is interrupted by another thread."""

    def interrupt() -> None:
        event.wait(120)
        launcher.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(InterruptedTrialError):
        launcher.run(launch_on("a"), folder)
    thread.join()


def test_a_trial_can_be_interrupted_from_any_thread_and_another_run_after_it(
    tmp_path: Path,
) -> None:
    started = threading.Event()

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job" and not started.is_set():
            started.set()  # and run until the end
            return ()
        return with_result(message)

    with Launcher([ScriptedHost("a", script)], SETTINGS) as launcher:
        interrupted_when(started, launcher, tmp_path / "first")
        assert not (tmp_path / "first/outcome.json").exists()
        assert isinstance(launcher.run(launch_on("a"), tmp_path / "second"), Measured)


def test_an_interrupt_between_trials_does_nothing(tmp_path: Path) -> None:
    with Launcher([ScriptedHost("a", with_result)], SETTINGS) as launcher:
        launcher.interrupt()
        assert isinstance(launcher.run(launch_on("a"), tmp_path / "t"), Measured)


def test_waiting_for_a_warm_process_can_be_interrupted(tmp_path: Path) -> None:
    asked = threading.Event()

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "warm":
            asked.set()
        return well_behaved(message)

    host = ScriptedHost("a", script)
    with Launcher([host], SETTINGS, warm_up=WARM_UP) as launcher:
        interrupted_when(asked, launcher, tmp_path / "t")
    assert not [message for message in host.heard if message.get("kind") == "prepare"]


def warm_with(problem: str) -> Script:
    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "warm":
            yield {"kind": "warm", "problem": problem, "import_s": 0.1}
        yield from with_result(message)

    return script


def test_a_trial_waits_for_warm_processes_once(tmp_path: Path) -> None:
    host = ScriptedHost("a", warm_with(""))
    with Launcher([host], SETTINGS, warm_up=WARM_UP) as launcher:
        for number in range(2):
            outcome = launcher.run(launch_on("a"), tmp_path / str(number))
            assert isinstance(outcome, Measured)
        assert warm(launcher)["a"]["import_s"] == 0.1
    assert len([message for message in host.heard if message.get("kind") == "warm"]) == 1


def test_where_nothing_can_be_warmed_up_it_is_said_once_and_trials_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Launcher(
        [ScriptedHost("a", warm_with("no module torch"))], SETTINGS, warm_up=WARM_UP
    ) as launcher:
        for number in range(2):
            outcome = launcher.run(launch_on("a"), tmp_path / str(number))
            assert isinstance(outcome, Measured)
    assert [record.message for record in caplog.records] == [
        "a: ranks start afresh: no module torch"
    ]


def test_attempts_of_a_controller_that_has_died_are_swept_everywhere() -> None:
    script = instead("sweep", {"kind": "swept", "left": ["7 x"]})
    stubborn, away = ScriptedHost("a", script), ScriptedHost("b", well_behaved, refuses="b is away")
    clean = ScriptedHost("c", well_behaved)
    with Launcher([stubborn, away, clean], SETTINGS) as launcher:
        assert launcher.group.sweep_trials(["t-1", "t-2"]) == ["a: 7 x", "b is away"]
    (asked,) = [message for message in clean.heard if message.get("kind") == "sweep"]
    assert (asked["tag"], asked["trials"]) == (None, ["t-1", "t-2"])


def test_hosts_that_are_one_machine_get_folders_of_their_own(tmp_path: Path) -> None:
    hosts = ScriptedHost("a", with_result), ScriptedHost("b", well_behaved)
    run_on(tmp_path, *hosts)
    names = {
        message["name"]
        for host in hosts
        for message in host.heard
        if message.get("kind") == "prepare"
    }
    assert len(names) == 2
    assert all(name.startswith("amp-ray-t-") for name in names)


def test_collecting_is_no_part_of_the_time_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, the controller takes in all longer for the pieces than the ranks may take."""
    add, pieces, clock = HostFiles.add, [], time.monotonic

    def add_slowly(files: HostFiles, message: Mapping[str, object]) -> None:
        pieces.append(message)
        add(files, message)

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            yield {"kind": "collecting", "reason": "exited"}
            yield from file_messages("rank-0.log", random.randbytes(15 * CHUNK_BYTES))
        yield from with_result(message)

    monkeypatch.setattr(HostFiles, "add", add_slowly)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 10.0 * len(pieces))
    outcome = run_on(tmp_path, ScriptedHost("a", script), timeout_s=100.0)
    assert isinstance(outcome, Measured), outcome
    assert len(pieces) == 16


def test_the_reason_wins_over_a_complaint_of_a_peer_that_arrives_first(tmp_path: Path) -> None:
    complaint = "ConnectionResetError: Connection reset by peer"
    first = instead("job", {**EXIT, "code": 1, "tail": [complaint]}, DONE)

    def second(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") != "job":
            yield from well_behaved(message)
            return
        time.sleep(0.3)
        yield from ({**EXIT, "rank": 1, "code": 1, "tail": ["ValueError: the reason"]}, DONE)

    hosts = ScriptedHost("a", first), ScriptedHost("b", second)
    with Launcher(hosts, replace(SETTINGS, settle_s=60.0)) as launcher:
        outcome = launcher.run(launch_on("a", "b"), tmp_path / "t")
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank) == ("crash", 1)
