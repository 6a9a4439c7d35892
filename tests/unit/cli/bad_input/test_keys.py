"""What a user may get wrong about any key: its name, its type, its size."""

from typing import Final

import pytest

from support.bad_input import Refused, edited

KEYS: Final = {
    "unknown key": (
        ("zero_stage: 0", "zero_stag: 0"),
        "experiment.yaml:8: zero_stag: unknown key 'zero_stag'; did you mean 'zero_stage'?",
    ),
    "missing key": (
        ("global_batch_size: 8\n", ""),
        "experiment.yaml: global_batch_size: key 'global_batch_size' is missing",
    ),
    "wrong type": (
        ("global_batch_size: 8", "global_batch_size: eight"),
        "experiment.yaml:10: global_batch_size: found 'eight'; expected an integer",
    ),
    "quoted number": (
        ("global_batch_size: 8", 'global_batch_size: "8"'),
        "experiment.yaml:10: global_batch_size: found '8'; expected an integer",
    ),
    "fraction instead of a count": (
        ("global_batch_size: 8", "global_batch_size: 8.0"),
        "experiment.yaml:10: global_batch_size: found 8.0; expected an integer",
    ),
    "flag instead of a count": (
        ("global_batch_size: 8", "global_batch_size: true"),
        "experiment.yaml:10: global_batch_size: found true; expected an integer",
    ),
    "count of 22 zeros": (
        ("global_batch_size: 8", "global_batch_size: 1" + "0" * 22),
        "global_batch_size: found 1" + "0" * 22 + "; expected less than or equal to 1000000",
    ),
    "count of 5000 zeros": (
        ("global_batch_size: 8", "global_batch_size: 1" + "0" * 5000),
        "global_batch_size: found a number of 5001 digits; expected an integer",
    ),
    "name that is a path": (
        ("name: mistaken", "name: ../escape/x"),
        "experiment.yaml:1: name: found '../escape/x'; expected a plain name: no '/', no ",
    ),
    "name that is hidden": (
        ("name: mistaken", "name: .mistaken"),
        "experiment.yaml:1: name: found '.mistaken'; expected a plain name: ",
    ),
    "name for a terminal": (
        ("name: mistaken", 'name: "\\e[2J"'),
        "experiment.yaml:1: name: found '\\x1b[2J'; expected a plain name: ",
    ),
    "name too long": (
        ("name: mistaken", "name: " + "x" * 101),
        "expected at most 100 characters",
    ),
    "key for a terminal": (
        ("zero_stage: 0", '"\\e[2J": 0'),
        "experiment.yaml:8: \\x1b[2J: unknown key '\\x1b[2J'; known here: name, ",
    ),
    "number for a name": (
        ("name: mistaken", "name: 7"),
        "experiment.yaml:1: name: found 7; expected text (quote it if it is one)",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), KEYS.values(), ids=KEYS)
def test_a_wrong_key_or_value_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})
