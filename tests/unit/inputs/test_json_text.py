import pytest

from amp_ray.errors import InputError, shown
from amp_ray.inputs.json_text import parse_json


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
        ("null", "x: expected a JSON object, found null"),
        ("[" * 100_000, "x: not usable JSON: "),
        ('{"a": 1' + "0" * 5000 + "}", "x: not usable JSON: "),
    ],
)
def test_what_is_no_object_is_led_to_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        parse_json(text, file="x")


def test_long_values_are_cut_in_messages() -> None:
    assert shown("a" * 100) == "'" + "a" * 59 + "..."
