import errno
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.study.journal import (
    Contents,
    Journal,
    JournalError,
    encode,
    parse,
    sync_folder,
)

EVENTS: list[dict[str, Any]] = [
    {"event": "study", "experiment": "größe"},
    {"event": "started", "number": 0, "predicted_s": 0.1 + 0.2},
    {"event": "ended", "number": 0, "reason": None, "lines": ["a\nb", "{}"]},
]
FULL = OSError(errno.ENOSPC, "No space left on device")


def read_journal(path: Path) -> Contents:
    """Read a journal that another process may be writing."""
    with path.open("rb") as stream:
        return parse(stream, file=str(path))


def filled(path: Path) -> bytes:
    journal = Journal.open(path)
    for event in EVENTS:
        journal.append(event)
    journal.close()
    return path.read_bytes()


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    assert list(read_journal(tmp_path / "j").bodies) == EVENTS
    journal = Journal.open(tmp_path / "j")
    assert list(journal.records) == EVENTS
    assert journal.dropped is None
    journal.close()


def test_a_journal_cut_at_any_byte_loads_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = filled(path)
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        journal = Journal.open(path)
        whole = data[:length].count(b"\n")
        assert list(journal.records) == EVENTS[:whole]
        torn = length > 0 and data[length - 1 : length] != b"\n"
        assert (journal.dropped is not None) == torn
        journal.append({"event": "more"})
        journal.close()
        assert list(read_journal(path).bodies) == [*EVENTS[:whole], {"event": "more"}]


def test_reading_leaves_a_torn_record_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    torn = filled(path)[:-5]
    path.write_bytes(torn)
    assert list(read_journal(path).bodies) == EVENTS[:2]
    assert path.read_bytes() == torn


def test_opening_a_damaged_journal_leaves_it_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    damaged = filled(path).replace(b"predicted_s", b"predicted-s")
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="j:2: at byte 86, this record is damaged"):
        Journal.open(path)
    assert path.read_bytes() == damaged


def test_a_damaged_journal_is_salvaged_up_to_the_damage_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"
    lines = [encode(number, {"event": str(number)}) for number in range(4)]
    lines[2] = lines[2].replace(b"2", b"3", 1)
    path.write_bytes(b"".join(lines))
    for salvaged in (1, 2):
        journal = Journal.open(path, salvage=True)
        aside = tmp_path / f"j.damaged-{salvaged}"
        place = f"line 3, byte {len(lines[0] + lines[1])}"
        assert journal.dropped == f"{place}: a damaged record, and all that follows, to {aside}"
        assert aside.read_bytes() == b"".join(lines[2:])
        assert aside.stat().st_mode & 0o777 == 0o600
        journal.append({"event": "again"})
        journal.close()
        assert [body["event"] for body in read_journal(path).bodies] == ["0", "1", "again"]
        path.write_bytes(b"".join(lines))


def test_a_record_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(path.stat().st_size)
        real(descriptor)

    journal = Journal.open(path)
    monkeypatch.setattr(os, "fsync", fsync)
    sizes = []
    for event in EVENTS:
        journal.append(event)
        sizes.append(path.stat().st_size)
    journal.close()
    assert synced == sizes


def test_a_disk_that_takes_a_part_and_then_the_rest_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda to, part: real(to, bytes(part)[:5]))
    filled(tmp_path / "j")
    assert list(read_journal(tmp_path / "j").bodies) == EVENTS


def failing_write(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    calls: list[int] = []

    def write(descriptor: int, part: bytes) -> int:
        calls.append(len(part))
        if len(calls) == 1:
            return real(descriptor, bytes(part)[:7])
        raise FULL

    return write


def test_a_failed_write_is_taken_back_and_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    data = filled(path)
    journal = Journal.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(os.write))
        with pytest.raises(
            JournalError, match=r"j: cannot be written: No space left.*Make room.*--resume"
        ):
            journal.append({"event": "x"})
    assert path.read_bytes() == data
    with pytest.raises(JournalError, match="No space left"):
        journal.append({"event": "y"})
    assert path.read_bytes() == data
    journal.close()


def test_a_failed_write_that_cannot_be_taken_back_is_dropped_by_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    data = filled(path)
    journal = Journal.open(path)

    def refuse(_descriptor: int, _length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(os.write))
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(JournalError, match=r"a torn record stays.*Input/output error"):
            journal.append({"event": "x"})
    journal.close()
    again = Journal.open(path)
    assert list(again.records) == EVENTS
    assert (
        again.dropped == f"line 4, byte {len(data)}: 7 bytes of a record that was never completed"
    )
    again.close()


def test_a_record_that_the_disk_did_not_confirm_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    data = filled(path)
    journal = Journal.open(path)

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.append({"event": "x"})
    assert path.read_bytes() == data
    journal.close()


def test_an_interruption_waits_until_the_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = Journal.open(path)
    write, fsync = os.write, os.fsync
    interruptions = ["write", "fsync"]

    def interrupted_write(descriptor: int, part: bytes) -> int:
        if "write" in interruptions:
            interruptions.remove("write")
            write(descriptor, bytes(part)[:7])
            raise KeyboardInterrupt
        return write(descriptor, part)

    def interrupted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if "fsync" in interruptions:
            interruptions.remove("fsync")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted_write)
        patch.setattr(os, "fsync", interrupted_fsync)
        with pytest.raises(KeyboardInterrupt):
            journal.append(EVENTS[0])
    assert not interruptions
    journal.append(EVENTS[1])
    journal.close()
    contents = read_journal(path)
    assert list(contents.bodies) == EVENTS[:2]
    assert contents.dropped is None


