import errno
import json
import os
import tracemalloc
import zlib
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
from support.programs import python

EVENTS: list[dict[str, Any]] = [
    {"event": "study", "experiment": "größe"},
    {"event": "started", "number": 0, "predicted_s": 0.1 + 0.2},
    {"event": "ended", "number": 0, "reason": None, "lines": ["a\nb", "{}", "\udcff"]},
]
LINES = [encode(number, event) for number, event in enumerate(EVENTS)]
CHANGED = [line.replace(b'"event"', b'"evenT"', 1) for line in LINES]
NUM_BYTES = [sum(map(len, LINES[:number])) for number in range(len(LINES))]  # before a record
FULL = OSError(errno.ENOSPC, "No space left on device")


# ------------------------------------------------------------------------- the text


def test_a_record_is_one_line_of_json() -> None:
    record = json.loads(LINES[2])
    assert (record["n"], record["body"]) == (2, EVENTS[2])
    assert LINES[2].count(b"\n") == 1
    assert LINES[2].endswith(b"\n")


def test_keys_that_json_turns_into_text_do_not_spoil_a_record() -> None:
    body: dict[Any, Any] = {"event": "x", "of": {10: "a", 9: "b"}}
    contents = parse([encode(0, body)], file="j")
    assert contents.bodies[0] == {"event": "x", "of": {"10": "a", "9": "b"}}


@pytest.mark.parametrize("salvage", [False, True])
def test_a_torn_record_is_dropped_with_its_size_and_is_no_damage(*, salvage: bool) -> None:
    contents = parse([*LINES[:2], LINES[2][:9]], file="newer version/j", salvage=salvage)
    assert list(contents.bodies) == EVENTS[:2]
    place = f"line 3, byte {NUM_BYTES[2]}"
    assert contents.dropped == f"{place}: 9 bytes of a record that was never completed"
    assert not contents.is_damaged


ZERO = r".*zero.*--resume --salvage"


