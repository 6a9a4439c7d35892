import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.study.folder import locked

PROGRAM = """
import sys
from pathlib import Path
from amp_ray.errors import InputError
from amp_ray.runtime.study.folder import locked
if len(sys.argv) > 2:
    print("ready", flush=True)
    sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])) as died:
        print("taken", died, flush=True)
        sys.stdin.read()
except InputError as error:
    print("refused", error, flush=True)
"""

Contender = subprocess.Popen[str]


def contender(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Contender:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM, str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: Contender) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: Contender) -> None:
    with process:
        pass


def take(folder: Path) -> None:
    """Take the lock for a moment."""
    with locked(folder):
        pass


def test_a_lock_is_free_after_its_release(tmp_path: Path) -> None:
    take(tmp_path)
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path) as died:
        assert died is None
        with pytest.raises(InputError, match="being driven"):
            take(tmp_path)


def test_a_killed_driver_leaves_a_lock_that_breaks_and_names_it(tmp_path: Path) -> None:
    first = contender(tmp_path)
    assert said(first).startswith("taken")
    first.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie until `end`
    with locked(tmp_path) as died:
        assert died is not None
        assert f"process {first.pid} on {os.uname().nodename}" in died
    end(first)


def test_of_many_contenders_for_a_stale_lock_one_wins(tmp_path: Path) -> None:
    left_behind(tmp_path)
    contenders = [contender(tmp_path, "wait") for _ in range(4)]
    for process in contenders:
        assert said(process) == "ready\n"
    for process in contenders:  # all at once
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    lines = [said(process) for process in contenders]
    winners = [
        process.pid for process, line in zip(contenders, lines, strict=True) if "taken" in line
    ]
    for process in contenders:
        end(process)
    assert len(winners) == 1
    losers = [line for line in lines if line.startswith("refused")]
    assert len(losers) == 3
    assert all(f"process {winners[0]} on" in line for line in losers)


def test_a_child_that_a_driver_started_does_not_keep_its_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with locked(tmp_path):
        pass
    child.communicate(b"\n", timeout=600)


def test_a_lock_holds_and_breaks_across_containers_of_one_machine(tmp_path: Path) -> None:
    own_pids = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--uts")
    if subprocess.run([*own_pids, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no namespace of process numbers")
    renamed = ("sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    with locked(tmp_path):
        inside = contender(tmp_path, prefix=(*own_pids, *renamed))
        assert f"process {os.getpid()} on" in said(inside)
        end(inside)
    inside = contender(tmp_path, prefix=(*own_pids, "--kill-child", *renamed))
    assert said(inside).startswith("taken")
    with pytest.raises(InputError, match="being driven by process 1 on elsewhere"):
        take(tmp_path)
    inside.send_signal(signal.SIGKILL)
    assert said(inside) == ""  # its last process is gone
    end(inside)
    with locked(tmp_path) as died:
        assert died is not None
        assert "process 1 on elsewhere" in died


def left_behind(folder: Path, **changes: str | int | None) -> None:
    """Leave the lock of a driver whose kernel lock is not to be seen from here."""
    with locked(folder):
        holder = json.loads((folder / "lock").read_bytes())
    (folder / "lock").write_text(json.dumps({**holder, **changes}), encoding="utf-8")


def test_a_driver_on_another_machine_may_be_alive(tmp_path: Path) -> None:
    left_behind(tmp_path, host="far", boot="other", pid=7)
    with pytest.raises(InputError, match=r"process 7 on far since .* remove .*/lock$"):
        take(tmp_path)
    (tmp_path / "lock").unlink()
    with locked(tmp_path):
        pass


def test_another_machine_of_the_same_name_is_another_machine(tmp_path: Path) -> None:
    left_behind(tmp_path, machine="other", boot="other")
    with pytest.raises(InputError, match="remove"):
        take(tmp_path)


def test_no_driver_lives_on_after_its_machine_has_been_started_again(tmp_path: Path) -> None:
    left_behind(tmp_path, boot="before", pid=os.getppid())
    with locked(tmp_path) as died:
        assert died is not None


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(AmpRayError, match=r"Function not implemented.*file system with locks"):
        take(tmp_path)


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    removals = [1]

    def flock(descriptor: int, operation: int) -> None:
        if removals:
            removals.pop()
            (tmp_path / "lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        monkeypatch.undo()
        with pytest.raises(InputError, match=f"process {os.getpid()}"):
            take(tmp_path)


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none/lock: cannot be written: No such file"):
        take(tmp_path / "none")


def test_a_full_disk_is_told_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _data: bytes, _offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(InputError, match="No space left on device"):
            take(tmp_path)
    with locked(tmp_path):
        pass


def test_a_torn_content_is_still_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / "lock").write_text("{", encoding="ascii")
        with pytest.raises(InputError, match="another driver"):
            take(tmp_path)
    (tmp_path / "lock").write_text("{", encoding="ascii")
    with locked(tmp_path) as died:
        assert died is None
