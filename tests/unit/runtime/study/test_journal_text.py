import json
import zlib
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.study.journal import encode, parse

EVENTS: list[dict[str, Any]] = [
    {"event": "study", "experiment": "größe"},
    {"event": "started", "number": 0, "predicted_s": 0.1 + 0.2},
    {"event": "ended", "number": 0, "reason": None, "lines": ["a\nb", "{}", "\udcff"]},
]
LINES = [encode(number, event) for number, event in enumerate(EVENTS)]


def lines_of(*order: int) -> list[bytes]:
    return [LINES[index] for index in order]


def test_a_record_is_one_line_of_json() -> None:
    record = json.loads(LINES[2])
    assert record["n"] == 2
    assert record["body"] == EVENTS[2]
    assert LINES[2].count(b"\n") == 1
    assert LINES[2].endswith(b"\n")


def test_bodies_are_read_as_they_were_written() -> None:
    contents = parse(LINES, file="j")
    assert list(contents.bodies) == EVENTS
    assert len(contents.bodies) == 3
    assert list(contents.bodies[1:]) == EVENTS[1:]
    assert contents.bodies[-1] == EVENTS[-1]
    assert contents.num_bytes == sum(map(len, LINES))
    assert contents.dropped is None


def test_no_lines_are_an_empty_journal() -> None:
    contents = parse([], file="j")
    assert not contents.bodies
    assert contents.dropped is None


def test_keys_that_json_turns_into_text_do_not_spoil_a_record() -> None:
    body: dict[Any, Any] = {"event": "x", "of": {10: "a", 9: "b"}}
    contents = parse([encode(0, body)], file="j")
    assert contents.bodies[0] == {"event": "x", "of": {"10": "a", "9": "b"}}


@pytest.mark.parametrize("index", [0, 1])
def test_changed_bytes_before_the_end_are_refused_by_line(index: int) -> None:
    changed = list(LINES)
    changed[index] = changed[index].replace(b'"event"', b'"evenT"', 1)
    place = sum(map(len, LINES[:index]))
    after = ("2 whole records", "1 whole record")[index]
    with pytest.raises(
        InputError,
        match=rf"^j:{index + 1}: at byte {place}, this record is damaged.* {after} follow",
    ):
        parse(changed, file="j")


def test_a_changed_line_feed_before_the_last_record_is_refused() -> None:
    joined = LINES[-2][:-1] + b"x" + LINES[-1]
    with pytest.raises(InputError, match="this record is damaged"):
        parse([*LINES[:-2], joined], file="j")


def test_a_changed_last_record_is_refused_since_it_was_completed() -> None:
    with pytest.raises(InputError, match=r"^j:3: .*damaged.*no crash does that.*the 2 records"):
        parse([*LINES[:2], LINES[2].replace(b'"event"', b'"evenT"', 1)], file="j")


def test_a_line_feed_that_changed_before_a_torn_record_takes_no_whole_one_along() -> None:
    for num_torn in range(1, 9):
        joined = LINES[1][:-1] + b"x" + LINES[2][:num_torn]
        with pytest.raises(InputError, match=r"^j:2: "):
            parse([LINES[0], joined], file="j")


def test_where_a_journal_lies_changes_no_judgement() -> None:
    contents = parse([*LINES[:2], LINES[2][:9]], file="newer version/j")
    assert len(contents.bodies) == 2


def test_a_changed_record_before_a_torn_one_is_refused() -> None:
    changed = LINES[1].replace(b'"event"', b'"evenT"', 1)
    with pytest.raises(InputError, match=r"^j:2: at byte 86, this record is damaged"):
        parse([LINES[0], changed, LINES[2][:9]], file="j")


def test_a_torn_record_is_dropped_with_its_size() -> None:
    contents = parse([*LINES[:2], LINES[2][:9]], file="j")
    place = f"line 3, byte {len(LINES[0]) + len(LINES[1])}"
    assert contents.dropped == f"{place}: 9 bytes of a record that was never completed"


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, LINES[2][:30] + b"\0" * 500, LINES[2][:60] + b"\0" * 9 + LINES[2][69:]]
)
def test_zeros_at_the_end_are_told_since_they_may_have_been_several_records(tail: bytes) -> None:
    num_bytes = len(LINES[0]) + len(LINES[1])
    with pytest.raises(InputError, match=rf"^j:3: at byte {num_bytes}, .*zero.*--salvage"):
        parse([*LINES[:2], tail], file="j")
    contents = parse([*LINES[:2], tail], file="j", salvage=True)
    assert list(contents.bodies) == EVENTS[:2]
    assert contents.is_damaged


def test_a_header_of_zeros_is_damage_and_no_file_of_something_else() -> None:
    for tail in (b"\0" * 90, b"\0" * 20 + LINES[0][20:]):
        with pytest.raises(InputError, match=r"^j:1: at byte 0, .*zero.*begin a new study"):
            parse([tail, *LINES[1:]], file="j")


@pytest.mark.parametrize(
    ("order", "num_good"),
    [
        ((0, 2, 1), 1),
        ((1, 0, 2), 0),
        ((0, 2), 1),
        ((2,), 0),
        ((0, 0, 1, 2), 1),
        ((0, 1, 2, 1, 2), 3),
        ((0, 1, 2, 2), 3),
    ],
)
def test_reordered_missing_and_doubled_records_are_refused_by_line(
    order: tuple[int, ...], num_good: int
) -> None:
    advice = "--resume --salvage" if num_good else "begin a new study"
    with pytest.raises(InputError, match=f"^j:{num_good + 1}: .*out of place.*{advice}"):
        parse(lines_of(*order), file="j")


def test_the_records_before_a_damage_can_be_salvaged() -> None:
    changed = LINES[1].replace(b'"event"', b'"evenT"', 1)
    contents = parse([LINES[0], changed, LINES[2]], file="j", salvage=True)
    assert list(contents.bodies) == EVENTS[:1]
    assert contents.is_damaged
    assert contents.num_bytes == len(LINES[0])
    assert contents.dropped == "line 2, byte 86: a damaged record, and all that follows"


def test_a_crash_is_no_damage() -> None:
    assert not parse([*LINES[:2], LINES[2][:9]], file="j", salvage=True).is_damaged


def test_of_a_damaged_header_nothing_can_be_salvaged() -> None:
    with pytest.raises(InputError, match=r"^j:1: .*begin a new study"):
        parse([LINES[0].replace(b"study", b"studY", 1), LINES[1]], file="j", salvage=True)


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
