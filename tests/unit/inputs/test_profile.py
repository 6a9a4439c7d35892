import json
from typing import Any

import numpy as np
import pytest

from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError
from amp_ray.inputs.profile import ANALYTIC, Anchor, Profile, parse_device_table, parse_profile
from amp_ray.inputs.published_profile import PublishedEntry, PublishedProfile

T4, H100 = find_device("T4"), find_device("H100")


def anchor(*seconds: float) -> Anchor:
    return Anchor(forward_s=np.array(seconds))


OURS = Profile(
    source="profile x",
    tables={"T4": {(2, 1): anchor(2.0), (1, 1): anchor(1.0), (2, 4): anchor(3.0)}},
)


def published(*tps: int) -> Profile:
    """Return a profile of a T4 at these degrees that another planner published."""
    one = np.array([1.0])
    entry = PublishedEntry(
        layer_s=one,
        layer_memory_bytes=one,
        layer_parameter_bytes=one,
        forward_backward_s=None,
        optimizer_s=0.0,
        batch_generator_s=0.0,
    )
    return Profile(
        source="profile x",
        tables={"T4": {(tp, 1): anchor(1.0) for tp in tps}},
        includes_all_reduces=True,
        published=PublishedProfile(source="x", entries={("T4", tp, 1): entry for tp in tps}),
    )


def test_anchors_are_those_of_the_device_and_tp_by_size() -> None:
    table = OURS.tables["T4"]
    assert OURS.anchors(T4, 2) == {1: table[2, 1], 4: table[2, 4]}
    assert (ANALYTIC.anchors(H100, 8), ANALYTIC.is_measured) == ({}, False)
    with pytest.raises(InputError, match="profile x has no times for device 'H100', only for T4"):
        OURS.anchors(H100, 1)
    with pytest.raises(InputError, match="no times at tp 4 for device 'T4', only at tp 1, 2; meas"):
        OURS.anchors(T4, 4)


@pytest.mark.parametrize("seconds", [-1.0, np.nan, np.inf])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    message = r"must be finite and not negative, found \[(-1.0|nan|inf)"
    with pytest.raises(ValueError, match=message):
        Anchor(forward_s=np.array([1.0]), backward_s=np.array([1.0, seconds]))


def test_times_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        anchor(1.0).forward_s[0] = 2.0


def test_what_nobody_published_is_a_gap_and_our_own_profiles_can_be_measured() -> None:
    assert published(1, 2).gap([T4], 2) is None
    assert published(1, 2).gap([T4], 4) == "tp 4 on T4"
    assert published(1, 2).gap([T4, H100], 1) == "tp 1 on H100"
    assert published(2, 4).gap([T4], 2) == "tp 1 on T4"  # all-reduces need tp 1 beside them
    assert OURS.gap([T4], 4) is None
    assert ANALYTIC.gap([T4], 2) is None


# ----------------------------------------------------------------------------------- files

DESCRIPTION = """\
num_layers: 1
model: a layer
precision: fp16
forward_runs: 2
includes_all_reduces: true
starts_idle: true
hardware: a board
versions: none
"""
TABLE = "layer,tp,micro_batch_size,forward_s\n0,1,1,0.5\n"
BOTH = "layer,tp,micro_batch_size,forward_s,backward_s\n0,1,1,0.5,1\n"
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
SLICE_FILE = "T4.tp1.slices.json"


def parse(files: dict[str, str] | None = None, **expected: Any) -> Profile:  # noqa: ANN401
    named = {"profile.yaml": DESCRIPTION, "T4.csv": TABLE, "notes.txt": "x"} | (files or {})
    shape: dict[str, Any] = {"num_layers": 1, "precision": "fp16", "sequence_length": 8}
    return parse_profile(named, folder="measured", **shape | expected)


def test_a_folder_has_a_description_and_a_table_per_device() -> None:
    profile = parse({"H100.csv": TABLE})
    assert (profile.forward_runs, profile.includes_all_reduces) == (2, True)
    assert profile.starts_idle
    assert (profile.source, sorted(profile.tables)) == ("profile measured", ["H100", "T4"])
    assert profile.slices == {}


def test_slices_belong_to_their_device_and_tp() -> None:
    points = parse({"T4.csv": BOTH, SLICE_FILE: SLICES}).slices["T4", 1]
    assert points.places.tolist() == [[1, 4, 0], [1, 8, 0]]


def test_a_profile_of_another_precision_is_refused() -> None:
    with pytest.raises(InputError, match=r"^measured/profile\.yaml:3: precision: measured in fp16"):
        parse(precision="bf16")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"profile.yaml": DESCRIPTION.replace("runs: 2", "runs: 3")},
            "forward_runs: found 3; expected less than or equal to 2",
        ),
        (
            {"T4.slices.json": SLICES},
            r"T4\.slices\.json: expected a name such as T4\.tp2\.slices",
        ),
        ({"T4.tp2.slices.json": SLICES}, r"slices at tp 2, but T4\.csv has no forward and backw"),
        ({"A100.tp1.slices.json": SLICES}, r"slices at tp 1, but A100\.csv has no forward"),
        (
            {"T4.csv": TABLE, SLICE_FILE: SLICES},
            r"slices at tp 1, but T4\.csv has no forward and backward passes",
        ),
        (
            {SLICE_FILE: SLICES.replace("8,", "16,", 1)},
            "tokens: slices of 16 tokens; .* have 8",
        ),
        ({SLICE_FILE: SLICES.replace("1_4_0", "1_4")}, r"points\.1_4: malformed key"),
        (
            {SLICE_FILE: SLICES.split('"points"')[0] + '"points": {}}'},
            "no slice without context could",
        ),
        ({SLICE_FILE: "{"}, r"measured/T4\.tp1\.slices\.json:1: not valid JSON"),
    ],
)
def test_a_mistake_is_led_to_its_file(files: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse({"T4.csv": BOTH} | files)


HEADER = "layer,tp,micro_batch_size,forward_s,backward_s\n"


def test_forward_and_backward_times_are_read_by_tp_and_size() -> None:
    text = f"{HEADER}1,2,4,0.3,0.4\n\n 0, 2, 4, 1e-1, 0.2\n"
    times = parse_device_table(text, num_layers=2, file="T4.csv")[2, 4]
    np.testing.assert_array_equal(times.forward_s, [0.1, 0.3])
    np.testing.assert_array_equal(times.backward_s, [0.2, 0.4])
    assert parse().tables["T4"][1, 1].backward_s is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1,1,1,1\n1,1,1,1,1\n0,1,2,1,1\n", ": tp 1, micro_batch_size 2: no row for layer 1"),
        *(
            (f"0,1,1,0.1,{seconds}\n", ":2: backward_s: found .* expected seconds")
            for seconds in ("nan", "inf", "-0.1", "", "1 ms")
        ),
    ],
)
def test_a_table_with_missing_times_is_refused(rows: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^T4\.csv{message}"):
        parse_device_table(HEADER + rows, num_layers=2, file="T4.csv")
