import ast
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment, SshSettings
from amp_ray.runtime import doctor
from amp_ray.runtime.doctor import (
    AGENT_PYTHON,
    LOCAL_NAME,
    Diagnosis,
    HostProbe,
    Question,
    diagnose,
    gpus_of_hosts,
    list_host_specs,
    require_ready_hosts,
)
from amp_ray.runtime.hosts.agent import wire
from amp_ray.runtime.hosts.host import Host, LocalHost, MakeHost
from amp_ray.runtime.hosts.link import AgentLink, Message
from amp_ray.runtime.hosts.login import LoginError
from amp_ray.trials.doctor.findings import Finding
from support.checked import required
from support.experiments import MIXED_HOST, experiment_from, small_experiment
from support.host_reports import healthy_report
from support.programs import python
from support.waiting import HANG_GUARD_S, wait_for

TEXT = """\
name: small
model: {family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
cluster:
  hostfile: hostfile
  nodes:
    - {count: 4, device: cpu, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10,
       memory_gib: 0.01}
precision: fp32
global_batch_size: 8
trials: {host_groups: 2, ssh: {user: ada}}
"""
HOSTFILE = "".join(f"{name} slots=2\n" for name in "abcd")


def experiment(backend: str = "ssh") -> Experiment:
    found = experiment_from(TEXT, {"hostfile": HOSTFILE})
    assert backend in {"ssh", "local"}
    return replace(found, trials=replace(found.trials, backend=backend))  # type: ignore[arg-type]


def refuse(name: str) -> Host:
    """Make a host that does not exist."""
    message = f"ada@{name}: Connection refused"
    raise HostError(message)


def test_every_host_of_every_group_is_a_site() -> None:
    specs = list_host_specs(experiment())
    assert [(spec.name, spec.group, spec.num_slots) for spec in specs] == [
        ("a", 0, 2),
        ("b", 0, 2),
        ("c", 1, 2),
        ("d", 1, 2),
    ]
    assert specs[3].login == ("ssh", "ada@d")


def test_a_host_in_two_entries_is_one_site() -> None:
    mixed = replace(small_experiment(MIXED_HOST), names_hosts=True)
    specs = list_host_specs(mixed)
    assert [(spec.name, spec.boards) for spec in specs] == [
        ("big", "2 x T4 and 1 x V100-32"),
        ("node1", "3 x T4"),
    ]


def test_local_trials_are_one_site_with_all_slots() -> None:
    (spec,) = list_host_specs(experiment("local"))
    assert (spec.name, spec.num_slots, spec.login) == (LOCAL_NAME, 8, ())


def test_without_a_hostfile_nobody_knows_which_hosts() -> None:
    text = TEXT.replace("  hostfile: hostfile\n", "")
    with pytest.raises(InputError, match=r"test.yaml:4: cluster.hostfile: .*--trials local"):
        list_host_specs(experiment_from(text))


def test_this_machine_is_looked_at_once() -> None:
    found = diagnose(experiment("local"), LocalHost)
    assert found.hosts == (LOCAL_NAME,)
    checks = [finding.check for finding in found.findings]
    assert len(checks) == len(set(checks))
    assert {"login", "agent Python", "disk", "address", "port"} <= set(checks)
    assert found.elapsed_s > 0


