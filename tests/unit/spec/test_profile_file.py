import pytest

from amp_ray.errors import InputError
from amp_ray.spec.profile import Profile
from amp_ray.spec.profile_file import parse_profile

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
