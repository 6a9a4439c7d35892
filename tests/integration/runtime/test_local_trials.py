"""Trials on this machine, with the same agent and no SSH."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Pattern
from amp_ray.runtime.hosts.agent.resources import find_address, free_port
from amp_ray.runtime.hosts.agent.wire import MODULES
from amp_ray.runtime.hosts.host import Channel, LocalHost
from amp_ray.runtime.hosts.link import AgentLink, AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.trial_folder import COLLECT_BYTES
from amp_ray.trials.launch import FOLDER, Launch, rank_commands
from amp_ray.trials.outcome import Crashed, Measured, outcome_from_json
from amp_ray.trials.own_program.metrics import formats_of, read_logs, words_of
from amp_ray.trials.result import Measurement
from support.trial_runs import events_of

pytestmark = pytest.mark.integration

RESULT = """
import json, os
if os.environ["RANK"] == "0":
    record = {"trial_id": "t", "step_s": [0.9, 0.2, 0.2, 0.2]}
    open("result.json", "w").write(json.dumps(record))
"""


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return AgentSettings(base=str(tmp_path / "base with spaces"), grace_s=0.2)


@pytest.fixture
def launcher(settings: AgentSettings, tmp_path: Path) -> Iterator[Launcher]:
    with Launcher([LocalHost()], settings) as opened:
        yield opened
    assert list(Path(str(settings.base)).glob("*")) == []


def launch(program: str, num_ranks: int = 2, **options: object) -> Launch:
    places = [("localhost", slot) for slot in range(num_ranks)]
    argv = [sys.executable, "-u", "program.py", f"{FOLDER}/program.py"]
    files = {"program.py": program.encode()}
    values: dict[str, object] = {"environment": {}, "timeout_s": 300.0, **options}
    commands = rank_commands(argv, places)
    return Launch(trial_id="t", commands=commands, files=files, **values)  # type: ignore[arg-type]


def test_a_trial_is_measured_and_written_down(launcher: Launcher, tmp_path: Path) -> None:
    outcome = launcher.run(launch(RESULT + "print('done')"), tmp_path / "t")
    assert isinstance(outcome, Measured)
    assert outcome.measured_s == 0.2
    record = json.loads((tmp_path / "t/outcome.json").read_text(encoding="utf-8"))
    assert outcome_from_json(record) == outcome
    log = tmp_path / "t/hosts/localhost/rank-1.log"
    assert log.read_text(encoding="utf-8") == "done\n"


def test_steps_are_found_wherever_they_stand_in_a_long_log(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = """
for step in range(40):
    os.write(1, (b"x" * 99 + b"\\n") * 10_000)  # 1 MB
    print(f"step took {0.5 if step else 9.0} s", flush=True)
"""
    formats = formats_of(Pattern(pattern=r"step took ([0-9.]+) s"))

    def read(files: Mapping[str, bytes], _trial_id: str) -> Measurement:
        return read_logs(files, formats, num_warmup_steps=1, samples=1)

    trial = launch("import os" + program, 2, words=words_of(formats))
    outcome = launcher.run(trial, tmp_path / "t", reader=read)
    assert isinstance(outcome, Measured), outcome
    assert outcome.step_time_s == (9.0, *[0.5] * 39)
    log = tmp_path / "t/hosts/localhost/rank-1.log"
    assert log.stat().st_size <= COLLECT_BYTES


def test_files_of_earlier_trials_are_not_sent_again(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = AgentLink.send

    def count(link: AgentLink, **message: Any) -> None:  # noqa: ANN401 - JSON
        sent[-1] += len(str(message.get("data", "")))
        send(link, **message)

    monkeypatch.setattr(AgentLink, "send", count)
    data = os.urandom(300_000)
    for number in range(2):
        trial = launch(RESULT + "assert len(open('data', 'rb').read()) == 300_000", 1)
        sent.append(0)
        trial = replace(trial, files={**trial.files, "data": data, "n": str(number).encode()})
        assert isinstance(launcher.run(trial, tmp_path / f"t{number}"), Measured)
    assert sent[0] > len(data)
    assert max(sent[1:]) < 1000


def test_a_program_cannot_change_the_files_of_the_next(launcher: Launcher, tmp_path: Path) -> None:
    program = RESULT + "assert open('data').read() == 'x'; open('data', 'w').write('y')"
    for number in range(2):
        trial = launch(program, 1)
        trial = replace(trial, files={**trial.files, "data": b"x"})
        assert isinstance(launcher.run(trial, tmp_path / f"t{number}"), Measured)


def test_a_trial_by_hand_uses_the_folder_of_its_files(launcher: Launcher, tmp_path: Path) -> None:
    program = """
