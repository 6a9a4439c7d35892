"""Hosts that have the key and send anything, and controllers without the key.

Whatever they send, there is no traceback, the trial ends in bounded time and memory, no file is
written outside of its folder, and a measurement comes only from complete figures.
"""

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.runtime.doctor import HostProbe, Probe, Question
from amp_ray.runtime.hosts import host_group
from amp_ray.runtime.hosts.agent.main import Stdio
from amp_ray.runtime.hosts.agent.wire import (
    FROM_AGENT,
    FROM_CONTROLLER,
    KEY_BYTES,
    Seal,
    WireError,
    pack,
)
from amp_ray.runtime.hosts.host import Channel, LocalHost
from amp_ray.runtime.hosts.link import AgentSettings, Message, check_message
from amp_ray.runtime.launch import launcher
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.trial_folder import HostFiles
from amp_ray.runtime.profile.links import constants_yaml, link_reports
from amp_ray.trials.doctor.checks import check_hosts
from amp_ray.trials.doctor.software import Needs
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured, Outcome
from amp_ray.trials.profile.records import LinkPlace, ProfileRecords, record_of_event
from amp_ray.trials.profile.tables import profile_files
from amp_ray.trials.timeline import read_timeline
from support.bounded import LONGEST_S, bounded
from support.experiments import small_experiment
from support.host_reports import healthy_parts, healthy_report
from support.scripted_host import ScriptedHost, file_messages, well_behaved

NUM_CASES: Final = max(500, settings().max_examples)
"""Number of cases of all tests of this module: 500 by default, 10,000 in ``make fuzz``."""


SETTINGS: Final = AgentSettings(lease_s=30.0, heartbeat_s=1.0, grace_s=0.01, settle_s=0.01)
RESULT: Final = b'{"trial_id": "t", "step_s": [0.5]}'
KEY: Final = bytes(KEY_BYTES)
SMALL_ONE: Final = small_experiment()
PIPE_BYTES: Final = 4096
"""Bytes that a pipe always accepts in one write."""


def share(part: float) -> int:
    return max(1, round(NUM_CASES * part))


def nested(depth: int) -> Any:  # noqa: ANN401 - JSON
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


WORDS: Final = (
    *("", "\0", "\x1b[2J", "\ud800", "..", "../owned", "/abs", "rank-0.log", "result.json"),
    *("x" * 5000, f"rank-{chr(0x1F600) * 190}.log", "rank-1.log", "nan", pack(b"x"), "deadline"),
    *("disk-full", "warm", "facts", "time", "reach", "old", "lost", "layer", "link", "failed"),
)
NUMBERS: Final = (0, 1, -1, 7, 2**31, 2**63, -(2**70), 10**400, 1.5, 1e308, float("nan"))
VALUES: Final = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from((*NUMBERS, float("inf"), None, True, False)),
    st.sampled_from((nested(3), nested(40), [[]] * 30_000, {"": {}}, [None], [""] * 3, {"a": []})),
    st.binary(max_size=9).map(lambda data: data.decode("latin-1")),
)

KEYS: Final = (
    *("folder", "address", "interface", "port", "digest", "problem", "import_s", "text"),
    *("rank", "pid", "data", "what", "code", "signal", "ended", "tail", "state", "reason", "name"),
    *("num_cut", "last", "clean", "left", "num_oom_kills", "found", "host", "time_s", "hostname"),
)
RIGHT: Final[tuple[Message, ...]] = (
    {"kind": "hello", "isolation": "none", "hostname": "a"},
    {
        "kind": "prepared",
        "folder": "/x",
        "address": "192.0.2.1",
        "interface": "eth0",
        "port": 1,
    },
    {"kind": "stored", "digest": "x"},
    {"kind": "warm", "problem": "", "import_s": 0.5},
    {"kind": "claimed", "problem": ""},
    {"kind": "warm-died", "text": "x"},
    {"kind": "started", "rank": 0, "pid": 1},
    {"kind": "said", "rank": 0, "data": {"event": "failed", "cause": "port_taken"}},
    {"kind": "trouble", "what": "disk-full", "rank": 0, "text": "full"},
    {"kind": "trouble", "what": "start", "rank": None, "text": "x"},
    {"kind": "exit", "rank": 0, "code": 0, "signal": None, "ended": False, "tail": []},
    {"kind": "exit", "rank": 0, "code": None, "signal": 9, "ended": True, "tail": ["x"]},
    {"kind": "exit", "rank": 1, "code": 1, "signal": None, "ended": False, "tail": []},
    {"kind": "collecting", "reason": "exited"},
    {"kind": "file", "name": "result.json", "data": pack(RESULT), "last": True},
    {"kind": "file", "name": "rank-0.log", "data": pack(b"x"), "last": False},
    {"kind": "done", "reason": "exited", "clean": True, "left": [], "num_oom_kills": 0},
    {"kind": "done", "reason": "deadline", "clean": False, "left": ["1 x"], "num_oom_kills": 1},
    {"kind": "swept", "left": []},
    {"kind": "alive"},
    {"kind": "lost", "text": "x"},
    {"kind": "nobody knows"},
)


