import json

import pytest

from net.comparing import differences, layout
from net.running import once
from net.table import words_of


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"a": [1.0, 2]}, {"a": [1.0 + 1e-13, 2]}, []),
        ({"a": [1.0, 2]}, {"a": [1.0 + 1e-11, 2]}, ["a[0]: 1.0 is now 1.00000000001"]),
        ({"a": 1}, {"a": 1.0}, ["a: 1 is now 1.0"]),
        ({"a": 1}, {"b": 1}, ['a: 1 is now "nothing"', 'b: "nothing" is now 1']),
        (["0.5 s"], ["0.50000000000001 s"], []),
        (["0.5 s"], ["0.51 s"], ['[0]: "0.5 s" is now "0.51 s"']),
        (["a 0.5"], ["b 0.5"], ['[0]: "a 0.5" is now "b 0.5"']),
    ],
)
def test_floats_are_compared_to_twelve_digits_and_all_else_exactly(
    old: object, new: object, told: list[str]
) -> None:
    assert list(differences(old, new)) == told


def test_parts_of_a_sum_are_compared_to_the_digits_of_the_largest() -> None:
    old, new = {"compute": 1.0, "bubble": 1e-6}, {"compute": 1.0, "bubble": 1e-6 + 1e-13}
    assert list(differences({"breakdown_s": old}, {"breakdown_s": new})) == []
    assert len(list(differences({"other": old}, {"other": new}))) == 1


def test_a_long_part_is_recorded_once_and_lines_are_json() -> None:
    part = {"text": "x" * 200}
    recorded = once([part, {"again": part}], "", {})
    assert recorded == [part, {"again": "as at [0]"}]
    assert json.loads(layout(recorded)) == recorded


def test_a_key_with_a_value_is_short_for_set() -> None:
    words = words_of("plan a.yaml zero_stage=1 --trials replay:a=b.csv")
    assert words == ("plan", "a.yaml", "--set", "zero_stage=1", "--trials", "replay:a=b.csv")
