"""The launcher against hosts that have the key and send whatever they like."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InterruptedTrialError
from amp_ray.runtime.hosts import host_group
from amp_ray.runtime.hosts.agent.wire import CHUNK_BYTES, pack
from amp_ray.runtime.hosts.host import Channel, LocalHost
from amp_ray.runtime.hosts.link import MESSAGE_BYTES, NOISE_BYTES, AgentSettings, Message
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.outcome import Crashed, Measured, Unreachable
from support.scripted_host import (
    DONE,
    EXIT,
    IMPATIENT,
    SETTINGS,
    Script,
    ScriptedChannel,
    ScriptedHost,
    instead,
    launch_on,
    run_on,
    well_behaved,
    with_result,
)

STARTED: Message = {"kind": "started", "rank": 0, "pid": 7}
FORGED = b'{"kind": "file", "name": "../owned", "content": "b3duZWQ="}'


def at_the_job(say: Iterable[Message | bytes] | Callable[[], Iterable[Message | bytes]]) -> Script:
    """Make an agent that says something in the middle of the trial, then ends it well."""

    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "job":
            yield from say() if callable(say) else say
        yield from with_result(message)

    return script


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


OURS = {"t/launch.json", "t/events.jsonl", "t/outcome.json", "t/rerun.sh"}


def one_file(name: str, data: str = pack(b"owned"), *, last: bool = True) -> Message:
    return {"kind": "file", "name": name, "data": data, "last": last}


@pytest.mark.parametrize(
    "name",
    [
        "../owned",
        "../../../owned",
        "/tmp/amp-ray-owned",  # noqa: S108 - nothing may be written there
        "rank-0.log/../../owned",
        "..",
        ".",
        "",
        "rank-\n.log",
        "rank-\0.log",
        "rank-\x1b[2J.log",
        f"rank-{'x' * 300}.log",
        f"rank-{chr(0x1F600) * 190}.log",
        "outcome.json",
        "authorized_keys",
    ],
)
def test_a_file_that_was_not_asked_for_loses_the_host_and_is_not_written(
    tmp_path: Path, name: str
) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", at_the_job([one_file(name)])))
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "a"
    assert "it sent what was not asked for" in outcome.reason
    assert outcome.reason.isprintable()
    assert files_below(tmp_path) == OURS
    assert not Path("/tmp/amp-ray-owned").exists()  # noqa: S108


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**EXIT, "rank": 1}, "rank 1 ended, which it does not run"),
        ({**EXIT, "rank": 7}, "rank 7 ended, which it does not run"),
        ({**EXIT, "rank": -1}, "rank -1 ended, which it does not run"),
        (one_file("rank-1.log"), "it sent what was not asked for"),
        ({"kind": "said", "rank": 1, "data": {"event": "failed"}}, "which it does not run"),
        ({"kind": "trouble", "what": "start", "rank": 1, "text": ""}, "which it does not run"),
        ({**STARTED, "rank": 1}, "which it does not run"),
    ],
)
def test_a_host_cannot_speak_for_the_ranks_of_another(
    tmp_path: Path, message: Message, reason: str
) -> None:
    hosts = ScriptedHost("a", at_the_job([message])), ScriptedHost("b", at_the_job([]))
    outcome = run_on(tmp_path, *hosts)
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "a"
    assert reason in outcome.reason


def test_a_host_that_is_done_before_it_has_begun_is_lost(tmp_path: Path) -> None:
    early = ScriptedHost("a", instead("prepare", DONE))
    outcome = run_on(tmp_path, ScriptedHost("b", well_behaved), early)
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.reason == "a: its agent is done before it has begun"


def test_what_a_listener_cannot_use_loses_the_host(tmp_path: Path) -> None:
    def listen(_event: object) -> None:
        message = "no figure"
        raise ValueError(message)

    event = {"kind": "said", "rank": 0, "data": {"event": "layer"}}
    host = ScriptedHost("a", at_the_job([event]))
    with Launcher([host], SETTINGS, listener=listen) as launcher:
        outcome = launcher.run(launch_on("a"), tmp_path / "t")
    assert isinstance(outcome, Unreachable), outcome
    assert "rank 0 says what cannot be used: no figure" in outcome.reason


def test_hosts_are_not_lost_because_this_machine_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"kind": "said", "rank": 0, "data": {"event": "step"}}
    host = ScriptedHost("a", at_the_job([event]))
    late_s, clock = [0.0], time.monotonic

    def listen(_event: object) -> None:
        late_s[0] += 1.5 * SETTINGS.lease_s

    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s[0])
    with Launcher([host], SETTINGS, listener=listen) as launcher:
        outcome = launcher.run(launch_on("a", timeout_s=3 * SETTINGS.lease_s), tmp_path / "t")
    assert isinstance(outcome, Measured), outcome


@pytest.mark.parametrize(
    "messages",
    [
        [one_file("rank-0.log"), one_file("rank-0.log")],
        [one_file("rank-0.log", last=False), one_file("rank-x.log")],
        [one_file("rank-0.log", "?")],
        [one_file("rank-0.log", pack(bytes(CHUNK_BYTES)), last=False)] * 200,
        [one_file(f"rank-{number}x.log") for number in range(5000)],
    ],
    ids=["twice", "mixed", "no piece", "too long", "too many"],
)
def test_files_of_which_there_is_too_much_lose_the_host(
    tmp_path: Path, messages: list[Message]
) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", at_the_job(messages)))
    assert isinstance(outcome, Unreachable), outcome
    assert "it sent what was not asked for" in outcome.reason
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.log")) < 20 << 20


def test_a_link_where_a_file_should_go_is_not_followed(tmp_path: Path) -> None:
    """Somebody else on this machine may have put it there."""

    def plant() -> Iterable[Message]:
        (tmp_path / "t/hosts/a/rank-0.log").symlink_to(tmp_path / "owned")
        return [one_file("rank-0.log")]

    with pytest.raises(FileExistsError):
        run_on(tmp_path, ScriptedHost("a", at_the_job(plant)))
    assert not (tmp_path / "owned").exists()


def test_names_of_hosts_that_are_paths_make_plain_folders(tmp_path: Path) -> None:
    names = ["..", "a/b", "a%2Fb", "u@h:22"]
    hosts = [ScriptedHost(name, at_the_job([one_file("rank-x.log")])) for name in names]
    assert isinstance(run_on(tmp_path, *hosts), Measured)
    assert files_below(tmp_path / "t/hosts") == {
        f"{folder}/{name}"
        for folder in ("%2E.", "a%2Fb", "a%252Fb", "u@h:22")
        for name in ("rank-x.log", "result.json")
    }


@pytest.mark.parametrize(
    "words",
    [
        FORGED,
        b'@amp-ray 00000000000000000000000000000000 {"kind": "done"}',
        b"@amp-ray",
        b"Welcome!",
        b"\xff\xfe\x00",
        {"kind": "stored", "digest": "never sent"},
        {"kind": "of a newer agent"},
        {**STARTED, "of": "a newer agent"},
    ],
)
def test_lines_without_the_key_and_words_that_nobody_asked_for_do_no_harm(
    tmp_path: Path, words: Message | bytes
) -> None:
    assert isinstance(run_on(tmp_path, ScriptedHost("a", at_the_job([words, words]))), Measured)
    assert files_below(tmp_path) == {*OURS, "t/hosts/a/result.json"}


NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "message",
    [
        {**EXIT, "rank": "0"},
        {**EXIT, "rank": 2**70},
        {**EXIT, "code": []},
        {**EXIT, "tail": "text"},
        {**EXIT, "tail": [1]},
        {"kind": "exit"},
        {"kind": "done", "reason": "exited"},
        {"kind": "trouble", "what": "nothing we know", "rank": 0, "text": ""},
        {"kind": "trouble", "what": {}, "rank": 0, "text": ""},
        {"kind": "said", "rank": 0, "data": NESTED},
        {"kind": "said", "rank": 0, "data": {"event": NESTED}},
        {"kind": "said", "rank": 0, "data": {"event": ["x"] * 20_000}},
        {"kind": "file", "name": 3, "data": "", "last": True},
        {"kind": "file"},
        {"kind": "prepared", "folder": "/x"},
    ],
)
def test_messages_that_no_agent_sends_lose_the_host(tmp_path: Path, message: Message) -> None:
    outcome = run_on(tmp_path, ScriptedHost("a", at_the_job([message])))
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "a"
    assert "not to be trusted" in outcome.reason


def endless(message: Message | bytes, num_bytes: int) -> Callable[[], Iterable[Message | bytes]]:
    size = len(str(message))
    return lambda: (message for _ in range(num_bytes // size + 1))


@pytest.mark.parametrize(
    ("say", "text"),
    [
        (
            endless({"kind": "said", "rank": 0, "data": {"x": "y" * 5000}}, 2 * MESSAGE_BYTES),
            "of messages in one trial",
        ),
        (endless({"kind": "alive"}, 1 << 16), "signs of life"),
        (endless(b"x" * 1000, 2 * NOISE_BYTES), "no messages of our agent"),
        (endless(FORGED, 2 * NOISE_BYTES), "no messages of our agent"),
        ([b"x" * (2 << 20)], "without a line feed"),
        ([os.urandom(8 << 20).replace(b"\n", b"")], "without a line feed"),
    ],
    ids=["messages", "signs of life", "noise", "forged", "one line", "binary line"],
)
def test_a_flood_loses_the_host(
    tmp_path: Path, say: Callable[[], Iterable[Message | bytes]], text: str
) -> None:
    quiet = ScriptedHost("b", well_behaved)
    outcome = run_on(tmp_path, ScriptedHost("a", at_the_job(say)), quiet)
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "a"
    assert text in outcome.reason
    assert (tmp_path / "t/events.jsonl").stat().st_size < 2 * MESSAGE_BYTES
    assert (tmp_path / "t/outcome.json").stat().st_size < 10_000


def test_last_words_stay_short_and_readable(tmp_path: Path) -> None:
    words = ["\x1b[2J\x07" + "x" * 20_000] * 10
    script = instead("job", {**EXIT, "code": 1, "tail": words}, {**DONE, "reason": "failed"})
    outcome = run_on(tmp_path, ScriptedHost("a", script))
    assert isinstance(outcome, Crashed), outcome
    assert outcome.reason.isprintable()
    assert all(line.isprintable() and len(line) < 3000 for line in outcome.lines)


class DeafHost(ScriptedHost):
    """A host that takes nothing any more after a word of the controller, and lives on."""

    def __init__(self, name: str, script: Script, word: str) -> None:
        """Remember from which kind of message on."""
        super().__init__(name, script)
        self.word = f'"kind": "{word}"'.encode()
        self.is_deaf = False

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start an agent that will not read everything."""
        super().open_channel(argv)
        self._channels[-1] = DeafChannel(self, self._answer)
        return self._channels[-1]