STORM = """
import signal, sys
from pathlib import Path
from amp_ray.runtime.study.journal import Journal

def interrupt(number, frame):
    raise KeyboardInterrupt

journal = Journal.open(Path(sys.argv[1]))
signal.signal(signal.SIGALRM, interrupt)
told = interruptions = number = 0
while interruptions < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003 + number % 50 * 0.00002)
        while True:
            number += 1
            journal.append({"event": "x", "number": number})
            told += 1
    except KeyboardInterrupt:
        interruptions += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(told, number)
"""


def test_interruptions_at_any_instant_leave_a_whole_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    ended = subprocess.run(
        [sys.executable, "-c", STORM, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    told, last = map(int, ended.stdout.split())
    contents = read_journal(path)
    numbers = [body["number"] for body in contents.bodies]
    assert numbers == sorted(set(numbers))
    assert told <= len(numbers) <= last
    assert contents.dropped is None


def test_a_second_writer_is_noticed_before_it_can_do_harm(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path)
    first, second = Journal.open(path), Journal.open(path)
    second.append({"event": "x"})
    data = path.read_bytes()
    with pytest.raises(JournalError, match="somebody else has changed it"):
        first.append({"event": "y"})
    assert path.read_bytes() == data
    first.close()
    second.close()


RACE = """
import sys
from pathlib import Path
from amp_ray.runtime.study.journal import Journal, JournalError

journal = Journal.open(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
for number in range(200):
    try:
        journal.append({"event": "x", "of": sys.argv[2], "number": number})
    except JournalError:
        break
    print(number, flush=True)
"""


def test_two_processes_that_write_at_once_lose_no_record_in_silence(tmp_path: Path) -> None:
    path, pipe = tmp_path / "j", subprocess.PIPE
    argv = [sys.executable, "-c", RACE, str(path)]
    writers = [
        subprocess.Popen([*argv, name], stdin=pipe, stdout=pipe, text=True) for name in ("a", "b")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
    outputs = [writer.communicate("go\n", timeout=120)[0] for writer in writers]
    confirmed = sum(len(output.splitlines()) for output in outputs)
    assert confirmed
    try:
        num_records = len(read_journal(path).bodies)
    except InputError:  # both wrote after the same record
        with pytest.raises(InputError, match=r"j:\d+: at byte \d+, .* out of place"):
            read_journal(path)
    else:
        assert num_records >= confirmed


def test_a_journal_that_was_removed_takes_no_records(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    (tmp_path / "j").unlink()
    with pytest.raises(JournalError, match="it has been removed"):
        journal.append({"event": "x"})
    journal.close()


FILL = """
import resource, signal, sys
from pathlib import Path
from amp_ray.runtime.study.journal import Journal, JournalError
path, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
journal = Journal.open(path)
try:
    for number in range(10_000):
        journal.append({"event": "x", "number": number, "text": "." * 100})
except JournalError as error:
    print(error)
journal.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
again = Journal.open(path)
print(again.dropped, [body["number"] for body in again.records] == list(range(number)), number > 9)
"""


def test_a_real_limit_of_size_leaves_a_journal_that_loads(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "j"), "4096"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    error, state = ended.stdout.splitlines()
    assert "File too large" in error
    assert "Raise the limit of file sizes" in error
    assert state == "None True True"


def test_a_full_file_system_leaves_a_journal_that_loads(tmp_path: Path) -> None:
    shell = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1/j" 0'
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no user namespace, in which to mount a small disk")
    ended = subprocess.run(
        [*own_mounts, "sh", "-c", shell, "sh", str(tmp_path), sys.executable, FILL],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    error, state = ended.stdout.splitlines()
    assert "No space left on device" in error
    assert "Make room" in error
    assert state == "None True True"


def test_a_place_that_cannot_have_a_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none/j: cannot be opened.*No such file"):
        Journal.open(tmp_path / "none" / "j")
    (tmp_path / "file").write_text("x", encoding="ascii")
    with pytest.raises(InputError, match=r"file/j: cannot be opened.*Not a directory"):
        Journal.open(tmp_path / "file" / "j")
    with pytest.raises(InputError, match=r"cannot be opened.*Is a directory"):
        Journal.open(tmp_path)


def test_an_open_journal_takes_little_more_memory_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    places = [[f"node{rank // 8}", rank % 8] for rank in range(64)]
    path.write_bytes(b"".join(encode(number, {"placement": places}) for number in range(1000)))
    tracemalloc.start()
    journal = Journal.open(path)
    assert all(body["placement"] == places for body in journal.records[1:])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    journal.close()
    assert peak_bytes < 1.5 * path.stat().st_size


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_cannot_be_synchronised_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    codes = {"open": errno.EACCES, "fsync": errno.EINVAL}

    def refuse(*_arguments: object) -> None:
        raise OSError(codes[call], os.strerror(codes[call]))

    monkeypatch.setattr(os, call, refuse)
    sync_folder(tmp_path)


def test_a_disk_that_fails_under_a_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InputError, match=r"j: cannot be opened for writing: Input/output error"):
        Journal.open(tmp_path / "j")
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
