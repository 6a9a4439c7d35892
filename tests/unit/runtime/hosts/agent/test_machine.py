import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.agent import machine
from amp_ray.units import GIB, MIB

GPU_ROWS = """\
0, GPU-a, 15360, 3, Tesla T4
1, GPU-b, 15360, [N/A], Tesla T4, special
"""
PROCESS_ROWS = "GPU-b, 123456789, 1024, /opt/a, b\nGPU-b, [Not Found], [N/A], [Not Found]\n"


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
    found = machine.gpus()
    assert found["problem"] is None
    first, second = found["gpus"]
    assert (first["uuid"], first["name"]) == ("GPU-a", "Tesla T4")
    assert (first["memory_bytes"], first["used_bytes"]) == (15 * GIB, 3 * MIB)
    assert (second["name"], second["used_bytes"]) == ("Tesla T4, special", None)
    known, unknown = found["processes"]
    assert (known["pid"], known["name"], known["memory_bytes"]) == (123456789, "/opt/a, b", GIB)
    assert (unknown["pid"], unknown["memory_bytes"], unknown["ours"]) == (0, None, False)


def test_a_driver_that_fails_says_why(smi: Path) -> None:
    write_script(smi, "echo 'NVIDIA-SMI has failed: no driver'; exit 9\n")
    found = machine.gpus()
    assert found["gpus"] == []
    assert found["problem"] == "nvidia-smi: NVIDIA-SMI has failed: no driver"


def test_words_that_are_no_table_are_a_problem(smi: Path) -> None:
    write_script(smi, "echo nothing here\n")
    assert "cannot read 'nothing here'" in machine.gpus()["problem"]


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus()["problem"] == "nvidia-smi is not there"


def test_capacity_is_that_of_this_process() -> None:
    found = machine.capacity()
    assert found["num_cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 0
    assert found["load"] >= 0


def test_identity_tells_machines_apart() -> None:
    found = machine.identity()
    assert found["uid"] == os.getuid()
    assert re.fullmatch(r"net:\[\d+\]", found["network"])
    assert len(found["boot_id"]) == 36


def test_the_smallest_quota_counts_in_both_versions(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/c/d\n", encoding="utf-8")
    root = tmp_path / "root"
    for folder in ("cpu,cpuacct/a/b", "c/d", "memory/a"):
        (root / folder).mkdir(parents=True)
    assert machine.quota_cores(groups, root) is None
    (root / "c/cpu.max").write_text("150000 100000\n", encoding="ascii")
    (root / "c/d/cpu.max").write_text("max 100000\n", encoding="ascii")
    assert machine.quota_cores(groups, root) == 1.5
    own = root / "cpu,cpuacct/a/b"
    (own / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    (own / "cpu.cfs_quota_us").write_text("50000\n", encoding="ascii")
    assert machine.quota_cores(groups, root) == 0.5
    (own / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")
    assert machine.quota_cores(groups, root) == 1.5
    # What lies above the root is not this host's.
    (tmp_path / "cpu.max").write_text("1 100000\n", encoding="ascii")
    assert machine.quota_cores(groups, root) == 1.5
    assert machine.quota_cores(tmp_path / "none", root) is None


def test_a_disk_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    found = machine.disk(str(tmp_path))
    assert (found["path"], found["problem"]) == (str(tmp_path), None)
    assert found["free_bytes"] > 0
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_still_to_be_made_is_not_made(tmp_path: Path) -> None:
    found = machine.disk(str(tmp_path / "a/b"))
    assert found["problem"] is None
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_to_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert machine.disk(str(file / "base"))["problem"] == f"{file} is no folder"


def test_a_file_system_that_takes_no_folder_says_why() -> None:
    assert machine.disk("/proc")["problem"] == "No such file or directory"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError(os.getuid())

    monkeypatch.setattr("getpass.getuser", fail)
    assert machine.identity()["user"] == str(os.getuid())


@contextmanager
def running(*words: str, **environment: str) -> Iterator[int]:
    """Run a process that waits; yield its number once it runs as itself."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.communicate()


def test_folders_of_trials_are_told_from_others(tmp_path: Path) -> None:
    names = ["amp-ray-study-7-0-0123abcd", "amp-ray-0123456789abcdef-warm"]
    for name in (*names, "amp-ray-hosts-xyz", "amp-ray", "other-0123abcd"):
        (tmp_path / name).mkdir()
    found = machine.leftovers(str(tmp_path))
    assert [Path(entry["path"]).name for entry in found["folders"]] == sorted(names)
    assert not any(entry["used"] for entry in found["folders"])
    assert all(entry["age_s"] >= 0 for entry in found["folders"])


def test_a_folder_in_which_a_process_works_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "amp-ray-t-0123abcd"
    folder.mkdir()
    with running(AMP_RAY_FOLDER=str(folder)):
        (entry,) = machine.leftovers(str(tmp_path))["folders"]
        assert entry["used"]


def test_processes_of_a_trial_are_found_with_and_without_their_agent(tmp_path: Path) -> None:
    tag = f"amp-ray-{secrets.token_hex(8)}"

    def used(pid: int) -> list[bool]:
        found = machine.leftovers(str(tmp_path))["processes"]
        return [entry["used"] for entry in found if entry["pid"] == pid]

    with running(AMP_RAY_TAG=tag) as pid:
        assert used(pid) == [False]
        with running("main", tag):
            assert used(pid) == [True]
            assert machine.leftovers(str(tmp_path))["num_agents"] >= 1
    assert used(pid) == []


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    assert machine.leftovers(str(tmp_path / "none"))["folders"] == []


def test_names_are_resolved_or_nothing_is_said() -> None:
    assert "127.0.0.1" in machine.resolve("localhost")
    assert machine.resolve("no such host") == []
    assert machine.resolve("a" * 100) == []


def test_free_bytes_of_what_is_not_there_are_unknown(tmp_path: Path) -> None:
    assert machine.free_bytes(tmp_path / "none") is None