class DeafChannel(ScriptedChannel):
    """Its agent."""

    def __init__(self, host: DeafHost, answer: Script) -> None:
        """Take the host that knows when to stop."""
        super().__init__(answer)
        self._host = host

    def write(self, data: bytes, given_up: threading.Event | None = None) -> None:
        """Wait until given up, once it is deaf."""
        self._host.is_deaf |= self._host.word in data
        if self._host.is_deaf:
            assert given_up is not None
            while not given_up.wait(SETTINGS.heartbeat_s):
                self.say({"kind": "alive"})
            message = "given up"
            raise OSError(message)
        super().write(data, given_up)


@pytest.mark.parametrize("word", ["prepare", "put", "job"])
def test_a_host_that_stops_reading_is_lost_and_keeps_no_other_waiting(
    tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_group, "_SWEEP_TIMEOUT_S", 1.0)  # its sweep never starts
    deaf = DeafHost("a", at_the_job([]), word)
    start = time.monotonic()
    files = {"program": os.urandom(1 << 20)}
    other = ScriptedHost("b", well_behaved)
    outcome = run_on(tmp_path, deaf, other, files=files, settings=IMPATIENT)
    assert isinstance(outcome, Unreachable), outcome
    assert outcome.host == "a"
    assert time.monotonic() - start < 60.0