@st.composite
def spoilt(draw: st.DrawFn, right: tuple[Message, ...] = RIGHT) -> Message:
    """Draw a correct message, or one with keys that are changed or left out."""
    message = dict(draw(st.sampled_from(right)))
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from([*message, *KEYS]))
        if draw(st.booleans()):
            message[key] = draw(VALUES)
        elif key != "kind":
            message.pop(key, None)
    message["kind"] = message["kind"] if isinstance(message["kind"], str) else "odd"
    return message


MESSAGES: Final = st.lists(spoilt() | st.binary(max_size=60), max_size=6)


# ---------------------------------------------------------------------------- the controller


@settings(max_examples=share(0.2))
@given(message=spoilt())
def test_a_message_is_safe_or_refused(message: Message) -> None:
    line = Seal(KEY, FROM_AGENT).seal(message)
    with bounded(), contextlib.suppress(WireError):
        opened = Seal(KEY, FROM_AGENT).open(line[:-1])
        assert opened is not None
        checked = check_message(opened)
        if checked["kind"] != "file":
            text = json.dumps(checked, allow_nan=False, ensure_ascii=False)
            assert len(text.encode()) < 200_000  # fails if the text has a lone surrogate
            assert re.search(r"(?<!\\)\\u00[01]", text) is None