@pytest.mark.parametrize(
    "part",
    [
        *("none", ["x"], {}, {"gpus": 7}, {"gpus": ["x"]}, {"gpus": [{"index": "x"}]}),
        {"gpus": [{"index": 0, "name": "T4", "memory_bytes": [1]}]},
        {"gpus": [{"index": 0, "name": "T4"}], "visible": 7},
    ],
)
def test_gpus_that_no_host_has_are_refused_with_its_name(
    part: Any,  # noqa: ANN401 - any JSON value
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {"kind": "facts", "version": "3.11", "executable": "python", "gpus": part}
    report = replace(healthy_report("a"), answer=answer)
    monkeypatch.setattr(doctor, "_probe_all", lambda *_arguments: [report])
    if part == {}:
        assert gpus_of_hosts(experiment(), refuse) == {"a": []}
        return
    with pytest.raises(HostError, match=r"^a: what it says of its GPUs cannot be used"):
        gpus_of_hosts(experiment(), refuse)


def test_hosts_that_are_lost_are_told_one_by_one() -> None:
    found = diagnose(experiment(), refuse)
    assert [(finding.host, finding.check) for finding in found.findings] == [
        (name, "reach") for name in "abcd"
    ]
    assert found.errors == list(found.findings)


def test_json_counts_levels_by_host_and_keeps_every_finding() -> None:
    findings = (
        Finding(level="ok", host="a", check="cores", found="8 cores"),
        Finding(level="warning", host="a", check="clock", found="9 s", expected="within 1 s"),
        Finding(level="error", host="b", check="reach", found="no answer", command="ssh b"),
    )
    found = Diagnosis(experiment="x", hosts=("a", "b"), findings=findings, elapsed_s=1.5)
    record = json.loads(json.dumps(found.to_json()))
    assert (record["schema"], record["experiment"], record["ok"]) == (1, "x", False)
    assert record["hosts"] == [
        {"name": "a", "ok": 1, "warning": 1, "error": 0},
        {"name": "b", "ok": 0, "warning": 0, "error": 1},
    ]
    assert [Finding(**entry) for entry in record["findings"]] == [*findings]
    assert replace(found, findings=findings[:2]).to_json()["ok"]


DEAD = Finding(
    level="error",
    host="b",
    check="ssh",
    found="Connection refused",
    expected="a login",
    command="ssh ada@b",
    advice="is it up?",
)
FULL = Finding(level="error", host="c", check="disk", found="1 GB free", expected="5 GB free")

Doctor = Callable[..., None]


def local() -> Experiment:
    found = small_experiment()
    return replace(found, trials=replace(found.trials, backend="local"))


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Have the doctor find something."""

    def set_findings(*findings: Finding) -> None:
        def report(_experiment: Experiment, _make_host: MakeHost) -> Diagnosis:
            return Diagnosis(experiment="x", hosts=(), findings=findings, elapsed_s=0.0)

        monkeypatch.setattr("amp_ray.runtime.doctor.diagnose", report)

    return set_findings


def test_hosts_that_are_fit_are_not_worth_a_word(finds: Doctor) -> None:
    finds()
    require_ready_hosts(local())


def test_everything_that_is_wrong_is_told_at_once_with_what_mends_it(finds: Doctor) -> None:
    finds(DEAD, FULL)
    with pytest.raises(HostError) as error:
        require_ready_hosts(local())
    assert str(error.value).splitlines() == [
        "hosts are not fit for trials (amp-ray doctor tells more):",
        "  b: ssh: Connection refused; expected a login; is it up?; run: ssh ada@b",
        "  c: disk: 1 GB free; expected 5 GB free",
    ]


def test_trials_over_ssh_need_to_know_the_hosts() -> None:
    with pytest.raises(InputError, match=r"cluster\.hostfile: .*--trials local"):
        require_ready_hosts(small_experiment())


# ------------------------------------------------------------ the probe of a host

TRIALS = small_experiment().trials
QUESTION = Question(trials=TRIALS, settings=SshSettings(), num_peers=2)
SPEC = healthy_report("localhost").spec


class Refusing(LocalHost):
    """A host that cannot be logged in to."""

    def connect(self) -> Never:
        message = "ada@a: Connection refused"
        raise HostError(message)


def test_a_variable_with_a_placeholder_is_not_known_yet() -> None:
    environment = {"A": "1", "B": "{tp}", "C": "@AMP_RAY_FOLDER@/x", "D": "me@home"}
    trials = replace(TRIALS, environment=environment)
    question = Question(trials=trials, settings=SshSettings(), num_peers=1)
    assert question.environment == {"A": "1", "D": "me@home"}


def test_a_probe_brings_facts_back() -> None:
    host_probe = HostProbe(SPEC, LocalHost, QUESTION)
    host_probe.ask()
    report = host_probe.report()
    host_probe.close()
    assert report.failure is None
    assert report.part("address")["address"] == "127.0.0.1"
    assert report.num_peers == 0


def test_hosts_of_a_group_try_the_way_to_each_other() -> None:
    others = [replace(SPEC, name="b"), replace(SPEC, name="c", group=1)]
    host_probes = [HostProbe(spec, LocalHost, QUESTION) for spec in (SPEC, *others)]
    for host_probe in host_probes:
        host_probe.ask()
    for host_probe in host_probes:
        host_probe.reach(host_probes)
    reports = [host_probe.report() for host_probe in host_probes]
    assert [report.num_peers for report in reports] == [1, 1, 0]
    assert [report.unreached for report in reports] == [(), (), ()]
    # A peer that has gone is told with the system's own words.
    host_probes[1].close()
    host_probes[0].reach(host_probes)
    assert host_probes[0].report().unreached == ((others[0], "Connection refused"),)
    # And a host that has gone itself reaches nobody.
    host_probes[0].close()
    host_probes[0].reach(host_probes)
    ((peer, reason),) = host_probes[0].report().unreached
    assert (peer, "the connection to the agent ended" in reason) == (others[0], True)
    host_probes[2].close()


def test_a_host_that_cannot_be_made_is_a_failed_login() -> None:
    def make(_name: str) -> Host:
        message = "a: key file /k does not exist; name an existing one"
        raise LoginError(message, check="login", found="key file /k does not exist")

    host_probe = HostProbe(SPEC, make, QUESTION)
    host_probe.ask()
    failure = required(host_probe.report().failure)
    assert failure.check == "login"
    host_probe.close()


def test_a_name_of_no_known_form_is_bad_input() -> None:
    def make(_name: str) -> Host:
        message = "found host"
        raise InputError(message)

    with pytest.raises(InputError):
        HostProbe(SPEC, make, QUESTION)


def test_a_host_that_refuses_is_told_and_asked_no_more() -> None:
    host_probe = HostProbe(SPEC, Refusing, QUESTION)
    host_probe.ask()
    host_probe.reach([host_probe])
    report = host_probe.report()
    assert report.failure is not None
    assert (report.failure.check, report.answer) == ("reach", None)
    host_probe.close()


def test_an_interpreter_that_does_not_start_is_told() -> None:
    host_probe = HostProbe(SPEC, lambda name: LocalHost(name, python="/no/python"), QUESTION)
    host_probe.ask()
    failure = required(host_probe.report().failure)
    assert (failure.check, failure.expected) == (
        "agent Python",
        "/no/python to run a short program",
    )
    host_probe.close()


def test_a_host_that_has_not_answered_in_time_counts_as_one_that_does_not() -> None:
    failure = required(HostProbe(SPEC, LocalHost, QUESTION).report().failure)
    assert (failure.check, "no answer within" in failure.found) == ("reach", True)


def test_a_host_that_does_not_answer_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doctor, "_REMARK_S", 0.01)

    class Slow(Refusing):
        def connect(self) -> Never:
            wait_for(lambda: bool(caplog.records))
            super().connect()

    diagnosis = diagnose(experiment(), Slow)
    assert caplog.records[0].message.startswith("waiting for a, b, c, d, for ")
    assert [finding.check for finding in diagnosis.errors] == ["reach"] * 4


def test_a_host_that_answers_when_nobody_waits_is_left_at_once() -> None:
    host_probe = HostProbe(SPEC, LocalHost, QUESTION)
    host_probe.close()
    host_probe.ask()
    assert host_probe.report().answer is None


# --------------------------------------------------- a probe on this machine, as it really runs

Start = Callable[..., AgentLink]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start probes that end with the test."""
    links: list[AgentLink] = []

    def begin(host: LocalHost | None = None, *, limit_s: float = 60) -> AgentLink:
        links.append(doctor.probe_link(host or LocalHost(), limit_s=limit_s))
        return links[-1]

    yield begin
    for link in links:
        link.close()
        link.wait(HANG_GUARD_S)


def reach(link: AgentLink, timeout_s: float) -> Message:
    return link.ask({"kind": "reach", "peers": [], "limit_s": 600}, "reach", timeout_s)


def test_silence_is_an_error_with_the_hosts_name(start: Start, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec cat > /dev/null\n", encoding="utf-8")
    slow.chmod(0o755)
    with pytest.raises(HostError, match=r"slow: no answer within 0\.1 s"):
        reach(start(LocalHost("slow", python=str(slow))), 0.1)


def test_the_last_words_of_an_interpreter_that_fails_are_told(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho cannot do that >&2; exit 1\n", encoding="utf-8")
    script.chmod(0o755)
    probe = start(LocalHost("a", python=str(script)))
    for _ in range(2):
        with pytest.raises(HostError, match="a: cannot do that"):
            reach(probe, HANG_GUARD_S)


def test_too_old_a_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "AGENT_PYTHON", (99, 0))
    host_probe = HostProbe(SPEC, LocalHost, QUESTION)
    host_probe.ask()
    answer = host_probe.report().answer
    host_probe.close()
    assert answer is not None
    version = ".".join(map(str, sys.version_info[:3]))
    assert (answer["kind"], answer["version"]) == ("old", version)


def test_what_the_probe_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    script, mark = tmp_path / "python", tmp_path / "mark"
    script.write_text(f"#!/bin/sh\necho $$ > {mark}\nsleep 300\n", encoding="utf-8")
    script.chmod(0o755)
    probe = start()
    with pytest.raises(HostError, match="no answer"):
        probe.ask(question(str(script), tmp_path), "facts", 0.5)
    wait_for(lambda: mark.exists() and bool(mark.read_text(encoding="ascii").strip()))
    folder = Path("/proc", mark.read_text(encoding="ascii").strip())
    assert folder.exists()
    probe.close()
    wait_for(lambda: is_gone(folder))


def test_a_probe_that_nobody_closes_ends_by_itself(start: Start) -> None:
    probe = start(limit_s=0.5)

    def ask_on() -> Never:
        while True:
            reach(probe, HANG_GUARD_S)
            time.sleep(0.05)

    with pytest.raises(HostError, match="the connection to the agent ended"):
        ask_on()


def test_modules_are_the_agents_own_and_old_enough() -> None:
    folder = Path(wire.__file__).parent
    for name in (*wire.PROBE_MODULES, "software"):
        ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"), feature_version=AGENT_PYTHON)


def test_the_check_of_the_version_runs_before_new_syntax_is_read() -> None:
    program = doctor.guarded("this is no Python")
    ast.parse(program, feature_version=(3, 4))
    assert "SyntaxError" in python("-c", program, code=1).stderr


def is_gone(folder: Path) -> bool:
    """Tell whether a process has ended; a zombie has."""
    try:
        return " Z " in (folder / "stat").read_text(encoding="utf-8")
    except OSError:
        return True


def question(python: str, base: Path) -> dict[str, object]:
    return {
        "kind": "facts",
        "base": str(base),
        "addresses": ["127.0.0.1"],
        "python": python,
        "environment": {},
        "script": "",
        "num_peers": 0,
        "limit_s": 600,
    }