@pytest.mark.parametrize("word", ["put", "job"])
def test_an_interruption_does_not_wait_for_hosts_that_do_not_read(
    tmp_path: Path, word: str
) -> None:
    hosts = [DeafHost(name, well_behaved, word) for name in "abcdefgh"]
    ended: list[float] = []

    def work() -> None:
        with contextlib.suppress(InterruptedTrialError), Launcher(hosts, settings) as launcher:
            launchers.append(launcher)
            launcher.run(launch_on(*"abcdefgh", files={"x": b"y"}), tmp_path / "t")
        ended.append(time.monotonic())

    settings = AgentSettings(lease_s=600.0, heartbeat_s=0.1)
    launchers: list[Launcher] = []
    thread = threading.Thread(target=work)
    thread.start()
    while not all(host.is_deaf for host in hosts):
        assert thread.is_alive()
        time.sleep(0.01)
    start = time.monotonic()
    launchers[0].interrupt()
    thread.join(300.0)
    assert ended
    assert ended[0] - start < 120.0  # 5 s on a machine that is idle, and far below one lease


def test_a_channel_that_is_given_up_ends_a_write_that_nobody_reads() -> None:
    channel = LocalHost().open_channel(["sleep", "60"])
    given_up = threading.Event()
    threading.Timer(0.3, given_up.set).start()
    with pytest.raises(OSError, match="given up"):
        channel.write(bytes(10 << 20), given_up)
    channel._process.kill()  # type: ignore[attr-defined] # noqa: SLF001
    channel.close()
    assert channel.read() == b""


def test_a_sweep_of_a_hostile_host_is_an_error_in_one_line() -> None:
    host = ScriptedHost("a", instead("sweep", {"kind": "swept", "left": 3}))
    with Launcher([host], SETTINGS) as launcher:
        [line] = launcher.group.sweep_trials(["t"])
    assert line.startswith("a: dropped, since it is not to be trusted")
