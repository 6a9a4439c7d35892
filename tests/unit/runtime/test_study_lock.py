import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.study_lock import StudyLock

PROGRAM = """
import sys, time
from pathlib import Path
from amp_ray.errors import InputError
from amp_ray.runtime.study_lock import StudyLock
lock = StudyLock(Path(sys.argv[1]))
try:
    lock.acquire()
except InputError as error:
    print("refused", error, flush=True)
else:
    print("taken", lock.broken, flush=True)
    sys.stdin.read()
"""


def contender(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: "subprocess.Popen[str]") -> None:
    with process:
        pass


def test_a_second_driver_is_refused_by_pid_and_host_of_the_first(tmp_path: Path) -> None:
    with StudyLock(tmp_path):
        second = contender(tmp_path)
        line = said(second)
        end(second)
    assert line.startswith("refused")
    assert f"process {os.getpid()} on {os.uname().nodename} since" in line


def test_a_lock_is_free_after_its_release(tmp_path: Path) -> None:
    with StudyLock(tmp_path):
        pass
    with StudyLock(tmp_path) as lock:
        assert lock.broken is None


def test_a_killed_driver_leaves_a_lock_that_breaks_and_names_it(tmp_path: Path) -> None:
    first = contender(tmp_path)
    assert said(first).startswith("taken")
    first.send_signal(signal.SIGKILL)
    end(first)
    with StudyLock(tmp_path) as lock:
        assert lock.broken is not None
        assert f"process {first.pid}" in lock.broken


def test_of_many_contenders_for_a_stale_lock_one_wins(tmp_path: Path) -> None:
    first = contender(tmp_path)
    assert said(first).startswith("taken")
    first.send_signal(signal.SIGKILL)
    end(first)
    contenders = [contender(tmp_path) for _ in range(6)]
    lines = [said(process) for process in contenders]
    for process in contenders:
        end(process)
    assert sorted(line.split()[0] for line in lines) == ["refused"] * 5 + ["taken"]


def test_a_child_that_a_driver_started_does_not_keep_its_lock(tmp_path: Path) -> None:
    with StudyLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with StudyLock(tmp_path):
        pass
    child.communicate(b"\n", timeout=60)


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(AmpRayError, match="No such file"):
        StudyLock(tmp_path / "none").acquire()


def test_a_torn_content_is_still_a_lock(tmp_path: Path) -> None:
    with StudyLock(tmp_path):
        (tmp_path / "lock").write_text("{", encoding="ascii")
        with pytest.raises(InputError, match="another driver"):
            StudyLock(tmp_path).acquire()
