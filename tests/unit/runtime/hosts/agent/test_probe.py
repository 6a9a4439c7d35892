"""Parts of a probe that need no process of their own."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_ray.runtime.doctor.host_probe import software_script
from amp_ray.runtime.hosts.agent import machine, probe


@pytest.fixture(autouse=True)
def closed_listeners() -> Iterator[None]:
    """A probe keeps what listens until its end; here its end is that of a test."""
    yield
    for opened in probe.listeners:
        opened.close()
    probe.listeners.clear()


@pytest.fixture
def request_(tmp_path: Path) -> dict[str, Any]:
    """What a controller asks of this machine."""
    return {
        "base": str(tmp_path),
        "name": "localhost",
        "addresses": ["127.0.0.1"],
        "python": sys.executable,
        "environment": {},
        "script": software_script(),
        "deep": False,
        "program": "sh",
        "cwd": str(tmp_path),
        "num_peers": 2,
        "limit_s": 30,
    }


def test_every_part_is_found(request_: dict[str, Any]) -> None:
    found = probe.gather(request_)
    assert found["version"] == ".".join(map(str, sys.version_info[:3]))
    # This machine may have no GPU.
    problems = {name: part.get("problem") for name, part in found.items() if isinstance(part, dict)}
    assert {name for name, problem in problems.items() if problem} <= {"gpus"}
    assert found["software"]["executable"] == sys.executable
    assert found["program"]["program"].endswith("/sh")
    assert found["program"]["has_cwd"]
    json.dumps(found)


def test_one_part_that_fails_hides_no_other(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_base: str | None) -> dict[str, Any]:
        message = "it hurts"
        raise OSError(message)

    monkeypatch.setattr(machine, "leftovers", fail)
    found = probe.gather(request_)
    assert found["left"] == {"problem": "OSError: it hurts"}
    assert found["disk"]["problem"] is None


def test_a_part_that_takes_too_long_is_left_out(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_base: str | None) -> dict[str, Any]:
        time.sleep(5)
        return {}

    monkeypatch.setattr(machine, "disk", wait)
    found = probe.gather({**request_, "limit_s": 1.5})
    assert found["disk"] == {"problem": "not found within 1.5 s"}
    assert found["identity"]["uid"] == os.getuid()


def test_an_address_that_is_not_ours_is_told(request_: dict[str, Any]) -> None:
    found = probe.listen({**request_, "addresses": ["192.0.2.1"]})
    assert "none of ['192.0.2.1'] is an address of this host" in found["problem"]


def test_peers_reach_what_listens_and_not_what_is_gone(request_: dict[str, Any]) -> None:
    found = probe.listen(request_)
    assert found["problem"] is None
    assert 20000 <= found["port"] < 32000
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    peers = [
        {"name": "there", "address": "127.0.0.1", "port": found["port"]},
        {"name": "gone", "address": "127.0.0.1", "port": port},
    ]
    reached = probe.reach({"peers": peers, "limit_s": 5})["peers"]
    assert reached == [
        {"name": "there", "problem": None},
        {"name": "gone", "problem": "Connection refused"},
    ]
    assert probe.reach({"peers": [], "limit_s": 5}) == {"peers": []}


def test_an_interpreter_that_is_not_there_is_told(request_: dict[str, Any]) -> None:
    found = probe.software({**request_, "python": "/no/python"})
    assert found == {"problem": "No such file or directory"}


def test_the_last_words_of_an_interpreter_that_fails_are_told(
    request_: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no; echo line >&2; echo last >&2; exit 3\n", "utf-8")
    script.chmod(0o755)
    assert probe.software({**request_, "python": str(script)}) == {"problem": "line / last"}
    script.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    assert probe.software({**request_, "python": str(script)}) == {"problem": "exit code 3"}


def test_the_interpreter_that_trains_gets_the_environment_of_a_rank(
    request_: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '9.9'\n", encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path)}
    assert probe.software({**request_, "environment": environment})["torch"] == "9.9"


def test_an_own_program_is_looked_for_in_the_path_of_a_rank(
    request_: dict[str, Any], tmp_path: Path
) -> None:
    own = tmp_path / "train-it"
    own.write_text("#!/bin/sh\n", encoding="utf-8")
    own.chmod(0o755)
    question = {**request_, "program": "train-it", "cwd": str(tmp_path / "none")}
    assert probe.program(question) == {"program": None, "has_cwd": False}
    question["environment"] = {"PATH": str(tmp_path)}
    assert probe.program(question)["program"] == str(own)
    assert probe.program({**question, "program": None, "cwd": None}) == {
        "program": None,
        "has_cwd": True,
    }


def test_own_names_are_those_of_the_hostfile_and_of_the_kernel(request_: dict[str, Any]) -> None:
    found = probe.own_name("localhost")["addresses"]
    assert "127.0.0.1" in found["localhost"]
    assert socket.gethostname() in found
