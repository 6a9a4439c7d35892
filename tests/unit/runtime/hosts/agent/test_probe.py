"""Parts of a probe that need no process of their own."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_ray.runtime.doctor import software_script
from amp_ray.runtime.hosts.agent import probe
from amp_ray.units import GIB, MIB

GPU_ROWS = """\
0, GPU-a, 15360, 3, 70.00, Tesla T4
1, GPU-b, 15360, [N/A], [N/A], Tesla T4, special
"""
PROCESS_ROWS = "GPU-b, 123456789, 1024, /opt/a, b\nGPU-b, [Not Found], [N/A], [Not Found]\n"


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
        "addresses": ["127.0.0.1"],
        "python": sys.executable,
        "environment": {},
        "script": software_script(),
        "num_peers": 2,
        "limit_s": 600,
    }


def test_every_part_is_found(request_: dict[str, Any]) -> None:
    facts = probe.gather(request_)
    assert facts["version"] == ".".join(map(str, sys.version_info[:3]))
    # This machine may have no GPU.
    problems = {name: part.get("problem") for name, part in facts.items() if isinstance(part, dict)}
    assert {name for name, problem in problems.items() if problem} <= {"gpus"}
    assert facts["software"]["executable"] == sys.executable
    json.dumps(facts)


def test_one_part_that_fails_hides_no_other(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, Any]:
        message = "it hurts"
        raise OSError(message)

    monkeypatch.setattr(probe, "gpus", fail)
    facts = probe.gather(request_)
    assert facts["gpus"] == {"problem": "OSError: it hurts"}
    assert facts["disk"]["problem"] is None


def test_a_part_that_takes_too_long_is_left_out(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def wait(_base: str | None) -> dict[str, Any]:
        ended.wait(600)
        return {}

    def join(thread: threading.Thread, _timeout_s: float) -> None:
        """Wait for a part that has an end, however late it is."""
        if thread.name != "disk":
            real_join(thread)

    real_join = threading.Thread.join
    monkeypatch.setattr(probe, "disk", wait)
    monkeypatch.setattr(threading.Thread, "join", join)
    facts = probe.gather({**request_, "limit_s": 1.5})
    ended.set()
    assert facts["disk"] == {"problem": "not found within 1.5 s"}
    assert facts["identity"]["uid"] == os.getuid()


def test_an_address_that_is_not_ours_is_told(request_: dict[str, Any]) -> None:
    facts = probe.listen({**request_, "addresses": ["192.0.2.1"]})
    assert "none of ['192.0.2.1'] is an address of this host" in facts["problem"]


def test_peers_reach_what_listens_and_not_what_is_gone(request_: dict[str, Any]) -> None:
    facts = probe.listen(request_)
    assert facts["problem"] is None
    assert 20000 <= facts["port"] < 32000
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    peers = [
        {"name": "there", "address": "127.0.0.1", "port": facts["port"]},
        {"name": "gone", "address": "127.0.0.1", "port": port},
    ]
    reached = probe.reach({"peers": peers, "limit_s": 600})["peers"]
    assert reached == [
        {"name": "there", "problem": None},
        {"name": "gone", "problem": "Connection refused"},
    ]
    assert probe.reach({"peers": [], "limit_s": 600}) == {"peers": []}


def test_an_interpreter_that_is_not_there_is_told(request_: dict[str, Any]) -> None:
    facts = probe.software({**request_, "python": "/no/python"})
    assert facts == {"problem": "No such file or directory"}


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


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-smi, alone in the PATH but for the shell's own tools."""
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
    path.chmod(0o755)


def test_gpus_and_their_processes_are_read(smi: Path, tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text(GPU_ROWS, encoding="utf-8")
    (tmp_path / "apps").write_text(PROCESS_ROWS, encoding="utf-8")
    write_script(
        smi,
        f'case "$1" in --query-gpu=*) cat {tmp_path}/gpus;; *) cat {tmp_path}/apps;; esac\n',
    )
    facts = probe.gpus()
    assert facts["problem"] is None
    first, second = facts["gpus"]
    assert (first["uuid"], first["name"]) == ("GPU-a", "Tesla T4")
    assert (first["memory_bytes"], first["used_bytes"]) == (15 * GIB, 3 * MIB)
    assert (second["name"], second["used_bytes"]) == ("Tesla T4, special", None)
    assert (first["power_limit_w"], second["power_limit_w"]) == (70.0, None)
    first_process, second_process = facts["processes"]
    assert (first_process["pid"], first_process["name"], first_process["memory_bytes"]) == (
        123456789,
        "/opt/a, b",
        GIB,
    )
    assert (second_process["pid"], second_process["memory_bytes"]) == (0, None)


def test_a_driver_that_fails_says_why(smi: Path) -> None:
    write_script(smi, "echo 'NVIDIA-SMI has failed: no driver'; exit 9\n")
    facts = probe.gpus()
    assert facts["gpus"] == []
    assert facts["problem"] == "nvidia-smi: NVIDIA-SMI has failed: no driver"


def test_words_that_are_no_table_are_a_problem(smi: Path) -> None:
    write_script(smi, "echo nothing here\n")
    assert "cannot read 'nothing here'" in probe.gpus()["problem"]


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.gpus()["problem"] == "nvidia-smi is not there"


def test_a_disk_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    facts = probe.disk(str(tmp_path))
    assert (facts["path"], facts["problem"]) == (str(tmp_path), None)
    assert facts["free_bytes"] > 0
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_still_to_be_made_is_not_made(tmp_path: Path) -> None:
    facts = probe.disk(str(tmp_path / "a/b"))
    assert facts["problem"] is None
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_to_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert probe.disk(str(file / "base"))["problem"] == f"{file} is no folder"


def test_a_file_system_that_takes_no_folder_says_why() -> None:
    assert probe.disk("/proc")["problem"] == "No such file or directory"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError(os.getuid())

    monkeypatch.setattr("getpass.getuser", fail)
    assert probe.identity()["user"] == str(os.getuid())


def test_free_bytes_of_what_is_not_there_are_unknown(tmp_path: Path) -> None:
    assert probe.free_bytes(tmp_path / "none") is None
