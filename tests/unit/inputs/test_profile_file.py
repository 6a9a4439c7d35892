import json

import numpy as np
import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profile import Profile, parse_device_table, parse_profile

DESCRIPTION = """\
num_layers: 1
model: a layer
precision: fp16
forward_runs: 2
includes_all_reduces: true
hardware: a board
versions: none
"""
TABLE = "layer,tp,micro_batch_size,forward_s\n0,1,1,0.5\n"


def parse(**files: str) -> Profile:
    named = {"profile.yaml": DESCRIPTION, "T4.csv": TABLE, "notes.txt": "x"} | files
    return parse_profile(named, folder="measured", num_layers=1, precision="fp16")


def test_the_description_says_what_the_times_hold() -> None:
    profile = parse()
    assert (profile.forward_runs, profile.includes_all_reduces) == (2, True)


def test_each_table_is_of_the_device_that_names_it() -> None:
    assert sorted(parse(**{"H100.csv": TABLE}).tables) == ["H100", "T4"]


def test_the_source_names_the_folder() -> None:
    assert parse().source == "profile measured"


def test_other_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"^measured/profile\.yaml:1: num_layers: found 1; the mo"):
        parse_profile(
            {"profile.yaml": DESCRIPTION, "T4.csv": TABLE},
            folder="measured",
            num_layers=2,
            precision="fp16",
        )


def test_another_precision_is_refused() -> None:
    with pytest.raises(InputError, match=r"^measured/profile\.yaml:3: precision: measured in fp16"):
        parse_profile(
            {"profile.yaml": DESCRIPTION, "T4.csv": TABLE},
            folder="measured",
            num_layers=1,
            precision="bf16",
        )


def test_three_forward_runs_are_refused() -> None:
    with pytest.raises(InputError, match="forward_runs: found 3; expected less than or equal to 2"):
        parse(**{"profile.yaml": DESCRIPTION.replace("runs: 2", "runs: 3")})


SLICES = json.dumps(
    {
        "batch": 1,
        "tokens": 8,
        "granularity": 4,
        "stages": 2,
        "context": "fitted",
        "points": {
            "1_4_0": {"forward_mean": 1.0, "backward_mean": 2.0},
            "1_8_0": {"forward_mean": 2.0, "backward_mean": 4.0},
        },
    }
)
BOTH = "layer,tp,micro_batch_size,forward_s,backward_s\n0,1,1,0.5,1\n"


def sliced(name: str = "T4.tp1.slices.json", text: str = SLICES, table: str = BOTH) -> Profile:
    return parse_profile(
        {"profile.yaml": DESCRIPTION, "T4.csv": table, name: text},
        folder="measured",
        num_layers=1,
        precision="fp16",
        sequence_length=8,
    )


def test_slices_belong_to_their_device_and_tp() -> None:
    points = sliced().slices["T4", 1]
    assert points.places.tolist() == [[1, 4, 0], [1, 8, 0]]
    assert parse().slices == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "T4.slices.json"}, r"T4\.slices\.json: expected a name such as T4\.tp2\.slices"),
        ({"name": "T4.tp2.slices.json"}, r"slices at tp 2, but T4\.csv has no forward and backw"),
        ({"name": "A100.tp1.slices.json"}, r"slices at tp 1, but A100\.csv has no forward"),
        ({"table": TABLE}, r"slices at tp 1, but T4\.csv has no forward and backward passes"),
        ({"text": SLICES.replace("8,", "16,", 1)}, "tokens: slices of 16 tokens; .* have 8"),
        ({"text": SLICES.replace("1_4_0", "1_4")}, r"points\.1_4: malformed key"),
        ({"text": SLICES.replace(": 4,", ": 0,", 1)}, "granularity: found 0"),
        ({"text": SLICES.replace("2.0", "-2.0", 1)}, "backward_mean: found -2.0; expected a num"),
        ({"text": SLICES.split('"points"')[0] + '"points": {}}'}, "no slice without context could"),
        ({"text": "{"}, r"measured/T4\.tp1\.slices\.json:1: not valid JSON|not JSON"),
    ],
)
def test_wrong_slices_are_led_to_their_file(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sliced(**changes)


HEADER = "layer,tp,micro_batch_size,forward_s,backward_s\n"


def test_forward_and_backward_times_are_read_by_tp_and_size() -> None:
    text = HEADER + "1,2,4,0.3,0.4\n0,2,4,0.1,0.2\n"
    table = parse_device_table(text, num_layers=2, file="T4.csv")
    anchor = table[2, 4]
    np.testing.assert_array_equal(anchor.forward_s, [0.1, 0.3])
    np.testing.assert_array_equal(anchor.backward_s, [0.2, 0.4])


def test_without_its_column_no_backward_time_is_known() -> None:
    text = "layer,tp,micro_batch_size,forward_s\n0,1,1,0.1\n"
    assert parse_device_table(text, num_layers=1, file="T4.csv")[1, 1].backward_s is None


def test_spaces_and_blank_lines_are_skipped() -> None:
    text = "layer, tp, micro_batch_size, forward_s\n\n 0, 1, 1, 1e-3\n"
    assert parse_device_table(text, num_layers=1, file="T4.csv")[1, 1].forward_s[0] == 1e-3


def test_each_size_needs_all_layers_of_its_own() -> None:
    text = HEADER + "0,1,1,1,1\n1,1,1,1,1\n0,1,2,1,1\n"
    with pytest.raises(InputError, match=r"^T4\.csv: tp 1, micro_batch_size 2: no row for layer 1"):
        parse_device_table(text, num_layers=2, file="T4.csv")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-0.1", "", "1 ms"])
def test_a_backward_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(InputError, match=r"^T4\.csv:2: backward_s: found .* expected seconds"):
        parse_device_table(f"{HEADER}0,1,1,0.1,{seconds}\n", num_layers=1, file="T4.csv")
