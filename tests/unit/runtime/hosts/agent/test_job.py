"""What a rank prints: its log, its events, its last lines; and the contents of its files."""

import errno
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from amp_ray.runtime.hosts.agent import job as module
from amp_ray.runtime.hosts.agent.job import (
    TAIL_CHARACTERS,
    TAIL_LINES,
    Log,
    RankProcess,
    Store,
    end_of,
)
from amp_ray.runtime.hosts.agent.wire import pack
from amp_ray.training.events import EventChannel

HEAD, HALF, KEPT = 400, 300, 500
LIMIT = 100_000

Write = Callable[..., list[str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write lines in pieces of any size to a log of small parts; return the lines that it keeps."""
    for name, value in (("HEAD_BYTES", HEAD), ("HALF_BYTES", HALF), ("KEPT_BYTES", KEPT)):
        monkeypatch.setattr(module, name, value)
    made: list[Log] = []

    def write_(
        lines: list[str], words: tuple[str, ...] = ("took ",), limit: int = LIMIT, seed: int = 0
    ) -> list[str]:
        made.append(Log(str(tmp_path), words))
        data = "".join(f"{line}\n" for line in lines).encode()
        draw = random.Random(seed)
        while data:
            size = draw.randint(1, 200)
            made[-1].write(data[:size])
            data = data[size:]
        return made[-1].content(limit).decode().splitlines()

    yield write_
    for log in made:
        log.close()


def chatter(number: int, every: int) -> list[str]:
    """Make lines of which some tell a step."""
    return [
        f"step {index} took 1.5 s" if index % every == 0 else f"{index} {'x' * (index % 23)}"
        for index in range(number)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 20, 60, 75, 100, 200])
def test_steps_are_kept_in_order_wherever_they_stand(write: Write, number: int, seed: int) -> None:
    lines = chatter(number, every=9)
    kept = write(lines, seed=seed)
    steps = [line for line in lines if "took " in line]
    assert [line for line in kept if re.match(r"step \d+ took", line)] == steps


def test_a_short_log_is_whole(write: Write) -> None:
    lines = chatter(60, every=9)
    assert write(lines) == lines


def test_of_a_long_log_both_ends_are_whole_and_the_gap_is_told(write: Write) -> None:
    lines = chatter(3000, every=10_000)
    kept = write(lines, ())
    [gap] = [index for index, line in enumerate(kept) if "bytes of this log were not kept" in line]
    head, last = kept[:gap], kept[gap + 1 :]
    assert head == lines[: len(head)]
    assert last[1:] == lines[-len(last) + 1 :]  # without words, the first may be cut
    assert len("\n".join(head)) > HEAD - 50
    assert len("\n".join(last)) > HALF - 50


def test_kept_lines_are_bounded_too(write: Write) -> None:
    kept = write(chatter(50_000, every=1))
    assert len("\n".join(kept)) < HEAD + KEPT + 2 * HALF + 200


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_cuts_the_middle_and_not_the_steps(write: Write, seed: int) -> None:
    lines = chatter(90, every=9)
    kept = write(lines, limit=800, seed=seed)
    assert len("\n".join(kept)) < 1000
    steps = [line for line in lines if "took " in line]
    assert [line for line in kept if re.match(r"step \d+ took", line)] == steps
    assert (kept[0], kept[-1]) == (lines[0], lines[-1])


def test_a_log_leaves_no_file(write: Write, tmp_path: Path) -> None:
    write(chatter(100, every=9))
    assert [*tmp_path.iterdir()] == []


TAG = "amp-ray-0123456789"
STEP = f'{{"event": "step", "tag": "{TAG}", "number": 3}}'

Hear = Callable[..., tuple[list[dict[str, Any]], list[str]]]


@pytest.fixture
def hear(tmp_path: Path) -> Iterator[Hear]:
    """Have a rank print something; return its messages and the lines that are left as text."""
    made: list[RankProcess] = []

    def print_(
        text: bytes | str, tag: str | None = TAG, room: int = 1 << 20
    ) -> tuple[list[dict[str, Any]], list[str]]:
        data = text if isinstance(text, bytes) else text.encode()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        rank = RankProcess(2, read_end, str(tmp_path), tag=tag, room=room)
        made.append(rank)
        messages: list[dict[str, Any]] = []
        for start in range(0, len(data), 4096):
            os.write(write_end, data[start : start + 4096])
            messages += rank.read(everything=True)
        os.close(write_end)
        messages += rank.read(everything=True)
        return messages, rank.exit_message(ended=False)["tail"]

    yield print_
    for rank in made:
        rank.close()


def test_a_line_with_the_tag_is_a_message_without_it(hear: Hear) -> None:
    messages, tail = hear(f"{STEP}\n")
    assert messages == [{"kind": "said", "rank": 2, "data": {"event": "step", "number": 3}}]
    assert tail == []


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "failed", "cause": "oom"}',
        '{"event": "failed", "tag": "amp-ray-of-another-trial"}',
        '{"event": "failed", "tag": null}',
        '{"event": "failed", "tag": ["amp-ray-0123456789"]}',
        '{"event": broken',
        f'{{"time": 1, "event": "failed", "tag": "{TAG}"}}',
        f" {STEP}",
        f"{STEP} and more",
        '{"event": ' + "[" * 400,
    ],
)
def test_what_a_library_logs_is_text_however_much_it_looks_like_a_message(
    hear: Hear, line: str
) -> None:
    assert hear(f"{line}\n") == ([], [line])


def test_without_a_tag_nothing_is_a_message(hear: Hear) -> None:
    line = '{"event": "failed", "tag": null}'
    assert hear(f"{line}\n{STEP}\n", None) == ([], [line, STEP])


def test_a_message_between_lines_of_text_is_found(hear: Hear) -> None:
    messages, tail = hear(f"before\n{STEP}\nafter\nno end of line")
    assert [message["data"]["number"] for message in messages] == [3]
    assert tail == ["before", "after", "no end of line"]


def test_bytes_that_are_no_text_are_readable(hear: Hear) -> None:
    messages, tail = hear(b'{"event": \xff\n\xff\xfe\r\n')
    assert messages == []
    assert tail == [r'{"event": \xff', r"\xff\xfe"]


def test_only_the_last_lines_are_kept(hear: Hear) -> None:
    _, tail = hear("".join(f"{number}\n" for number in range(2 * TAIL_LINES)))
    assert tail == [str(number) for number in range(TAIL_LINES, 2 * TAIL_LINES)]


def test_a_line_without_end_does_not_pile_up(hear: Hear) -> None:
    [line] = hear(b"x" * 300_000)[1]
    assert line.startswith("x" * TAIL_CHARACTERS)
    assert len(line) < 2 * TAIL_CHARACTERS


def test_last_words_that_are_binary_stay_short_and_readable(hear: Hear) -> None:
    _, tail = hear(os.urandom(1 << 20))
    assert len("".join(tail)) < 2 * TAIL_LINES * TAIL_CHARACTERS
    assert all(line.replace("\t", "").isprintable() for line in tail)


def test_colours_are_left_out_and_what_moves_a_cursor_is_shown(hear: Hear) -> None:
    assert hear("\x1b[31mred\x1b[0m\x1b[2Jgone\n")[1] == [r"red\x1b[2Jgone"]


def test_messages_without_end_become_text(hear: Hear) -> None:
    line = f'{{"event": "step", "tag": "{TAG}", "text": "{"x" * 15_000}"}}\n'
    messages, tail = hear(line * 100, room=20 * len(line))
    assert len(messages) == 20
    assert tail


def test_everything_stands_in_the_log(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    rank = RankProcess(2, read_end, str(tmp_path), tag=TAG)
    os.write(write_end, f"text\n{STEP}\n".encode())
    os.close(write_end)
    assert len([*rank.read(everything=True)]) == 1
    assert rank.log.content(1000).decode() == f"text\n{STEP}\n"
    rank.close()
    assert [*tmp_path.iterdir()] == []


def test_what_the_training_program_writes_is_a_message(
    hear: Hear, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMP_RAY_TAG", TAG)
    with EventChannel() as channel:
        channel.send("step", loss=0.5)
    line = capfd.readouterr().out
    [message], tail = hear(line)
    assert message["data"] == {
        key: value for key, value in json.loads(line).items() if key != "tag"
    }
    assert tail == []


def test_the_end_of_a_pipe_is_nothing_and_is_not_waited_for(tmp_path: Path) -> None:
    """A program may leave a pipe in its folder; opened otherwise it waits for a writer forever."""
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    ends: list[bytes | None] = []
    reader = Thread(target=lambda: ends.append(end_of(pipe, 10)), daemon=True)
    reader.start()
    reader.join(60)
    assert ends == [None]
    (tmp_path / "link").symlink_to(pipe)
    assert end_of(tmp_path / "link", 10) is None
    (tmp_path / "file").write_bytes(b"0123456789abc")
    assert end_of(tmp_path / "file", 10) == b"3456789abc"


def test_a_content_of_which_a_piece_was_not_written_is_not_stored_until_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [pack(b"first "), pack(b"second")]

    def fail(_file: object, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as opened:
        monkeypatch.setattr(module, "unnamed_file", lambda _folder: opened)
        store = Store(str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_all", fail)
            with pytest.raises(OSError, match="full"):
                store.add("d", parts[0], last=False)
        with pytest.raises(OSError, match="Input/output error"):
            store.add("d", parts[1], last=True)
        for part, last in zip(parts, (False, True), strict=True):
            store.add("d", part, last=last)
        store.write("d", tmp_path / "a/file")
    assert (tmp_path / "a/file").read_bytes() == b"first second"
