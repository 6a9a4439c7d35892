import base64
import json
import random
import subprocess
import sys
import zlib
from itertools import pairwise
from typing import Any

import pytest

from amp_ray.runtime.hosts.agent.wire import (
    CHUNK_BYTES,
    FIRST_BYTES,
    FROM_AGENT,
    FROM_CONTROLLER,
    MARK,
    Lines,
    Seal,
    WireError,
    is_plain_name,
    pack,
    printable,
    unpack,
)

READ_LINE = """
from amp_ray.runtime.hosts.agent.wire import read_line
print(read_line())
print(read_line())
"""

KEY = bytes(range(32))
MESSAGES: list[dict[str, Any]] = [{"kind": "a", "number": number} for number in range(5)]


def sealed(key: bytes = KEY, sender: bytes = FROM_AGENT) -> list[bytes]:
    sealer = Seal(key, sender)
    return [sealer.seal(message).rstrip(b"\n") for message in MESSAGES]


def test_messages_arrive_as_they_were_sent() -> None:
    opener = Seal(KEY, FROM_AGENT)
    assert [opener.open(line) for line in sealed()] == MESSAGES


@pytest.mark.parametrize(
    "lines",
    [
        sealed(key=bytes(32)),
        sealed(sender=FROM_CONTROLLER),
        [line.replace(b'"a"', b'"b"') for line in sealed()],
        [line + b" " for line in sealed()],
        [line.replace(MARK, b"") for line in sealed()],
        [json.dumps(message).encode() for message in MESSAGES],
        sealed()[1:],
        [b"", MARK, MARK + b"00 {}"],
    ],
)
def test_what_is_forged_changed_or_comes_after_a_gap_is_noise(lines: list[bytes]) -> None:
    opener = Seal(KEY, FROM_AGENT)
    assert [opener.open(line) for line in lines] == [None] * len(lines)


def test_a_message_counts_once_and_noise_between_messages_does_no_harm() -> None:
    opener = Seal(KEY, FROM_AGENT)
    lines = [line for one in sealed() for line in (one, one, b"noise")]
    assert [message for message in map(opener.open, lines) if message] == MESSAGES


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"kind": 3}', b"{", b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_message_is_an_error_also_with_the_right_hash(body: bytes) -> None:
    line = MARK + Seal(KEY, FROM_AGENT)._digits(body) + b" " + body  # noqa: SLF001 - no sender does
    with pytest.raises(WireError):
        Seal(KEY, FROM_AGENT).open(line)


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_the_same_however_they_arrive(seed: int) -> None:
    draw = random.Random(seed)
    data = bytes(draw.choice(b"ab\n") for _ in range(500))
    cuts = sorted(draw.choices(range(len(data)), k=draw.randint(0, 60)))
    lines = Lines()
    received = [
        line
        for start, end in pairwise([0, *cuts, len(data)])
        for line in lines.feed(data[start:end])
    ]
    *expected, rest = data.split(b"\n")
    assert (received, lines.rest()) == (expected, rest)


def test_a_line_without_end_is_an_error() -> None:
    lines = Lines(limit=100)
    assert lines.feed(b"x" * 100) == []
    with pytest.raises(WireError, match="more than 100 bytes without a line feed"):
        lines.feed(b"x")


@pytest.mark.parametrize(
    "data", [b"", b"text" * 1000, random.Random(0).randbytes(CHUNK_BYTES), bytes(CHUNK_BYTES)]
)
def test_pieces_of_files_arrive_as_they_were(data: bytes) -> None:
    assert unpack(pack(data)) == data


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        base64.b64encode(b"plain").decode(),
        pack(b"text" * 1000)[:-8],
        base64.b64encode(zlib.compress(bytes(100_000_000))).decode(),
    ],
)
def test_what_is_no_piece_is_refused_also_one_that_grows_without_end(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(text)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "a\nb", "a" * 201])
def test_names_that_are_no_plain_ones(name: str) -> None:
    assert not is_plain_name(name)


def test_text_is_cut_and_shows_what_would_move_the_cursor() -> None:
    assert printable("tab\tline\n\x1b[2J\x07\u202e") == "tab\tline\n\\x1b[2J\\x07\\u202e"
    assert printable("x" * 50, 10) == "xxxxxxxxxx [... 40 more]"


@pytest.mark.parametrize("more", [b"", b"no line feed", b"x" * (FIRST_BYTES + 2) + b"\n"])
def test_lines_of_stdin_are_read_one_by_one_and_bad_input_ends_the_program(more: bytes) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READ_LINE], input=b"one\n" + more, capture_output=True, check=True
    )
    assert ended.stdout == b"b'one\\n'\n"
