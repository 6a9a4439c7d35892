import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.journal import Journal, JournalError, encode, parse, read_journal

EVENTS: list[dict[str, Any]] = [
    {"event": "study", "experiment": "größe"},
    {"event": "started", "number": 0, "predicted_s": 0.1 + 0.2},
    {"event": "ended", "number": 0, "reason": None, "lines": ["a\nb", "{}"]},
]


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


def test_a_changed_byte_is_refused_in_the_middle_and_dropped_at_the_end(tmp_path: Path) -> None:
    data = filled(tmp_path / "j")
    lines = data.splitlines(keepends=True)
    for index in range(3):
        changed = [*lines]
        changed[index] = changed[index].replace(b'"event"', b'"evenT"', 1)
        if index < 2:
            with pytest.raises(InputError, match=rf"j:{index + 1}: damaged"):
                parse(b"".join(changed), file="j")
        else:
            contents = parse(b"".join(changed), file="j")
            assert list(contents.bodies) == EVENTS[:2]
            assert contents.dropped is not None


def test_reordered_and_missing_records_are_refused() -> None:
    lines = [encode(number, event) for number, event in enumerate(EVENTS)]
    for order in ((0, 2, 1), (1, 0, 2), (0, 2), (1, 2), (0, 0, 1, 2)):
        with pytest.raises(InputError, match=r"expected \d"):
            parse(b"".join(lines[index] for index in order), file="j")


def test_a_doubled_last_record_is_dropped_with_a_message() -> None:
    lines = [encode(number, event) for number, event in enumerate(EVENTS)]
    contents = parse(b"".join([*lines, lines[-1]]), file="j")
    assert list(contents.bodies) == EVENTS
    assert contents.dropped == "a second copy of record 2"


def test_another_record_with_a_number_that_is_taken_is_refused() -> None:
    lines = [encode(number, event) for number, event in enumerate(EVENTS)]
    with pytest.raises(InputError, match="found record 2, expected 3"):
        parse(b"".join([*lines, encode(2, {"event": "else"})]), file="j")


def test_a_newer_format_is_refused_even_in_the_last_line() -> None:
    line = encode(0, EVENTS[0]).replace(b'"v":1', b'"v":2')
    with pytest.raises(InputError, match="newer version"):
        parse(line, file="j")


def test_numbers_that_json_has_not_are_our_mistake(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"event": "x", "time": float("nan")})
    journal.close()


def test_a_failed_write_is_taken_back_and_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    data = filled(path)
    journal = Journal.open(path)
    real = os.write
    calls = []

    def full(descriptor: int, part: bytes) -> int:
        calls.append(len(part))
        if len(calls) == 1:
            return real(descriptor, bytes(part)[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JournalError, match=r"j: cannot be written: No space left.*--resume"):
        journal.append({"event": "x"})
    monkeypatch.undo()
    assert path.read_bytes() == data
    with pytest.raises(JournalError, match="No space left"):
        journal.append({"event": "y"})
    assert path.read_bytes() == data
    journal.close()


def test_a_real_limit_of_size_leaves_a_journal_that_loads(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from amp_ray.runtime.journal import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
journal = Journal.open(Path({str(tmp_path / "j")!r}))
try:
    for number in range(1000):
        journal.append({{"event": "x", "number": number}})
except JournalError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "File too large" in ended.stdout
    contents = read_journal(tmp_path / "j")
    assert 10 < len(contents.bodies) < 100
    assert contents.dropped is None
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file or directory"):
        Journal.open(tmp_path / "none" / "j")
    with pytest.raises(InputError, match="cannot be read"):
        read_journal(tmp_path / "none" / "j")