import os, sys, mine
print(sys.argv[1], os.environ["AMP_RAY_FOLDER"], mine.X, os.environ["ODD"], os.environ["RANK"])
"""
    places = [("localhost", 0)]
    argv = [sys.executable, "program.py", f"--to={FOLDER}/a b:{FOLDER}"]
    trial = Launch(
        trial_id="t",
        commands=rank_commands(argv, places),
        files={"program.py": program.encode(), "lib/mine.py": b"X = 3"},
        environment={"PYTHONPATH": f"{FOLDER}/lib:/else where", "ODD": "it's $(odd)"},
    )
    launcher.run(trial, tmp_path / "t")
    text = (tmp_path / "t/rerun.sh").read_text(encoding="utf-8")
    assert "amp-ray-t-" not in text
    where = tmp_path / "t/files"
    script = f"FOLDER='{where}'\n{text}"
    again = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert again.stdout == f"--to={where}/a b:{where} {where} 3 it's $(odd) 0\n"


@pytest.mark.parametrize(("visible", "devices"), [("", "0,1"), ("6,7", "6,7")])
def test_devices_are_the_slots_among_those_that_the_login_sees(
    settings: AgentSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    devices: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    program = (
        f"{RESULT}assert os.environ['CUDA_VISIBLE_DEVICES'] == '{devices}'\n"
        "assert os.environ['CUDA_DEVICE_ORDER'] == 'PCI_BUS_ID'"
    )
    with Launcher([LocalHost()], settings) as launcher:
        assert isinstance(launcher.run(launch(program), tmp_path / "t"), Measured)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with Launcher([LocalHost()], AgentSettings(base="/proc/nowhere")) as launcher:
        outcome = launcher.run(launch(RESULT), tmp_path / "t")
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "disk"
    assert "/proc/nowhere" in outcome.reason


def test_isolation_off_leaves_nothing_either(settings: AgentSettings, tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    open('child', 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not os.path.exists('child') or not open('child').read():\n    time.sleep(0.01)\n"
        "os._exit(3)\n"
    )
    plain = AgentSettings(base=settings.base, grace_s=0.2, isolate=False)
    with Launcher([LocalHost()], plain) as launcher:
        outcome = launcher.run(launch(program, 1, collect=("child",)), tmp_path / "t")
    assert isinstance(outcome, Crashed)
    child = (tmp_path / "t/hosts/localhost/child").read_text(encoding="ascii")
    assert not Path(f"/proc/{child}").exists()


class CrampedHost(LocalHost):
    """This machine, but without the right to make namespaces."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        script = 'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"'
        wrapper = ["unshare", "--user", "--map-root-user", "--", "sh", "-c", script, "sh"]
        return super().open_channel([*wrapper, *argv])


def test_without_namespaces_trials_run_all_the_same_and_say_so(
    settings: AgentSettings, tmp_path: Path
) -> None:
    host = CrampedHost()
    wrapper = ["unshare", "--user", "--map-root-user", "true"]
    if subprocess.run(wrapper, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets us make no user namespace, in which to forbid others")
    with Launcher([host], settings) as launcher:
        assert isinstance(launcher.run(launch(RESULT), tmp_path / "t"), Measured)
    (hello,) = events_of(tmp_path / "t", "hello")
    assert hello["isolation"].startswith("none: unshare: ")


def test_a_trial_never_overwrites_another(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(launch(RESULT), tmp_path / "t")
    with pytest.raises(FileExistsError):
        launcher.run(launch(RESULT), tmp_path / "t")


def test_a_host_that_the_launcher_does_not_have_is_refused(
    launcher: Launcher, tmp_path: Path
) -> None:
    commands = rank_commands(["true"], [("elsewhere", 0)])
    trial = Launch(trial_id="t", commands=commands, files={}, environment={})
    with pytest.raises(InputError, match=r"needs \['elsewhere'\].*\['localhost'\]"):
        launcher.run(trial, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lease_s 1\.0 .* heartbeat_s 0\.9"):
        AgentSettings(lease_s=1.0, heartbeat_s=0.9)


def test_a_command_gets_its_input_and_both_its_streams_come_back() -> None:
    channel = LocalHost().open_channel(["sh", "-c", "cat; echo b >&2; exit 3"])
    channel.write(b"a")
    channel.close()
    assert b"".join(iter(channel.read, b"")) == b"ab\n"


def test_commands_that_do_not_start_are_errors() -> None:
    with pytest.raises(HostError, match="cannot be started"):
        LocalHost().open_channel(["/no such program"])


def test_own_addresses_are_found_and_others_refused() -> None:
    assert find_address(["192.0.2.1", "127.0.0.1"]) == ("127.0.0.1", "lo")
    with pytest.raises(OSError, match=r"none of \['192\.0\.2\.1'\] is an address of this host"):
        find_address(["192.0.2.1"])


def test_the_loopback_network_is_no_answer_to_a_name() -> None:
    with pytest.raises(OSError, match="is an address of this host"):
        find_address(["localhost"])


def test_a_free_port_is_below_the_ephemeral_range() -> None:
    assert 20000 <= free_port("127.0.0.1") < 32000


@pytest.mark.parametrize("name", MODULES)
def test_the_agent_is_python_3_8(name: str, repository: Path) -> None:
    source = (repository / f"amp_ray/runtime/hosts/agent/{name}.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    assert "from __future__ import annotations" in source
