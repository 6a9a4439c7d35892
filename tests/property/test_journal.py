"""What holds for every journal, whatever happens to its end."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import InputError
from amp_ray.runtime.study.journal import encode, parse

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
    """Split as files are: at line feeds alone."""
    whole = [line + b"\n" for line in data.split(b"\n")]
    whole[-1] = whole[-1][:-1]
    return [line for line in whole if line]


@given(bodies=_BODIES)
def test_a_journal_is_read_as_it_was_written(bodies: list[dict[str, Any]]) -> None:
    contents = parse(lines(bodies), file="j")
    assert list(contents.bodies) == bodies
    assert contents.dropped is None


@given(bodies=_BODIES, data=st.data())
def test_a_journal_that_is_cut_anywhere_has_every_whole_record(
    bodies: list[dict[str, Any]], data: st.DataObject
) -> None:
    written = b"".join(lines(bodies))
    cut = written[: data.draw(st.integers(0, len(written)))]
    contents = parse(split(cut), file="j")
    assert list(contents.bodies) == bodies[: cut.count(b"\n")]
    assert contents.num_bytes == cut.rfind(b"\n") + 1
    assert (contents.dropped is None) == (contents.num_bytes == len(cut))


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


@given(bodies=_BODIES, data=st.data())
def test_lines_in_another_order_never_load_as_a_journal(
    bodies: list[dict[str, Any]], data: st.DataObject
) -> None:
    written = lines(bodies)
    order = data.draw(st.lists(st.integers(0, len(bodies) - 1), max_size=8))
    try:
        contents = parse([written[index] for index in order], file="j")
    except InputError:
        return
    num_records = len(contents.bodies)
    assert order[:num_records] == list(range(num_records))
    assert list(contents.bodies) == bodies[:num_records]
    # Nothing behind it but, with a message, one more copy of its last line.
    assert order[num_records:] == [num_records - 1] * (contents.dropped is not None)


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