def hostile(turns: dict[str, list[Message | bytes]], *, also_right: bool) -> ScriptedHost:
    """Make a host that sends some messages when it is asked, and may also answer correctly."""

    def script(message: Message) -> Iterable[Message | bytes]:
        kind = str(message.get("kind"))
        yield from turns.get(kind, [])
        if kind in turns and not also_right:
            host.close_channel()
        else:
            if kind == "job":
                yield from file_messages("result.json", RESULT)
            yield from well_behaved(message)

    host = ScriptedHost("a", script)
    return host


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    """Set short time limits, since hosts answer here at once or never."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_PREPARE_TIMEOUT_S", "_STALL_TIMEOUT_S", "_MARGIN_S"):
            patch.setattr(launcher, name, 0.1)
        patch.setattr(host_group, "_HASTE_S", 0.1)
        yield


def trial(folder: Path, hosts: list[ScriptedHost], **options: Any) -> Outcome:  # noqa: ANN401
    commands = rank_commands(["run"], [(host.name, 0) for host in hosts])
    given_ = {"files": {"x": b"x"}, "environment": {}, "timeout_s": 0.1, **options}
    launch = Launch(trial_id="t", commands=commands, **given_)
    with Launcher(hosts, SETTINGS) as runner:
        return runner.run(launch, folder / "t")


@settings(max_examples=share(0.2))
@given(
    turns=st.dictionaries(st.sampled_from(["prepare", "put", "job", "stop"]), MESSAGES, max_size=2),
    also_right=st.booleans(),
    is_first=st.booleans(),
)
def test_a_trial_ends_with_an_outcome_whatever_a_host_says(
    turns: dict[str, list[Message | bytes]],
    also_right: bool,  # noqa: FBT001 - hypothesis
    is_first: bool,  # noqa: FBT001
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("trial")
    other = ScriptedHost("b", well_behaved)
    hosts = [hostile(turns, also_right=also_right), other]
    with bounded():
        outcome = trial(folder, hosts if is_first else hosts[::-1])
    names = {path.name for path in folder.iterdir()}
    assert names == {"t"}
    json.dumps(json.loads((folder / "t/outcome.json").read_text("utf-8")), allow_nan=False)
    if isinstance(outcome, Measured):  # a host with the key can send a false result
        assert outcome.measured_s == 0.5
        assert is_first
    for path in (folder / "t/hosts").rglob("*"):
        assert path.parent.name in {"a", "b"} or path.name in {"a", "b"}


@settings(max_examples=share(0.1))
@given(
    pieces=st.lists(
        st.tuples(
            st.sampled_from(WORDS), st.sampled_from([pack(b"x"), "?", "", "\ud800"]), st.booleans()
        ),
        max_size=8,
    )
)
def test_files_stay_in_their_folder(
    pieces: list[tuple[str, str, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files = HostFiles(folder / "a", ("rank-*.log", "result.json"), [0])
    for name, data, last in pieces:
        with contextlib.suppress(ValueError):
            files.add({"name": name, "data": data, "last": last})
    assert all(len(files[name]) < 100 for name in files)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert {path.name for path in (folder / "a").iterdir()} <= {"rank-0.log", "result.json"}


# ---------------------------------------------------------------------------- the agent


@settings(max_examples=share(0.15))
@given(
    pieces=st.lists(
        st.binary(max_size=200)
        | st.just(b"\n")
        | spoilt().map(Seal(KEY, FROM_CONTROLLER).seal)
        | spoilt().map(Seal(bytes(reversed(range(KEY_BYTES))), FROM_CONTROLLER).seal),
        min_size=1,
    )
)
def test_an_agent_takes_messages_of_its_controller_only(pieces: list[bytes]) -> None:
    read_end, write_end = os.pipe()
    saved = [os.dup(number) for number in (0, 1)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(read_end, 0)
        os.dup2(null, 1)
        stdio = Stdio(KEY, lease_s=60.0, heartbeat_s=60.0)
        right = Seal(KEY, FROM_CONTROLLER)
        sent = b"".join(pieces)
        for start in range(0, len(sent), PIPE_BYTES):
            os.write(write_end, sent[start : start + PIPE_BYTES])
            stdio.listen(readable=True)
            if stdio.over:
                break
        expected = []
        with contextlib.suppress(WireError):
            for line in filter(None, sent.split(b"\n")[:-1]):
                message = right.open(line)
                if message is None:
                    break
                expected.append(message)
        found = stdio.take_messages()
        assert repr(found) == repr(expected[: len(found)])  # nan is not nan
    finally:
        for number, copy in zip((0, 1), saved, strict=True):
            os.dup2(copy, number)
            os.set_blocking(number, True)
        for number in (read_end, write_end, null, *saved):
            os.close(number)


# ---------------------------------------------------------------------------- the doctor


class Answering(LocalHost):
    """A host whose probe sends any bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        """Store the output, piece by piece."""
        super().__init__("a")
        self.pieces = pieces

    def open_channel(self, argv: object) -> Channel:
        """Return a channel with the output; start no process."""
        del argv
        return Saying(self.pieces)


class Saying:
    """A channel whose output is given in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        """Store the pieces."""
        self._pieces = deque(pieces)

    def read(self) -> bytes:
        """Return the next piece."""
        return self._pieces.popleft() if self._pieces else b""

    def write(self, data: bytes, given_up: object = None) -> None:
        """Ignore the data."""

    def close(self) -> None:
        """End the output."""
        self._pieces.clear()


ANSWERS: Final[tuple[Message, ...]] = (
    {"kind": "old", "version": "2.7.1", "executable": "python"},
    {"kind": "facts", "version": "3.11.7", "executable": None, **healthy_parts()},
    {"kind": "reach", "peers": []},
)
QUESTION: Final = Question(trials=SMALL_ONE.trials, settings=SshSettings(), num_peers=2)


def answer(message: Message) -> bytes:
    return b"\n" + json.dumps(message).encode() + b"\n"


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a probe's answer with some changes."""
    found: dict[str, Any] = healthy_parts(draw(st.integers(0, 2)))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*found, *healthy_parts()]))
        part = found.get(name)
        if isinstance(part, dict) and part and draw(st.booleans()):
            found[name] = {**part, draw(st.sampled_from([*part])): draw(VALUES)}
        else:
            found[name] = draw(VALUES)
    return found


@settings(max_examples=share(0.15))
@given(facts=parts(), device=st.sampled_from(["cpu", "T4"]), more=st.lists(spoilt(ANSWERS)))
def test_the_doctor_has_findings_whatever_a_probe_says(
    facts: dict[str, Any], device: str, more: list[Message]
) -> None:
    said = {"kind": "facts", "version": "3.11.7", "executable": "python", **facts}
    probe = HostProbe(
        healthy_report(device=device).spec,
        lambda _name: Answering([*map(answer, more), answer(said)]),
        QUESTION,
    )
    with bounded():
        probe.ask()
        report = probe.report()
        probe.close()
        other = healthy_report("b", device=device)
        findings = check_hosts([report, other], Needs(python="python3"))
    assert {finding.host for finding in findings} == {"a", "b"}
    assert "Traceback" not in "".join(map(str, findings))
    place = probe.listens_at
    assert place is None or 0 < place[1] < 65536


