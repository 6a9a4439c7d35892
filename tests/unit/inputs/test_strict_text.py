import tracemalloc

import pytest

from amp_ray.errors import InputError, Where
from amp_ray.inputs.strict_text import (
    is_count,
    parse_any_json,
    parse_json,
    parse_toml,
    read_count,
    read_rows,
    read_seconds,
)

WHERE = Where(file="x.csv", line=3, key="tp")


def test_an_object_is_read_in_its_order() -> None:
    assert list(parse_json('{"b": 1, "a": [2.5, null]}', file="x")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x:1: not valid JSON: Expecting value; the file ends here: is it cut short?"),
        ('{"a": [1,\n 2', "x:2: not valid JSON: .*; the file ends here: is it cut short"),
        ('{"a": "b', "x:1: not valid JSON: Unterminated string.*; the file ends here"),
        ('{"a": 1,}', "x:1: not valid JSON: [^;]*$"),
        ('{"a": 1, "a": 2}', "x: not usable JSON: key 'a' stands there twice: keep one"),
        ('{"a": NaN}', "x: not usable JSON: found NaN; expected a finite number"),
        ('{"a": -Infinity}', "x: not usable JSON: found -Infinity; expected"),
        ("[1]", r"x: expected a JSON object, found \[1\]"),
        (f'"{"a" * 100}"', "x: expected a JSON object, found 'a{59}[.]{3}$"),
        ("null", "x: expected a JSON object, found null"),
        ("[" * 100_000, "x: not usable JSON: "),
        ('{"a": 1' + "0" * 5000 + "}", "x: not usable JSON: "),
    ],
)
def test_what_is_no_object_is_led_to_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        parse_json(text, file="x")


def test_rows_come_with_their_lines_and_without_blank_ones() -> None:
    rows = [(where.line, row) for where, row in read_rows("a, b \n\n , \n1,2\n", "x.csv")]
    assert rows == [(1, ["a", "b"]), (4, ["1", "2"])]
    with pytest.raises(InputError, match=r"^x\.csv:2: not valid CSV"):
        list(read_rows('a\n"b\n', "x.csv"))


@pytest.mark.parametrize("cell", ["", "-1", "1.0", "1_0", "٣", "1e3", "1000000000"])
def test_a_count_is_plain_digits_of_a_plausible_size(cell: str) -> None:
    assert not is_count(cell, 0)
    assert read_count(" 12 ", WHERE) == 12


@pytest.mark.parametrize("cell", ["0", None])
def test_a_count_below_the_lowest_is_refused_with_its_place(cell: str | None) -> None:
    message = rf"^x\.csv:3: tp: found '{cell or ''}'; expected an integer of at least 1"
    with pytest.raises(InputError, match=message):
        read_count(cell, WHERE)


@pytest.mark.parametrize(
    ("cell", "seconds"),
    [
        *(("0", 0.0), (" 1e-3 ", 1e-3), ("2.5", 2.5)),
        *((cell, None) for cell in (None, "", "nan", "inf", "-1e-9", "1_0", "1 s")),
    ],
)
def test_seconds_are_read_or_none(cell: str | None, seconds: float | None) -> None:
    assert read_seconds(cell) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a." * 20_000 + "a = 1", "x:1: cannot be read as TOML: a key of more than 50 parts"),
        (
            'x = 1\n["' + '" . "' * 20_000 + '"]',
            "x:2: cannot be read as TOML: a key of",
        ),
        ("x = " + "[" * 20_000, "nested more than 50 levels deep"),
        ("x = " + "[" * 51 + "]" * 51, "nested more than 50 levels deep"),
        ("x = 1\ny = !\n", "x:2: cannot be read as TOML: Invalid value"),
    ],
)
def test_toml_nested_too_deeply_is_refused_before_it_takes_memory(text: str, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        parse_toml(text, file="x")
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


@pytest.mark.parametrize("depth", [51, 900, 100_000])
def test_json_nested_too_deeply_is_refused(depth: int) -> None:
    with pytest.raises(InputError, match="nested more than 50 levels deep"):
        parse_any_json("[" * depth + "]" * depth, file="x")
    assert parse_any_json("[" * 50 + "]" * 50, file="x")
    assert parse_toml('x = "' + "a. b." * 100 + '"', file="x")
