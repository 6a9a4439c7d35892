"""Properties of every journal, whatever the damage."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import InputError
from amp_ray.runtime.study.journal import Contents, encode, parse
from support.examples import examples

_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
) | st.text()
_JSON = st.recursive(
    _PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)
_BODIES = st.lists(st.dictionaries(st.text(), _JSON, max_size=4), min_size=1, max_size=6)


def lines(bodies: list[dict[str, Any]]) -> list[bytes]:
    return [encode(number, body) for number, body in enumerate(bodies)]


def split(data: bytes) -> list[bytes]:
    """Split a journal into lines, at line feeds only, as reading a file does."""
    whole = [line + b"\n" for line in data.split(b"\n")]
    whole[-1] = whole[-1][:-1]
    return [line for line in whole if line]


@given(bodies=_BODIES)
def test_a_journal_is_read_as_it_was_written(bodies: list[dict[str, Any]]) -> None:
    contents = parse(lines(bodies), file="j")
    assert list(contents.bodies) == bodies
    assert contents.dropped is None


@given(bodies=_BODIES, data=st.data())
def test_a_changed_byte_never_changes_a_record_unnoticed(
    bodies: list[dict[str, Any]], data: st.DataObject
) -> None:
    written = bytearray(b"".join(lines(bodies)))
    place = data.draw(st.integers(0, len(written) - 1))
    written[place] ^= data.draw(st.integers(1, 255))
    try:
        contents = parse(split(bytes(written)), file="j")
    except InputError:
        return
    assert list(contents.bodies) == bodies[:-1]
    assert contents.dropped is not None


@given(bodies=_BODIES, tail=st.binary(min_size=1))
def test_no_tail_hides_a_record_before_it(bodies: list[dict[str, Any]], tail: bytes) -> None:
    written = b"".join(lines(bodies))
    try:
        contents = parse(split(written + tail), file="j")
    except InputError:
        return
    assert list(contents.bodies) == bodies
    assert contents.dropped is not None
    assert contents.num_bytes == len(written)


_RECORDS = [
    encode(number, {"event": "ended", "number": number, "lines": ["é\n{}"] * (number * 7 % 30)})
    for number in range(40)
]
_WHOLE = b"".join(_RECORDS)
_STARTS = [sum(map(len, _RECORDS[:number])) for number in range(len(_RECORDS) + 1)]


def _changed_in_place(draw: st.DrawFn) -> bytes:
    """Draw a journal with changed or zeroed bytes; all other records stay in their places."""
    block = draw(st.sampled_from([1, 512, 4096]))
    start = draw(st.integers(0, (len(_WHOLE) - 1) // block)) * block
    length = draw(st.integers(1, 3000)) if block == 1 else block
    end = min(len(_WHOLE), start + length)
    if draw(st.booleans()):
        return _WHOLE[:start] + bytes(end - start) + _WHOLE[end:]
    changed = bytearray(_WHOLE)
    for place in draw(st.lists(st.integers(start, end - 1), min_size=1, max_size=3)):
        changed[place] ^= draw(st.integers(1, 255))
    return bytes(changed)


def _moved(draw: st.DrawFn) -> bytes:
    """Draw a journal with repeated or swapped lines, or with records of a second writer."""
    records = list(_RECORDS)
    one, other = (draw(st.integers(0, len(records) - 1)) for _ in range(2))
    way = draw(st.sampled_from(["repeat", "swap", "two processes"]))
    if way == "repeat":
        records.insert(one, records[other])
    elif way == "swap":
        records[one], records[other] = records[other], records[one]
    else:
        for number in range(one, draw(st.integers(one, len(records) - 1)) + 1):
            place = draw(st.integers(number, len(records)))
            records.insert(place, encode(number, {"event": "ended", "by": "another"}))
    return b"".join(records)


@st.composite
def damages(draw: st.DrawFn) -> bytes:
    """Draw a journal with one or two damages as disks, crashes and people cause them."""
    data = _moved(draw) if draw(st.booleans()) else _changed_in_place(draw)
    if draw(st.integers(0, 3)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    tail = draw(st.sampled_from([b"", b"", b"", bytes(1), bytes(512), bytes(4096)]))
    return data + tail


def read(data: bytes) -> tuple[Contents | None, InputError | None]:
    try:
        return parse(split(data), file="j"), None
    except InputError as error:
        return None, error


@examples(1500)
@given(data=damages())
def test_no_damage_takes_a_record_away_in_silence(data: bytes) -> None:
    """The reader returns every record that is in its place, or names a damaged line."""
    first = next(
        (
            number
            for number, start in enumerate(_STARTS[:-1])
            if data[start : _STARTS[number + 1]] != _RECORDS[number]
        ),
        len(_RECORDS),
    )
    contents, problem = read(data)
    if problem is not None:
        where = problem.where
        assert where is not None
        assert where.line is not None
        # A second writer's record may stand in place of our first missing one.
        assert where.line > first
        *good, line = split(data)[: where.line]
        is_foreign = first == 0 and "this is no journal of a study" in str(problem)
        # A damaged digit of the version cannot be told from a record of a newer version.
        is_newer = not line.startswith(b'{"v":1,') and "a newer version" in str(problem)
        assert is_foreign or is_newer or f"at byte {len(b''.join(good))}, " in str(problem)
        return
    assert contents is not None
    rest = data[contents.num_bytes :]
    assert len(contents.bodies) >= first
    assert b"\n" not in rest
    assert b"\0" not in rest
    assert (contents.dropped is not None) == bool(rest)
    # The dropped end is a part of one record.
    assert rest.count(b'{"v":') <= 1
    assert all(record[:-1] not in rest or record[:-1] == rest for record in _RECORDS)