@settings(max_examples=share(0.1))
@given(pieces=st.lists(st.binary(max_size=99) | spoilt(ANSWERS).map(answer)))
def test_a_probe_answers_or_is_refused(pieces: list[bytes]) -> None:
    probe = Probe(Answering(pieces), limit_s=5)
    with bounded():
        for kind in ("facts", "reach"):
            with contextlib.suppress(HostError):
                found = probe.ask(kind, LONGEST_S)
                json.dumps(found, allow_nan=False)
        probe.close()


def test_a_probe_that_sends_bytes_without_end_costs_no_time() -> None:
    probe = Probe(Answering([bytes(100)] * 50_000), limit_s=5)
    with bounded(), pytest.raises(HostError, match="a: not to be trusted: more than"):
        probe.ask("facts", LONGEST_S)
    probe.close()


# ---------------------------------------------------------------------------- profiles

FIGURES: Final = (
    *("forward_s", "backward_s", "forward_launch_s", "backward_launch_s", "all_reduce_s"),
    *("spread_s", "repeats", "kept_bytes", "temporary_bytes", "seconds"),
    *("host_s_per_micro_batch", "host_s_per_iteration", "memory_bytes_per_s"),
)
SAID: Final = tuple(
    {
        "kind": "x",
        "event": kind,
        "tp": 1,
        "micro_batch_size": 1,
        "layer": 0,
        "what": "p2p",
        "num_ranks": 2,
        "bytes": 8,
        "hardware": "h",
        "versions": "v",
        **dict.fromkeys(FIGURES, 1),
    }
    for kind in ("layer", "link", "step", "oom", "hardware", "begin")
)


@settings(max_examples=share(0.1))
@given(events=st.lists(spoilt(SAID), max_size=5))
def test_what_a_profile_keeps_can_be_read_again(events: list[Message]) -> None:
    records, place = ProfileRecords(), LinkPlace(scope="intra", devices="T4")
    for event in events:
        with contextlib.suppress(ValueError):
            record = record_of_event(event, place=place, date="2026-11-22")
            if record is not None:
                json.dumps(record, allow_nan=False)
                records.add(record)
    assert {device for device, _ in records.layers} <= {"T4"}
    for text in profile_files(records, SMALL_ONE.model, SMALL_ONE.precision).values():
        assert "nan" not in text
    json.dumps([asdict(report) for report in link_reports(records, SMALL_ONE)], allow_nan=False)
    assert "nan" not in constants_yaml(records, SMALL_ONE)
    assert all(0 <= seconds < 1e19 for seconds in records.links.values())


# ---------------------------------------------------------------------------- files of a trial

RANK: Final = {
    "rank": 0,
    "host": "a",
    "stage": 0,
    "dp_rank": 0,
    "instructions": [["0F0", 0.0, 0.5], ["0B0", 0.5, 1.0]],
}


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:  # noqa: ANN401 - JSON
    """Draw a value in which one part is replaced by something else."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place, copy = draw(st.sampled_from(places)), value.copy()
        copy[place] = draw(changed(value[place]))
        return copy
    return draw(VALUES)


@settings(max_examples=share(0.2))
@given(
    record=changed({"schema": 1, "trial_id": "t", "step": 1, "ranks": [RANK, {**RANK, "rank": 1}]}),
    piece=st.binary(max_size=9),
    at=st.integers(0, 200),
)
def test_a_timeline_is_data_or_refused(record: object, piece: bytes, at: int) -> None:
    text = json.dumps(record).encode()
    for data in (text, text[:at] + piece + text[at:]):
        with bounded(), contextlib.suppress(ValueError):
            for rank in read_timeline(data, num_ranks=2, trial_id="t"):
                assert 0 <= rank.rank < 2
                assert 0 <= rank.stage < 2
                assert rank.host.isprintable()
                for name, begin_s, end_s in rank.spans:
                    assert re.fullmatch(r"[0-9A-Z_.]+", name)
                    assert 0 <= begin_s <= end_s <= 1e6