@pytest.mark.parametrize(
    ("lines", "num_good", "message"),
    [
        ([CHANGED[0], *LINES[1:]], 0, "2 whole records follow. Restore .* begin a new study"),
        ([LINES[0], CHANGED[1], LINES[2]], 1, "1 whole record follows. .*keep the record before"),
        ([*LINES[:2], CHANGED[2]], 2, "no crash does that.*keep the 2 records before it"),
        ([LINES[0], LINES[1][:-1] + b"x" + LINES[2]], 1, "damaged"),  # the line feed has changed
        *(
            ([LINES[0], LINES[1][:-1] + b"x" + LINES[2][:num_torn]], 1, "damaged")
            for num_torn in range(1, 9)
        ),
        ([LINES[0], CHANGED[1], LINES[2][:9]], 1, "damaged"),
        ([*LINES[:2], b"\0" * 4096], 2, ZERO),
        ([*LINES[:2], LINES[2][:30] + b"\0" * 500], 2, ZERO),
        ([*LINES[:2], LINES[2][:60] + b"\0" * 9 + LINES[2][69:]], 2, ZERO),
        ([b"\0" * 90, *LINES[1:]], 0, "zero.*begin a new study"),
        ([b"\0" * 20 + LINES[0][20:], *LINES[1:]], 0, "zero.*begin a new study"),
        *(
            ([LINES[index] for index in order], num_good, "out of place")
            for order, num_good in (
                ((0, 2, 1), 1),
                ((1, 0, 2), 0),
                ((0, 2), 1),
                ((2,), 0),
                ((0, 0, 1, 2), 1),
                ((0, 1, 2, 1, 2), 3),
                ((0, 1, 2, 2), 3),
            )
        ),
    ],
)
def test_damage_is_refused_by_line_and_the_records_before_it_can_be_salvaged(
    lines: list[bytes], num_good: int, message: str
) -> None:
    place = len(b"".join(LINES[:num_good]))
    with pytest.raises(InputError, match=rf"^j:{num_good + 1}: at byte {place}, .*{message}"):
        parse(lines, file="j")
    if num_good:
        contents = parse(lines, file="j", salvage=True)
        assert list(contents.bodies) == EVENTS[:num_good]
        assert (contents.num_bytes, contents.is_damaged) == (place, True)
    else:
        with pytest.raises(InputError, match="begin a new study"):
            parse(lines, file="j", salvage=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"NaN", "a number NaN"),
        (b"-Infinity", "a number -Infinity"),
        (b"1" * 5000, "digits"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_value_error(value: bytes, message: str) -> None:
    body = b'{"event":' + value + b"}"
    line = b'{"v":1,"n":0,"crc":%d,"body":%s}\n' % (zlib.crc32(body, zlib.crc32(b"0:")), body)
    contents = parse([line], file="j")
    with pytest.raises(ValueError, match=message):
        contents.bodies[0]


@pytest.mark.parametrize("line", [0, 2])
def test_a_newer_format_is_refused_wherever_it_begins(line: int) -> None:
    newer = b'{"v":2,"n":%d,"hash":"x","what":{}}\n' % line
    with pytest.raises(InputError, match=rf"^j:{line + 1}: .* newer version.*format 2"):
        parse([*LINES[:line], newer], file="j", salvage=True)


@pytest.mark.parametrize("foreign", [b"time,loss\n", b"hello", b"{}\n", b'{"time":1}\n'])
def test_a_file_of_something_else_is_not_taken_for_what_a_crash_left(foreign: bytes) -> None:
    with pytest.raises(InputError, match="no journal of a study"):
        parse([foreign], file="j")


def test_a_number_that_json_has_not_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(0, {"event": "x", "time": float("nan")})


# ------------------------------------------------------------------------- the file


def read_journal(path: Path) -> Contents:
    """Read a journal that another process may be writing."""
    with path.open("rb") as stream:
        return parse(stream, file=str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "j"


def filled(path: Path) -> bytes:
    journal = Journal.open(path)
    for event in EVENTS:
        journal.append(event)
    journal.close()
    return path.read_bytes()


def test_a_journal_cut_at_any_byte_loads_and_goes_on(path: Path) -> None:
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


def test_reading_leaves_a_torn_record_where_it_is(path: Path) -> None:
    torn = filled(path)[:-5]
    path.write_bytes(torn)
    assert list(read_journal(path).bodies) == EVENTS[:2]
    assert path.read_bytes() == torn


def test_a_damaged_journal_is_salvaged_up_to_the_damage_and_nothing_is_lost(
    path: Path,
    tmp_path: Path,
) -> None:
    lines = [encode(number, {"event": str(number)}) for number in range(4)]
    lines[2] = lines[2].replace(b"2", b"3", 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"j:3: at byte \d+, this record is damaged"):
        Journal.open(path)
    assert path.read_bytes() == b"".join(lines)
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
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda to, part: real(to, bytes(part)[:5]))
    filled(path)
    assert list(read_journal(path).bodies) == EVENTS


def refuse(*_arguments: object) -> int:
    """Stand for a system call that a broken disk refuses."""
    raise OSError(errno.EIO, "Input/output error")


def failing_write(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    calls: list[int] = []

    def write(descriptor: int, part: bytes) -> int:
        calls.append(len(part))
        if len(calls) == 1:
            return real(descriptor, bytes(part)[:7])
        raise FULL

    return write


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("write", r"j: cannot be written: No space left.*Make room.*--resume"),
        ("fsync", "Input/output error"),  # the disk did not confirm the record
    ],
)
def test_a_failed_write_is_taken_back_and_ends_the_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, message: str
) -> None:
    data = filled(path)
    journal = Journal.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing_write(os.write) if call == "write" else refuse)
        with pytest.raises(JournalError, match=message):
            journal.append({"event": "x"})
    assert path.read_bytes() == data
    with pytest.raises(JournalError, match=message):
        journal.append({"event": "y"})
    assert path.read_bytes() == data
    journal.close()


def test_a_failed_write_that_cannot_be_taken_back_is_dropped_by_the_next_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = filled(path)
    journal = Journal.open(path)

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


def test_an_interruption_waits_until_the_record_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_interruptions_at_any_instant_leave_a_whole_journal(path: Path) -> None:
    told, last = map(int, python("-c", STORM, path).stdout.split())
    contents = read_journal(path)
    numbers = [body["number"] for body in contents.bodies]
    assert numbers == sorted(set(numbers))
    assert told <= len(numbers) <= last
    assert contents.dropped is None


def test_a_second_writer_is_noticed_before_it_can_do_harm(path: Path) -> None:
    filled(path)
    first, second = Journal.open(path), Journal.open(path)
    second.append({"event": "x"})
    data = path.read_bytes()
    with pytest.raises(JournalError, match="somebody else has changed it"):
        first.append({"event": "y"})
    assert path.read_bytes() == data
    first.close()
    second.close()


def test_a_journal_that_was_removed_takes_no_records(path: Path) -> None:
    journal = Journal.open(path)
    (path).unlink()
    with pytest.raises(JournalError, match="it has been removed"):
        journal.append({"event": "x"})
    journal.close()


def test_a_place_that_cannot_have_a_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none/j: cannot be opened.*No such file"):
        Journal.open(tmp_path / "none" / "j")
    (tmp_path / "file").write_text("x", encoding="ascii")
    with pytest.raises(InputError, match=r"file/j: cannot be opened.*Not a directory"):
        Journal.open(tmp_path / "file" / "j")
    with pytest.raises(InputError, match=r"cannot be opened.*Is a directory"):
        Journal.open(tmp_path)


def test_an_open_journal_takes_little_more_memory_than_its_file(path: Path) -> None:
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
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InputError, match=r"j: cannot be opened for writing: Input/output error"):
        Journal.open(tmp_path / "j")
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
