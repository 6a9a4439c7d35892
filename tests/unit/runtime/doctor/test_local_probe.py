"""A probe on this machine, as it really runs."""

import ast
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Never

import pytest

from amp_ray.errors import HostError
from amp_ray.runtime import doctor
from amp_ray.runtime.doctor import AGENT_PYTHON, Probe
from amp_ray.runtime.hosts.agent import wire
from amp_ray.runtime.hosts.host import LocalHost

HANG_GUARD_S = 300.0

Start = Callable[..., Probe]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start probes that end with the test."""
    probes: list[Probe] = []

    def begin(host: LocalHost | None = None, *, limit_s: float = 60) -> Probe:
        probes.append(Probe(host or LocalHost(), limit_s=limit_s))
        return probes[-1]

    yield begin
    for probe in probes:
        probe.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_peer_is_reached(start: Start) -> None:
    answer = start().ask("reach", HANG_GUARD_S, peers=[], limit_s=5)
    assert answer["peers"] == []


def test_silence_is_an_error_with_the_hosts_name(start: Start, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec cat > /dev/null\n", encoding="utf-8")
    slow.chmod(0o755)
    with pytest.raises(HostError, match=r"slow: no answer within 0\.1 s"):
        start(LocalHost("slow", python=str(slow))).ask("reach", 0.1)


def test_an_interpreter_that_is_not_there_is_told() -> None:
    with pytest.raises(HostError, match="/no/python cannot be started"):
        Probe(LocalHost(python="/no/python"), limit_s=5)


def test_the_last_words_of_an_interpreter_that_fails_are_told(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho cannot do that >&2; exit 1\n", encoding="utf-8")
    script.chmod(0o755)
    probe = start(LocalHost("a", python=str(script)))
    for _ in range(2):
        with pytest.raises(HostError, match="a: cannot do that"):
            probe.ask("reach", HANG_GUARD_S, peers=[], limit_s=5)


def test_too_old_a_python_says_so_to_whatever_is_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "AGENT_PYTHON", (99, 0))
    probe = start()
    version = ".".join(map(str, sys.version_info[:3]))
    for kind in ("facts", "reach"):
        answer = probe.ask(kind, HANG_GUARD_S)
        assert (answer["kind"], answer["version"]) == ("old", version)


def test_what_the_probe_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    script, mark = tmp_path / "python", tmp_path / "mark"
    script.write_text(f"#!/bin/sh\necho $$ > {mark}\nsleep 300\n", encoding="utf-8")
    script.chmod(0o755)
    probe = start()
    with pytest.raises(HostError, match="no answer"):
        probe.ask("facts", 0.5, **question(str(script), tmp_path))
    wait_until(lambda: mark.exists() and bool(mark.read_text(encoding="ascii").strip()))
    folder = Path("/proc", mark.read_text(encoding="ascii").strip())
    assert folder.exists()
    probe.close()
    wait_until(lambda: is_gone(folder))


def test_a_probe_that_nobody_closes_ends_by_itself(start: Start) -> None:
    probe = start(limit_s=0.5)
    probe.ask("reach", HANG_GUARD_S, peers=[], limit_s=5)

    def ask_on() -> Never:
        while True:
            probe.ask("reach", HANG_GUARD_S, peers=[], limit_s=5)
            time.sleep(0.05)

    with pytest.raises(HostError, match="the connection ended"):
        ask_on()


def test_modules_are_the_agents_own_and_old_enough() -> None:
    folder = Path(wire.__file__).parent
    for name in (*wire.PROBE_MODULES, "software"):
        ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"), feature_version=AGENT_PYTHON)


def test_the_check_of_the_version_runs_before_new_syntax_is_read() -> None:
    program = doctor.guarded("this is no Python")
    ast.parse(program, feature_version=(3, 4))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "SyntaxError" in ended.stderr


def is_gone(folder: Path) -> bool:
    """Tell whether a process has ended; a zombie has."""
    try:
        return " Z " in (folder / "stat").read_text(encoding="utf-8")
    except OSError:
        return True


def question(python: str, base: Path) -> dict[str, object]:
    return {
        "base": str(base),
        "addresses": ["127.0.0.1"],
        "python": python,
        "environment": {},
        "script": "",
        "num_peers": 0,
        "limit_s": 30,
    }
